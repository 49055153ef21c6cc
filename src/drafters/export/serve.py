"""Commands that serve a drafter, as templates: see `layout.Layout.serve`."""

from __future__ import annotations


def vllm(method: str, tokens: int) -> str:
    """`vllm serve` with a drafter of this method, for drafts of so many tokens."""
    return (
        f'vllm serve {{target}} --speculative-config \'{{{{"method": "{method}", "model": "{{drafter}}", '
        f'"num_speculative_tokens": {tokens}}}}}\''
    )


def sglang(algorithm: str, tokens: int) -> str:
    """SGLang's server with a drafter of this algorithm, for chains of so many tokens.

    A chain, since that is what `scripts/verify_served.py` can hold against a scorecard.
    """
    return (
        f"{_sglang(algorithm)} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def sglang_block(algorithm: str, width: int) -> str:
    """The same for a drafter that writes blocks of this width, the root among them."""
    return f"{_sglang(algorithm)} --speculative-num-draft-tokens {width}"


def _sglang(algorithm: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {drafter}"
    )

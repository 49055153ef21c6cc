"""Greedy answers of vLLM on a CPU in fp32. Runs in an environment with vLLM; must not import foredraft.

    python vllm_on_cpu.py drafts|counters TARGET SPECULATIVE_CONFIG PROMPTS MAX_TOKENS [HF_OVERRIDES]

PROMPTS is a list of token ids each; the last line of the output is JSON. With `drafts` it has the answers,
and of every round the place of the newest settled token, the root behind it and the drafted tokens, as the
first model runner has them. With `counters` it has the answers and vLLM's counters. Drafters that the first
model runner lacks, such as DSpark, need the second one: VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 in the
environment run its kernels in Triton's interpreter, which is slow, and the engine's own code.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start(target: str, speculative: str, max_tokens: str, overrides: str = "{}") -> tuple[Any, Any]:
    """An engine, and parameters of greedy answers of a length."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        hf_overrides=json.loads(overrides),
        speculative_config=json.loads(speculative),
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=int(max_tokens), detokenize=False, ignore_eos=True)
    return engine, sampling


def drafts(target: str, speculative: str, prompts: str, max_tokens: str) -> list[dict[str, Any]]:
    """Answer one prompt after another, and note what is drafted."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm.v1.spec_decode import llm_base_proposer  # pyright: ignore[reportMissingImports]

    rounds: list[dict[str, Any]] = []
    base: Any = llm_base_proposer.SpecDecodeBaseProposer
    propose = base.propose

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = propose(self, *args, **kwargs)
        given = dict(zip(propose.__code__.co_varnames[1:], args, strict=False)) | kwargs
        places, which = given["target_positions"], given["token_indices_to_sample"]
        place = places[-1 if which is None else which[0]]
        ids = drafted[0] if isinstance(drafted, tuple) else drafted
        root = given["next_token_ids"][0]
        rounds.append({"place": int(place), "root": int(root), "drafted": ids[0].tolist()})
        return drafted

    base.propose = recording
    engine, greedy = start(target, speculative, max_tokens)
    found = []
    for prompt in json.loads(prompts):
        rounds.clear()
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        found.append({"answer": list(answer.outputs[0].token_ids), "rounds": list(rounds)})
    return found


def counters(target: str, speculative: str, prompts: str, max_tokens: str, *overrides: str) -> dict[str, Any]:
    """Answer all prompts, and read the counters."""
    if "TRITON_INTERPRET" in os.environ:
        from triton.backends import backends  # pyright: ignore[reportMissingImports]

        # Triton for CPUs is a fork; vLLM looks for the name of its backend, and the interpreter needs none.
        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    engine, greedy = start(target, speculative, max_tokens, *overrides)
    given = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = [list(answer.outputs[0].token_ids) for answer in engine.generate(given, greedy, use_tqdm=False)]
    found = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    return {"answers": answers, **found}


if __name__ == "__main__":
    os.environ |= SETTINGS
    print(json.dumps({"drafts": drafts, "counters": counters}[sys.argv[1]](*sys.argv[2:])))

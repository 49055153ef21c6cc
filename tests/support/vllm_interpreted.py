"""vLLM's second model runner on a CPU, for drafters that its first one lacks, such as DSpark.

    python vllm_interpreted.py TARGET SPECULATIVE_CONFIG PROMPTS MAX_TOKENS

The runner asks for Triton, whose kernels run in Triton's interpreter here: slow, and the engine's own code.
PROMPTS is a list of token ids each; the last line of the output has the answers and vLLM's counters, as JSON.
Runs in an environment with vLLM; must not import foredraft.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

from vllm_on_cpu import start

SETTINGS = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def main(target: str, speculative: str, prompts: str, max_tokens: str) -> None:
    """Answer greedily, in fp32, one prompt after another."""
    from triton.backends import backends  # pyright: ignore[reportMissingImports]

    # Triton for CPUs is a fork; vLLM looks for the name of its backend, and the interpreter needs none.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    engine, greedy = start(target, speculative, max_tokens)
    given = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = [list(answer.outputs[0].token_ids) for answer in engine.generate(given, greedy, use_tqdm=False)]
    counters = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    print(json.dumps({"answers": answers, **counters}))


if __name__ == "__main__":
    os.environ |= SETTINGS
    main(*sys.argv[1:])

"""Start vLLM in this process, greedy and in fp32: for scripts in its environment, without foredraft."""

from __future__ import annotations

import json
import os
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start(target: str, speculative: str, max_tokens: str) -> tuple[Any, Any]:
    """An engine with this --speculative-config (JSON), and parameters of greedy answers of a length."""
    os.environ |= SETTINGS
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        speculative_config=json.loads(speculative),
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=int(max_tokens), detokenize=False, ignore_eos=True)
    return engine, sampling

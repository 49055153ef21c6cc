"""What vLLM drafts, token by token, with its first model runner on a CPU.

    python vllm_drafts.py TARGET SPECULATIVE_CONFIG PROMPTS MAX_TOKENS

PROMPTS is a list of token ids each; the last line of the output has, as JSON, the answers and of every round
the place of the newest settled token, the root behind it and the drafted tokens. Runs in an environment
with vLLM; must not import foredraft.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm_on_cpu import start


def main(target: str, speculative: str, prompts: str, max_tokens: str) -> None:
    """Answer greedily, in fp32, one prompt after another."""
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
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    main(*sys.argv[1:])

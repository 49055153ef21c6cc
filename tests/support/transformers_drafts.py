"""Greedy answers of transformers' own drafting, in fp32. Runs without foredraft, which it must not import.

    python transformers_drafts.py lm|dflash|mtp TARGET DRAFT PROMPTS MAX_TOKENS

DRAFT is the folder of an export, loaded as its note says. PROMPTS is a list of token ids each; the last line
of the output is JSON: transformers' version, plain answers, and for every prompt the answer and its rounds,
each the number of drafted and of accepted tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

FP32: dict[str, Any] = {"dtype": torch.float32}


class Rounds:
    """Streamer and hook of a model: what it reads in a pass, and what of it is kept."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.kept: list[int] = []

    def hook(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.read.append(kwargs["input_ids"].shape[1])

    def put(self, value: torch.Tensor) -> None:
        self.kept.append(value.numel())

    def end(self) -> None:
        """Nothing is held back."""

    def told(self, prompt: int) -> list[tuple[int, int]]:
        """All rounds but a first pass over the prompt alone; the first text is the prompt."""
        drafted = [self.read[0] - prompt, *(count - 1 for count in self.read[1:])]
        accepted = [count - 1 for count in self.kept[1:]]
        return [*zip(drafted, accepted, strict=True)][not drafted[0] :]


def loaded(kind: str, target: str, draft: str) -> tuple[Any, dict[str, Any]]:
    """The target, and the arguments of `generate` that draft."""
    if kind == "mtp":
        model = AutoModelForCausalLM.from_pretrained(target, config=AutoConfig.from_pretrained(draft), **FP32)
        model.config.name_or_path = draft
        return model, {"use_mtp": True}
    model = AutoModelForCausalLM.from_pretrained(target, **FP32)
    if kind == "dflash":
        assistant = AutoModel.from_pretrained(draft, **FP32)
        return model, {"assistant_model": assistant, "speculation_type": "dflash"}
    return model, {"assistant_model": AutoModelForCausalLM.from_pretrained(draft, **FP32)}


def main(kind: str, target: str, draft: str, prompts: str, max_tokens: str) -> dict[str, Any]:
    """Answer one prompt after another, plainly and with drafts."""
    model, drafting = loaded(kind, target, draft)
    given = {"max_new_tokens": int(max_tokens), "do_sample": False}
    found, plain = [], []
    for prompt in json.loads(prompts):
        ids = torch.tensor([prompt])
        plain.append(model.generate(ids, **given)[0, len(prompt) :].tolist())
        rounds = Rounds()
        handle = model.register_forward_pre_hook(rounds.hook, with_kwargs=True)
        answer = model.generate(ids, streamer=rounds, **given, **drafting)[0, len(prompt) :].tolist()
        handle.remove()
        found.append({"answer": answer, "rounds": rounds.told(len(prompt))})
    return {"version": transformers.__version__, "plain": plain, "drafted": found}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

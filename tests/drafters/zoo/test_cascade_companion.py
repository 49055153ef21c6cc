"""The bundled draft model drafts the same with a lookup that guesses for it, in fp64."""

from __future__ import annotations

from collections import Counter

import pytest
from workbench import ROOT

from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.zoo.cascade import Cascade

POCKET, COMPANION, PROMPTS = (ROOT / "data" / name for name in ("pocket", "pocket-draft", "prompts"))
EACH = 4  # prompts of a category


@pytest.mark.proof
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_the_draft_model_without_guesses(temperature):
    """In fp32 a pass of another shape rounds otherwise, and a draw near a boundary falls elsewhere."""
    target, chat = load_target(str(POCKET), "float64"), Chat(load_tokenizer(str(POCKET)))
    first = DraftLM.for_target(target, path=str(COMPANION), train=False).to(target.dtype).eval()
    plan = Plan(6, proposal="sampled" if temperature else "fixed")
    options = {"max_new_tokens": 48, "stop": stop_tokens(target), "plan": plan}
    seen = Counter[str]()
    for number, prompt in enumerate(read_prompts(PROMPTS / "heldout.jsonl")):
        seen[prompt.category] += 1
        if seen[prompt.category] > EACH:
            continue
        rounds = []
        for drafter in (first, Cascade(first, Ngram(1, 3))):
            ids, sampler = [chat.encode(prompt.messages)], Sampler(temperature)
            run = generate(target, drafter, ids, sampler=sampler, requests=[number], **options)
            (output,) = run.outputs
            rounds.append((output.tokens, output.accepted, output.draft_lengths))
        assert rounds[0] == rounds[1]

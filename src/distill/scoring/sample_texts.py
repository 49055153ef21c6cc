"""Texts that a scorecard shows: a few held-out prompts as the decoder answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.errors import UserError
from decode.evaluation.scorecard import Setting
from decode.evaluation.traces import Written, samples
from decode.generation.text import Detokenizer
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from drafters.base import Drafter

TEXTS, TOKENS = 4, 64  # shown at every law, and the most of each
ASKED = 600  # characters of a prompt


def texts(
    target: Target,
    drafter: Drafter,
    chat: Chat,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    max_new_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """For the scorecard: the first lossless plan of every law, on prompts of several categories.

    Each has `tokens`, a list of [text, source, p, rank by p, q, rank by q]; see `samples.Written`.

    Args:
        target: writes.
        drafter: drafts.
        chat: renders prompts, and spells tokens.
        prompts: held out.
        settings: of the scorecard.
        max_new_tokens: that it was scored with.
        seed: of all draws.
    """
    chosen = varied(prompts, TEXTS)
    ids = [chat.encode(p.messages, p.tools) for p in chosen]
    first: dict[Any, Setting] = {}
    for setting in settings:
        if not setting.plan.lossy:
            first.setdefault(setting.sampler, setting)
    made: list[dict[str, Any]] = []
    for sampler, setting in first.items():
        found = samples(
            target,
            drafter,
            ids,
            plan=setting.plan,
            sampler=sampler,
            max_new_tokens=min(TOKENS, max_new_tokens),
            laws=has_laws(drafter, setting.plan),
            stop=stop_tokens(target),
            seed=seed,
            names=[p.id for p in chosen],
        )
        made += [
            {
                "id": prompt.id,
                "category": prompt.category,
                "prompt": _asked(chat, read),
                "temperature": sampler.temperature,
                "decode": setting.plan.name,
                "tokens": _spelled(chat, text),
            }
            for prompt, read, text in zip(chosen, ids, found, strict=True)
        ]
    return made


def varied(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first of every category, then the next of each."""
    seen: dict[str, int] = {}
    turn = []
    for prompt in prompts:
        turn.append(seen.get(prompt.category, 0))
        seen[prompt.category] = turn[-1] + 1
    order = sorted(range(len(prompts)), key=lambda i: turn[i])
    return [prompts[i] for i in order[:count]]


def has_laws(drafter: Drafter, plan: Plan) -> bool:
    """Whether it can draw a chain as deep as the plan, and so has a probability for every token."""
    try:
        drafter.check(Plan(plan.depth, proposal="sampled"))
    except UserError:
        return False
    return plan.depth > 0


def _asked(chat: Chat, ids: list[int]) -> str:
    text = chat.tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text if len(text) <= ASKED else f"... {text[-ASKED:]}"


def _spelled(chat: Chat, text: Sequence[Written]) -> list[list[Any]]:
    """A token that ends within a character has no text yet; the next one has it."""
    words = Detokenizer(chat.tokenizer)
    lines = [[words.add(one.token), *one[1:4], _short(one.q), one.q_rank] for one in text]
    for line in lines:
        line[2] = _short(line[2])
    if lines:
        lines[-1][0] += words.end()
    return lines


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)

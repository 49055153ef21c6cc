"""Sample texts of a scorecard: a few held-out prompts as the decoder answers them."""

from __future__ import annotations

from collections.abc import Sequence

from decode.errors import UserError
from decode.evaluation.score import Setting
from decode.evaluation.scorecard import SampleText, SampleToken
from decode.evaluation.traces import TracedToken, trace_tokens
from decode.generation.text import Detokenizer
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from drafters.base import Drafter

TEXTS, TOKENS = 4, 64  # texts per sampler; maximum tokens of a text
PROMPT_CHARACTERS = 600


def sample_texts(
    target: Target,
    drafter: Drafter,
    chat: Chat,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    max_new_tokens: int,
    seed: int,
) -> list[SampleText]:
    """Decode prompts of several categories with the first lossless plan of each sampler.

    Args:
        target: target to decode with.
        drafter: drafter to draft with.
        chat: renders prompts and detokenizes.
        prompts: held-out prompts.
        settings: settings of the scorecard.
        max_new_tokens: limit used for scoring.
        seed: seed of all draws.
    """
    chosen = varied(prompts, TEXTS)
    ids = [chat.encode(p.messages, p.tools) for p in chosen]
    first: dict[Sampler, Setting] = {}
    for setting in settings:
        if not setting.plan.lossy:
            first.setdefault(setting.sampler, setting)
    texts: list[SampleText] = []
    for sampler, setting in first.items():
        answers = trace_tokens(
            target,
            drafter,
            ids,
            plan=setting.plan,
            sampler=sampler,
            max_new_tokens=min(TOKENS, max_new_tokens),
            has_probs=has_probs(drafter, setting.plan),
            stop=stop_tokens(target),
            seed=seed,
            names=[p.id for p in chosen],
        )
        texts += [
            SampleText(
                id=prompt.id,
                category=prompt.category,
                prompt=_prompt_text(chat, prompt_ids),
                temperature=sampler.temperature,
                decode=setting.plan.name,
                tokens=_tokens(chat, answer),
            )
            for prompt, prompt_ids, answer in zip(chosen, ids, answers, strict=True)
        ]
    return texts


def varied(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first prompt of every category, then the second of each, and so on."""
    counts: dict[str, int] = {}
    places = []  # of each prompt within its category
    for prompt in prompts:
        places.append(counts.get(prompt.category, 0))
        counts[prompt.category] = places[-1] + 1
    order = sorted(range(len(prompts)), key=lambda i: places[i])
    return [prompts[i] for i in order[:count]]


def has_probs(drafter: Drafter, plan: Plan) -> bool:
    """Whether the drafter can sample a chain as deep as the plan, with a probability per token."""
    try:
        drafter.check(Plan(plan.depth, proposal="sampled"))
    except UserError:
        return False
    return plan.depth > 0


def _prompt_text(chat: Chat, ids: list[int]) -> str:
    text = chat.tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text if len(text) <= PROMPT_CHARACTERS else f"... {text[-PROMPT_CHARACTERS:]}"


def _tokens(chat: Chat, answer: Sequence[TracedToken]) -> list[SampleToken]:
    """Tokens with their texts; a token that ends inside a character has an empty text."""
    words = Detokenizer(chat.tokenizer)
    tokens = [
        SampleToken(words.add(t.token), t.source, round(t.p, 6), t.p_rank, _rounded(t.q), t.q_rank)
        for t in answer
    ]
    if tokens:
        tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + words.end())
    return tokens


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)

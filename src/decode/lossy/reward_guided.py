"""Reward-guided speculative decoding (RSD, Liao et al., arXiv:2501.19324): a judge accepts steps.

A draft model writes a step of the answer. If the judge accepts it, the step stays; otherwise the target
writes that step. The output does NOT have the target's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Generation, Times, Until
from decode.integers import token_ids, whole_number
from decode.model.target import Target
from decode.sampling import Sampler

DRAFT, TARGET = 0, 1  # samples that key the draws: the target's step must not repeat the draft's draws


class Judge(Protocol):
    """Scores a step of an answer: for example a process reward model or a checker."""

    def __call__(self, request: int, answer: Sequence[int], step: Sequence[int]) -> float:
        """The score.

        Args:
            request: index of the prompt.
            answer: token ids of the answer before the step.
            step: token ids of the step.
        """
        ...


class Step(NamedTuple):
    """One step of an answer."""

    tokens: int
    score: float  # of the draft model's step
    drafted: bool  # whether that step was kept; otherwise the target wrote it


@dataclass(slots=True)
class JudgedOutput:
    """One answer.

    Attributes:
        tokens: ids, including the end token.
        steps: in order.
        stopped: ended by an end token, not by length.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stopped: bool = False


class JudgedGeneration(NamedTuple):
    """Answers to all prompts, and times."""

    outputs: list[JudgedOutput]
    draft_times: Times
    target_times: Times


def generate_judged(
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    judge: Judge,
    least: float,
    step: Until,
    *,
    max_new_tokens: int,
    sampler: Sampler,
    stop: Sequence[int] = (),
    seed: int = 0,
    requests: Sequence[int | str] | None = None,
) -> JudgedGeneration:
    """Answer prompts step by step.

    Both models read the text before a step again, in one pass.

    Args:
        target: writes steps that the judge rejects.
        draft: a model with the same vocabulary; writes every step first.
        prompts: token ids.
        judge: scores steps.
        least: minimum score of an accepted step: with -inf only the draft model answers, with inf only the
            target.
        step: factory of tests that end a step, such as `StopStrings`.
        max_new_tokens: per prompt.
        sampler: of both models.
        stop: end tokens.
        seed: of all draws.
        requests: identifiers that key each prompt's draws; default 0, 1, ...

    Raises:
        UserError: see `generate`; a score that is not a number.
    """
    if math.isnan(least):
        raise UserError("judge: the least score is NaN; give a number")
    stop, max_new_tokens = token_ids(stop), whole_number(max_new_tokens, "max_new_tokens", 1)
    prompts = [token_ids(prompt) for prompt in prompts]
    names = list(range(len(prompts))) if requests is None else list(requests)
    options = {"sampler": sampler, "seed": seed, "stop": stop, "until": step}
    outputs, times = [JudgedOutput() for _ in prompts], [Times(), Times()]
    limits = [_room(target, draft, row, prompt, max_new_tokens) for row, prompt in enumerate(prompts)]
    rows = list(range(len(prompts)))

    def write(writer: int, rows: Sequence[int]) -> dict[int, list[int]]:
        """Row -> its next step, written by one of the models."""
        texts = [[*prompts[row], *outputs[row].tokens] for row in rows]
        room = [limits[row] - len(outputs[row].tokens) for row in rows]
        keys = {"requests": [names[row] for row in rows], "samples": [writer] * len(rows)}
        model = (draft, target)[writer]
        found = generate(model, None, texts, max_new_tokens=max(room), **keys, **options)
        times[writer] = Generation([], times[writer]).followed_by(found).times
        return {row: o.tokens[:most] for row, o, most in zip(rows, found.outputs, room, strict=True)}

    while rows:
        drafts = write(DRAFT, rows)
        scores = {row: _score(judge, row, outputs[row], tokens) for row, tokens in drafts.items()}
        rejected = [row for row in rows if scores[row] < least]
        written = write(TARGET, rejected) if rejected else {}
        for row in rows:
            tokens, output = written.get(row, drafts[row]), outputs[row]
            output.tokens += tokens
            output.steps.append(Step(len(tokens), scores[row], row not in written))
            output.stopped = tokens[-1] in stop
        rows = [r for r in rows if not outputs[r].stopped and len(outputs[r].tokens) < limits[r]]
    return JudgedGeneration(outputs, *times)


def _score(judge: Judge, row: int, output: JudgedOutput, step: Sequence[int]) -> float:
    """The judge's score of a step.

    Raises:
        UserError: the score is not a number; NaN is neither below nor above the minimum.
    """
    found = judge(row, output.tokens, step)
    try:
        score = math.nan if isinstance(found, str) else float(found)
    except (TypeError, ValueError):
        score = math.nan
    if math.isnan(score):
        number = len(output.steps)
        raise UserError(f"judge: its score of step {number} of prompt {row} is {found!r}, not a number")
    return score


def _room(target: Target, draft: Target, row: int, prompt: Sequence[int], most: int) -> int:
    """Number of tokens that fit an answer in the contexts of both models.

    Raises:
        UserError: no token fits.
    """
    context = min((m.max_positions for m in (target, draft) if m.max_positions is not None), default=None)
    if context is not None and len(prompt) >= context:
        raise UserError(
            f"prompt {row} has {len(prompt)} tokens and leaves no room in a context of {context}: shorten it"
        )
    return most if context is None else min(most, context - len(prompt))

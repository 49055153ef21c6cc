"""Quality of a lossy rule: how far its text is from the target's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import PAD
from decode.generation.types import Round
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.rule import LossyRule

BATCH = 16  # texts per batch

QUALITY_HEAD = ["log p (plain)", "KL", "changed", "judge (plain)"]

# (index of the prompt, token ids of its answer) -> score
Judge = Callable[[int, Sequence[int]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Comparison of a lossy rule's answers with plain decoding's, for the same prompts and seed.

    Attributes:
        log_likelihood: log-probability of a token under the target at temperature 1, nats, mean over tokens.
        plain_log_likelihood: the same for plain decoding's tokens.
        kl: KL(rule's distribution || target's) per token, nats, mean over the rule's tokens. n times this is
            the KL of texts of n tokens or slightly more, because a token's distribution also depends on where
            its round began. None at temperature 0; if a warper had removed an accepted token, so that KL is
            infinite; and if no formula is known (several drawn siblings, a repetition penalty).
        changed: share of tokens that are not the target's most likely one after the text before them; None
            above temperature 0.
        judge: mean score of a judge; None without one.
        plain_judge: its mean score of plain decoding's answers.
    """

    log_likelihood: float
    plain_log_likelihood: float
    kl: float | None
    changed: float | None
    judge: float | None = None
    plain_judge: float | None = None

    def cells(self) -> list[str]:
        """Table cells under `QUALITY_HEAD`, with plain decoding's values in brackets."""

        def text(value: float | None, form: str, plain: float | None = None) -> str:
            plainly = "" if plain is None else f" ({form.format(plain)})"
            return "-" if value is None else form.format(value) + plainly

        return [
            text(self.log_likelihood, "{:.2f}", self.plain_log_likelihood),
            text(self.kl, "{:.3f}"),
            text(self.changed, "{:.1%}"),
            text(self.judge, "{:.2f}", self.plain_judge),
        ]


class DeviationMeter:
    """An `on_round` callback that compares a lossy rule's tokens with the target's distributions.

    Args:
        rule: of the text.
        sampler: of the text.
        prompts: token ids; needed to locate the positions where the rule applies.

    Attributes:
        divergence: per answer, summed over its tokens.
    """

    def __init__(self, rule: LossyRule, sampler: Sampler, prompts: Sequence[Sequence[int]]) -> None:
        self.rule, self.sampler, self.prompts = rule, sampler, prompts
        self._known = not sampler.needs_history
        self._texts = [list(prompt) for prompt in prompts]
        self.divergence = [0.0] * len(prompts)
        self._changed = self._tokens = 0

    def __call__(self, seen: Round) -> None:
        """Add one round."""
        for row, (request, tokens) in enumerate(zip(seen.requests, seen.emitted, strict=True)):
            for place, token in enumerate(tokens):
                logits = seen.logits[row, seen.result.slots[row, place]][None]  # (1, V)
                self._tokens += 1
                if self.sampler.temperature and self._known:
                    self.divergence[request] += self._divergence(seen, row, place, logits, request)
                elif not self.sampler.temperature:
                    self._changed += token != int(self.sampler.probs(logits).argmax())
                self._texts[request].append(token)

    @property
    def kl(self) -> float | None:
        """See `Quality`."""
        total = sum(self.divergence)
        known = self._known and self.sampler.temperature > 0 and math.isfinite(total)
        return total / max(self._tokens, 1) if known else None

    @property
    def changed(self) -> float | None:
        """See `Quality`."""
        return None if self.sampler.temperature else self._changed / max(self._tokens, 1)

    def _divergence(self, seen: Round, row: int, place: int, logits: Tensor, request: int) -> float:
        """KL(rule's distribution || target's) of one token of a round."""
        draft, slot = seen.draft, int(seen.result.slots[row, place])
        p = self.sampler.probs(logits).double()
        children = (draft.parents[row] == slot - 1) & (draft.tokens[row] != PAD) if draft.depth else None
        if children is None or not children.any() or not self.rule.applies(self._text(request, p)):
            return 0.0
        tokens, drafted = draft.tokens[row][children][None], draft.probs
        if drafted is not None and drafted.sampled[row][children].any():
            if tokens.shape[1] > 1:
                self._known = False
                return 0.0
            owner = int((drafted.owner[row] == slot).int().argmax())
            probs = self.rule.emitted(p, drafted.q[row, owner][None].to(p))
        else:
            probs = self.rule.emitted_among(p, tokens)
        if probs is not None:
            return float(torch.special.xlogy(probs, probs / p).nansum())
        if place < int(seen.result.accepted[row]):  # the draft decides, deterministically given the text
            return -float(p[0, seen.emitted[row][place]].log())
        return 0.0

    def _text(self, request: int, like: Tensor) -> Tensor:
        return torch.tensor([self._texts[request]], device=like.device)


def quality(
    target: Target,
    plan: Plan,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    decode: Callable[..., object],
    judge: Judge | None = None,
) -> Quality:
    """Compare a lossy rule's answers with plain decoding's.

    Args:
        target: model that verified them.
        plan: plan with the rule.
        sampler: of all answers.
        prompts: token ids.
        answers: the rule's answers.
        plain: plain decoding's answers.
        decode: decodes the prompts with the plan once more, calling its `on_round`.
        judge: scores answers.
    """
    assert isinstance(plan.rule, LossyRule)
    meter = DeviationMeter(plan.rule, sampler, prompts)
    decode(on_round=meter)

    def judged(texts: Sequence[Sequence[int]]) -> float | None:
        return None if judge is None else sum(judge(i, text) for i, text in enumerate(texts)) / len(texts)

    return Quality(
        log_likelihood=mean_log_likelihood(target, prompts, answers),
        plain_log_likelihood=mean_log_likelihood(target, prompts, plain),
        kl=meter.kl,
        changed=meter.changed,
        judge=judged(answers),
        plain_judge=judged(plain),
    )


def mean_log_likelihood(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> float:
    """Mean log-probability of all answers' tokens under the target at temperature 1, in nats."""
    total, count = 0.0, 0
    for start in range(0, len(prompts), BATCH):
        pairs = list(zip(prompts[start : start + BATCH], answers[start : start + BATCH], strict=True))
        texts = [[*prompt, *answer] for prompt, answer in pairs]
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        last = target.read(tokens.to(target.device)).last
        for row, (prompt, answer) in enumerate(pairs):
            logits = target.head(last[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]).float()  # (n, V)
            ids = torch.tensor(list(answer), device=logits.device)[:, None]
            total += float(logits.log_softmax(-1).gather(1, ids).double().sum())
            count += len(answer)
    return total / count if count else math.nan

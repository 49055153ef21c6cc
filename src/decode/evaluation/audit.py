"""Losslessness audit of a decoder run.

Greedy runs get two tests (docs/lossless.md). First, every token must be the argmax of the verifier's
logits. Second, a forward pass over the finished text without cache, tree or masks must agree with every
token, up to near ties. A near tie is at most twice as wide as the largest change of the top-2 gap when
plain decoding is rescored, and never wider than rounding can explain, so an error shared by plain
decoding is not excused.

Above temperature 0, `sampling_tests` tests tokens against the verifier's distributions, and draft tokens
against the drafter's stated distributions.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.evaluation.sampling_tests import SampledRun, SamplingTests
from decode.generation.generate import generate
from decode.generation.types import Generation, Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

Case = tuple[Sampler, Plan]
Prompts = Sequence[Sequence[int]]
ROWS = 16  # prompts per batch
CHANCE = 1e-6  # probability that a lossless decoder fails the audit
ROUNDINGS = 16  # roundings of the largest logit: the widest near tie
LEAST = 1e-3  # share of the largest logit: lower bound of the widest near tie
LARGEST_COPY = 1_000_000_000  # weights; larger targets are rescored in their own dtype


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of an audit.

    Attributes:
        tokens: number of greedy tokens; the next four count these.
        own_row: tokens that are the argmax of the verifier's logits.
        equal: tokens that are the argmax of the rescored logits.
        near_ties: other tokens within `margin` of the argmax.
        mismatches: all other tokens.
        margin: width of a near tie, in logits.
        rescored_in: dtype of the rescoring pass.
        sampled: test results of runs above temperature 0.
    """

    tokens: int
    own_row: int
    equal: int
    near_ties: int
    mismatches: int
    margin: float
    rescored_in: str
    sampled: tuple[SampledRun, ...]

    @property
    def pit_p(self) -> float:
        """Smallest PIT p-value over orders and runs, Bonferroni-corrected for all tests of both kinds."""
        return self._smallest([p for run in self.sampled for p in run.pit.values()])

    @property
    def surprisal_p(self) -> float:
        """Smallest surprisal p-value over runs, Bonferroni-corrected for all tests of both kinds."""
        return self._smallest([run.surprisal_p for run in self.sampled])

    def _smallest(self, values: Sequence[float]) -> float:
        tests = sum(len(run.pit) + 1 for run in self.sampled)
        return min([1.0, *(tests * p for p in values)])

    @property
    def passed(self) -> bool:
        """Whether all tests passed on at least one token each."""
        greedy = self.tokens > 0 and self.own_row == self.tokens and self.mismatches == 0
        possible = all(run.tokens > 0 and not run.impossible for run in self.sampled)
        return greedy and possible and min(self.pit_p, self.surprisal_p) >= CHANCE

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens over all runs above temperature 0."""
        return sum(run.tokens for run in self.sampled)

    @property
    def impossible(self) -> int:
        """Number of sampled tokens with probability 0 or a NaN distribution."""
        return sum(run.impossible for run in self.sampled)

    @property
    def surprisal_z(self) -> float:
        """The z score furthest from 0 over all runs."""
        return max((run.surprisal_z for run in self.sampled), key=abs, default=0.0)


def audit(
    target: Target,
    drafter: Proposer | None,
    prompts: Prompts,
    *,
    plan: Plan,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    also: Sequence[Case] | None = None,
    samples: int = 1,
    seed: int = 0,
    on_batch: Callable[[], None] = lambda: None,
    tie_widths: MutableMapping[Hashable, float] | None = None,
) -> Audit:
    """Decode with and without the drafter, and check every token of the former.

    Args:
        target: the target model.
        drafter: the proposer.
        prompts: token ids.
        plan: plan of the greedy run.
        max_new_tokens: per prompt.
        stop: end tokens.
        also: additional (sampler, plan) cases; default `plan` at temperature 1.
        samples: answers per prompt in sampled cases.
        seed: of the draws.
        on_batch: called after each of `num_batches` batches.
        tie_widths: widths of near ties of this target, kept between audits; plain decoding measures them.
    """
    also = [(Sampler(1.0), plan)] if also is None else also
    decode = partial(generate, target, max_new_tokens=max_new_tokens, stop=stop, seed=seed)
    plans = [plan, *(p for sampler, p in also if sampler.temperature == 0)]
    rescore = Rescorer(target)
    widths, key = {} if tie_widths is None else tie_widths, _texts_key(prompts, max_new_tokens, stop)
    if key in widths:
        for _ in _batches(prompts):
            on_batch()
    else:
        widths[key] = _tie_width(target, prompts, rescore, decode, on_batch)
    greedy = _greedy(drafter, prompts, plans, rescore, widths[key], decode, on_batch)
    rows = [(request, sample) for request in range(len(prompts)) for sample in range(samples)]
    runs = []
    for sampler, case_plan in also:
        if sampler.temperature == 0:
            continue
        tests = SamplingTests(sampler, target.vocab_size, case_plan.rule.reads_probs)
        for part in _batches(rows):
            requests, numbers = zip(*part, strict=True)
            texts = [prompts[request] for request in requests]
            options = {"requests": requests, "samples": numbers, "on_round": tests.watch(texts)}
            decode(drafter, texts, sampler=sampler, plan=case_plan, **options)
            on_batch()
        runs.append(tests.result(case_plan.name))
    return replace(greedy, sampled=tuple(runs))


def num_batches(prompts: int, also: Sequence[Case], samples: int) -> int:
    """Number of batches that `audit` decodes."""
    num_sampled = sum(sampler.temperature > 0 for sampler, _ in also)
    num_greedy = 2 + len(also) - num_sampled  # with plain decoding and `plan`
    return num_greedy * len(_batches(range(prompts))) + num_sampled * len(_batches(range(prompts * samples)))


def _batches(rows: Sequence[Any]) -> list[Sequence[Any]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def _texts_key(prompts: Prompts, max_new_tokens: int, stop: Sequence[int]) -> Hashable:
    return tuple(map(tuple, prompts)), max_new_tokens, tuple(stop)


def _tie_width(
    target: Target,
    prompts: Prompts,
    rescore: Rescorer,
    decode: Callable[..., Generation],
    on_batch: Callable[[], None],
) -> float:
    """Width of a near tie in logits, from what rescoring changes in plain decoding."""
    changes, largest = [0.0], 0.0
    for part in _batches(prompts):
        gaps = _Gaps(len(part))
        plain = decode(None, part, sampler=Sampler(0.0), on_round=gaps)
        for row, prompt, output in zip(gaps.rows, part, plain.outputs, strict=True):
            logits = rescore(prompt, output.tokens)  # (n, V)
            gap, first, second = (torch.tensor(x) for x in zip(*row, strict=True))
            rescored_gap = logits.gather(1, first[:, None]) - logits.gather(1, second[:, None])
            changes.append(float((rescored_gap[:, 0] - gap).abs().max()))
            largest = max(largest, float(logits.abs().max()))
        on_batch()
    return min(2 * max(changes), widest_tie(largest, target.dtype))


def _greedy(
    drafter: Proposer | None,
    prompts: Prompts,
    plans: Sequence[Plan],
    rescore: Rescorer,
    margin: float,
    decode: Callable[..., Generation],
    on_batch: Callable[[], None],
) -> Audit:
    """The greedy part of the audit."""
    verifier_argmax, counts = _VerifierArgmax(), Counter[str]()
    for plan in plans:
        for part in _batches(prompts):
            run = {"sampler": Sampler(0.0), "plan": plan, "on_round": verifier_argmax}
            outputs = decode(drafter, part, **run).outputs
            for prompt, output in zip(part, outputs, strict=True):
                counts += _compared(rescore(prompt, output.tokens), torch.tensor(output.tokens), margin)
            on_batch()
    names = ("equal", "near_ties", "mismatches")
    return Audit(
        tokens=sum(counts[name] for name in names),
        own_row=verifier_argmax.agreed,
        **{name: counts[name] for name in names},
        margin=margin,
        rescored_in=rescore.dtype,
        sampled=(),
    )


def widest_tie(largest: float, dtype: torch.dtype) -> float:
    """Width in logits of the widest near tie that rounding can explain, from the largest logit."""
    return largest * max(ROUNDINGS * torch.finfo(dtype).eps, LEAST)


def _compared(logits: Tensor, tokens: Tensor, margin: float) -> Counter[str]:
    """Classify (n,) tokens, which should be the argmax of (n, V) logits."""
    gap = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]  # (n,)
    # NaN counts as a mismatch: argmax would select it, but its gap is not 0.
    same = (logits.argmax(-1) == tokens) & (gap == 0)
    near = ~same & (gap <= margin)
    return Counter(equal=int(same.sum()), near_ties=int(near.sum()), mismatches=int((~same & ~near).sum()))


class _Gaps:
    """Records the top-2 gap of plain decoding at every token: (gap, first token, second token)."""

    def __init__(self, requests: int) -> None:
        self.rows: list[list[tuple[float, int, int]]] = [[] for _ in range(requests)]

    def __call__(self, seen: Round) -> None:
        value, index = seen.logits[:, 0].double().topk(2)
        for i, request in enumerate(seen.requests):
            if seen.emitted[i]:
                gap = float(value[i, 0] - value[i, 1])
                self.rows[request].append((gap, int(index[i, 0]), int(index[i, 1])))


class _VerifierArgmax:
    """Counts emitted tokens that are the argmax of the verifier's logits."""

    def __init__(self) -> None:
        self.agreed = 0

    def __call__(self, seen: Round) -> None:
        row = torch.arange(seen.logits.shape[0], device=seen.logits.device)[:, None]
        best = seen.logits[row, seen.result.slots].argmax(-1).tolist()  # (B, K + 1)
        for expected, emitted in zip(best, seen.emitted, strict=True):
            self.agreed += sum(a == b for a, b in zip(expected, emitted, strict=False))


class Rescorer:
    """Logits of a finished text from one causal pass without cache, in fp32 if the model is small enough."""

    def __init__(self, target: Target) -> None:
        small = sum(p.numel() for p in target.model.parameters()) <= LARGEST_COPY
        wide = torch.promote_types(target.dtype, torch.float32)
        is_copied = small and target.movable and wide != target.dtype
        model: Any = copy.deepcopy(target.model) if is_copied else target.model
        self.model = model.to(wide) if is_copied else model
        self.dtype = str(wide if is_copied else target.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(n, V) float64 logits that the n tokens should follow, on the host."""
        ids = torch.tensor([[*prompt, *tokens]], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.double().cpu()

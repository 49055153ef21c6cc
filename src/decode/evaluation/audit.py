"""Is what the decoder wrote really the target's own text?

Greedily, two tests of a real run (docs/lossless.md). Every token must be the largest of the very
row the verifier used. And a cache-free pass over the finished text, which knows nothing of trees,
masks or compaction, must agree with every token, up to ties: the width of a near tie is measured,
as twice the largest change of the top-2 gap that the same rescoring shows for plain decoding, but
never more than rounding can explain: an error that plain decoding shares must not excuse itself.

Above temperature 0 `uniformity` tests the tokens against the laws of the verifier's rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.evaluation.sampling_tests import Uniform, Uniformity
from decode.generation.generate import generate
from decode.generation.types import Generation, Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

Case = tuple[Sampler, Plan]
Prompts = Sequence[Sequence[int]]
ROWS = 16  # decoded together
CHANCE = 1e-6  # of failing a lossless decoder
ROUNDINGS = 16  # of the largest logit: the widest near tie (measured: 5 in bf16, 12 layers)
LEAST = 1e-3  # of the largest logit, where roundings are finer than that
LARGEST_COPY = 1_000_000_000  # weights; a bigger target is rescored in its own dtype


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over all audited tokens.

    Attributes:
        tokens: audited greedily; so are the next four.
        own_row: that are the argmax of the row they were drawn from.
        equal: that are the argmax of their rescored row.
        near_ties: that are within `margin` of it.
        mismatches: that are not.
        margin: width of a near tie, in logits.
        rescored_in: dtype of the rescoring pass.
        sampled: runs above temperature 0.
    """

    tokens: int
    own_row: int
    equal: int
    near_ties: int
    mismatches: int
    margin: float
    rescored_in: str
    sampled: tuple[Uniform, ...]

    @property
    def pit_p(self) -> float:
        """The smallest p-value of all orders and runs, times the number of tests of both kinds."""
        return self._smallest([p for run in self.sampled for p in run.pit.values()])

    @property
    def surprisal_p(self) -> float:
        """The smallest p-value of all runs, times the number of tests of both kinds."""
        return self._smallest([run.surprisal_p for run in self.sampled])

    def _smallest(self, values: Sequence[float]) -> float:
        tests = sum(len(run.pit) + 1 for run in self.sampled)
        return min([1.0, *(tests * p for p in values)])

    @property
    def passed(self) -> bool:
        """Nothing is wrong greedily or in a draw, and something was looked at."""
        greedy = self.tokens > 0 and self.own_row == self.tokens and self.mismatches == 0
        possible = all(run.tokens > 0 and not run.impossible for run in self.sampled)
        return greedy and possible and min(self.pit_p, self.surprisal_p) >= CHANCE

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all runs above temperature 0."""
        return sum(run.tokens for run in self.sampled)

    @property
    def impossible(self) -> int:
        """Of these, tokens that the target gives no probability, or no distribution for."""
        return sum(run.impossible for run in self.sampled)

    @property
    def surprisal_z(self) -> float:
        """Of the run where it is furthest from 0."""
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
    advanced: Callable[[], None] = lambda: None,
) -> Audit:
    """Decode with and without the drafter, and check every token of the former.

    Args:
        target: whose text it should be.
        drafter: what proposes.
        prompts: token ids.
        plan: decoded greedily.
        max_new_tokens: per prompt.
        stop: end tokens.
        also: decoded as well, at any temperature; `plan` at temperature 1 if omitted.
        samples: texts a prompt is given where they differ.
        seed: of the draws.
        advanced: called after each of `steps` batches.
    """
    also = [(Sampler(1.0), plan)] if also is None else also
    decode = partial(generate, target, max_new_tokens=max_new_tokens, stop=stop, seed=seed)
    plans = [plan, *(p for sampler, p in also if sampler.temperature == 0)]
    found = _greedy(target, drafter, prompts, plans, decode, advanced)
    rows = [(request, sample) for request in range(len(prompts)) for sample in range(samples)]
    runs = []
    for sampler, drawn in also:
        if sampler.temperature == 0:
            continue
        tests = Uniformity(sampler, target.vocab_size)
        for part in _batches(rows):
            requests, numbers = zip(*part, strict=True)
            texts = [prompts[request] for request in requests]
            options = {"requests": requests, "samples": numbers, "on_round": tests.watch(texts)}
            decode(drafter, texts, sampler=sampler, plan=drawn, **options)
            advanced()
        runs.append(tests.result(drawn.name))
    return replace(found, sampled=tuple(runs))


def steps(prompts: int, also: Sequence[Case], samples: int) -> int:
    """Batches that `audit` decodes."""
    drawn = sum(sampler.temperature > 0 for sampler, _ in also)
    greedy = 2 + len(also) - drawn  # the plain one, and `plan`
    return greedy * len(_batches(range(prompts))) + drawn * len(_batches(range(prompts * samples)))


def _batches(rows: Sequence[Any]) -> list[Sequence[Any]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def _greedy(
    target: Target,
    drafter: Proposer | None,
    prompts: Prompts,
    plans: Sequence[Plan],
    decode: Callable[..., Generation],
    advanced: Callable[[], None],
) -> Audit:
    """Everything but the sampled runs."""
    rescore = _Rescorer(target)
    sampler = Sampler(0.0)
    changes, largest = [0.0], 0.0
    for part in _batches(prompts):
        gaps = _Gaps(len(part))
        plain = decode(None, part, sampler=sampler, on_round=gaps)
        for row, prompt, output in zip(gaps.rows, part, plain.outputs, strict=True):
            logits = rescore(prompt, output.tokens)  # (n, V)
            gap, first, second = (torch.tensor(x) for x in zip(*row, strict=True))
            again = logits.gather(1, first[:, None]) - logits.gather(1, second[:, None])
            changes.append(float((again[:, 0] - gap).abs().max()))
            largest = max(largest, float(logits.abs().max()))
        advanced()
    margin = min(2 * max(changes), largest * max(ROUNDINGS * torch.finfo(target.dtype).eps, LEAST))

    own, counts = _OwnRow(), Counter[str]()
    for plan in plans:
        for part in _batches(prompts):
            outputs = decode(drafter, part, sampler=sampler, plan=plan, on_round=own).outputs
            for prompt, output in zip(part, outputs, strict=True):
                counts += _compared(rescore(prompt, output.tokens), torch.tensor(output.tokens), margin)
            advanced()
    names = ("equal", "near_ties", "mismatches")
    return Audit(
        tokens=sum(counts[name] for name in names),
        own_row=own.agreed,
        **{name: counts[name] for name in names},
        margin=margin,
        rescored_in=rescore.dtype,
        sampled=(),
    )


def _compared(logits: Tensor, tokens: Tensor, margin: float) -> Counter[str]:
    """How (n,) tokens stand in the (n, V) rows they were to be the largest of."""
    short = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]  # (n,)
    # Not a number is a mismatch, though argmax finds it in both rows.
    same = (logits.argmax(-1) == tokens) & (short == 0)
    near = ~same & (short <= margin)
    return Counter(equal=int(same.sum()), near_ties=int(near.sum()), mismatches=int((~same & ~near).sum()))


class _Gaps:
    """Plain decoding's top-2 gap at every token: (gap, winner, runner-up)."""

    def __init__(self, requests: int) -> None:
        self.rows: list[list[tuple[float, int, int]]] = [[] for _ in range(requests)]

    def __call__(self, seen: Round) -> None:
        value, index = seen.logits[:, 0].double().topk(2)
        for i, request in enumerate(seen.requests):
            if seen.emitted[i]:
                gap = float(value[i, 0] - value[i, 1])
                self.rows[request].append((gap, int(index[i, 0]), int(index[i, 1])))


class _OwnRow:
    """Counts emitted tokens that are the argmax of the row the verifier used."""

    def __init__(self) -> None:
        self.agreed = 0

    def __call__(self, seen: Round) -> None:
        row = torch.arange(seen.logits.shape[0], device=seen.logits.device)[:, None]
        best = seen.logits[row, seen.result.slots].argmax(-1).tolist()  # (B, K + 1)
        for mine, emitted in zip(best, seen.emitted, strict=True):
            self.agreed += sum(a == b for a, b in zip(mine, emitted, strict=False))


class _Rescorer:
    """Rows of a finished text from one cache-free causal pass, in fp32 where memory allows."""

    def __init__(self, target: Target) -> None:
        small = sum(p.numel() for p in target.model.parameters()) <= LARGEST_COPY
        wide = torch.promote_types(target.dtype, torch.float32)
        copied = small and target.movable and wide != target.dtype
        model: Any = copy.deepcopy(target.model) if copied else target.model
        self.model = model.to(wide) if copied else model
        self.dtype = str(wide if copied else target.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(n, V) float64 rows that the n tokens were to be drawn from, on the host."""
        ids = torch.tensor([[*prompt, *tokens]], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.double().cpu()

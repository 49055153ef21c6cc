"""Is what the decoder wrote really the target's own greedy text?

Two tests of a real run (docs/lossless.md). Every token must be the largest of the very row the
verifier used. And a cache-free pass over the finished text, which knows nothing of trees, masks
or compaction, must agree with every token, up to ties: the width of a near tie is measured, as
twice the largest change of the top-2 gap that the same rescoring shows for plain decoding, but
never more than rounding can explain: an error that plain decoding shares must not excuse itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from decode.generate import Proposer, Round, generate
from decode.plan import Plan
from decode.sampling import Sampler
from decode.target import Target

ROUNDINGS = 16  # of the largest logit: the widest near tie (measured: 5 in bf16, 12 layers)
LEAST = 1e-3  # of the largest logit, where roundings are finer than that
LARGEST_COPY = 1_000_000_000  # weights; a bigger target is rescored in its own dtype


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over all audited tokens.

    Attributes:
        tokens: audited.
        own_row: that are the argmax of the row they were drawn from.
        equal: that are the argmax of their rescored row.
        near_ties: that are within `margin` of it.
        mismatches: that are not.
        margin: width of a near tie, in logits.
        rescored_in: dtype of the rescoring pass.
    """

    tokens: int
    own_row: int
    equal: int
    near_ties: int
    mismatches: int
    margin: float
    rescored_in: str

    @property
    def passed(self) -> bool:
        """Every token from its own row, no mismatch, and something was looked at."""
        return self.tokens > 0 and self.own_row == self.tokens and self.mismatches == 0

    def report(self) -> dict[str, float | int | str | bool]:
        """For the scorecard."""
        return asdict(self) | {"passed": self.passed}


def audit(
    target: Target,
    drafter: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    plan: Plan,
    max_new_tokens: int,
    stop: Sequence[int] = (),
) -> Audit:
    """Decode greedily with and without the drafter, and check every token of the former."""
    rescore = _Rescorer(target)
    options = {"max_new_tokens": max_new_tokens, "sampler": Sampler(0.0), "stop": stop}

    gaps = _Gaps(len(prompts))
    plain = generate(target, None, prompts, on_round=gaps, **options)
    changes, largest = [0.0], 0.0
    for row, prompt, output in zip(gaps.rows, prompts, plain.outputs, strict=True):
        logits = rescore(prompt, output.tokens)  # (n, V)
        gap, first, second = (torch.tensor(x) for x in zip(*row, strict=True))
        again = logits.gather(1, first[:, None]) - logits.gather(1, second[:, None])
        changes.append(float((again[:, 0] - gap).abs().max()))
        largest = max(largest, float(logits.abs().max()))
    margin = min(2 * max(changes), largest * max(ROUNDINGS * torch.finfo(target.dtype).eps, LEAST))

    own = _OwnRow()
    outputs = generate(target, drafter, prompts, plan=plan, on_round=own, **options).outputs
    equal = near = wrong = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = rescore(prompt, output.tokens)
        tokens = torch.tensor(output.tokens)
        short = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]  # (n,)
        # Not a number is a mismatch, though argmax finds it in both rows.
        same = (logits.argmax(-1) == tokens) & (short == 0)
        equal += int(same.sum())
        near += int((~same & (short <= margin)).sum())
        wrong += int((~same & ~(short <= margin)).sum())
    total = sum(len(o.tokens) for o in outputs)
    return Audit(total, own.agreed, equal, near, wrong, margin, rescore.dtype)


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
        best = seen.logits[row, seen.verdict.slots].argmax(-1).tolist()  # (B, K + 1)
        for mine, emitted in zip(best, seen.emitted, strict=True):
            self.agreed += sum(a == b for a, b in zip(mine, emitted, strict=False))


class _Rescorer:
    """Rows of a finished text from one cache-free causal pass, in fp32 where memory allows."""

    def __init__(self, target: Target) -> None:
        small = sum(p.numel() for p in target.model.parameters()) <= LARGEST_COPY
        wide = torch.promote_types(target.dtype, torch.float32)
        copied = small and wide != target.dtype
        model: Any = copy.deepcopy(target.model) if copied else target.model
        self.model = model.to(wide) if copied else model
        self.dtype = str(wide if copied else target.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(n, V) float64 rows that the n tokens were to be drawn from, on the host."""
        ids = torch.tensor([[*prompt, *tokens]], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.double().cpu()

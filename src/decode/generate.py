"""The decoding loop: propose, read, verify, keep, advance; batched, each row at its own pace.

Plain decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from decode.coin import KeyedCoin
from decode.draft import Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.sampling import Sampler
from decode.target import Target
from decode.verify import Rows, Verdict, verify


class Proposer(Protocol):
    """All that the decoder knows of a drafter. State lives in an object, never on the module."""

    def new_state(self, rows: int) -> Any:
        """State for `rows` fresh sequences."""
        ...

    def advance(
        self, state: Any, target: Target, tokens: Tensor, taps: Tensor, counts: Sequence[int], root: Tensor
    ) -> None:
        """Absorb settled tokens.

        Args:
            state: from `new_state`; changed in place.
            target: for its embedding.
            tokens: (B, M) right-padded; entries past `counts` are ignored.
            taps: (B, M, L, D) of these tokens.
            counts: tokens per row, at least 1.
            root: (B,) the token after them, which the target has not read.
        """
        ...

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""
        ...

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root. Proposing twice gives the same draft."""
        ...


@dataclass(slots=True)
class Output:
    """One finished request.

    Attributes:
        tokens: generated, up to and including an end token.
        emitted: tokens each verification round gave, cut at the end; the first token comes from
            the prefill and belongs to no round.
        accepted: draft tokens each round accepted, before any cut.
        offered: depth of the draft each round was offered.
        drafted: draft nodes each round was offered.
        stopped: ended by an end token rather than by length.
        ttft: seconds from the start of the batch to the first token.
    """

    tokens: list[int]
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    stopped: bool = False
    ttft: float = 0.0


@dataclass(slots=True)
class Times:
    """Seconds spent; `other` is what is left of `total`. Prefill is no part of the shares."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Bookkeeping: rules, coins, compaction, the loop."""
        return self.total - self.draft - self.verify


class Round(NamedTuple):
    """One verification as observers see it, the prefill (which drafts nothing) included."""

    requests: list[int]  # index of each row's request
    logits: Tensor  # (B, S, V)
    draft: Draft
    verdict: Verdict
    emitted: list[list[int]]  # per row, cut at the end


@dataclass(slots=True)
class Generation:
    """All requests' outputs, in the order they were given."""

    outputs: list[Output]
    times: Times


class _Batch:
    """The rows still running, and what the host knows of them."""

    def __init__(self, prompts: Sequence[Sequence[int]], limit: Sequence[int]) -> None:
        self.request = list(range(len(prompts)))
        self.position = np.array([len(p) for p in prompts])  # of the token after the settled ones
        self.rounds = np.zeros(len(prompts), np.int64)
        self.left = list(limit)

    def select(self, rows: list[int]) -> None:
        self.request = [self.request[r] for r in rows]
        self.position, self.rounds = self.position[rows], self.rounds[rows]
        self.left = [self.left[r] for r in rows]


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    plan: Plan | None = None,
    seed: int = 0,
    requests: Sequence[int | str] | None = None,
    samples: Sequence[int] | None = None,
    stop: Sequence[int] = (),
    coin: Any = None,
    on_round: Callable[[Round], None] | None = None,
) -> Generation:
    """Decode all prompts in one batch, distributed exactly as the target.

    Args:
        target: the model whose law is kept.
        drafter: what proposes, or None for plain decoding.
        prompts: token ids, at least one each.
        max_new_tokens: per request; fewer where the target's context ends.
        sampler: the law.
        plan: how much to draft and which rule verifies it.
        seed: of all randomness.
        requests: names that key each request's randomness; default 0, 1, ...
        samples: which sample of its request each row is; default 0.
        stop: end tokens; emitted, then the request is over.
        coin: replaces the keyed coin (tests).
        on_round: observer.

    Raises:
        UserError: an empty prompt, or one that fills the target's context.
    """
    limits = _limits(target, prompts, max_new_tokens)
    plan = plan or Plan()
    outputs = [Output([]) for _ in prompts]
    times = Times()
    if not prompts:
        return Generation(outputs, times)
    names = list(range(len(prompts))) if requests is None else requests
    coin = KeyedCoin(seed, names, samples) if coin is None else coin
    loop = _Loop(target, drafter, sampler, plan, coin, frozenset(stop), outputs, times, on_round)
    loop.prefill(_Batch(prompts, limits), prompts)
    start = loop.now()
    while loop.batch.request:
        loop.round()
    times.total = loop.now() - start
    return Generation(outputs, times)


def _limits(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    limits = []
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty: give at least one token")
        room = max_new_tokens
        if target.max_positions is not None:
            room = min(room, target.max_positions - len(prompt))
        if room < 1:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and leaves no room in the target's "
                f"context of {target.max_positions}: shorten it, or ask for at least one token"
            )
        limits.append(room)
    return limits


class _Loop:
    def __init__(self, target, drafter, sampler, plan, coin, stop, outputs, times, on_round) -> None:
        self.target: Target = target
        self.drafter: Proposer | None = drafter
        self.sampler: Sampler = sampler
        self.plan: Plan = plan
        self.coin: KeyedCoin = coin
        self.stop: frozenset[int] = stop
        self.outputs: list[Output] = outputs
        self.times: Times = times
        self.on_round = on_round

    def now(self) -> float:
        """Seconds, after the device has caught up."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def prefill(self, batch: _Batch, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts and draw each request's first token."""
        begin = self.now()
        target, device = self.target, self.target.device
        counts = [len(p) for p in prompts]
        tokens = torch.zeros(len(prompts), max(counts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.as_tensor(prompt)
        tokens = tokens.to(device)
        slack = 1 + (self.plan.nodes if self.drafter else 0)
        target.start(len(prompts), max(c + n for c, n in zip(counts, batch.left, strict=True)) + slack)
        read = target.extend(tokens)
        target.keep(counts)
        end = torch.tensor(counts).to(device) - 1
        rows = torch.arange(len(prompts), device=device)
        self.seen = None
        if self.sampler.needs_history:
            real = torch.arange(tokens.shape[1], device=device) <= end[:, None]
            self.seen = torch.zeros(len(prompts), target.vocab_size, dtype=torch.bool, device=device)
            self.seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), value=True)
        logits = target.head(read.last[rows, end])[:, None]  # (B, 1, V)
        coin = self.coin.at(batch.position, batch.rounds)
        draft = Draft.empty(len(prompts), device)
        verdict = verify("match", draft, Rows(logits, self.sampler, self.seen), coin)
        self.batch = batch
        self.state = self.drafter.new_state(len(prompts)) if self.drafter else None
        running = self._settle(verdict)
        self._observe(logits, draft, verdict)
        # The rows of the prompt, gathered so that `running` may drop some of them.
        self._carry(running, tokens, read.taps, counts, verdict)
        took = self.now() - begin
        self.times.prefill, self.times.draft = took, 0.0
        for output in self.outputs:
            output.ttft = took

    def round(self) -> None:
        """One draft, one target pass, one verdict for every running row."""
        target, batch, times = self.target, self.batch, self.times
        coin = self.coin.at(batch.position, batch.rounds)
        begin = self.now()
        if self.drafter is None or self.plan.depth == 0:
            draft = Draft.empty(len(batch.request), target.device)
        else:
            draft = self.drafter.propose(self.state, target, self.sampler, coin, self.plan)
        drafted = self.now()
        read = target.extend(self.root[:, None], draft)
        logits = target.head(read.last)  # (B, S, V)
        verified = self.now()
        times.draft += drafted - begin
        times.verify += verified - drafted

        rule = self.plan.rule if self.drafter else "match"
        verdict = verify(rule, draft, Rows(logits, self.sampler, self.seen), coin)
        shape = draft.offered(), (draft.tokens >= 0).sum(-1)
        running = self._settle(verdict, shape)
        self._observe(logits, draft, verdict)

        # Settle the root and the accepted nodes. Emitted token i was drawn at slots[i], so the
        # slots of the kept tokens are those of the emitted ones.
        counts = [a + 1 for a in self._accepted]
        target.keep(counts, None if draft.is_chain else verdict.slots)
        path = verdict.slots  # (B, K + 1)
        tokens = torch.cat([self.root[:, None], draft.tokens], 1).gather(1, path)
        row = torch.arange(path.shape[0], device=path.device)[:, None]
        self._carry(running, tokens, read.taps[row, path], counts, verdict)

    def _observe(self, logits: Tensor, draft: Draft, verdict: Verdict) -> None:
        if self.on_round:
            self.on_round(Round(self._before, logits, draft, verdict, self._emitted))

    def _settle(self, verdict: Verdict, shape: tuple[Tensor, Tensor] | None = None) -> list[int]:
        """Learn what was emitted (the round's one synchronisation); returns rows that go on.

        `shape` is each row's (depth offered, nodes drafted); the prefill has none and is no round.
        """
        batch, first = self.batch, shape is None
        columns = [verdict.accepted[:, None], verdict.tokens, *(s[:, None] for s in shape or ())]
        table = torch.cat(columns, 1).tolist()
        width = verdict.tokens.shape[1]
        self._before, self._accepted, self._emitted = batch.request, [], []
        running = []
        for row, line in enumerate(table):
            accepted = line[0]
            tokens = line[1 : 2 + accepted][: batch.left[row]]
            end = next((i for i, t in enumerate(tokens) if t in self.stop), None)
            output = self.outputs[batch.request[row]]
            if end is not None:
                tokens, output.stopped = tokens[: end + 1], True
            output.tokens += tokens
            self._accepted.append(accepted)
            self._emitted.append(tokens)
            if not first:
                output.emitted.append(len(tokens))
                output.accepted.append(accepted)
                output.offered.append(line[1 + width])
                output.drafted.append(line[2 + width])
            batch.left[row] -= len(tokens)
            if batch.left[row] > 0 and not output.stopped:
                running.append(row)
        batch.position = batch.position + np.array(self._accepted) + 1
        batch.rounds = batch.rounds + (0 if first else 1)
        return running

    def _carry(
        self, running: list[int], tokens: Tensor, taps: Tensor, counts: list[int], verdict: Verdict
    ) -> None:
        """Drop finished rows, remember the new roots, and let the drafter absorb the rest."""
        root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(verdict.tokens >= 0, verdict.tokens, root[:, None]), value=True)
        if len(running) < len(self.batch.request):
            self.batch.select(running)
            if not running:
                return
            self.target.select(running)
            self.coin = self.coin.select(running)
            tokens, taps, root = tokens[running], taps[running], root[running]
            counts = [counts[r] for r in running]
            if self.seen is not None:
                self.seen = self.seen[running]
            if self.drafter:
                self.drafter.select(self.state, running)
        self.root = root
        if self.drafter:
            width = max(counts)
            begin = self.now()
            self.drafter.advance(self.state, self.target, tokens[:, :width], taps[:, :width], counts, root)
            self.times.draft += self.now() - begin

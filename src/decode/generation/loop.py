"""The decoding loop: propose, read, verify, keep, advance; batched, each row at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.adaptive import paced
from decode.generation.types import Output, Piece, Proposer, Round, Times, Until
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verify import Rows, Verdict, match, verify


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


class Loop:
    """Decodes a batch; see `generate` for what the arguments mean.

    Attributes:
        outputs: of all requests, so far.
        times: so far.
    """

    def __init__(
        self,
        target: Target,
        drafter: Proposer | None,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampler: Sampler,
        plan: Plan,
        coin: KeyedCoin,
        stop: Sequence[int],
        until: Until | None,
        on_round: Callable[[Round], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        target.check_taps(drafter)
        self.target, self.prompts, self.clock = target, prompts, clock
        self.drafter = None if drafter is None else paced(drafter, plan)
        self.sampler, self.plan, self.coin = sampler, plan, coin
        self.stop = frozenset(stop)
        self.ends = [until() for _ in prompts] if until else None
        self.on_round = on_round
        self.batch = _Batch(prompts, limits)
        self.outputs, self.times = [Output([]) for _ in prompts], Times()

    def rounds(self) -> Iterator[None]:
        """Decode to the end, pausing after the prefill and after every round."""
        self.prefill()
        yield
        while self.batch.request:
            begin = self.now()
            self.round()
            self.times.total += self.now() - begin
            yield

    def pieces(self) -> Generator[Piece, None, None]:
        """The same, of one request, with what was settled before each pause."""
        for _ in self.rounds():
            tokens, accepted = self._emitted[0], self._accepted[0]
            yield Piece(tokens, [i < accepted for i in range(len(tokens))], self.outputs[0], self.times)

    def now(self) -> float:
        """Seconds, after the device has caught up."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.clock()

    @torch.inference_mode()  # of a step, not of the generator: its caller would be left in the mode
    def prefill(self) -> None:
        """Read the prompts and draw each request's first token."""
        begin = self.now()
        target, batch, prompts = self.target, self.batch, self.prompts
        device = target.device
        counts = [len(p) for p in prompts]
        tokens = torch.zeros(len(prompts), max(counts), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.as_tensor(prompt)
        tokens = tokens.to(device)
        slack = 1 + (self.plan.nodes if self.drafter else 0)
        target.start(len(prompts), max(c + n for c, n in zip(counts, batch.left, strict=True)) + slack)
        self.cache = target.cache
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
        verdict = match(draft, Rows(logits, self.sampler, self.seen), coin)
        self.state = self.drafter.new_state(len(prompts)) if self.drafter else None
        running = self._settle(verdict)
        self._observe(logits, draft, verdict)
        # The rows of the prompt, gathered so that `running` may drop some of them.
        self._carry(running, tokens, read.taps, counts, verdict)
        took = self.now() - begin
        self.times.prefill, self.times.draft = took, 0.0
        for output in self.outputs:
            output.ttft = took

    @torch.inference_mode()
    def round(self) -> None:
        """One draft, one target pass, one verdict for every running row."""
        target, batch, times = self.target, self.batch, self.times
        if target.cache is not self.cache:
            raise UserError("stream: its target has begun another text; finish one before the next")
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

        verdict = verify(self.plan, draft, Rows(logits, self.sampler, self.seen), coin)
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
            request = batch.request[row]
            end = next((i for i, t in enumerate(tokens) if self._is_end(t, request)), None)
            output = self.outputs[request]
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

    def _is_end(self, token: int, request: int) -> bool:
        return token in self.stop or (self.ends is not None and self.ends[request](token))

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

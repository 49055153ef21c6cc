"""The speculative decoding loop: propose, target pass, verify, keep accepted tokens, advance the drafter.

Rows of a batch accept different numbers of tokens and finish at different times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.draft_check import FAULTS
from decode.errors import UserError
from decode.generation.adaptive import adapt_depth
from decode.generation.capture.choice import captured_rows
from decode.generation.capture.makers import Captures, captures_of
from decode.generation.capture.rows import CapturedRows, Setup
from decode.generation.capture.verification import RunningTexts
from decode.generation.device_part import accepted_path, checked, follow, proposed, result_table, target_pass
from decode.generation.finite import broken_slot, not_finite
from decode.generation.types import (
    Observes,
    Output,
    Piece,
    Proposer,
    ReadsTaps,
    Round,
    Times,
    Traits,
    Until,
)
from decode.model.cache import KVCache
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.row_state import append_rows, select_rows
from decode.sampling import Sampler
from decode.transfer import RowInts, Settled, upload
from decode.verification.descent import match
from decode.verification.result import VerificationResult
from decode.verification.rule import verify
from decode.verification.target_probs import EditedProbs, EditLogits, TargetProbs, TextState

SHARE = 8  # rows join once 1 / SHARE of the batch is free, because their prompts need an extra pass


class _Batch:
    """State of the running rows, except the target's cache and the drafter's state."""

    root: Any  # (B,) last emitted tokens, not yet read by the target; None while captured
    seen: Tensor | None = None  # (B, V) tokens of each text, for the repetition penalty
    followed: TextState | None = None  # state that the rule keeps for each text

    def __init__(
        self, requests: list[int], prompts: Sequence[Sequence[int]], limits: Sequence[int], coin: Any
    ) -> None:
        self.request, self.coin = requests, coin
        self.position = np.array([len(prompts[r]) for r in requests])  # (B,) index of next token
        self.rounds = np.zeros(len(requests), np.int64)  # (B,) verification rounds so far
        self.remaining = [limits[r] for r in requests]  # new tokens allowed

    def select(self, rows: RowInts) -> None:
        """Keep these rows, in this order."""
        self.request = [self.request[r] for r in rows]
        self.remaining = [self.remaining[r] for r in rows]
        self.position, self.rounds = select_rows(self.position, rows), select_rows(self.rounds, rows)
        self.seen, self.root = select_rows(self.seen, rows), select_rows(self.root, rows)
        self.followed = select_rows(self.followed, rows)
        self.coin = self.coin.select(rows)

    def append(self, other: _Batch) -> None:
        """Append another batch's rows."""
        self.request = [*self.request, *other.request]
        self.remaining = [*self.remaining, *other.remaining]
        self.position = append_rows(self.position, other.position)
        self.rounds = append_rows(self.rounds, other.rounds)
        self.seen, self.root = append_rows(self.seen, other.seen), append_rows(self.root, other.root)
        self.followed = append_rows(self.followed, other.followed)
        self.coin = self.coin.append(other.coin)


class Loop:
    """Decode a batch; see `generate` for the arguments.

    Attributes:
        outputs: one per request, updated every round.
        times: times of the batch, updated every round.
        names: names of the requests in messages.
        slots: slots of a row in the newest pass of the target.
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
        clock: Callable[[], float] | None = None,
        batch_size: int | None = None,
        edit: EditLogits | None = None,
    ) -> None:
        if isinstance(drafter, ReadsTaps):
            target.check_taps(drafter.taps)
        if drafter or target.abilities.own_cache:
            target.abilities.check_decode(f"target: {type(target.model).__name__}")
        plan = plan.resolved(sampler.temperature, (drafter.traits if drafter else Traits()).proposals)
        self.target, self.prompts, self.limits, self.clock = target, prompts, limits, clock
        self.taps = target.taps
        self.names: Sequence[int | str] = range(len(prompts))
        self.drafter = adapt_depth(drafter, plan) if drafter and plan.depth else None
        self.proposer = type(drafter).__name__
        self.observer = self.drafter if isinstance(self.drafter, Observes) else None
        self.sampler, self.plan, self.coin, self.edit = sampler, plan, coin, edit
        self.stop = frozenset(stop)
        self.stop_tests = [until() for _ in prompts] if until else None
        self.on_round = on_round
        self.size = len(prompts) if batch_size is None else batch_size
        self.begun, self.waiting = 0, len(prompts)  # counts of requests, started in order
        self.batch = _Batch([], prompts, limits, coin)
        self.outputs, self.times, self.slots = [Output([]) for _ in prompts], Times(), 1
        self.cache: Any = None  # of the target, while rounds are not captured
        self._captured: CapturedRows | None = None
        self._captures = captures_of(target)
        if self._captures and (reason := self._host_reads()):
            self._captures.say(f"decoding is not captured: {reason}")
            self._captures = None
        self.start = self.now()

    def _host_reads(self) -> str:
        """What reads more than a round's table on the host, between rounds; "" if nothing does."""
        readers = {
            "the target's logits are changed on the host": self.edit,
            "`on_round` reads every round": self.on_round,
            "random numbers come from elsewhere": None if isinstance(self.coin, KeyedCoin) else self.coin,
        }
        return next((reason for reason, reader in readers.items() if reader is not None), "")

    @property
    def passes(self) -> str:
        """How the target's passes ran so far; see `Generation`."""
        if self._captured:
            return self._captured.passes + (", compiled" if self.target.compiles else "")
        fused = self.target.fused
        return "compiled" if fused is not None and fused.compiled is not None else "uncompiled"

    @property
    def done(self) -> float:
        """Requests that have ended, and of each that runs the share of its limit; between rounds."""
        running = zip(self.batch.request, self.batch.remaining, strict=True)
        return self.begun - sum(remaining / self.limits[request] for request, remaining in running)

    def rounds(self) -> Iterator[None]:
        """Decode to the end; yields after every prefill and every round."""
        while self.waiting or self.batch.request:
            free = self.size - len(self.batch.request)
            with self.target.lock:  # excludes other threads; released at each `yield`
                if self.waiting and free >= min(self.waiting, max(1, self.size // SHARE)):
                    self.target.taps = self.taps  # another `Loop` may have changed them
                    self.admit()
                else:
                    self.round()
            yield

    def pieces(self) -> Generator[Piece, None, None]:
        """Like `rounds`, for a batch of one; yields the tokens settled since the last piece."""
        for _ in self.rounds():
            tokens, accepted = self._emitted[0], self._accepted[0]
            yield Piece(tokens, [i < accepted for i in range(len(tokens))], self.outputs[0], self.times)

    def now(self) -> float:
        """Current time in seconds; if the caller gave a clock, the device first finishes its work."""
        if self.clock is None:
            return time.perf_counter()
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.clock()

    @torch.inference_mode()  # per step; on a generator it would leak into the caller
    def admit(self) -> None:
        """Prefill the next prompts that fit, and draw their first tokens.

        Their rows are appended to the running ones.
        """
        count = min(self.size - len(self.batch.request), self.waiting)
        begin, drafted = self.now(), self.times.draft
        requests = list(range(self.begun, self.begun + count))
        self.begun, self.waiting = self.begun + count, self.waiting - count
        running = self.batch
        held = (self.cache, self.state) if running.request and not self._captured else None
        self.batch = _Batch(requests, self.prompts, self.limits, self.coin.select(requests))
        self._prefill([self.prompts[request] for request in requests])
        if held:
            if self.batch.request:
                self._join(running, *held)
            else:
                self.target.resume(held[0])
            self.batch, (self.cache, self.state) = running, held
        elif self._captured:
            if self.batch.request:
                self._captured.load(self._texts(), len(self.batch.request))
                self._release()
                running.append(self.batch)
            self.batch = running
        now = self.now()
        self.times.prefill, self.times.draft = self.times.prefill + now - begin, drafted
        for request in requests:
            self.outputs[request].ttft = now - self.start

    def _join(self, running: _Batch, cache: KVCache, state: Any) -> None:
        """Append the current rows to the running ones."""
        cache.store.append(self.cache.store)
        self.target.resume(cache)
        if self.drafter:
            self.drafter.append(state, self.target, self.state)
        running.append(self.batch)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run the target on the prompts of the current batch, and settle their first tokens."""
        target, batch, device = self.target, self.batch, self.target.device
        counts = RowInts([len(p) for p in prompts])
        padded = np.zeros((len(prompts), max(counts)), np.int64)  # (B, T) right-padded
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        tokens = upload(padded, device)
        # Cache capacity: prompt, new tokens, and the slots of one draft that are not kept.
        slack = target.slots(1 + self.plan.nodes) if self.drafter else 1
        if self.drafter and self.drafter.traits.reads_cache:
            # A drafter may read the widest level of a tree at every depth.
            slack = max(slack, 1 + self.plan.width * (self.plan.depth - 1))
        longest = max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))
        target.start(len(prompts), longest + slack)
        self.cache = target.cache
        forward = target.extend(tokens)
        target.keep(counts)
        end = counts.on(device) - 1  # (B,) last position of each prompt
        rows = torch.arange(len(prompts), device=device)
        real = torch.arange(tokens.shape[1], device=device) <= end[:, None]
        batch.followed = self.plan.rule.follow(tokens.where(real, PAD))
        if self.sampler.needs_history:
            batch.seen = torch.zeros(len(prompts), target.vocab_size, dtype=torch.bool, device=device)
            # Padding marks the row's first token, which is in the text anyway.
            batch.seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), value=True)
        logits = target.head(forward.last[rows, end])[:, None]  # (B, 1, V)
        coin = batch.coin.at(batch.position, batch.rounds)
        draft = Draft.empty(len(prompts), device)
        result = match(draft, self._probs(logits), coin)
        self.state = self.drafter.new_state(len(prompts)) if self.drafter else None
        broken = broken_slot(logits, draft)
        no_fault = torch.zeros_like(broken)
        table = result_table(draft, result, broken, no_fault).tolist()
        running = self._settle(table, 0, lambda: draft, prefill=True)
        self._report(logits, draft, result)
        texts = [[*prompt, *new] for prompt, new in zip(prompts, self._settled, strict=True)]
        self._advance(running, tokens, forward.taps, Settled(counts, end + 1, texts, ()), result)

    @torch.inference_mode()
    def round(self) -> None:
        """Run one draft, one target pass and one verification for every running row."""
        if self._captures and self._captured is None:
            self._capture(self._captures)
        if self._captured:
            self._captured.fit(self.waiting > 0)
        begin = self.now()  # a capture is not counted: it is made once
        if self._captured:
            self._captured_round(self._captured)
        else:
            self._uncaptured_round()
        self.times.total += self.now() - begin

    def _uncaptured_round(self) -> None:
        target, batch, times = self.target, self.batch, self.times
        if target.cache is not self.cache:
            raise UserError("stream: the target has started another text; finish one stream before the next")
        if self.drafter and target.taps != self.taps:
            raise UserError("stream: `tap` was called in between; finish the stream before changing taps")
        coin = batch.coin.at(batch.position, batch.rounds)
        begin = self.now()
        rows = len(batch.request)
        draft = proposed(self.drafter, self.state, target, self.sampler, coin, self.plan, rows)
        draft, fault = checked(draft, target, self.plan)
        draft_end = self.now()
        forward, logits = target_pass(target, batch.root, draft)
        verify_end = self.now()
        times.draft += draft_end - begin
        times.verify += verify_end - draft_end
        self.slots = logits.shape[1]

        result = verify(self.plan.rule, draft, self._probs(logits, batch.followed), coin)
        answers = logits.argmax(-1) if self.observer else None
        # The only synchronisation of a round.
        table = result_table(draft, result, broken_slot(logits, draft), fault, answers).tolist()
        running = self._settle(table, draft.depth, lambda: draft)
        if self.observer:
            self.observer.observe(self.state, [line[6 + draft.depth :] for line in table])
        self._report(logits, draft, result)

        # Keep the root and the accepted nodes in the cache.
        counts = self._counts(result.accepted + 1)
        target.keep(counts, None if draft.is_chain else result.slots)
        tokens, taps = accepted_path(batch.root, draft, result, forward)
        self._advance(running, tokens, taps, counts, result)

    def _texts(self) -> RunningTexts:
        """The current rows, on the device."""
        batch = self.batch
        return RunningTexts(self.target, self.state, batch.root, batch.seen, batch.followed)

    def _release(self) -> None:
        """Let go of what captured rounds hold for the current rows."""
        self.cache = self.state = None
        self.batch.root = self.batch.seen = self.batch.followed = None

    def _capture(self, captures: Captures) -> None:
        """Move the running rows into captured rounds, or find that these cannot be captured."""
        rows, plan = len(self.batch.request), self.plan
        rows = min(self.size, rows + self.waiting) if self.waiting else rows
        draft = max(self.target.slots(1 + plan.nodes), 1 + plan.width * plan.depth) if self.drafter else 1
        slots = max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True)) + draft
        setup = Setup(captures, self.drafter, plan, self.sampler, slots)
        name = self.proposer if self.drafter else "the target"
        coin = self.batch.coin.at(self.batch.position, self.batch.rounds)
        self._captured = captured_rows(setup, name, self._texts(), rows, coin)
        if self._captured is None:
            self._captures = None
        else:
            self._release()

    def _captured_round(self, rows: CapturedRows) -> None:
        """`round`, repeated from graphs."""
        batch, times, begin = self.batch, self.times, self.now()
        rows.draft(batch.coin, batch.position, batch.rounds)
        self.slots = rows.slots
        draft_end = self.now()
        rows.verify()
        verify_end = self.now()
        table = rows.table()  # the only synchronisation
        times.draft += draft_end - begin + self.now() - verify_end
        times.verify += verify_end - draft_end
        running = self._settle(table, rows.depth, rows.drafted)
        begin = self.now()
        rows.settle(running, self._counts())
        times.draft += self.now() - begin
        if len(running) < len(batch.request):
            batch.select(RowInts(running))

    def _counts(self, copy: Tensor | None = None) -> Settled:
        """What the rows settled in this round, for drafters; `copy` is the number of tokens on the device."""
        lengths = [output.draft_lengths[-1] for output in map(self.outputs.__getitem__, self._requests)]
        return Settled([a + 1 for a in self._accepted], copy, self._settled, lengths)

    def _probs(self, logits: Tensor, state: TextState | None = None) -> TargetProbs:
        """The target's distributions for the (B, S, V) logits of a round."""
        batch = self.batch
        if self.edit is None:
            return TargetProbs(logits, self.sampler, batch.seen, state)
        texts = [[*self.prompts[request], *self.outputs[request].tokens] for request in batch.request]
        return EditedProbs(logits, self.sampler, batch.seen, state, self.edit, batch.request, texts)

    def _report(self, logits: Tensor, draft: Draft, result: VerificationResult) -> None:
        """Call `on_round`."""
        if self.on_round:
            self.on_round(Round(self._requests, logits, draft, result, self._emitted))

    def _settle(
        self,
        table: Sequence[Sequence[int]],
        depth: int,
        draft: Callable[[], Draft],
        prefill: bool = False,
    ) -> list[int]:
        """Append the emitted tokens to the outputs.

        Args:
            table: see `result_table`.
            depth: of the draft.
            draft: returns the round's draft; called if something is wrong with it.
            prefill: whether these are the texts' first tokens.

        Returns:
            Rows that are not finished.

        Raises:
            UserError: the target's logits are not finite, or verification of the draft would not be lossless.
        """
        batch, width = self.batch, depth + 1
        for row, line in enumerate(table):
            if slot := line[1 + width]:
                raise self._not_finite(row, draft(), slot - 1)
        if number := next((line[2 + width] for line in table if line[2 + width]), 0):
            raise UserError(
                f"{self.proposer} drafted {FAULTS[number]}; decode.rule={self.plan.rule.name} would not be "
                "lossless: correct its `propose` (docs/adding.md)"
            )
        self._requests, self._accepted = batch.request, []
        self._settled, self._emitted = [], []  # tokens before and after the cut at a request's end
        running = []
        for row, line in enumerate(table):
            accepted = line[0]
            self._settled.append(line[1 : 2 + accepted])
            tokens = self._settled[-1][: batch.remaining[row]]
            request = batch.request[row]
            end = next((i for i, t in enumerate(tokens) if self._is_end(t, request)), None)
            output = self.outputs[request]
            if end is not None:
                tokens, output.stopped = tokens[: end + 1], True
            output.tokens += tokens
            self._accepted.append(accepted)
            self._emitted.append(tokens)
            if not prefill:
                output.emitted.append(len(tokens))
                output.accepted.append(accepted)
                output.draft_lengths.append(line[3 + width])
                output.drafted.append(line[4 + width])
            batch.remaining[row] -= len(tokens)
            if batch.remaining[row] > 0 and not output.stopped:
                running.append(row)
        batch.position = batch.position + np.array(self._accepted) + 1
        batch.rounds = batch.rounds + (0 if prefill else 1)
        return running

    def _not_finite(self, row: int, draft: Draft, slot: int) -> UserError:
        """Error for a row whose logits are not finite; `slot` is the first such slot.

        A broken node affects all slots of its row, because attention multiplies masked values by 0. So the
        nodes' paths are checked as well.
        """
        request = self.batch.request[row]
        name = f"prompt {self.names[request]}{' and its draft' if draft.depth else ''}"
        text, nodes = [*self.prompts[request], *self.outputs[request].tokens], draft.tokens[row]
        real = [0, *((nodes != PAD).nonzero()[:, 0] + 1).tolist()]
        paths = [draft.ancestors()[row, s, 1:].nonzero()[:, 0] for s in [slot, *real]]
        texts = [[*text, *nodes[path].tolist()] for path in paths]
        return not_finite(self.target, texts, name)

    def _is_end(self, token: int, request: int) -> bool:
        return token in self.stop or (self.stop_tests is not None and self.stop_tests[request](token))

    def _advance(
        self, running: list[int], tokens: Tensor, taps: Tensor, counts: Settled, result: VerificationResult
    ) -> None:
        """Drop finished rows, set the new roots, and advance the drafter by the settled tokens."""
        batch = self.batch
        follow(batch, result)
        if len(running) < len(batch.request):
            rows = RowInts(running)
            batch.select(rows)
            if not running:
                return
            self.target.select(rows)
            tokens, taps, counts = (select_rows(part, rows) for part in (tokens, taps, counts))
            if self.drafter:
                self.drafter.select(self.state, rows)
        if self.drafter:
            width = max(counts)
            begin = self.now()
            tokens, taps = tokens[:, :width], taps[:, :width]
            self.drafter.advance(self.state, self.target, tokens, taps, counts, batch.root)
            self.times.draft += self.now() - begin

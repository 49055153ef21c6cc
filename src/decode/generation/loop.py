"""The speculative decoding loop: propose, target pass, verify, keep accepted tokens, advance the drafter.

Batched; rows accept different numbers of tokens and finish at different times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.draft_check import FAULTS, draft_fault
from decode.errors import UserError
from decode.generation.adaptive import adapt_depth
from decode.generation.types import Output, Piece, Proposer, Round, Times, Until, supported_proposals
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts, Settled, upload
from decode.verify import RULES, TargetProbs, VerificationResult, match, verify


class _Batch:
    """Bookkeeping on the host for the rows that are still running."""

    def __init__(self, prompts: Sequence[Sequence[int]], limit: Sequence[int]) -> None:
        self.request = list(range(len(prompts)))
        self.position = np.array([len(p) for p in prompts])  # (B,) of the next token to settle
        self.rounds = np.zeros(len(prompts), np.int64)  # (B,) verification rounds so far
        self.remaining = list(limit)  # new tokens allowed

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.request = [self.request[r] for r in rows]
        self.position, self.rounds = self.position[rows], self.rounds[rows]
        self.remaining = [self.remaining[r] for r in rows]


class Loop:
    """Decode a batch; see `generate` for the arguments.

    Attributes:
        outputs: of all requests, updated every round.
        times: of the batch, updated every round.
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
    ) -> None:
        target.check_taps(drafter)
        if drafter or target.abilities.own_cache:
            target.abilities.check_decode(f"target: {type(target.model).__name__}")
        plan = plan.resolved(sampler.temperature, supported_proposals(drafter))
        self.target, self.prompts, self.clock = target, prompts, clock
        self.drafter = adapt_depth(drafter, plan) if drafter and plan.depth else None
        self.proposer = type(drafter).__name__
        self.sampler, self.plan, self.coin = sampler, plan, coin
        self.stop = frozenset(stop)
        self.stop_tests = [until() for _ in prompts] if until else None
        self.on_round = on_round
        self.batch = _Batch(prompts, limits)
        self.outputs, self.times = [Output([]) for _ in prompts], Times()

    def rounds(self) -> Iterator[None]:
        """Decode to the end; yields after the prefill and after every round."""
        self.prefill()
        yield
        while self.batch.request:
            begin = self.now()
            self.round()
            self.times.total += self.now() - begin
            yield

    def pieces(self) -> Generator[Piece, None, None]:
        """Like `rounds`, for a batch of one; yields the tokens settled since the last piece."""
        for _ in self.rounds():
            tokens, accepted = self._emitted[0], self._accepted[0]
            yield Piece(tokens, [i < accepted for i in range(len(tokens))], self.outputs[0], self.times)

    def now(self) -> float:
        """Current time in seconds; by the caller's clock, after synchronising with the device."""
        if self.clock is None:
            return time.perf_counter()
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.clock()

    @torch.inference_mode()  # per step; on a generator it would leak into the caller
    def prefill(self) -> None:
        """Run the target on the prompts and draw each request's first token."""
        begin = self.now()
        target, batch, prompts = self.target, self.batch, self.prompts
        device = target.device
        counts = RowInts([len(p) for p in prompts])
        padded = np.zeros((len(prompts), max(counts)), np.int64)  # (B, T) right-padded
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        tokens = upload(padded, device)
        # Cache capacity: prompt, new tokens, and the slots of one draft that are read but not kept.
        slack = 1 + (self.plan.nodes if self.drafter else 0)
        target.start(len(prompts), max(c + n for c, n in zip(counts, batch.remaining, strict=True)) + slack)
        self.cache = target.cache
        forward = target.extend(tokens)
        target.keep(counts)
        end = counts.on(device) - 1  # (B,) last position of each prompt
        rows = torch.arange(len(prompts), device=device)
        self.seen = None  # (B, V) tokens of each text, for the repetition penalty
        if self.sampler.needs_history:
            real = torch.arange(tokens.shape[1], device=device) <= end[:, None]
            self.seen = torch.zeros(len(prompts), target.vocab_size, dtype=torch.bool, device=device)
            # Padding writes the row's first token, which is in the text anyway.
            self.seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), value=True)
        logits = target.head(forward.last[rows, end])[:, None]  # (B, 1, V)
        coin = self.coin.at(batch.position, batch.rounds)
        draft = Draft.empty(len(prompts), device)
        result = match(draft, TargetProbs(logits, self.sampler, self.seen), coin)
        self.state = self.drafter.new_state(len(prompts)) if self.drafter else None
        running = self._settle(result)
        self._observe(logits, draft, result)
        texts = [[*prompt, *new] for prompt, new in zip(prompts, self._settled, strict=True)]
        self._advance(running, tokens, forward.taps, Settled(counts, end + 1, texts, ()), result)
        seconds = self.now() - begin
        self.times.prefill, self.times.draft = seconds, 0.0  # drafter time so far belongs to the prefill
        for output in self.outputs:
            output.ttft = seconds

    @torch.inference_mode()
    def round(self) -> None:
        """Run one draft, one target pass and one verification for every running row."""
        target, batch, times = self.target, self.batch, self.times
        if target.cache is not self.cache:
            raise UserError("stream: the target has started another text; finish one stream before the next")
        coin = self.coin.at(batch.position, batch.rounds)
        begin = self.now()
        if self.drafter is None or self.plan.depth == 0:  # a timer changes the plan between rounds
            draft = Draft.empty(len(batch.request), target.device)
        else:
            draft = self.drafter.propose(self.state, target, self.sampler, coin, self.plan)
        fault = draft_fault(draft, target.vocab_size, RULES[self.plan.rule].reads_probs)  # (B,)
        # An id out of range would fail in the embedding, before the fault is read.
        draft = replace(draft, tokens=draft.tokens.clamp(PAD, target.vocab_size - 1))
        draft_end = self.now()
        forward = target.extend(self.root[:, None], draft)  # root and nodes: S slots
        logits = target.head(forward.last)  # (B, S, V)
        verify_end = self.now()
        times.draft += draft_end - begin
        times.verify += verify_end - draft_end

        result = verify(self.plan, draft, TargetProbs(logits, self.sampler, self.seen), coin)
        shape = draft.lengths(), (draft.tokens >= 0).sum(-1), fault  # (B,) each
        running = self._settle(result, shape)
        self._observe(logits, draft, result)

        # Keep the root and the accepted nodes in the cache. Emitted token i was drawn at slots[i], so
        # slots[0 .. accepted] are the root and the accepted path.
        lengths = [output.draft_lengths[-1] for output in map(self.outputs.__getitem__, self._requests)]
        counts = Settled([a + 1 for a in self._accepted], result.accepted + 1, self._settled, lengths)
        target.keep(counts, None if draft.is_chain else result.slots)
        path = result.slots  # (B, K + 1)
        tokens = torch.cat([self.root[:, None], draft.tokens], 1).gather(1, path)  # (B, K + 1)
        row = torch.arange(path.shape[0], device=path.device)[:, None]
        self._advance(running, tokens, forward.taps[row, path], counts, result)

    def _observe(self, logits: Tensor, draft: Draft, result: VerificationResult) -> None:
        """Call `on_round`."""
        if self.on_round:
            self.on_round(Round(self._requests, logits, draft, result, self._emitted))

    def _settle(
        self, result: VerificationResult, shape: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> list[int]:
        """Copy the emitted tokens to the host and append them to the outputs.

        This is the only device synchronisation of a round, so all results travel in one table.

        Args:
            result: of the round.
            shape: (B,) draft lengths, (B,) numbers of draft nodes and (B,) faults; None in the prefill.

        Returns:
            The rows that are not finished.

        Raises:
            UserError: a draft with which verification would not be lossless.
        """
        batch, is_prefill = self.batch, shape is None
        columns = [result.accepted[:, None], result.tokens, *(s[:, None] for s in shape or ())]
        table = torch.cat(columns, 1).tolist()  # rows of [accepted, *tokens, draft length, nodes, fault]
        if not is_prefill and (fault := next((line[-1] for line in table if line[-1]), 0)):
            raise UserError(
                f"{self.proposer} drafted {FAULTS[fault]}; decode.rule={self.plan.rule} would not be "
                "lossless: correct its `propose` (docs/adding.md)"
            )
        width = result.tokens.shape[1]
        self._requests, self._accepted = batch.request, []
        self._settled, self._emitted = [], []  # before and after the cut at the end of a request
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
            if not is_prefill:
                output.emitted.append(len(tokens))
                output.accepted.append(accepted)
                output.draft_lengths.append(line[1 + width])
                output.drafted.append(line[2 + width])
            batch.remaining[row] -= len(tokens)
            if batch.remaining[row] > 0 and not output.stopped:
                running.append(row)
        batch.position = batch.position + np.array(self._accepted) + 1
        batch.rounds = batch.rounds + (0 if is_prefill else 1)
        return running

    def _is_end(self, token: int, request: int) -> bool:
        return token in self.stop or (self.stop_tests is not None and self.stop_tests[request](token))

    def _advance(
        self, running: list[int], tokens: Tensor, taps: Tensor, counts: Settled, result: VerificationResult
    ) -> None:
        """Drop finished rows, set the new roots, and advance the drafter by the settled tokens."""
        root = result.tokens.gather(1, result.accepted[:, None])[:, 0]  # (B,) last emitted token
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(result.tokens >= 0, result.tokens, root[:, None]), value=True)
        if len(running) < len(self.batch.request):
            self.batch.select(running)
            if not running:
                return
            rows = RowInts(running)
            index = rows.on(root.device)
            self.target.select(rows)
            self.coin = self.coin.select(rows)
            tokens, taps, root = tokens[index], taps[index], root[index]
            counts = counts.select(rows)
            if self.seen is not None:
                self.seen = self.seen[index]
            if self.drafter:
                self.drafter.select(self.state, rows)
        self.root = root
        if self.drafter:
            width = max(counts)
            begin = self.now()
            self.drafter.advance(self.state, self.target, tokens[:, :width], taps[:, :width], counts, root)
            self.times.draft += self.now() - begin

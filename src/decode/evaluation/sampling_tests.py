"""Statistical tests that sampled tokens come from the target's distributions, without a reference run.

Each token x of a lossless decoder is a draw from the target's distribution p at its position, given all
tokens before it and that the rule reached this position (docs/lossless.md). Two tests follow:

PIT (probability integral transform). Fix an order of the vocabulary before x is drawn. Then p(tokens before
x) plus a uniform share of p(tokens tied with x) is uniform for any p, and independent between tokens; a
chi-square test over bins checks this. The orders are: by p; by token id, the order of the inverse CDF,
which reveals reused random numbers; and by the draft, which reveals errors of the rule: p / q if children
were drawn from q, otherwise fixed children first. A drawn child cannot define an order, because the rule
decides whether x equals it.

Surprisal. Under p the sum of -log p(x) - entropy has mean 0 and known variance, so it gives a z score for
reports. Its normal approximation fails for peaked distributions. The test therefore uses the likelihood
ratio of p at other temperatures, p^(1-t) normalised, to p. Such ratios and their average have mean 1
under p; by Markov's inequality 1 / ratio is a p-value at any length.

Positions without a draft, e.g. after a fully accepted draft, are tested separately.

Rules that weigh sampled nodes by q are lossless only if the nodes were drawn from that q. The same two
tests therefore check draft tokens under their q, in the orders by q and by id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.generation.types import Round
from decode.sampling import Sampler
from decode.verification.result import first_true, normalised, without_token

BINS = 20
EXPECTED = 5  # minimum expected tokens per bin; keeps p-values of 1e-6 correct to a factor of 4
PLACES = ("free", "drafted", "draft token")
TESTS = (("p", "id"), ("p", "id", "draft"), ("q", "id"))  # orders at each of PLACES
DRAFT_TOKEN = 2  # index into PLACES
Q_ROWS = 8  # tested rows of q per round
TILTS = tuple(sign * 2.0**-k for k in range(1, 7) for sign in (1, -1))  # T from 2/3 to 2
FLOOR = -1e3  # lower bound of logarithms, so that 0 * log 0 = 0


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Test results of a run at one temperature.

    Attributes:
        temperature: of the run.
        decode: name of its plan.
        tokens: number of tested tokens.
        impossible: number of tokens, including draft tokens, with probability 0 or a NaN distribution.
        pit: p-value for each kind of position and order with enough tokens.
        surprisal_z: sum(-log p(x) - entropy) in standard deviations.
        surprisal_p: p-value of the likelihood ratio.
        draft_tokens: number of draft tokens tested under their q.
    """

    temperature: float
    decode: str
    tokens: int
    impossible: int
    pit: dict[str, float]
    surprisal_z: float
    surprisal_p: float
    draft_tokens: int = 0


class SamplingTests:
    """Observes runs of `generate` and tests every emitted token.

    Args:
        sampler: of the runs; its temperature must be above 0.
        vocab: size of the target's vocabulary.
        reads_probs: the rule weighs sampled nodes by q, so draft tokens are tested, too.
    """

    def __init__(self, sampler: Sampler, vocab: int, reads_probs: bool = True) -> None:
        assert sampler.temperature > 0, "greedy tokens are not random"
        self.sampler, self.vocab, self.reads_probs = sampler, vocab, reads_probs
        self.rounds = 0
        self.dice = np.random.default_rng(0)  # for ties; independent of the decoder's draws
        self.counts = torch.zeros(len(PLACES), len(TESTS[1]), BINS, dtype=torch.long)
        self.ratios = torch.zeros(len(PLACES), len(TILTS), dtype=torch.float64)  # logarithms
        self.tokens = torch.zeros(len(PLACES), dtype=torch.long)
        self.excess = self.variance = 0.0
        self.impossible = 0

    def watch(self, prompts: Sequence[Sequence[int]]) -> Callable[[Round], None]:
        """The `on_round` callback for one call of `generate` with these prompts."""
        history = None
        if self.sampler.needs_history:
            history = torch.zeros(len(prompts), self.vocab, dtype=torch.bool)
            for row, prompt in zip(history, prompts, strict=True):
                row[list(prompt)] = True
        return partial(self._see, history)

    def _see(self, history: Tensor | None, seen: Round) -> None:
        width = max(len(tokens) for tokens in seen.emitted)
        emitted = torch.tensor([tokens + [PAD] * (width - len(tokens)) for tokens in seen.emitted])
        requests, device = torch.tensor(seen.requests), seen.logits.device
        for i in range(width):  # one by one, because a repetition penalty depends on earlier tokens
            row = (emitted[:, i] != PAD).nonzero()[:, 0]
            request, token = requests[row], emitted[row, i]
            before = None if history is None else history[request].to(device)
            row = row.to(device)
            slot = seen.result.slots[row, i]
            p = self.sampler.probs(seen.logits[row, slot], before).double()  # (M, V)
            self._test(normalised(p), token.to(device), seen.draft, row, slot)
            if history is not None:
                history[request, token] = True
        if self.reads_probs:
            self._see_draft(seen.draft)

    def _see_draft(self, draft: Draft) -> None:
        """Test sampled nodes of a round under their q, rotating through rows of q whatever was drawn."""
        drafted = draft.probs
        if drafted is None or drafted.selected:
            return
        count = drafted.q.shape[1]
        turn = (torch.arange(min(count, Q_ROWS)) + self.rounds * Q_ROWS) % max(count, 1)
        self.rounds += 1
        owner, q = drafted.owner[:, turn], normalised(drafted.q[:, turn].double())  # (B, n), (B, n, V)
        waiting = (draft.parents[:, None] == owner[..., None] - 1) & (owner >= 0)[..., None]  # (B, n, N)
        waiting = waiting & (drafted.sampled & (draft.tokens != PAD))[:, None]
        for rank in range(drafted.siblings if draft.depth else 0):
            node = first_true(waiting)  # (B, n) the next child that was drawn
            token = draft.tokens.gather(1, node.clamp_min(0))
            drawn = node >= 0
            self._add(q[drawn], token[drawn], torch.full_like(token[drawn], DRAFT_TOKEN), [q[drawn]])
            if rank + 1 < drafted.siblings:
                waiting = waiting.scatter(2, node.clamp_min(0)[..., None], value=False)
                q = q if drafted.replacement else without_token(q, token[..., None])

    def _test(self, p: Tensor, token: Tensor, draft: Draft, row: Tensor, slot: Tensor) -> None:
        """Add (M,) tokens drawn from (M, V) distributions at (M,) slots of (M,) rows of a draft."""
        child = (draft.parents[row] == slot[:, None] - 1) & (draft.tokens[row] != PAD)  # (M, N)
        place = child.any(-1).long()  # (M,) index into PLACES
        self._add(p, token, place, [p, _by_draft(p, child, draft, row, slot)])

    def _add(self, p: Tensor, token: Tensor, place: Tensor, orders: Sequence[Tensor]) -> None:
        """Add (M,) tokens drawn from (M, V) distributions.

        Args:
            p: the distributions.
            token: the tokens.
            place: (M,) index into PLACES.
            orders: (M, V) sort keys by p, and by the draft if there is one; the order by id comes second.
        """
        x = token[:, None]
        real = p.gather(1, x)[:, 0] > 0  # False for NaN
        self.impossible += int((~real).sum())
        self.tokens += place.bincount(minlength=len(PLACES)).cpu()

        share = torch.from_numpy(self.dice.random(len(token))).to(p.device)
        by_id = torch.arange(p.shape[1], device=p.device).expand_as(p)
        for order, key in enumerate([orders[0], by_id, *orders[1:]]):
            token_key = key.gather(1, x)  # (M, 1)
            u = (p * (key < token_key)).sum(-1) + share * (p * (key == token_key)).sum(-1)
            cell = (place * self.counts.shape[1] + order) * BINS + (u * BINS).long().clamp(0, BINS - 1)
            cell_counts = torch.bincount(cell[real], minlength=self.counts.numel())
            self.counts += cell_counts.view_as(self.counts).cpu()

        log = p.log()
        surprisal, entropy, variance = surprisals(p, log, token)
        emitted = real & (place != DRAFT_TOKEN)
        self.excess += float((surprisal - entropy)[emitted].sum())
        self.variance += float(variance[emitted].sum())
        # (M, tilts) log likelihood ratio of p^(1 - t) normalised to p, at x.
        log_ratio = torch.stack([tilt * surprisal - ((1 - tilt) * log).logsumexp(-1) for tilt in TILTS], -1)
        self.ratios.index_add_(0, place[real].cpu(), log_ratio[real].cpu())

    def result(self, decode: str) -> SampledRun:
        """Results so far; `decode` is the plan's name."""
        pit = {
            f"{place} by {order}": p
            for place, orders, rows in zip(PLACES, TESTS, self.counts, strict=True)
            for order, counts in zip(orders, rows, strict=False)
            if (p := _chi_square(counts)) is not None
        }
        # Ratios over each kind of token and over all emitted ones. Each has mean 1, and so has their average,
        # although draft tokens depend on emitted ones.
        ratios = torch.cat([self.ratios, self.ratios[:DRAFT_TOKEN].sum(0, keepdim=True)])
        ratio = float(ratios.flatten().logsumexp(0)) - math.log(ratios.numel())
        return SampledRun(
            temperature=self.sampler.temperature,
            decode=decode,
            tokens=int(self.tokens[:DRAFT_TOKEN].sum()),
            impossible=self.impossible,
            pit=pit,
            surprisal_z=self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0,
            surprisal_p=math.exp(min(0.0, -ratio)),
            draft_tokens=int(self.tokens[DRAFT_TOKEN]),
        )


def surprisals(p: Tensor, log: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Surprisal of tokens, in nats.

    Args:
        p: (M, V) distributions.
        log: (M, V) their logarithms.
        token: (M,) tokens.

    Returns:
        (M,) -log p(token), its mean under p (the entropy), and its variance under p.
    """
    surprisal = -log.gather(1, token[:, None])[:, 0]
    entropy = torch.special.entr(p).sum(-1)
    second_moment = (p * log.clamp_min(FLOOR) ** 2).sum(-1)
    return surprisal, entropy, second_moment - entropy**2


def _by_draft(p: Tensor, child: Tensor, draft: Draft, row: Tensor, slot: Tensor) -> Tensor:
    """(M, V) sort keys: p / q if the slot's children were drawn from q, otherwise fixed children first."""
    drafted = draft.probs
    fixed = child if drafted is None else child & ~drafted.sampled[row]  # (M, N)
    is_fixed = torch.zeros_like(p).scatter_add_(
        1, draft.tokens[row].clamp_min(0), fixed.to(p.dtype)
    )  # (M, V)
    key = torch.where(is_fixed > 0, p - 1, p)
    if drafted is None:
        return key
    owns = drafted.owner[row] == slot[:, None]  # (M, Q) rows of q that belong to the slot
    q = drafted.q[row, owns.long().argmax(-1)]
    # 0 / 0 is NaN, which compares false everywhere; such a token has p = 0 anyway.
    return torch.where(owns.any(-1, keepdim=True), p / q, key)


def _chi_square(counts: Tensor) -> float | None:
    """P-value of (BINS,) counts under a uniform distribution; None if there are too few."""
    total = int(counts.sum())
    bins = next((b for b in (BINS, 10, 5, 4, 2) if total >= EXPECTED * b), None)
    if bins is None:
        return None
    expected = total / bins
    statistic = ((counts.view(bins, -1).sum(-1) - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), statistic / 2))

"""Were sampled tokens drawn from the very laws the verifier used? Two tests that need no reference.

However a lossless decoder drafts, each token x it emits is a draw from the target's law p at its
place, given all that came before and that the walk came to this place (docs/lossless.md). So:

PIT. Put the vocabulary in an order that is settled before x is drawn. Then p(the tokens before x)
plus a uniform share of p(those level with x) is uniform, whatever p is, and independent from token
to token: a chi-square over bins. An error that leans towards one end of the order is seen. The
orders: by p; by token id, the order of the inverse CDF, where a coin used twice shows; and by the
draft, where its own errors show: p / q where children were drawn from q, else the chosen children
first. Never by a drawn child: whether x equals it is what the rule decides.

Surprisal. Under p the tokens' -log p(x) exceed their entropies by sum zero and known variance: a z
for people. Its normal law fails where rows are peaked (85 times too many z beyond 1e-6 in 78 tokens
of the pocket target at T=0.3), so what decides is exact at any length: the likelihood ratio of the
rows at other temperatures, p^(1-t) normalised, to the rows themselves. It has mean 1 if the tokens
come from p, and so does a mean of several; by Markov's inequality 1 / ratio is a p-value.

Places where nothing was drafted, such as after a draft accepted whole, are tested apart.
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

BINS = 20
EXPECTED = 5  # tokens a bin, or there are fewer bins: a p-value of 1e-6 is then right to a factor of 4
TESTS = (("p", "id"), ("p", "id", "draft"))  # orders where nothing, something was drafted
PLACES = ("free", "drafted")
TILTS = tuple(sign * 2.0**-k for k in range(1, 7) for sign in (1, -1))  # T from 2/3 to 2
FLOOR = -1e3  # of a logarithm that a probability of 0 multiplies


@dataclass(frozen=True, slots=True)
class Uniform:
    """What the tests say of a run at one temperature.

    Attributes:
        temperature: of the run.
        decode: name of its plan.
        tokens: that were tested.
        impossible: of them, those that their law gives no mass, or that have no law.
        pit: p-value of each place and order with enough tokens.
        surprisal_z: sum(-log p(x) - entropy) in standard deviations.
        surprisal_p: p-value of the likelihood ratio.
    """

    temperature: float
    decode: str
    tokens: int
    impossible: int
    pit: dict[str, float]
    surprisal_z: float
    surprisal_p: float


class Uniformity:
    """Watches runs of `generate` and tests every token they emit.

    Args:
        sampler: of these runs; its temperature is above 0.
        vocab: size of the target's vocabulary.
    """

    def __init__(self, sampler: Sampler, vocab: int) -> None:
        assert sampler.temperature > 0, "a greedy token is no draw"
        self.sampler, self.vocab = sampler, vocab
        self.dice = np.random.default_rng(0)  # shares of ties: no draw of the decoder knows it
        self.counts = torch.zeros(len(PLACES), len(TESTS[1]), BINS, dtype=torch.long)
        self.ratios = torch.zeros(len(PLACES), len(TILTS), dtype=torch.float64)  # logarithms
        self.excess = self.variance = 0.0
        self.impossible = 0

    def watch(self, prompts: Sequence[Sequence[int]]) -> Callable[[Round], None]:
        """The `on_round` of one call of `generate` with these prompts."""
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
        for i in range(width):  # in turn: a penalty depends on the tokens before
            row = (emitted[:, i] != PAD).nonzero()[:, 0]
            request, token = requests[row], emitted[row, i]
            before = None if history is None else history[request].to(device)
            row = row.to(device)
            slot = seen.result.slots[row, i]
            law = self.sampler.probs(seen.logits[row, slot], before).double()  # (M, V)
            self._test(law / law.sum(-1, keepdim=True), token.to(device), seen.draft, row, slot)
            if history is not None:
                history[request, token] = True

    def _test(self, p: Tensor, token: Tensor, draft: Draft, row: Tensor, slot: Tensor) -> None:
        """Count (M,) tokens drawn from (M, V) laws at slots of rows of a draft."""
        x = token[:, None]
        child = (draft.parents[row] == slot[:, None] - 1) & (draft.tokens[row] != PAD)  # (M, N)
        place = child.any(-1).long()  # (M,)
        real = p.gather(1, x)[:, 0] > 0  # and so are numbers
        self.impossible += int((~real).sum())

        share = torch.from_numpy(self.dice.random(len(token))).to(p.device)
        orders = (
            p,
            torch.arange(p.shape[1], device=p.device).expand_as(p),
            _by_draft(p, child, draft, row, slot),
        )
        for order, key in enumerate(orders):
            at = key.gather(1, x)
            u = (p * (key < at)).sum(-1) + share * (p * (key == at)).sum(-1)
            cell = (place * len(orders) + order) * BINS + (u * BINS).long().clamp(0, BINS - 1)
            counted = torch.bincount(cell[real], minlength=self.counts.numel())
            self.counts += counted.view_as(self.counts).cpu()

        log = p.log()
        own, entropy, variance = surprisals(p, log, token)
        self.excess += float((own - entropy)[real].sum())
        self.variance += float(variance[real].sum())
        gain = torch.stack([tilt * own - ((1 - tilt) * log).logsumexp(-1) for tilt in TILTS], -1)  # (M, t)
        self.ratios.index_add_(0, place[real].cpu(), gain[real].cpu())

    def result(self, decode: str) -> Uniform:
        """What the tests say so far of runs with the plan of this name."""
        pit = {
            f"{place} by {order}": p
            for place, orders, rows in zip(PLACES, TESTS, self.counts, strict=True)
            for order, counts in zip(orders, rows, strict=False)
            if (p := _chi_square(counts)) is not None
        }
        # Tilts of all tokens, and of those of one place: each a ratio of mean 1.
        ratios = torch.cat([self.ratios, self.ratios.sum(0, keepdim=True)])
        ratio = float(ratios.flatten().logsumexp(0)) - math.log(ratios.numel())
        return Uniform(
            temperature=self.sampler.temperature,
            decode=decode,
            tokens=int(self.counts[:, 0].sum()) + self.impossible,
            impossible=self.impossible,
            pit=pit,
            surprisal_z=self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0,
            surprisal_p=math.exp(min(0.0, -ratio)),
        )


def surprisals(p: Tensor, log: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What (M,) tokens drawn from (M, V) laws, and these laws' logarithms, have in nats.

    Returns:
        (M,) -log p(token), its mean under the law (the entropy), and its variance.
    """
    own = -log.gather(1, token[:, None])[:, 0]
    entropy = torch.special.entr(p).sum(-1)
    second = (p * log.clamp_min(FLOOR) ** 2).sum(-1)
    return own, entropy, second - entropy**2


def _by_draft(p: Tensor, child: Tensor, draft: Draft, row: Tensor, slot: Tensor) -> Tensor:
    """(M, V) p / q where the children of the slot were drawn from q, else chosen children first."""
    laws = draft.probs
    chosen = child if laws is None else child & ~laws.sampled[row]  # (M, N)
    among = torch.zeros_like(p).scatter_add_(1, draft.tokens[row].clamp_min(0), chosen.to(p.dtype))
    key = torch.where(among > 0, p - 1, p)
    if laws is None:
        return key
    own = laws.owner[row] == slot[:, None]  # (M, Q)
    q = laws.q[row, own.long().argmax(-1)]
    # 0 / 0 is no number and comes nowhere, and such a token weighs nothing anywhere.
    return torch.where(own.any(-1, keepdim=True), p / q, key)


def _chi_square(counts: Tensor) -> float | None:
    """P-value of (BINS,) counts against equal chances; None where they are too few to tell."""
    total = int(counts.sum())
    bins = next((b for b in (BINS, 10, 5, 4, 2) if total >= EXPECTED * b), None)
    if bins is None:
        return None
    expected = total / bins
    statistic = ((counts.view(bins, -1).sum(-1) - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), statistic / 2))

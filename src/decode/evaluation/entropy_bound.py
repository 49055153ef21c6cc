"""How many tokens a tree of P nodes can give at best: the entropy limit, and the best trees themselves.

Any tree whose nodes are fixed before the target is asked is accepted down to the node where the
target's own draw leaves it, so it keeps sum_v p(path to v) tokens on average, p the target's law. The
P likeliest paths keep the most; with independent rows no tree keeps more than log P / mu + mu2 / mu^2
(docs/limits.md has the proof; Pankratov and Alistarh, arXiv:2512.11718, have another coefficient).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.model.target import Target, TargetOutput
from decode.sampling import Sampler

DEEPEST = 128  # levels of a best tree; where the target is certain it would go on for ever


class Entropy(NamedTuple):
    """Surprise of the target's own text, in nats; every text is one draw.

    Attributes:
        sums: (texts, 2) over a text's positions of -log p and (log p)^2, both expected under p.
        counts: (texts,) positions.
        correlation: of the entropies at positions k apart, k = 1, 2, ...: rows of real text are not
            independent.
    """

    sums: np.ndarray
    counts: np.ndarray
    correlation: list[float]

    @property
    def moments(self) -> tuple[float, float]:
        """Mu = E[-log p] and mu2 = E[(log p)^2]."""
        mu, mu2 = self.sums.sum(0) / self.counts.sum()
        return float(mu), float(mu2)


def entropy(laws: Sequence[Tensor], lags: int = 8) -> Entropy:
    """Of (T, V) laws, one tensor for each text of the target's own."""
    sums, entropies = [], []
    for law in laws:
        log = law.double().clamp_min(1e-300).log()
        mass = law.double()
        surprise = -(mass * log).sum(-1)
        sums.append([surprise.sum().item(), (mass * log.square()).sum().item()])
        entropies.append(surprise.cpu().numpy())
    counts = np.array([len(law) for law in laws])
    return Entropy(np.array(sums), counts, _correlation(entropies, lags))


def _correlation(series: Sequence[np.ndarray], lags: int) -> list[float]:
    """Autocorrelation within texts, about the mean over all."""
    every = np.concatenate(series)
    mean, spread = every.mean(), every.var()
    found = []
    for lag in range(1, lags + 1):
        pairs = [(s[:-lag] - mean) * (s[lag:] - mean) for s in series if len(s) > lag]
        values = np.concatenate(pairs) if pairs else np.zeros(0)
        found.append(float(values.mean() / spread) if len(values) and spread > 0 else 0.0)
    return found


def bound(nodes: int, mu: float, mu2: float) -> float:
    """Most draft tokens that a fixed tree of so many nodes keeps on average, where rows are independent.

    Returns:
        log P / mu + mu2 / mu^2; infinity where the target is certain of everything (temperature 0).
    """
    return math.log(nodes) / mu + mu2 / mu**2 if mu > 0 else math.inf


def published(nodes: int, mu: float, mu2: float) -> float:
    """The same with the coefficient of arXiv:2512.11718, (mu + mu2) log P / mu^2, short of its constant."""
    return (mu + mu2) * math.log(nodes) / mu**2 if mu > 0 else math.inf


class Settled(NamedTuple):
    """Contexts that the target has read, but for their roots."""

    tokens: Tensor  # (B, n) right-padded, the roots left out
    counts: list[int]
    root: Tensor  # (B,)
    read: TargetOutput


def settle(target: Target, contexts: Sequence[Sequence[int]], room: int) -> Settled:
    """Begin the target's cache anew with contexts of two tokens or more, and `room` for what is below."""
    counts = [len(context) - 1 for context in contexts]
    tokens = torch.zeros(len(contexts), max(counts), dtype=torch.long)
    for row, context in enumerate(contexts):
        tokens[row, : counts[row]] = torch.tensor(context[:-1])
    tokens = tokens.to(target.device)
    target.start(len(contexts), max(counts) + 1 + room)
    read = target.extend(tokens)
    target.keep(counts)
    return Settled(tokens, counts, torch.tensor([c[-1] for c in contexts], device=target.device), read)


class _Grown:
    """The best nodes found so far below every context, and what has been read of them.

    Attributes:
        mass: (B, P) probability of the path to each, descending; 0 where there is none.
        token: (B, P).
        parent: (B, P) scratch slot of the parent.
        slot: (B, P) scratch slot of the node itself, -1 until it is read.
        level: (B, P) tokens from the root.
        reach: (B, S, S) bool: slot j is slot i or lies on its path.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        self.mass = torch.zeros(rows, nodes, dtype=torch.float64, device=device)
        self.token = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        self.parent = torch.zeros_like(self.token)
        self.slot = torch.full_like(self.token, -1)
        self.level = torch.zeros_like(self.token)
        self.reach = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)

    def children(self, slots: Tensor, mass: Tensor, level: Tensor, laws: Tensor) -> None:
        """Take in what follows (B, n) slots of this mass, by (B, n, V) laws, and keep the best."""
        nodes = self.mass.shape[1]
        top = laws.double().topk(min(nodes, laws.shape[-1]), -1)
        shape = top.indices.shape
        new = {
            "mass": top.values * mass[..., None],
            "token": top.indices,
            "parent": slots[..., None].expand(shape),
            "slot": torch.full(shape, -1, device=slots.device),
            "level": level[..., None].expand(shape) + 1,
        }
        both = {name: torch.cat([getattr(self, name), value.flatten(1)], 1) for name, value in new.items()}
        best = both["mass"].topk(nodes, -1).indices
        for name, value in both.items():
            setattr(self, name, value.gather(1, best))

    def open(self) -> Tensor:
        """(B, P) bool: unread nodes below which a better one than the worst may lie."""
        return (self.slot < 0) & (self.mass > self.mass[:, -1:]) & (self.level < DEEPEST)


@torch.inference_mode()
def best_trees(target: Target, contexts: Sequence[Sequence[int]], nodes: int, sampler: Sampler) -> Tensor:
    """The likeliest paths below each context, by the target's own law.

    A node is less likely than its parent, so the best P nodes hang together: all unread ones among the
    best are read, their children compete, until every one of the best is read.

    Args:
        target: its cache is begun anew.
        contexts: token ids, two or more each.
        nodes: P; of a smaller tree, the first.
        sampler: the law; one without a repetition penalty.

    Returns:
        (B, P) fp64 probabilities of the paths, descending. What the best tree of k nodes keeps is
        the sum of the first k.
    """
    rows, device = len(contexts), target.device
    tokens = settle(target, contexts, room=2 * nodes).root[:, None]  # (B, 1)
    grown, most = _Grown(rows, nodes, device), max(8, nodes // 4)
    mass = torch.ones(rows, 1, dtype=torch.float64, device=device)
    slots = level = torch.zeros(rows, 1, dtype=torch.long, device=device)
    used = 0
    while True:
        hidden = target.forward(tokens, grown.reach[:, used:], scratch=used)  # (B, n, D)
        used += tokens.shape[1]
        laws = sampler.probs(target.head(hidden))  # (B, n, V)
        grown.children(slots, mass, level, laws)
        waiting = grown.open()
        n = min(most, int(waiting.sum(1).max()))
        if not n:
            return grown.mass
        # The likeliest unread ones; a row with fewer reads others in vain, of mass 0.
        order = (grown.mass * waiting).topk(n, -1).indices  # (B, n)
        wanted = waiting.gather(1, order)
        tokens, level = grown.token.gather(1, order), grown.level.gather(1, order)
        mass = grown.mass.gather(1, order) * wanted
        slots = torch.arange(used, used + n, device=device).expand(rows, -1)
        grown.slot.scatter_(1, order, torch.where(wanted, slots, grown.slot.gather(1, order)))
        above = grown.parent.gather(1, order)
        path = grown.reach.gather(1, above[..., None].expand(-1, -1, used))  # (B, n, used)
        own = torch.eye(n, dtype=torch.bool, device=device).expand(rows, -1, -1)
        grown.reach = torch.nn.functional.pad(grown.reach, (0, n))
        grown.reach = torch.cat([grown.reach, torch.cat([path, own], -1)], 1)

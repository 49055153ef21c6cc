"""Upper bound of the acceptance of a tree of P nodes: the entropy bound, and the best trees.

A tree of fixed nodes is accepted up to the node where the target's draw leaves it. So the expected number
of accepted tokens is sum_v p(path to v), with p the target's distribution. The P most likely paths are
optimal; with independent positions no tree exceeds log P / mu + mu2 / mu^2 (proof in docs/limits.md;
Pankratov and Alistarh, arXiv:2512.11718, have a different coefficient).
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

MAX_LEVELS = 128  # of a best tree; without it the tree would be infinite if the target is certain


class Entropy(NamedTuple):
    """Entropy of the target on its own texts, in nats.

    Attributes:
        sums: (texts, 2) sums over positions of E[-log p] and E[(log p)^2].
        counts: (texts,) number of positions.
        correlation: autocorrelation of the entropies at lags 1, 2, ...; positions of real text are not
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


def entropy(texts: Sequence[Tensor], lags: int = 8) -> Entropy:
    """Entropy from the (T, V) distributions at all positions of each text."""
    sums, entropies = [], []
    for probs in texts:
        p = probs.double()
        log = p.clamp_min(1e-300).log()
        values = -(p * log).sum(-1)  # (T,)
        sums.append([values.sum().item(), (p * log.square()).sum().item()])
        entropies.append(values.cpu().numpy())
    counts = np.array([len(probs) for probs in texts])
    return Entropy(np.array(sums), counts, _correlation(entropies, lags))


def _correlation(series: Sequence[np.ndarray], lags: int) -> list[float]:
    """Autocorrelation within texts, with the mean and variance over all texts."""
    pooled = np.concatenate(series)
    mean, variance = pooled.mean(), pooled.var()
    correlation = []
    for lag in range(1, lags + 1):
        pairs = [(s[:-lag] - mean) * (s[lag:] - mean) for s in series if len(s) > lag]
        values = np.concatenate(pairs) if pairs else np.zeros(0)
        correlation.append(float(values.mean() / variance) if len(values) and variance > 0 else 0.0)
    return correlation


def bound(nodes: int, mu: float, mu2: float) -> float:
    """Upper bound of the expected number of accepted tokens of a fixed tree, for independent positions.

    Returns:
        log P / mu + mu2 / mu^2; infinity if mu is 0 (temperature 0).
    """
    return math.log(nodes) / mu + mu2 / mu**2 if mu > 0 else math.inf


def published_bound(nodes: int, mu: float, mu2: float) -> float:
    """The bound of arXiv:2512.11718, (mu + mu2) log P / mu^2, without its constant."""
    return (mu + mu2) * math.log(nodes) / mu**2 if mu > 0 else math.inf


class ContextState(NamedTuple):
    """Contexts in the target's cache, without their roots."""

    tokens: Tensor  # (B, n) right-padded, without the roots
    counts: list[int]
    root: Tensor  # (B,)
    output: TargetOutput


def read_contexts(target: Target, contexts: Sequence[Sequence[int]], room: int) -> ContextState:
    """Reset the target's cache and run contexts of at least two tokens, with `room` for a tree below."""
    counts = [len(context) - 1 for context in contexts]
    tokens = torch.zeros(len(contexts), max(counts), dtype=torch.long)
    for row, context in enumerate(contexts):
        tokens[row, : counts[row]] = torch.tensor(context[:-1])
    tokens = tokens.to(target.device)
    target.start(len(contexts), max(counts) + 1 + room)
    output = target.extend(tokens)
    target.keep(counts)
    return ContextState(tokens, counts, torch.tensor([c[-1] for c in contexts], device=target.device), output)


class _BestNodes:
    """The P best nodes below every context found so far.

    Attributes:
        mass: (B, P) probability of the path to each node, descending; 0 if there is none.
        token: (B, P) token of each node.
        parent: (B, P) scratch slot of the parent.
        slot: (B, P) scratch slot of the node, -1 until the target has run it.
        level: (B, P) depth.
        ancestors: (B, S, S) bool: slot j is slot i or one of its ancestors.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        self.mass = torch.zeros(rows, nodes, dtype=torch.float64, device=device)
        self.token = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        self.parent = torch.zeros_like(self.token)
        self.slot = torch.full_like(self.token, -1)
        self.level = torch.zeros_like(self.token)
        self.ancestors = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)

    def add_children(self, slots: Tensor, mass: Tensor, level: Tensor, probs: Tensor) -> None:
        """Add the children of (B, n) slots, with (B, n, V) distributions, and keep the P best nodes."""
        nodes = self.mass.shape[1]
        top = probs.double().topk(min(nodes, probs.shape[-1]), -1)
        shape = top.indices.shape
        new = {
            "mass": top.values * mass[..., None],
            "token": top.indices,
            "parent": slots[..., None].expand(shape),
            "slot": torch.full(shape, -1, device=slots.device),
            "level": level[..., None].expand(shape) + 1,
        }
        both = {name: torch.cat([getattr(self, name), value.flatten(1)], 1) for name, value in new.items()}
        kept = both["mass"].topk(nodes, -1).indices
        for name, value in both.items():
            setattr(self, name, value.gather(1, kept))

    def unexpanded(self) -> Tensor:
        """(B, P) bool: nodes not yet run whose children may be better than the worst node."""
        return (self.slot < 0) & (self.mass > self.mass[:, -1:]) & (self.level < MAX_LEVELS)


@torch.inference_mode()
def best_trees(target: Target, contexts: Sequence[Sequence[int]], nodes: int, sampler: Sampler) -> Tensor:
    """The P most likely paths below each context under the target.

    A path is at most as likely as its prefix, so the P best nodes form a tree. Best-first search: run the
    best nodes not run yet, add their children, and repeat until all P best nodes were run.

    Args:
        target: its cache is reset.
        contexts: at least two token ids each.
        nodes: P.
        sampler: without a repetition penalty.

    Returns:
        (B, P) fp64 probabilities of the paths, descending. The sum of the first k is the expected
        acceptance of the best tree of k nodes.
    """
    rows, device = len(contexts), target.device
    tokens = read_contexts(target, contexts, room=2 * nodes).root[:, None]  # (B, 1)
    best, most = _BestNodes(rows, nodes, device), max(8, nodes // 4)
    mass = torch.ones(rows, 1, dtype=torch.float64, device=device)
    slots = level = torch.zeros(rows, 1, dtype=torch.long, device=device)
    used = 0  # scratch slots written
    while True:
        hidden = target.forward(tokens, best.ancestors[:, used:], scratch=used)  # (B, n, D)
        used += tokens.shape[1]
        probs = sampler.probs(target.head(hidden))  # (B, n, V)
        best.add_children(slots, mass, level, probs)
        waiting = best.unexpanded()
        n = min(most, int(waiting.sum(1).max()))
        if not n:
            return best.mass
        # The n most likely ones. Rows with fewer also run nodes with mass 0, which has no effect.
        order = (best.mass * waiting).topk(n, -1).indices  # (B, n)
        selected = waiting.gather(1, order)
        tokens, level = best.token.gather(1, order), best.level.gather(1, order)
        mass = best.mass.gather(1, order) * selected
        slots = torch.arange(used, used + n, device=device).expand(rows, -1)
        best.slot.scatter_(1, order, torch.where(selected, slots, best.slot.gather(1, order)))
        parent = best.parent.gather(1, order)
        path = best.ancestors.gather(1, parent[..., None].expand(-1, -1, used))  # (B, n, used)
        # A new slot sees its parent's path and itself.
        itself = torch.eye(n, dtype=torch.bool, device=device).expand(rows, -1, -1)
        best.ancestors = torch.nn.functional.pad(best.ancestors, (0, n))
        best.ancestors = torch.cat([best.ancestors, torch.cat([path, itself], -1)], 1)

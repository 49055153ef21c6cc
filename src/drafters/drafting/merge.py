"""Union of a draft tree and a tree of fixed nodes with the same root, verified in one pass."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from decode.draft import PAD, Draft, DraftProbs

PRIORITY = 1e6  # above any difference of scores


def merge_trees(first: Draft, second: Draft, kept: int, nodes: int) -> Draft:
    """The best `kept` nodes of the first tree, then nodes of only the second, then the rest of the first.

    At most `nodes` per row; a path in both trees counts once. Parents precede children in this order, so the
    selection is a tree. A row without nodes in the second tree keeps all of the first.

    The selection of drawn nodes does not depend on their tokens (docs/lossless.md): a drawn node that is not
    among the best `kept` matches no path of the second tree, so it may have a fixed sibling with the same
    token.

    Args:
        first: a dynamic tree of fixed or hybrid nodes.
        second: a tree of fixed nodes, for the same rows.
        kept: number of the first tree's nodes that precede the second's.
        nodes: maximum number of nodes of a row.
    """
    count = first.tokens.shape[1]
    score, other = _score(first), _score(second) + PRIORITY
    best = _descending(score)[:, :kept]
    may_be_twin = torch.ones_like(first.tokens, dtype=torch.bool)
    if first.probs is not None:
        may_be_twin = (~first.probs.sampled).scatter(1, best, value=True)
    twin = _twins(first, second, may_be_twin)  # (B, N2)
    key = score.scatter_add(1, best, score.new_full((), 2 * PRIORITY).expand(best.shape))
    # A node in both trees counts as the first's, with the higher priority.
    key = torch.maximum(key, _values_at_twins(other, twin, count))
    return _joined(first, second, twin, key, other, nodes)


def mix_trees(first: Draft, second: Draft, weight: float, nodes: int) -> Draft:
    """The most probable paths of two trees of fixed nodes under the mixture of both.

    A path has the probability w q_1 + (1 - w) q_2, where q is exp(score) in a tree with the path, and 0 in
    the other. No node is more probable than its parent, so the selection is a tree.

    Args:
        first: a dynamic tree of fixed nodes, scored by log-probabilities of paths.
        second: likewise, for the same rows.
        weight: w of the first, from 0 to 1.
        nodes: maximum number of nodes of a row.
    """
    twin = _twins(first, second, torch.ones_like(first.tokens, dtype=torch.bool))  # (B, N2)
    own, other = (
        _score(tree) + (math.log(share) if share else -math.inf)
        for tree, share in ((first, weight), (second, 1 - weight))
    )
    key = torch.logaddexp(own, _values_at_twins(other, twin, own.shape[1]))
    return _joined(first, second, twin, key, other, nodes)


def _values_at_twins(value: Tensor, twin: Tensor, count: int) -> Tensor:
    """(B, N2) values of the second tree's nodes -> (B, N1) values at their twins in the first, else -inf."""
    empty = value.new_full((len(value), count), -torch.inf)
    return empty.scatter_reduce(1, twin.clamp_min(0), value.masked_fill(twin < 0, -torch.inf), "amax")


def _joined(first: Draft, second: Draft, twin: Tensor, key: Tensor, other: Tensor, nodes: int) -> Draft:
    """The `nodes` nodes of each row of the union with the highest keys.

    Args:
        first: a tree.
        second: of fixed nodes.
        twin: (B, N2) from `_twins`.
        key: (B, N1) of the first tree's nodes, none above its parent's.
        other: (B, N2) of the second tree's nodes; ignored for nodes with a twin.
        nodes: maximum number of nodes of a row.
    """
    rows, count = first.tokens.shape
    key = torch.cat([key, other.masked_fill(twin >= 0, -torch.inf)], 1)  # (B, N1 + N2)
    selection = _descending(key)[:, :nodes].sort(1).values  # parents before children
    parent_twin = twin.gather(1, second.parents.clamp_min(0))  # the parent's twin
    parents = torch.where(parent_twin >= 0, parent_twin, second.parents + count)
    parents = torch.cat([first.parents, parents.masked_fill(second.parents < 0, -1)], 1)
    slot = torch.zeros(rows, key.shape[1] + 1, dtype=torch.long, device=key.device)
    order = torch.arange(1, selection.shape[1] + 1, device=key.device).expand_as(selection)
    slot.scatter_(1, selection + 1, order)
    parents = slot.gather(1, parents.gather(1, selection) + 1) - 1
    tokens = torch.cat([first.tokens, second.tokens], 1).masked_fill(key == -torch.inf, PAD)
    probs = None if first.probs is None else _renumbered(first.probs, slot, selection)
    depth = max(first.depth, second.depth)
    return Draft(tokens.gather(1, selection), parents, depth, probs, score=key.gather(1, selection))


def _renumbered(probs: DraftProbs, slot: Tensor, selection: Tensor) -> DraftProbs:
    """The distributions of the first tree's drawn nodes, renumbered for the union.

    Args:
        probs: of the first tree.
        slot: (B, N1 + N2 + 1) slot in the union of the root and of all nodes of both trees; 0: omitted.
        selection: (B, N) nodes of the union, the first tree's numbered before the second's.
    """
    owner = slot.gather(1, probs.owner.clamp_min(0))
    owner = owner.masked_fill((probs.owner != 0) & (owner == 0), -1)
    fixed = torch.zeros_like(slot[:, 1 + probs.sampled.shape[1] :], dtype=torch.bool)
    return replace(probs, owner=owner, sampled=torch.cat([probs.sampled, fixed], 1).gather(1, selection))


def _score(draft: Draft) -> Tensor:
    """(B, N) ranking scores of nodes; -inf past a row's nodes."""
    if draft.score is not None:
        return draft.score.double()
    place = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
    return (-place.double()).expand(draft.tokens.shape).masked_fill(draft.tokens == PAD, -torch.inf)


def _descending(values: Tensor) -> Tensor:
    """(B, n) indices that sort the values, stable."""
    return values.sort(dim=1, descending=True, stable=True).indices


def _twins(first: Draft, second: Draft, may_be_twin: Tensor) -> Tensor:
    """(B, N2) index of the first tree's node with the same path as each node of the second; negative: none.

    Only nodes of the first tree with (B, N1) `may_be_twin` are compared.
    """
    same = (second.tokens[:, :, None] == first.tokens[:, None]) & may_be_twin[:, None]  # (B, N2, N1)
    above, roots = second.parents.clamp_min(0), second.parents < 0
    twin = torch.full_like(second.tokens, -2)
    for _ in range(second.depth):  # iteration d completes level d
        up = twin.gather(1, above).masked_fill_(roots, -1)
        match = same & (up[:, :, None] == first.parents[:, None])
        found, twin = match.byte().max(-1)  # paths are unique
        twin = twin.masked_fill_(found == 0, -2)
    return twin

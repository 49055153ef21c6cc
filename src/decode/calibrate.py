"""`decode=calibrated`: the static tree that a checkpoint's own accuracies call for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from decode.errors import UserError
from decode.plan import Path, Plan
from decode.rounds import Proposer
from decode.sampling import Sampler
from decode.starts import Dictate, Rollout, Texts
from decode.target import Target


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The tree of at most so many nodes that keeps the most tokens of stored answers.

    Medusa (arXiv:2401.10774, section 2.3.3) multiplies the accuracies of the depths, as if these
    were independent, and adds the best node until there are enough. Here whole paths are counted:
    how often an answer took the rank-2 token and then the rank-1 one, which is exact for any
    drafter, and needs no more than the ranks.

    Args:
        nodes: most that the tree has.
        depth: most that it is deep, in tokens.
        width: most children that a node has.

    Raises:
        UserError: one of them is below 1.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"decode=calibrated: decode.{name}={getattr(self, name)} must be at least 1")

    @property
    def plans(self) -> tuple[Plan, ...]:
        """What a drafter must be able to make: its laws, to rank by, at every depth."""
        return (Plan(self.depth, proposal="sampled"),)

    def choose(
        self,
        target: Target,
        drafter: Proposer,
        rollouts: Sequence[Rollout],
        sampler: Sampler,
        batch_size: int,
        **options: Any,
    ) -> tuple[Plan, list[dict[str, Any]]]:
        """The tree, and of every depth how often the answer's token had which rank.

        Args:
            target: that wrote the rollouts.
            drafter: to be calibrated.
            rollouts: not those that the tree will be judged by.
            sampler: their law; it says nothing more about ranks.
            batch_size: of the decoder; the tree is the same for all.
            options: of the decoder; they change nothing either.
        """
        del sampler, batch_size, options
        ranks = np.concatenate([*_ranks(target, drafter, rollouts, self.plans[0])])  # (starts, K)
        reached: Counter[Path] = Counter()
        for line in ranks.tolist():
            stop = next((j for j, rank in enumerate(line) if not 0 <= rank < self.width), self.depth)
            reached.update(tuple(line[:j]) for j in range(1, stop + 1))
        table = []
        for depth, column in enumerate(ranks.T, 1):
            there = column[column >= 0]
            share = np.bincount(there, minlength=self.width)[: self.width] / max(len(there), 1)
            table.append({"depth": depth, "accuracy": share.tolist()})
        return Plan(tree=best_tree(reached, self.nodes) or ((0,),)), table


def best_tree(reached: Mapping[Path, float], nodes: int) -> tuple[Path, ...]:
    """The tree that the most tokens fall into, its best nodes first.

    Greedy: a node makes room for its first child and its next sibling. That is optimal where a
    likelier sibling is reached at least as often as the next; few answers may say otherwise.

    Args:
        reached: how often an answer went by each path of child ranks; a path left out, never.
        nodes: most that it has; nodes that nothing reached are not added.
    """
    tree: list[Path] = []
    heap: list[tuple[float, int, Path]] = [(-reached.get((0,), 0), 1, (0,))]
    while heap and len(tree) < nodes:
        value, _, path = heappop(heap)
        if not value:
            break
        tree.append(path)
        for other in ((*path[:-1], path[-1] + 1), (*path, 0)):
            heappush(heap, (-reached.get(other, 0), len(other), other))
    return tuple(tree)


@torch.inference_mode()
def _ranks(
    target: Target, drafter: Proposer, rollouts: Sequence[Rollout], plan: Plan, batch_size: int = 32
) -> Iterator[np.ndarray]:
    """(B, K) of every start: how many tokens the drafter holds likelier than the answer's own, told
    those before it; -1 past the answer's end."""
    order = sorted(rollouts, key=lambda r: -len(r.answer))
    yield np.zeros((0, plan.depth), dtype=np.int64)
    for first in range(0, len(order), batch_size):
        texts = Texts(target, order[first : first + batch_size], plan.depth)
        for place, rows, state in texts.starts(drafter):
            ahead = texts.answers[:rows, place : place + plan.depth]  # (B, K)
            draft = drafter.propose(state, target, Sampler(1.0), Dictate(ahead), plan)  # pyright: ignore[reportArgumentType]
            assert draft.q is not None
            own = draft.q.gather(2, ahead.clamp_min(0)[..., None])
            rank = (draft.q > own).sum(-1)
            yield torch.where(ahead >= 0, rank, -1).cpu().numpy()

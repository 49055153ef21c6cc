"""`decode=calibrated`: the static tree that a checkpoint's own accuracies call for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from decode.errors import UserError
from decode.evaluation.teacher_forced import Dictate, Rollout, Texts
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.sampling import Sampler

TREES = 8  # most that are tried; they seldom change after three
Line = list[int]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The tree of at most so many nodes that needs the fewest rounds on stored answers.

    Medusa (arXiv:2401.10774, section 2.3.3) multiplies the accuracies of the depths, as if these
    were independent, and adds the best node until there are enough. Here whole paths are counted:
    how often an answer took the rank-2 token and then the rank-1 one, which holds for a drafter
    that reads its own tokens as well. What counts is where rounds begin, which the tree itself
    decides: they skip what was easy. So rounds are played with the tree, paths are counted again
    where they began, and the best of the trees met is taken.

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
        answers = _ranks(target, drafter, rollouts, self.plans[0])
        everywhere = [line for answer in answers for line in answer]
        begun, met = everywhere, {}
        while True:
            tree = best_tree(self._reached(begun), self.nodes) or ((0,),)
            if tree in met or len(met) == TREES:
                break
            begun = [line for answer in answers for line in rounds(answer, set(tree))]
            met[tree] = len(begun)
        table = []
        for depth in range(self.depth):
            column = np.array([line[depth] for line in everywhere if line[depth] >= 0], dtype=np.int64)
            share = np.bincount(column, minlength=self.width)[: self.width] / max(len(column), 1)
            table.append({"depth": depth + 1, "accuracy": share.tolist()})
        return Plan(tree=min(met, key=lambda tree: met[tree])), table

    def _reached(self, lines: Sequence[Line]) -> Counter[Path]:
        """How often each path of ranks was taken."""
        reached: Counter[Path] = Counter()
        for line in lines:
            stop = next((j for j, rank in enumerate(line) if not 0 <= rank < self.width), self.depth)
            reached.update(tuple(line[:j]) for j in range(1, stop + 1))
        return reached


def rounds(answer: Sequence[Line], tree: Collection[Path]) -> list[Line]:
    """Where rounds begin on an answer that is drafted with a tree: as `replay` has it, by ranks."""
    begun: list[Line] = []
    place = 0
    while place < len(answer):
        line = answer[place]
        begun.append(line)
        kept = next((j for j in range(len(line)) if tuple(line[: j + 1]) not in tree), len(line))
        place += kept + 1
    return begun


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
) -> list[list[Line]]:
    """A line for every start of every answer: K numbers, how many tokens the drafter holds likelier
    than the answer's own, told those before it; -1 past the answer's end."""
    order = sorted(rollouts, key=lambda r: -len(r.answer))
    found: list[list[Line]] = []
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        lines: list[list[Line]] = [[] for _ in part]
        texts = Texts(target, part, plan.depth)
        for place, rows, state in texts.starts(drafter):
            ahead = texts.answers[:rows, place : place + plan.depth]  # (B, K)
            draft = drafter.propose(state, target, Sampler(1.0), Dictate(ahead), plan)  # pyright: ignore[reportArgumentType]
            assert draft.q is not None
            own = draft.q.gather(2, ahead.clamp_min(0)[..., None])
            rank = (draft.q > own).sum(-1).masked_fill(ahead < 0, -1)
            for row, line in enumerate(rank.tolist()):
                lines[row].append(line)
        found += lines
    return found

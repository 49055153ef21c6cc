"""`decode=calibrated`: a static tree fitted to a drafter's accuracy on stored answers.

After section 2.3.3 of Medusa (arXiv:2401.10774), but counts whole paths of ranks at round starts. Each
position of an answer is a line of K ranks; rank 0 is the drafter's most likely token. A tree is a tuple of
paths of ranks, as in `Plan.tree`. It is measured by the number of rounds that the answers need with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from decode.evaluation.teacher_forced import ForcedTokens, Rollout, TeacherForcedTexts
from decode.generation.types import Proposer
from decode.integers import whole_number
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.sampling import Sampler

TREES = 8  # maximum number of iterations; the tree rarely changes after three
Line = list[int]  # per depth, the answer's token's rank among the draft's candidates; -1 past the end


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Fits the static tree that needs the fewest rounds on stored answers.

    Medusa (arXiv:2401.10774, section 2.3.3) multiplies the accuracies of the depths as if independent and
    adds the best node until the tree is full. Here whole paths are counted (for example the rank-2 token and
    then the rank-1 token), which is also correct for autoregressive drafters. Only positions where rounds
    start matter, and they depend on the tree. So the fit iterates: simulate rounds with the tree, count paths
    at the round starts, and keep the best tree.

    Args:
        nodes: maximum number of nodes.
        depth: maximum depth, in tokens.
        width: maximum number of children per node.

    Raises:
        UserError: one of them is below 1.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "width"):
            whole_number(getattr(self, name), f"decode=calibrated: decode.{name}", least=1)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans that the drafter must support; their distributions give the ranks."""
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
        """Fit the tree.

        Args:
            target: the model that generated the rollouts.
            drafter: the drafter to calibrate.
            rollouts: answers on which the tree is not evaluated.
            sampler: unused; ranks do not depend on it.
            batch_size: unused.
            options: unused.

        Returns:
            The plan, and for every depth the share of tokens by rank.
        """
        del sampler, batch_size, options
        answers = _ranks(target, drafter, rollouts, self.plans[0])
        everywhere = [line for answer in answers for line in answer]
        starts, rounds_of = everywhere, {}
        while True:
            tree = best_tree(self._count_paths(starts), self.nodes) or ((0,),)
            if tree in rounds_of or len(rounds_of) == TREES:
                break
            starts = [line for answer in answers for line in round_start_lines(answer, set(tree))]
            rounds_of[tree] = len(starts)
        table = []
        for depth in range(self.depth):
            column = np.array([line[depth] for line in everywhere if line[depth] >= 0], dtype=np.int64)
            share = np.bincount(column, minlength=self.width)[: self.width] / max(len(column), 1)
            table.append({"depth": depth + 1, "accuracy": share.tolist()})
        return Plan(tree=min(rounds_of, key=lambda tree: rounds_of[tree])), table

    def _count_paths(self, lines: Sequence[Line]) -> Counter[Path]:
        """Count how often each path of ranks was taken."""
        reached: Counter[Path] = Counter()
        for line in lines:
            stop = next((j for j, rank in enumerate(line) if not 0 <= rank < self.width), self.depth)
            reached.update(tuple(line[:j]) for j in range(1, stop + 1))
        return reached


def round_start_lines(answer: Sequence[Line], tree: Collection[Path]) -> list[Line]:
    """Lines of an answer where rounds start when drafting with the tree."""
    starts: list[Line] = []
    place = 0
    while place < len(answer):
        line = answer[place]
        starts.append(line)
        num_accepted = next((j for j in range(len(line)) if tuple(line[: j + 1]) not in tree), len(line))
        place += num_accepted + 1
    return starts


def best_tree(reached: Mapping[Path, float], nodes: int) -> tuple[Path, ...]:
    """The tree with the most accepted tokens; its best nodes come first.

    Greedy: adding a node makes its first child and its next sibling available. This is optimal if lower
    ranks are at least as frequent as higher ones, which may fail with few answers.

    Args:
        reached: how often answers took each path of child ranks; missing paths count 0.
        nodes: maximum number of nodes; nodes that were never reached are not added.
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
    """Line of K ranks for every position of every answer, under teacher forcing.

    The rank is the number of tokens more likely under the drafter than the answer's token; -1 past the end.
    """
    order = sorted(rollouts, key=lambda r: -len(r.answer))
    ranks: list[list[Line]] = []
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        lines: list[list[Line]] = [[] for _ in part]
        texts = TeacherForcedTexts(target, part, plan.depth)
        for place, rows, state in texts.starts(drafter):
            ahead = texts.answers[:rows, place : place + plan.depth]  # (B, K)
            draft = drafter.propose(state, target, Sampler(1.0), ForcedTokens(ahead), plan)  # pyright: ignore[reportArgumentType]
            assert draft.q is not None
            q_token = draft.q.gather(2, ahead.clamp_min(0)[..., None])
            rank = (draft.q > q_token).sum(-1).masked_fill(ahead < 0, -1)
            for row, line in enumerate(rank.tolist()):
                lines[row].append(line)
        ranks += lines
    return ranks

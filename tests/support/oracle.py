"""The verification rules as their papers have them, one row and one coin at a time, in plain Python.

They share no code with `decode.verification`. `Toss` decides by a `Tape`, for `exact_law`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from exact import Node, Tape, struck

Row = Sequence[float]


class Toss:
    """Coins and draws of one play."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def flip(self, chance: float) -> bool:
        """True with this probability."""
        chance = min(max(chance, 0.0), 1.0)
        return self.tape.choose([chance, 1 - chance]) == 0

    def draw(self, probs: Row) -> int:
        """An index."""
        return self.tape.choose([mass / sum(probs) for mass in probs])


class Tree(NamedTuple):
    """A slot: the target's distribution there, and its children in the order they were drawn."""

    p: Row
    children: list[tuple[int, list[float], Tree]]  # token, the distribution it was drawn from, what is below


def tree_of(
    nodes: Sequence[Node], p: Callable[[tuple[int, ...]], Row], vocab: int, replacement: bool = False
) -> Tree:
    """Of one row's draft; drawn siblings without replacement carry their conditional distributions."""

    def below(parent: int, path: tuple[int, ...]) -> Tree:
        tree, taken, first = Tree(p(path), []), [], None
        for i, node in enumerate(nodes):
            if node.parent != parent or node.token < 0:
                continue
            probs = [float(token == node.token) for token in range(vocab)]
            if node.probs is not None:
                first = node.probs if first is None else first
                probs = list(first) if replacement else struck(first, *taken)
                taken.append(node.token)
            tree.children.append((node.token, probs, below(i, (*path, node.token))))
        return tree

    return below(-1, ())


def positive(left: Iterable[float]) -> tuple[list[float], float]:
    """Negative entries cut off; and what the others sum to."""
    kept = [max(mass, 0.0) for mass in left]
    return kept, sum(kept)


def recursive(toss: Toss, tree: Tree) -> tuple[int, ...]:
    """From the root: SpecInfer (arXiv:2305.09781), Sequoia (arXiv:2402.12374)."""
    out: tuple[int, ...] = ()
    while True:
        left, go = list(tree.p), None
        for token, q, child in tree.children:
            if toss.flip(left[token] / q[token]):
                out, go = (*out, token), child
                break
            rest, mass = positive(r - m for r, m in zip(left, q, strict=True))
            left = [r / mass for r in rest] if mass else left
        if go is None:
            return (*out, toss.draw(left))
        tree = go


def match(toss: Toss, tree: Tree) -> tuple[int, ...]:
    """From the root: draw, and descend while there is such a child."""
    out: tuple[int, ...] = ()
    while True:
        out = (*out, toss.draw(tree.p))
        below = [child for token, _, child in tree.children if token == out[-1]]
        if not below:
            return out
        tree = below[0]


def traversal(toss: Toss, tree: Tree) -> tuple[int, ...]:
    """From the leaves: arXiv:2505.12398."""

    def visit(tree: Tree, w: float, root: bool) -> tuple[int, ...] | None:
        left = list(tree.p)
        for token, q, child in tree.children:
            found = visit(child, min(1.0, w * left[token] / q[token]), root=False)
            if found is not None:
                return (token, *found)
            rest, s = positive(w * r - m for r, m in zip(left, q, strict=True))
            w = s / (s + (1 - w)) if s + (1 - w) else w
            left = [r / s for r in rest] if s else left
        return (toss.draw(left),) if root or toss.flip(w) else None

    found = visit(tree, 1.0, root=True)
    assert found is not None
    return found


def block(toss: Toss, tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row]) -> tuple[int, ...]:
    """A chain: algorithm 2 of Sun et al. (arXiv:2403.10444)."""
    kept, w, w_kept = 0, 1.0, 1.0
    for i, token in enumerate(tokens, 1):
        w = min(1.0, w * p[i - 1][token] / q[i - 1][token])
        h = w
        if i < len(tokens):
            s = positive(w * a - b for a, b in zip(p[i], q[i], strict=True))[1]
            h = s / (s + (1 - w)) if s + (1 - w) else 1.0
        if toss.flip(h):
            kept, w_kept = i, w
    probs = p[kept]
    if kept < len(tokens):
        left, mass = positive(w_kept * a - b for a, b in zip(p[kept], q[kept], strict=True))
        probs = left if mass else probs
    return (*tokens[:kept], toss.draw(probs))


RULES = {"match": match, "recursive": recursive, "traversal": traversal}

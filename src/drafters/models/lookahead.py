"""Lookahead decoding (Fu et al., arXiv:2402.02057): n-grams of Jacobi iterations in the verifying pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import new_tokens
from drafters.base import Drafter
from drafters.families.lookup import Node, pack_drafts


@dataclass(slots=True)
class Trajectories:
    """Guesses of one row.

    Attributes:
        text: its tokens, root included.
        window: (N - 1, W) guesses; entry (i, j) is for the (i + j + 1)-th token after the root.
        pool: n-grams by their first token, the newest last.
        places: nodes of the window's entries in the newest draft, by row; shorter where there was no room.
        answers: the target's most likely token after each node of that draft, the root's first.
    """

    text: list[int] = field(default_factory=list)
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[Path, None]] = field(default_factory=dict)
    places: list[list[int]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)


class Lookahead(Drafter):
    """Guesses later tokens in the pass that verifies, and drafts n-grams that such guesses have formed.

    A window of W columns and N - 1 rows of guesses hangs below the root: the first row is a chain, and below
    its j-th token hang the j-th entries of the other rows. Since the target reads every entry after those
    that it belongs to, its answers to the last row are the next iteration of a Jacobi solver (Santilli et
    al., arXiv:2305.10427): with the column above they are an n-gram for the pool, and the newest row of the
    next window. Beside the window, n-grams of the pool that begin with the root are drafted, newest first.
    With ngram=2 and no pool it is plain Jacobi decoding, whose guesses are the draft. All nodes are fixed and
    verified alike, window included, so that the text is the target's.

    Args:
        columns: of guesses, W.
        ngram: N, tokens of an n-gram.
        pool: most n-grams kept of each first token.
        text: put n-grams of the row's own text into the pool, too.

    Raises:
        UserError: an option out of range.
    """

    proposals = ("fixed",)

    def __init__(self, columns: int, ngram: int, pool: int, text: bool) -> None:
        super().__init__()
        if columns < 1 or ngram < 2 or pool < 0:
            raise UserError(
                f"drafter: columns={columns} must be at least 1, ngram={ngram} at least 2, pool={pool} at "
                "least 0"
            )
        self.settings = {"columns": columns, "ngram": ngram, "pool": pool, "text": text}
        self.columns, self.rows, self.pool, self.text = columns, ngram - 1, pool, text

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        return cls(**options)

    @override
    def new_state(self, rows: int) -> list[Trajectories]:
        return [Trajectories() for _ in range(rows)]

    def observe(self, state: list[Trajectories], answers: Sequence[Sequence[int]]) -> None:
        """Take the target's most likely token at every slot of the draft, row by row."""
        for row, line in zip(state, answers, strict=True):
            row.answers = list(line)

    @override
    def advance(
        self,
        state: list[Trajectories],
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        texts = new_tokens(tokens, counts, root, first=not state[0].text)
        for row, text in zip(state, texts, strict=True):
            before = len(row.text)
            row.text += text
            if self.text:
                for end in range(max(before, self.rows), len(row.text)):
                    self._remember(row, row.text[end - self.rows : end + 1])
            self._iterate(row, len(text) - 1)

    def _iterate(self, row: Trajectories, accepted: int) -> None:
        """The next window: one row newer, and without the columns of accepted tokens."""
        rows, used = row.window or [[]] * self.rows, len(row.places) if row.answers else 0
        if used:
            newest = [row.answers[node + 1] for node in row.places[-1]]  # to the last row that was drafted
            for column, answer in enumerate(newest):
                self._remember(row, [*(guesses[column] for guesses in rows[:used]), answer])
            rows = [*rows[1:used], newest, *rows[used:]]
        # Entry (i, j) is for token i + j + 1 after the root: a newer row is for one token later.
        passed = accepted + (not used)
        # Missing guesses are the newest tokens of the text, backwards.
        filled = [row.text[-1 - column % len(row.text)] for column in range(self.columns)]
        row.window = [[*guesses[passed:], *filled[len(guesses[passed:]) :]] for guesses in rows]
        row.places, row.answers = [], []

    def _remember(self, row: Trajectories, gram: Sequence[int]) -> None:
        """Put an n-gram into the pool as the newest of its first token."""
        if not self.pool:
            return
        kept = row.pool.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self.pool:
            del kept[next(iter(kept))]

    @override
    def propose(
        self, state: list[Trajectories], target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        self.check(plan)
        return pack_drafts([self._nodes(row, plan) for row in state], target.device, coin)

    def _nodes(self, row: Trajectories, plan: Plan) -> list[Node]:
        """The draft of one row: n-grams of its pool, and the columns of its window that there is room for."""
        trie = _Trie(plan.nodes)
        grams = [gram[: plan.depth] for gram in reversed(row.pool.get(row.text[-1], {}))]
        if plan.width == 1:  # a chain: an n-gram, or the first row of the window
            grams, columns = grams[:1], 0 if grams else min(self.columns, plan.depth)
            rows = min(1, columns)
        else:
            rows = self.rows
            columns = max(0, min(self.columns, plan.depth - rows + 1, plan.nodes // rows))
        row.places = [[] for _ in range(rows)] if columns else []
        room = plan.nodes - rows * columns
        for gram in grams:
            if len(gram) > room:
                break
            room -= trie.add(gram)
        for column in range(columns):
            path = tuple(row.window[0][: column + 1])
            trie.add(path)
            row.places[0].append(trie.index[path])
            for number in range(1, rows):
                path = (*path, row.window[number][column])
                trie.add(path)
                row.places[number].append(trie.index[path])
        return trie.nodes


class _Trie:
    """Paths below the root, whose common beginnings are one; parents precede children."""

    def __init__(self, most: int) -> None:
        self.nodes: list[Node] = []
        self.index: dict[Path, int] = {(): -1}
        self.most = most

    def add(self, path: Path) -> int:
        """Add a path; returns how many nodes are new."""
        before = len(self.nodes)
        for end in range(1, len(path) + 1):
            if path[:end] not in self.index:
                self.index[path[:end]] = len(self.nodes)
                self.nodes.append(Node(path[end - 1], self.index[path[: end - 1]]))
        assert len(self.nodes) <= self.most
        return len(self.nodes) - before

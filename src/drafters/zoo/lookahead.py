"""Lookahead decoding (Fu et al., arXiv:2402.02057): n-grams of Jacobi iterations in the verifying pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Path, Plan
from drafters.families.lookup import FixedNodesDrafter, Node


@dataclass(slots=True)
class Trajectories:
    """Guesses of one row.

    Attributes:
        columns: of the window, W.
        rows: of the window, N - 1.
        limit: most n-grams kept of each first token.
        remembers_text: whether the text's own n-grams are kept, too.
        tokens: the text, root included.
        window: (N - 1, W) guesses; entry (i, j) is for the (i + j + 1)-th token after the root.
        pool: n-grams by their first token, the newest last.
        places: nodes of the window's entries in the newest draft, by row; shorter where there was no room.
        answers: the target's most likely token after each node of that draft, the root's first.
    """

    columns: int
    rows: int
    limit: int
    remembers_text: bool
    tokens: list[int] = field(default_factory=list)
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[Path, None]] = field(default_factory=dict)
    places: list[list[int]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append settled tokens, and take the window one iteration further."""
        before = len(self.tokens)
        self.tokens += tokens
        if self.remembers_text:
            for end in range(max(before, self.rows), len(self.tokens)):
                self._remember(self.tokens[end - self.rows : end + 1])
        self._iterate(len(tokens) - 1)

    def _iterate(self, accepted: int) -> None:
        """The next window: one row newer, and without the columns of accepted tokens."""
        rows, used = self.window or [[]] * self.rows, len(self.places) if self.answers else 0
        if used:
            newest = [self.answers[node + 1] for node in self.places[-1]]  # to the last row that was drafted
            for column, answer in enumerate(newest):
                self._remember([*(guesses[column] for guesses in rows[:used]), answer])
            rows = [*rows[1:used], newest, *rows[used:]]
        # Entry (i, j) is for token i + j + 1 after the root: a newer row is for one token later.
        passed = accepted + (not used)
        # Missing guesses are the newest tokens of the text, backwards.
        filled = [self.tokens[-1 - column % len(self.tokens)] for column in range(self.columns)]
        self.window = [[*guesses[passed:], *filled[len(guesses[passed:]) :]] for guesses in rows]
        self.places, self.answers = [], []

    def _remember(self, gram: Sequence[int]) -> None:
        """Put an n-gram into the pool as the newest of its first token."""
        if not self.limit:
            return
        kept = self.pool.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self.limit:
            del kept[next(iter(kept))]


class Lookahead(FixedNodesDrafter):
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
        return [Trajectories(self.columns, self.rows, self.pool, self.text) for _ in range(rows)]

    def observe(self, state: list[Trajectories], answers: Sequence[Sequence[int]]) -> None:
        """Take the target's most likely token at every slot of the draft, row by row."""
        for row, line in zip(state, answers, strict=True):
            row.answers = list(line)

    @override
    def nodes(self, history: Trajectories, plan: Plan) -> list[Node]:
        """N-grams of the row's pool, and the columns of its window that there is room for."""
        trie = _Trie()
        grams = [gram[: plan.depth] for gram in reversed(history.pool.get(history.tokens[-1], {}))]
        if plan.width == 1:  # a chain: an n-gram, or the first row of the window
            grams, columns = grams[:1], 0 if grams else min(self.columns, plan.depth)
            rows = min(1, columns)
        else:
            rows = self.rows
            columns = max(0, min(self.columns, plan.depth - rows + 1, plan.nodes // rows))
        history.places = [[] for _ in range(rows)] if columns else []
        room = plan.nodes - rows * columns
        for gram in grams:
            if len(gram) > room:
                break
            room -= trie.add(gram)
        for column in range(columns):
            path = tuple(history.window[0][: column + 1])
            trie.add(path)
            history.places[0].append(trie.index[path])
            for number in range(1, rows):
                path = (*path, history.window[number][column])
                trie.add(path)
                history.places[number].append(trie.index[path])
        return trie.nodes


class _Trie:
    """Paths below the root, whose common beginnings are one; parents precede children."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.index: dict[Path, int] = {(): -1}

    def add(self, path: Path) -> int:
        """Add a path; returns how many nodes are new."""
        before = len(self.nodes)
        for end in range(1, len(path) + 1):
            if path[:end] not in self.index:
                self.index[path[:end]] = len(self.nodes)
                self.nodes.append(Node(path[end - 1], self.index[path[: end - 1]]))
        return len(self.nodes) - before

"""Lookahead decoding (Fu et al., arXiv:2402.02057): n-grams of Jacobi iterations in verification."""

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
    """Window and n-gram pool of one row.

    Attributes:
        columns: W, columns of the window.
        rows: N - 1, rows of the window.
        limit: maximum n-grams kept for each first token.
        remembers_text: whether the text's own n-grams are kept.
        tokens: the text, root included.
        window: (N - 1, W) guesses; entry (i, j) is for the (i + j + 1)-th token after the root.
        pool: first token -> rest of each n-gram, the newest last.
        places: nodes of the window's entries in the newest draft, by row; without those that did not fit.
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
        """Append settled tokens, and advance the window by one iteration."""
        before = len(self.tokens)
        self.tokens += tokens
        if self.remembers_text:
            for end in range(max(before, self.rows), len(self.tokens)):
                self._remember(self.tokens[end - self.rows : end + 1])
        self._iterate(len(tokens) - 1)

    def _iterate(self, accepted: int) -> None:
        """Build the next window: with one new row, and without the columns of accepted tokens."""
        rows, used = self.window or [[]] * self.rows, len(self.places) if self.answers else 0
        if used:
            newest = [self.answers[node + 1] for node in self.places[-1]]  # to the last drafted row
            for column, answer in enumerate(newest):
                self._remember([*(guesses[column] for guesses in rows[:used]), answer])
            rows = [*rows[1:used], newest, *rows[used:]]
        # Entry (i, j) is for token i + j + 1 after the root: a newer row is for one token later.
        passed = accepted + (not used)
        # Missing guesses are filled with the text's newest tokens, backwards.
        filled = [self.tokens[-1 - column % len(self.tokens)] for column in range(self.columns)]
        self.window = [[*guesses[passed:], *filled[len(guesses[passed:]) :]] for guesses in rows]
        self.places, self.answers = [], []

    def _remember(self, gram: Sequence[int]) -> None:
        """Add an n-gram to the pool as the newest of its first token."""
        if not self.limit:
            return
        kept = self.pool.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self.limit:
            del kept[next(iter(kept))]


class Lookahead(FixedNodesDrafter):
    """Guesses later tokens in the verification pass, and drafts n-grams formed by earlier guesses.

    A window of N - 1 rows and W columns of guesses is drafted below the root: the first row is a chain, and
    the j-th entries of the other rows are below its j-th token. The target's answers to the last row are the
    next iteration of a Jacobi solver (Santilli et al., arXiv:2305.10427). Each answer completes the n-gram of
    the column above it for the pool; together the answers are the newest row of the next window. N-grams
    of the pool that begin with the root are drafted in addition, newest first. With ngram=2 and no pool this
    is plain Jacobi decoding. All nodes are fixed and verified, window included, so decoding is lossless.

    Args:
        columns: W, columns of guesses.
        ngram: N, tokens of an n-gram.
        pool: maximum n-grams kept for each first token.
        text: whether n-grams of the row's own text enter the pool.

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
        """Store the target's most likely token at every slot of the draft, row by row."""
        for row, line in zip(state, answers, strict=True):
            row.answers = list(line)

    @override
    def nodes(self, history: Trajectories, plan: Plan) -> list[Node]:
        """N-grams of the row's pool, and as many columns of its window as fit."""
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
    """Paths below the root with shared prefixes; parents precede children."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.index: dict[Path, int] = {(): -1}

    def add(self, path: Path) -> int:
        """Add a path; returns the number of new nodes."""
        before = len(self.nodes)
        for end in range(1, len(path) + 1):
            if path[:end] not in self.index:
                self.index[path[:end]] = len(self.nodes)
                self.nodes.append(Node(path[end - 1], self.index[path[: end - 1]]))
        return len(self.nodes) - before

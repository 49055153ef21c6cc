"""Laws without a sample: run a randomised program once for every outcome of its decisions.

`EnumeratingCoin` answers the production code's flips and draws from tapes, one a row. A `Tape`
replays given picks and then takes first options, noting how many there were; `exact_law` plays
until none is untried. A `Script` decides the rows that only keep a branching row company.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.coin import Key, Purpose
from decode.draft import PAD, Draft
from decode.sampling import Sampler

Law = dict[tuple[int, ...], float]
EXACT = 1e-12


class Tape:
    """One row's decisions: replays `picks`, then takes the first of what is possible."""

    def __init__(self, picks: Sequence[int] = ()) -> None:
        self.picks, self.given = list(picks), len(picks)
        self.options: list[int] = []
        self.probability = 1.0
        self.keys: set[tuple] = set()

    def choose(self, chances: Sequence[float]) -> int:
        """Index of one of the outcomes with these probabilities."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        turn = len(self.options)
        if turn == len(self.picks):
            self.picks.append(self.prefer(len(possible)))
        self.options.append(len(possible))
        pick = possible[self.picks[turn]]
        self.probability *= chances[pick]
        return pick

    def prefer(self, count: int) -> int:
        """Which of `count` outcomes to take where nothing is given."""
        del count
        return 0

    def untried(self) -> list[list[int]]:
        """Picks of every branch that this play passed and no earlier one was given."""
        turns = range(self.given, len(self.options))
        return [[*self.picks[:t], other] for t in turns for other in range(1, self.options[t])]


class Script(Tape):
    """Decisions fixed by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)

    def prefer(self, count: int) -> int:
        """Any of them."""
        return self.dice.randrange(count)


class EnumeratingCoin:
    """Satisfies `decode.coin.Coin`, and `at` and `select` as the loop calls them.

    Args:
        tapes: one a row.
        junk: what a row that is not active is told; nothing may depend on it.
    """

    def __init__(self, tapes: Sequence[Tape], junk: int = 0, position=None, rounds=None) -> None:
        self.tapes, self.junk = list(tapes), junk
        self.position = [0] * len(self.tapes) if position is None else [int(p) for p in position]
        self.rounds = [0] * len(self.tapes) if rounds is None else [int(r) for r in rounds]
        assert len(self.tapes) == len(self.position) == len(self.rounds)

    def at(self, position, rounds) -> EnumeratingCoin:
        """The same tapes in a later round."""
        return EnumeratingCoin(self.tapes, self.junk, position, rounds)

    def select(self, rows: Sequence[int]) -> EnumeratingCoin:
        """Keep these rows."""
        return EnumeratingCoin([self.tapes[r] for r in rows], self.junk)

    def _choose(self, row: int, chances: list[float], key: Key) -> int:
        tape = self.tapes[row]
        if key.purpose == Purpose.TARGET:
            name = (key.purpose, self.position[row] + key.slot, 0, key.number)
        else:
            name = (key.purpose, self.rounds[row], key.slot, key.number)
        assert name not in tape.keys, f"key {name} was used before: two decisions would agree"
        tape.keys.add(name)
        return tape.choose(chances)

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) bool."""
        out = torch.full((len(self.tapes),), bool(self.junk))
        for row in active.nonzero()[:, 0].tolist():
            p, q = float(accept[row]), float(proposal[row])
            assert q > 0, "a token that its own law cannot draw"
            yes = min(1.0, p / q)
            out[row] = self._choose(row, [yes, 1.0 - yes], key) == 0
        return out

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) index."""
        assert weights.shape[0] == len(self.tapes)
        out = torch.full((len(self.tapes),), self.junk % weights.shape[1])
        for row in active.nonzero()[:, 0].tolist():
            mass = weights[row].double().tolist()
            assert min(mass) >= 0, "negative mass"
            assert sum(mass) > 0, "nothing to draw from"
            out[row] = self._choose(row, [m / sum(mass) for m in mass], key)
        return out


def exact_law(play: Callable[[list[Tape]], Sequence[tuple[int, ...]]], abreast: int = 1) -> Law:
    """Law of what `play` makes of a tape.

    Args:
        play: outcomes of a list of tapes, each a function of its own tape alone.
        abreast: plays at a time; 1 is a depth-first replay.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    waiting: list[list[int]] = [[]]
    while waiting:
        tapes = [Tape(waiting.pop()) for _ in range(min(abreast, len(waiting)))]
        for tape, outcome in zip(tapes, play(tapes), strict=True):
            law[outcome] += tape.probability
            waiting += tape.untried()
    assert abs(sum(law.values()) - 1) < EXACT, "some branch was missed or played twice"
    return dict(law)


@torch.no_grad()
def target_law(model, prompt: Sequence[int], length: int, sampler: Sampler, stop: Sequence[int] = ()) -> Law:
    """Law of the first `length` tokens, up to an end token, from full forwards without a cache."""
    law: Law = {(): 1.0}
    for _ in range(length):
        open_ = [text for text in law if not (text and text[-1] in stop)]
        if not open_:
            break
        ids = torch.tensor([[*prompt, *text] for text in open_])
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, text in enumerate(ids.tolist()):
            seen[row, text] = True
        for text, row in zip(open_, sampler.law(logits, seen).tolist(), strict=True):
            mass = law.pop(text)
            law |= {(*text, token): mass * p for token, p in enumerate(row) if p > 0}
    return law


def assert_same_law(got: Law, want: Law) -> None:
    """To 1e-12 at every outcome."""
    worst = max(set(got) | set(want), key=lambda y: abs(got.get(y, 0) - want.get(y, 0)))
    error = abs(got.get(worst, 0) - want.get(worst, 0))
    assert error < EXACT, f"{worst}: {got.get(worst, 0):.6f}, should be {want.get(worst, 0):.6f}"


class Scripted:
    """A proposer that remembers each row's text; its drafts are a function of that and a seed."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.vocab, self.seed = vocab, seed

    def new_state(self, rows):
        return [[] for _ in range(rows)]

    def advance(self, state, target, tokens, taps, counts, root):
        assert len(state) == len(tokens), "rows that left were not dropped"
        for text, new, count, end in zip(state, tokens.tolist(), counts, root.tolist(), strict=True):
            assert not text or text.pop() == new[0], "the old root was not settled first"
            text += [*new[:count], end]

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    def dice(self, text: Sequence[int]) -> random.Random:
        """Of a context."""
        return random.Random(f"{self.seed} {text}")


class FixedChains(Scripted):
    """Chosen chains of the plan's depth, some rows' shorter or empty."""

    def propose(self, state, target, sampler, coin, plan):
        tokens = torch.full((len(state), plan.depth), PAD)
        for row, text in enumerate(state):
            dice = self.dice(text)
            for depth in range(dice.choice([plan.depth, plan.depth, dice.randint(0, plan.depth)])):
                tokens[row, depth] = dice.randrange(self.vocab)
        return Draft.chain(tokens)


class FixedTrees(Scripted):
    """Chosen trees of up to `plan.nodes` nodes: siblings, cousins, no two rows alike."""

    def propose(self, state, target, sampler, coin, plan):
        tokens = torch.full((len(state), plan.nodes), PAD)
        parents = torch.full_like(tokens, -1)
        for row, text in enumerate(state):
            dice, level = self.dice(text), [0]
            for node in range(dice.choice([plan.nodes, dice.randint(0, plan.nodes)])):
                above = dice.choice([i for i, high in enumerate(level) if high < plan.depth])
                level.append(level[above] + 1)
                taken = [int(t) for t, p in zip(tokens[row], parents[row], strict=True) if p == above - 1]
                free = [t for t in range(self.vocab) if t not in taken] or [0]
                tokens[row, node], parents[row, node] = dice.choice(free), above - 1
        return Draft(tokens, parents, depth=plan.depth)


class SampledChains(Scripted):
    """Chains drawn from arbitrary laws of its own, with zeros; some rows' are cut beforehand."""

    def law(self, text: Sequence[int]) -> list[float]:
        dice = self.dice(text)
        mass = [dice.choice([0.0, *[dice.random() ** 3 + 0.01] * 4]) for _ in range(self.vocab)]
        mass[dice.randrange(self.vocab)] += 0.1
        return [m / sum(mass) for m in mass]

    def propose(self, state, target, sampler, coin, plan):
        texts = [list(text) for text in state]
        length = torch.tensor([self.dice(t).choice([plan.depth] * 3 + [0, 1]) for t in texts])
        tokens, laws = [], []
        for depth in range(plan.depth):
            laws.append(torch.tensor([self.law(text) for text in texts], dtype=torch.float64))
            real = depth < length
            drawn = coin.draw(laws[-1], Key(Purpose.PROPOSE, depth), real)
            tokens.append(torch.where(real, drawn, PAD))
            for text, token in zip(texts, tokens[-1].tolist(), strict=True):
                text.append(token)
        return Draft.chain(torch.stack(tokens, 1), torch.stack(laws, 1))

"""Exact probabilities: a randomised program is run once for every outcome of its decisions.

`EnumeratingCoin` answers flips and draws of src from tapes, one a row; `exact_law` plays until no outcome of
a `Tape` is untried. A `Script` decides for the other rows of a batch. Drafts of any form: see `grow`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.draft import PAD, Draft, DraftProbs
from decode.generation.generate import generate
from decode.generation.types import Traits
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
from decode.sampling import Sampler
from decode.verification.result import VerificationResult
from decode.verification.rule import verify
from decode.verification.target_probs import TargetProbs
from drafters.drafting.tree import expand

Probs = dict[tuple[int, ...], float]
EXACT = 1e-12
NOISE = 1e-14  # a chance that is there or not as rounding will have it, and with it the batch


class Tape:
    """One row's decisions: replays `picks`, then takes the first of what is possible."""

    def __init__(self, picks: Sequence[int] = ()) -> None:
        self.picks, self.given = list(picks), len(picks)
        self.options: list[int] = []
        self.probability = 1.0
        # Interval of [0, 1) in which the production coin's number of a decision is, after what was picked.
        self.known: dict[float | tuple, tuple[float, float]] = {}

    def choose(self, chances: Sequence[float]) -> int:
        """Index of one of the outcomes with these probabilities."""
        possible = [i for i, chance in enumerate(chances) if chance > NOISE]
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
    """Satisfies `decode.rng.Coin`, and `at`, `select` and `append` as the loop calls them.

    Args:
        tapes: one a row.
        junk: answer for a row that is not active; nothing may depend on it.
    """

    def __init__(self, tapes: Sequence[Tape], junk: int = 0, position=None, rounds=None) -> None:
        self.tapes, self.junk = list(tapes), junk
        self.position = [0] * len(self.tapes) if position is None else [int(p) for p in position]
        self.rounds = [0] * len(self.tapes) if rounds is None else [int(r) for r in rounds]
        assert len(self.tapes) == len(self.position) == len(self.rounds)

    def at(self, position, rounds) -> EnumeratingCoin:
        """The same tapes in a later round."""
        return type(self)(self.tapes, self.junk, position, rounds)

    def select(self, rows: Sequence[int]) -> EnumeratingCoin:
        """Keep these rows."""
        return type(self)([self.tapes[r] for r in rows], self.junk)

    def append(self, other: EnumeratingCoin) -> EnumeratingCoin:
        """The other's rows behind these."""
        return type(self)([*self.tapes, *other.tapes], self.junk)

    def _choose(self, row: int, chances: list[float], key: Key) -> int:
        tape = self.tapes[row]
        if key.purpose == Purpose.TARGET:
            name = (key.purpose, self.position[row] + key.slot, 0, key.number)
        else:
            name = (key.purpose, self.rounds[row], key.slot, key.number)
        assert name not in tape.known, f"key {name} was used before: two decisions would agree"
        pick = tape.choose(chances)
        low = sum(chances[:pick])
        tape.known[name] = low, low + chances[pick]
        return pick

    def flip(self, accept: Tensor, proposal: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) bool."""
        out = torch.full((len(self.tapes),), bool(self.junk))
        for row in active.nonzero()[:, 0].tolist():
            p, q = float(accept[row]), float(proposal[row])
            assert q > 0, "a token that its own distribution cannot draw"
            yes = min(1.0, p / q)
            out[row] = self._choose(row, [yes, 1.0 - yes], key) == 0
        return out

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) index, or (B, n) for n slots."""
        assert weights.shape[0] == len(self.tapes)
        assert weights.shape[:-1] == active.shape
        out = torch.full(active.shape, self.junk % weights.shape[-1])
        all_probs, places = weights[active].double().tolist(), active.nonzero().tolist()
        for mass, (row, *more) in zip(all_probs, places, strict=True):
            total = sum(mass)
            assert min(mass) >= 0, "negative mass"
            assert total > 0, "nothing to draw from"
            name = key._replace(slot=key.slot + more[0]) if more else key
            out[(row, *more)] = self._choose(row, [m / total for m in mass], name)
        return out


class RealKeys(EnumeratingCoin):
    """Decisions to which the production coin gives one number agree, as they would in production.

    What a decision says of its number is an interval of [0, 1); the next one must be in it too.
    """

    def __init__(self, tapes: Sequence[Tape], junk: int = 0, position=None, rounds=None) -> None:
        super().__init__(tapes, junk, position, rounds)
        self.coin = KeyedCoin(0, [0] * len(self.tapes))  # a request a tape
        self.coin = self.coin.at(np.array(self.position), np.array(self.rounds))

    def number(self, row: int, key: Key) -> float | tuple:
        """What a decision is made of."""
        return float(self.coin.uniform(key)[row])

    def _choose(self, row: int, chances: list[float], key: Key) -> int:
        tape, number = self.tapes[row], self.number(row, key)
        low, high = tape.known.get(number, (0.0, 1.0))
        ends = [0.0, *itertools.accumulate(chances)]
        ends[-1] = 1.0
        parts = [(max(low, a), min(high, b)) for a, b in itertools.pairwise(ends)]
        mass = [(b - a) / (high - low) if b - a > NOISE else 0.0 for a, b in parts]
        pick = tape.choose(mass)
        tape.known[number] = parts[pick]
        return pick


def exact_probs(play: Callable[[list[Tape]], Sequence[tuple[int, ...]]], abreast: int = 1) -> Probs:
    """Distribution of what `play` makes of a tape.

    Args:
        play: outcomes of a list of tapes, each a function of only its own tape.
        abreast: plays at a time; 1 is a depth-first replay.
    """
    probs: dict[tuple[int, ...], float] = defaultdict(float)
    waiting: list[list[int]] = [[]]
    while waiting:
        tapes = [Tape(waiting.pop()) for _ in range(min(abreast, len(waiting)))]
        for tape, outcome in zip(tapes, play(tapes), strict=True):
            probs[outcome] += tape.probability
            waiting += tape.untried()
    assert abs(sum(probs.values()) - 1) < EXACT, "some branch was missed or played twice"
    return dict(probs)


@torch.no_grad()
def target_probs(
    model, prompt: Sequence[int], length: int, sampler: Sampler, stop: Sequence[int] = ()
) -> Probs:
    """Distribution of the first `length` tokens, up to an end token, from full forwards without a cache."""
    probs: Probs = {(): 1.0}
    for _ in range(length):
        open_ = [text for text in probs if not (text and text[-1] in stop)]
        if not open_:
            break
        ids = torch.tensor([[*prompt, *text] for text in open_])
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, text in enumerate(ids.tolist()):
            seen[row, text] = True
        for text, row in zip(open_, sampler.probs(logits, seen).tolist(), strict=True):
            mass = probs.pop(text)
            probs |= {(*text, token): mass * p for token, p in enumerate(row) if p > 0}
    return probs


def assert_same_probs(got: Probs, want: Probs) -> None:
    """To 1e-12 at every outcome."""
    worst = max(set(got) | set(want), key=lambda y: abs(got.get(y, 0) - want.get(y, 0)))
    error = abs(got.get(worst, 0) - want.get(worst, 0))
    assert error < EXACT, f"{worst}: {got.get(worst, 0):.6f}, should be {want.get(worst, 0):.6f}"


PROMPTS = [[1, 2, 0, 1], [2], [0, 0, 2]]


def differences(
    target,
    drafter,
    plan,
    sampler,
    length=3,
    stop=(),
    prompts=PROMPTS,
    abreast=96,
    rows=None,
    tosses=None,
    **more,
):
    """Each row in turn branches on all its decisions, its neighbours following scripts.

    Yields its distribution, and what it should be.

    The row below a draft of depth K first matters for token K + 2: the prefill gives the first.
    """
    options = {"max_new_tokens": length, "sampler": sampler, "plan": plan, "stop": stop, **more}
    for row in range(len(prompts)) if rows is None else rows:

        def play(tapes, row=row):
            coins = [Script(r) for r in range(len(prompts))]
            coins[row] = tapes[0]
            batch = [*prompts, *[prompts[row]] * (len(tapes) - 1)]  # further plays ride along
            coin = (tosses or EnumeratingCoin)([*coins, *tapes[1:]])
            run = generate(target, drafter, batch, coin=coin, **options)
            texts = [tuple(output.tokens) for output in run.outputs]
            return [texts[row], *texts[len(prompts) :]]

        yield exact_probs(play, abreast), target_probs(target.model, prompts[row], length, sampler, stop)


def check_lossless(*arguments, **options):
    """`differences` has none."""
    for got, want in differences(*arguments, **options):
        assert_same_probs(got, want)


def complete(probs: Probs, p: Callable[[tuple[int, ...]], Sequence[float]], length: int) -> Probs:
    """The distribution of the first `length` tokens, continued by p where a text ends."""
    full: dict[tuple[int, ...], float] = defaultdict(float)
    waiting = list(probs.items())
    while waiting:
        text, mass = waiting.pop()
        if len(text) >= length:
            full[text[:length]] += mass
        else:
            waiting += [((*text, token), mass * chance) for token, chance in enumerate(p(text)) if chance > 0]
    return dict(full)


def error(got: Probs, want: Probs) -> float:
    """The largest difference at an outcome."""
    return max(abs(got.get(y, 0.0) - want.get(y, 0.0)) for y in {*got, *want})


# -- drafts of any form --------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of one row's draft, as `draft_of` takes it."""

    token: int
    parent: int = -1  # index among the row's nodes
    probs: Sequence[float] | None = None  # q of a drawn node, or of its first drawn sibling; None: chosen


Story = Generator[Sequence[float], int, list[Node]]


def draft_of(rows: Sequence[Sequence[Node]], vocab: int, **flags: bool) -> Draft:
    """One draft of rows that may differ in all; `flags` are those of `DraftProbs`."""
    size, depth, siblings = max(map(len, rows), default=0), 0, 1
    is_chain = all(node.parent == i - 1 for nodes in rows for i, node in enumerate(nodes))
    full, stated = [], []  # of each row: nodes; level -> slot -> q
    for nodes in rows:
        filler = range(len(nodes), size)
        full.append([*nodes, *(Node(PAD, i - 1 if is_chain else -1) for i in filler)])
        level, all_probs, elders = [0], defaultdict(dict), defaultdict(int)
        for node in nodes:
            level.append(level[node.parent + 1] + 1)
            if node.probs is not None:
                all_probs[level[-1] - 1].setdefault(node.parent + 1, node.probs)
                elders[node.parent] += 1
        stated.append(all_probs)
        depth, siblings = max(depth, *level), max(siblings, *elders.values(), 1)
    if not depth:
        return Draft.empty(len(rows), torch.device("cpu"))
    tokens = torch.tensor([[node.token for node in nodes] for nodes in full])
    parents = torch.tensor([[node.parent for node in nodes] for nodes in full])
    sampled = torch.tensor([[node.probs is not None for node in nodes] for nodes in full])
    if not sampled.any():
        return Draft(tokens, parents, depth, is_chain=is_chain)
    levels = tuple(max(len(all_probs[level]) for all_probs in stated) for level in range(depth))
    owner, q = [], []
    for all_probs in stated:
        entries = []
        for level, count in enumerate(levels):
            entries += [*all_probs[level].items(), *[(-1, [0.0] * vocab)] * (count - len(all_probs[level]))]
        owner.append([slot for slot, _ in entries])
        q.append([probs for _, probs in entries])
    tensors = torch.tensor(q, dtype=torch.float64), torch.tensor(owner), levels, sampled, siblings
    return Draft(tokens, parents, depth, DraftProbs(*tensors, **flags), is_chain)


def grow(stories: Sequence[Story], coin: EnumeratingCoin, vocab: int, **flags: bool) -> Draft:
    """Draft by one generator a row: it yields weights, is sent what was drawn, and returns its nodes."""
    done: dict[int, list[Node]] = {}
    asked: dict[int, Sequence[float]] = {}

    def send(row: int, token: int | None) -> None:
        try:
            asked[row] = stories[row].send(token)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            done[row] = end.value
            asked.pop(row, None)

    for row in range(len(stories)):
        send(row, None)
    turn = 0
    while asked:
        nothing = [0.0] * vocab
        weights = [asked.get(row, nothing) for row in range(len(stories))]
        active = torch.tensor([row in asked for row in range(len(stories))])
        probs = torch.tensor(weights, dtype=torch.float64)
        drawn = coin.draw(probs, Key(Purpose.PROPOSE, turn), active).tolist()
        for row in list(asked):
            send(row, drawn[row])
        turn += 1
    return draft_of([done[row] for row in range(len(stories))], vocab, **flags)


def struck(probs: Sequence[float], *taken: int) -> list[float]:
    """The distribution given that it is none of these; all zeros where nothing is left."""
    left = [0.0 if token in taken else mass for token, mass in enumerate(probs)]
    return [mass / (sum(left) or 1.0) for mass in left]


# -- proposers -----------------------------------------------------------------------------------


class Scripted:
    """A proposer that remembers each row's text; its drafts are a function of that and a seed.

    With `rounds`, only so many rounds draft; the others decode plainly, which is cheaper to enumerate.
    """

    traits = Traits()

    def __init__(self, vocab: int, seed: int = 0, rounds: float = math.inf) -> None:
        self.vocab, self.seed, self.rounds = vocab, seed, rounds

    def new_state(self, rows):
        self.turn = 0
        return [[] for _ in range(rows)]

    def over(self) -> bool:
        """Whether this round, which is counted, drafts nothing."""
        self.turn += 1
        return self.turn > self.rounds

    def advance(self, state, target, tokens, taps, counts, root):
        assert len(state) == len(tokens), "rows that left were not dropped"
        for text, new, count, end in zip(state, tokens.tolist(), counts, root.tolist(), strict=True):
            assert not text or text.pop() == new[0], "the old root was not settled first"
            text += [*new[:count], end]

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    def append(self, state, target, other):
        state += other

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
    """Chains drawn from arbitrary distributions of its own, with zeros; some rows' are cut beforehand."""

    def probs(self, text: Sequence[int]) -> list[float]:
        dice = self.dice(text)
        mass = [dice.choice([0.0, *[dice.random() ** 3 + 0.01] * 4]) for _ in range(self.vocab)]
        mass[dice.randrange(self.vocab)] += 0.1
        return [m / sum(mass) for m in mass]

    def propose(self, state, target, sampler, coin, plan):
        texts = [list(text) for text in state]
        length = torch.tensor([self.dice(t).choice([plan.depth] * 3 + [0, 1]) for t in texts])
        tokens, all_probs = [], []
        for depth in range(plan.depth):
            all_probs.append(torch.tensor([self.probs(text) for text in texts], dtype=torch.float64))
            real = depth < length
            drawn = coin.draw(all_probs[-1], Key(Purpose.PROPOSE, depth), real)
            tokens.append(torch.where(real, drawn, PAD))
            for text, token in zip(texts, tokens[-1].tolist(), strict=True):
                text.append(token)
        return Draft.chain(torch.stack(tokens, 1), torch.stack(all_probs, 1))


class Grown(Scripted):
    """Whatever the plan says, grown by the production `expand` over a table of distributions."""

    def logits(self, text: Sequence[int]) -> Tensor:
        dice = self.dice(text)
        return torch.tensor([dice.gauss(0, 1.2) for _ in range(self.vocab)], dtype=torch.float64)

    def propose(self, state, target, sampler, coin, plan):
        if self.over():
            return Draft.empty(len(state), torch.device("cpu"))
        entries = [[tuple(text)] for text in state]
        self.level = 0

        def step(tokens, parents):
            nonlocal entries
            self.level += 1
            lines = [zip(t, p, strict=True) for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)]
            entries = [[(*old[p], t) for t, p in line] for old, line in zip(entries, lines, strict=True)]
            return torch.stack([torch.stack([self.logits(list(e)) for e in row]) for row in entries])

        first = torch.stack([self.logits(text) for text in state])
        return expand(first, step, sampler, coin, plan)


class Trees(Scripted):
    """Trees of no plan's form: drawn and chosen children in any number, holes, rows that are unlike.

    The distributions know nothing of the target, and some leave too little to draw from. What hangs below a
    node depends on the path to it. `drawn` and `chosen` are how many such children a node may have.
    """

    def __init__(self, vocab, seed=0, depth=2, drawn=(0, 1, 2), chosen=(0, 1), replacement=False, rounds=1):
        super().__init__(vocab, seed, rounds)
        self.depth, self.drawn, self.chosen, self.replacement = depth, drawn, chosen, replacement

    def probs(self, dice: random.Random) -> list[float]:
        """With zeros; now and then nothing but zeros."""
        mass = [dice.choice([0.0, dice.random() ** 2, dice.random()]) for _ in range(self.vocab)]
        return struck(mass) if sum(mass) else mass

    def propose(self, state, target, sampler, coin, plan):
        if self.over():
            return Draft.empty(len(state), torch.device("cpu"))
        stories = [self.story(text) for text in state]
        return grow(stories, coin, self.vocab, replacement=self.replacement)

    def story(self, text: Sequence[int]) -> Story:
        """The draft below a text."""
        nodes: list[Node] = []
        level: list[tuple[int, list]] = [(-1, [*text, "and"])]
        for _ in range(self.depth):
            below = []
            for parent, path in level:
                dice = self.dice(path)
                probs, taken, children, drawn = self.probs(dice), [], [], dice.choice(self.drawn)
                # Not there, but its distribution is. The root always has one: a batch without any draws as
                # plain decoding does.
                if dice.random() < 0.15 or (parent < 0 and not drawn):
                    children.append(Node(PAD, parent, probs))
                for _ in range(drawn):
                    left = probs if self.replacement else struck(probs, *taken)
                    taken.append((yield left) if sum(left) else PAD)
                    children.append(Node(taken[-1], parent, probs))
                free = [token for token in range(self.vocab) if token not in taken] + [PAD]
                children += [
                    Node(t, parent) for t in dice.sample(free, min(dice.choice(self.chosen), len(free)))
                ]
                for node in children:
                    if dice.random() < 0.6:  # even below a hole, where nothing can be reached
                        below.append((len(nodes), [*path, node.token]))
                    nodes.append(node)
            level = below
        return nodes


class Table:
    """A random row of logits, and a random distribution of a drafter, for every path below root 0."""

    def __init__(self, seed: int, sampler: Sampler, vocab: int = 3) -> None:
        self.seed, self.sampler, self.vocab = seed, sampler, vocab
        self._known: dict[tuple, Any] = {}

    def logits(self, path: Sequence[int]) -> Tensor:
        """(V,) of the target."""
        if ("logits", *path) not in self._known:
            dice = random.Random(f"p {self.seed} {list(path)}")
            row = [dice.gauss(0, 1.5) for _ in range(self.vocab)]
            self._known["logits", *path] = torch.tensor(row, dtype=torch.float64)
        return self._known["logits", *path]

    def p(self, path: Sequence[int]) -> list[float]:
        """The target's warped distribution."""
        if ("p", *path) not in self._known:
            seen = torch.zeros(1, self.vocab, dtype=torch.bool)
            seen[0, [0, *path]] = True
            self._known["p", *path] = self.sampler.probs(self.logits(path)[None], seen)[0].tolist()
        return self._known["p", *path]

    def q(self, path: Sequence[int], zeros: float = 0.0) -> list[float]:
        """The drafter's distribution."""
        if ("q", zeros, *path) not in self._known:
            dice = random.Random(f"q {self.seed} {list(path)}")
            mass = [dice.random() ** 2 * (dice.random() >= zeros) for _ in range(self.vocab)]
            mass[dice.randrange(self.vocab)] += 0.2
            self._known["q", zeros, *path] = struck(mass)
        return self._known["q", zeros, *path]

    def probs(self, length: int) -> Probs:
        """The target's distribution of the first tokens."""
        return complete({(): 1.0}, self.p, length)

    def complete(self, probs: Probs, length: int) -> Probs:
        """A distribution of texts, continued to this length."""
        return complete(probs, self.p, length)

    def rows(self, draft: Draft) -> TargetProbs:
        """Of every slot of a draft, as a target pass would give them."""
        paths = [paths_of(t, p) for t, p in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)]
        logits = torch.stack([self.logits(path) for line in paths for path in line])
        logits = logits.unflatten(0, (len(paths), -1))
        seen = torch.zeros(len(paths), self.vocab, dtype=torch.bool)
        seen[:, 0] = True
        return TargetProbs(logits, self.sampler, seen)

    def round(self, make: Callable[[], Story], plan: Plan, judge=verify, abreast: int = 64, **flags) -> Probs:
        """Exact distribution of what one round emits: of what is drafted and of how it is verified."""

        def play(tapes):
            coin = EnumeratingCoin(tapes, junk=self.vocab)
            draft = grow([make() for _ in tapes], coin, self.vocab, **flags)
            return emitted(draft, judge(plan.rule, draft, self.rows(draft), coin))

        return exact_probs(play, abreast)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Of every slot, the tokens from the root to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def emitted(draft: Draft, result: VerificationResult) -> list[tuple[int, ...]]:
    """Each row's tokens, after a look at what else a result says."""
    texts = []
    for row, count in enumerate((result.accepted + 1).tolist()):
        tokens, slots = result.tokens[row].tolist(), result.slots[row].tolist()
        texts.append(tuple(tokens[:count]))
        assert PAD not in texts[-1], "an absent node was emitted"
        assert all(t == PAD for t in tokens[count:]), "something follows the extra token"
        assert not any(slots[count:]), "something follows the slot of the extra token"
        paths = paths_of(draft.tokens[row].tolist(), draft.parents[row].tolist())
        for step, slot in enumerate(slots[:count]):
            assert paths[slot] == texts[-1][:step], "a token was drawn from another slot's row"
    return texts

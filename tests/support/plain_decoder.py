"""A decoder without batch, cache, mask and tensors, one token at a time, and random cases for it.

hypothesis draws a case; drafts are a function of the case and of the text that they hang from.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from exact import Scripted
from hypothesis import reject
from hypothesis import strategies as st

from decode.draft import PAD, Draft, DraftProbs
from decode.model.target import Target
from decode.sampling import Sampler

SEEN: Counter[str] = Counter()  # of cases, what they held
NEAR = 1e-9  # a decision this close to a border may fall on either side of it
TARGET, ACCEPT, RESIDUAL = 0, 2, 3  # purposes of a draw
Text = tuple[int, ...]
Shape = list[tuple[int, bool]]  # of each node its parent, -1 for the root, and whether it is left out

# Drafts and the rules that may verify them. "chosen" trees have no distributions, "sampled" ones have them
# at every node, "hybrid" slots have one sampled child, "mixed" ones any number of them and then chosen ones.
PAIRS = [
    *(("mixed", "traversal"), ("chosen", "match"), ("mixed", "recursive"), ("sampled chain", "token")),
    *(("sampled", "traversal"), ("chosen chain", "match"), ("sampled", "recursive")),
    *(("sampled chain", "block"), ("hybrid", "recursive"), ("hybrid", "traversal")),
    *(("sampled chain", "match"), ("chosen", "recursive"), ("sampled", "match")),
    *(("hybrid", "match"), ("mixed", "match")),
]
BLOCK = 20  # cases a run of hypothesis: in long ones most are mutations of one another
TARGETS: dict[str, dict[str, int]] = {"two layers": {}, "one layer": {"layers": 1}}
TARGETS |= {"a window of 2": {"window": 2}, "12 positions": {"positions": 12}}
SAMPLERS = [Sampler(1.0), Sampler(0.0), Sampler(0.7), Sampler(1.0, top_k=3), Sampler(0.7, top_p=0.8)]
SAMPLERS += [Sampler(1.0, min_p=0.1), Sampler(0.0, repetition_penalty=1.8)]
SAMPLERS += [Sampler(1.0, repetition_penalty=1.5)]
SAMPLERS += [Sampler(0.7, top_k=5, top_p=0.9, min_p=0.02, repetition_penalty=1.3)]
FORMS: dict[str, Callable[[int, int], int]] = {  # the parent of node i
    "any": lambda i, byte: byte % (i + 1) - 1,  # every tree there is, in every order with parents first
    "chain": lambda i, _: i - 1,
    "star": lambda i, _: -1,
    "deep": lambda i, byte: max(i - 1 - byte % 2, -1),
    "wide": lambda i, byte: byte % min(i + 1, 3) - 1,
}


class Case(NamedTuple):
    """What hypothesis draws; bytes become tokens, parents and gaps, so that they shrink."""

    block: int
    drafts: str
    rule: str
    target: str
    vocab: int
    rows: list[bytes]
    twins: bool  # all rows are the first: they end at once
    limit: int
    sampler: Sampler
    replacement: bool
    shapes: list[tuple[str, bytes]]
    ends: list[tuple[int, int]]  # end tokens: the row and number of one that plain decoding emits

    @property
    def seed(self) -> int:
        """Of all there is to the case: one that resembles another still has other drafts and coins."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=4).digest(), "big")

    @property
    def prompts(self) -> list[Text]:
        rows = self.rows[:1] * len(self.rows) if self.twins else self.rows
        return [tuple(byte % self.vocab for byte in row) for row in rows]

    @property
    def names(self) -> list[tuple[int, int]]:
        """Request and sample of each row."""
        return [(0, 0) if self.twins else divmod(row, 2) for row in range(len(self.rows))]

    def shape(self, form: str, nodes: bytes) -> Shape:
        parent = FORMS["chain" if "chain" in self.drafts else form]
        return [(parent(i, byte), byte >= 232) for i, byte in enumerate(nodes)]


NUMBERS = st.sampled_from([5, 12, 9, 7, 10, 3, 11, 8, 6, 4, 2, 1])  # hypothesis is fond of the first
cases = partial(
    st.builds,
    Case,
    target=st.sampled_from(list(TARGETS)),
    vocab=st.sampled_from([8, 12, 3, 4, 5, 6, 7, 9, 10, 11]),
    rows=st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=6),
    twins=st.sampled_from([False] * 7 + [True]),
    limit=NUMBERS,
    sampler=st.sampled_from(SAMPLERS),
    replacement=st.booleans(),
    shapes=st.lists(st.tuples(st.sampled_from(list(FORMS)), st.binary(max_size=10)), min_size=1, max_size=4),
    ends=st.lists(st.tuples(st.integers(0, 5), NUMBERS), max_size=2),
)


def levels(parents: Sequence[int]) -> list[int]:
    """Of each slot."""
    out = [0]
    for parent in parents:
        out.append(out[parent + 1] + 1)
    return out


# -- the target, from its weights ----------------------------------------------------------------


class Model:
    """The rows of a text, from one pass over all of it."""

    def __init__(self, target: Target) -> None:
        config = target.config
        self.weights = {n.removeprefix("model."): w.numpy() for n, w in target.model.state_dict().items()}
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.positions, self.window = config.max_position_embeddings, getattr(config, "sliding_window", None)
        angles = target.base.rotary_emb(target.embed.weight, torch.arange(self.positions)[None])
        self.cos, self.sin = (x[0].numpy() for x in angles)  # (P, head_dim)
        self.next = lru_cache(4096)(lambda text: self.rows(text)[-1])

    def rows(self, text: Text) -> np.ndarray:
        """(T, V) logits. What stands past the end of the context is read at its last position."""
        place = np.minimum(np.arange(len(text)), self.positions - 1)
        hidden = np.tri(len(text)) == 0
        if self.window:
            hidden |= place[:, None] - place >= self.window
        x = self.weights["embed_tokens.weight"][list(text)]
        for layer in range(self.layers):
            at = f"layers.{layer}."
            x = x + self.attention(f"{at}self_attn.", self.norm(f"{at}input_layernorm", x), place, hidden)
            h = self.norm(f"{at}post_attention_layernorm", x)
            gate, up = self.linear(f"{at}mlp.gate_proj", h), self.linear(f"{at}mlp.up_proj", h)
            x = x + self.linear(f"{at}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self.linear("lm_head", self.norm("norm", x))

    def attention(self, at: str, h: np.ndarray, place: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        query, key, value = (self.linear(f"{at}{name}_proj", h) for name in "qkv")
        key, heads = self.turn(key, place), []  # one head of keys and values serves all queries
        for head in np.split(query, self.heads, 1):
            score = self.turn(head, place) @ key.T / key.shape[1] ** 0.5
            weight = np.exp(np.where(hidden, -np.inf, score))
            heads.append(weight / weight.sum(1, keepdims=True) @ value)
        return self.linear(f"{at}o_proj", np.concatenate(heads, 1))

    def turn(self, x: np.ndarray, place: np.ndarray) -> np.ndarray:
        left, right = np.split(x, 2, 1)
        return x * self.cos[place] + np.concatenate([-right, left], 1) * self.sin[place]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * self.weights[f"{name}.weight"]


# -- drafts --------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """One row's draft; `q` is the distribution of a slot's first sampled child."""

    parents: list[int]
    tokens: list[int]
    sampled: list[bool]
    q: dict[int, np.ndarray]

    def children(self, slot: int, sampled: bool) -> list[tuple[int, int]]:
        """Slots and tokens."""
        every = enumerate(zip(self.parents, self.tokens, self.sampled, strict=True))
        return [(i + 1, t) for i, (p, t, s) in every if p == slot - 1 and t != PAD and s == sampled]


class Script(Scripted):
    """Proposes `Reference.tree` to every row."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(reference.case.vocab)
        self.case, self.tree, self.depth = reference.case, reference.tree, reference.depth

    def propose(self, state, target, sampler, coin, plan):
        trees = [self.tree(tuple(text)) for text in state]
        chain, chosen = "chain" in self.case.drafts, "chosen" in self.case.drafts
        nodes = self.depth if chain else max([1, *(len(tree.tokens) for tree in trees)])

        def tensor(rows: Sequence[list], filler: Any) -> torch.Tensor:
            return torch.tensor([[*row, *[filler] * (nodes - len(row))] for row in rows])

        tokens = tensor([tree.tokens for tree in trees], PAD)
        parents = tensor([tree.parents for tree in trees], -1)
        if chain:
            slots = [list(range(nodes))] * len(trees)
            return Draft.chain(tokens, None if chosen else self.all_probs(trees, slots))
        if chosen:
            return Draft(tokens, parents, self.depth)
        owners, sizes = [[] for _ in trees], []
        for level in range(self.depth):
            here = [[slot for slot in tree.q if levels(tree.parents)[slot] == level] for tree in trees]
            sizes.append(max([int(level == 0), *map(len, here)]))
            for own, slots in zip(owners, here, strict=True):
                own += [*slots, *[-1] * (sizes[-1] - len(slots))]
        siblings = max([1, *(len(t.children(s, sampled=True)) for t in trees for s in t.q)])
        sampled = tensor([tree.sampled for tree in trees], False)
        all_probs = self.all_probs(trees, owners), torch.tensor(owners), tuple(sizes), sampled, siblings
        return Draft(tokens, parents, self.depth, DraftProbs(*all_probs, self.case.replacement))

    def all_probs(self, trees: list[Tree], owners: list[list[int]]) -> torch.Tensor:
        """(B, Q, V), flat where no node is."""
        flat = np.full(self.vocab, 1 / self.vocab)
        rows = zip(trees, owners, strict=True)
        return torch.tensor(np.array([[tree.q.get(slot, flat) for slot in own] for tree, own in rows]))


# -- the reference -------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What is compared of every request."""

    tokens: list[int]
    emitted: list[int]
    accepted: list[int]
    offered: list[int]
    drafted: list[int]
    stopped: bool

    @property
    def cut(self) -> bool:
        """It ends before the last draft does."""
        return bool(self.emitted) and self.emitted[-1] <= self.accepted[-1]


class Reference:
    """Makes a case's drafts, and decodes it."""

    def __init__(self, case: Case, model: Model) -> None:
        self.case, self.model, self.vocab = case, model, range(case.vocab)
        self.prompts, self.seed, self.names = case.prompts, case.seed, case.names
        self.probs, self.tree = lru_cache(None)(self._probs), lru_cache(None)(self._tree)
        self.shapes = [case.shape(*shape) for shape in case.shapes]
        self.depth = max(max(levels([parent for parent, _ in shape])) for shape in self.shapes)
        self.rule = case.rule if self.depth and "chosen" not in case.drafts else "match"
        self.known: list[list[int]] = [[] for _ in self.prompts]
        ends = [(row % len(self.prompts), number % case.limit) for row, number in case.ends]
        self.stop = {self.plain(row, place) for row, place in ends}

    def decode(self, row: int) -> Answer:
        prompt, a = self.prompts[row], Answer([self.plain(row, 0)], [], [], [], [], stopped=False)
        length = min(len(prompt) + self.case.limit, self.model.positions)
        while (text := (*prompt, *a.tokens)) and len(text) < length and text[-1] not in self.stop:
            tree = self.tree(text) if self.depth else Tree([], [], [], {})
            emitted = getattr(self, self.rule)(row, len(a.emitted), text, tree)
            a.accepted.append(len(emitted) - 1)
            emitted = emitted[: length - len(text)]
            ends = [i for i, token in enumerate(emitted) if token in self.stop]
            emitted = emitted[: ends[0] + 1] if ends else emitted
            a.emitted.append(len(emitted))
            a.tokens.extend(emitted)
            real = [n for n, t in zip(levels(tree.parents)[1:], tree.tokens, strict=True) if t != PAD]
            a.offered.append(max(real, default=0))
            a.drafted.append(len(real))
        return a._replace(stopped=a.tokens[-1] in self.stop)

    # -- rules: the tokens of a round, the last of which no node stands for

    def match(self, row: int, turn: int, text: Text, tree: Tree) -> list[int]:
        emitted, slot = [], 0
        while True:
            here = *text, *emitted
            y = self.pick(self.probs(here), self.uniform(row, TARGET, len(here)))
            emitted.append(y)
            below = sorted(tree.children(slot, sampled=True) + tree.children(slot, sampled=False))
            slot = next((child for child, token in below if token == y), 0)
            if not slot:
                return emitted

    def recursive(self, row: int, turn: int, text: Text, tree: Tree) -> list[int]:
        """Rejection, sampled child by sampled child (docs/lossless.md)."""
        emitted, slot = [], 0
        while True:
            depth, probs, q = len(emitted), self.probs((*text, *emitted)), tree.q.get(slot)
            for rank, (below, token) in enumerate(tree.children(slot, sampled=True)):
                margin = probs[token] - self.uniform(row, ACCEPT, turn, depth, rank) * q[token]
                clear(abs(margin) > NEAR)
                if margin > 0:
                    slot = below
                    break
                probs = normal(np.maximum(probs - q, 0), probs)
                q = q if self.case.replacement else strike(q, token)
            else:
                token = self.pick(probs, self.uniform(row, RESIDUAL, turn, depth))
                fixed = tree.children(slot, sampled=False)
                slot = next((child for child, other in fixed if other == token), 0)
            emitted.append(token)
            if not slot:
                return emitted

    def traversal(self, row: int, turn: int, text: Text, tree: Tree) -> list[int]:
        """One coin says which slot is the first to stand."""
        paths, chances, all_probs, fails = [], [], [], 1.0
        for path, chance, probs in self.visit(tree, 0, text, 1.0):
            paths.append(path)
            chances.append(fails * chance)
            all_probs.append(probs)
            fails *= 1 - chance
        end = self.pick(chances, self.uniform(row, ACCEPT, turn))
        return [*paths[end][len(text) :], self.pick(all_probs[end], self.uniform(row, RESIDUAL, turn))]

    def visit(self, tree: Tree, slot: int, text: Text, w: float) -> Iterator[tuple[Text, float, np.ndarray]]:
        """Theorem 2 (docs/lossless.md): the slots below and then this one, in the order of the visit,
        each with its chance to stand once those before have not, and the distribution that then follows."""
        probs, q = self.probs(text), tree.q.get(slot)
        for sampled in (True, False):
            for child, token in tree.children(slot, sampled):
                if not sampled:
                    q = np.eye(len(probs))[token]
                yield from self.visit(tree, child, (*text, token), min(1.0, w * probs[token] / q[token]))
                rest = np.maximum(w * probs - q, 0)
                probs, mass = normal(rest, probs), rest.sum()
                w = mass / (mass + (1 - w)) if mass else 0.0
                q = q if self.case.replacement else strike(q, token)
        yield text, w if slot else 1.0, probs

    token, block = recursive, traversal

    # -- coins and distributions

    def uniform(self, row: int, purpose: int, counter: int, slot: int = 0, number: int = 0) -> float:
        """Philox-4x32-10."""
        request, sample = self.names[row]
        name = repr((self.seed, str(request), sample)).encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        low = 2**32 - 1
        k, m, c = key & low, key >> 32, (purpose, counter, slot, number)
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = (b >> 32) ^ c[1] ^ k, b & low, (a >> 32) ^ c[3] ^ m, a & low
            k, m = (k + 0x9E3779B9) & low, (m + 0xBB67AE85) & low
        return (c[0] << 21 | c[1] >> 11) / 2**53

    def pick(self, weights: Sequence[float] | np.ndarray, u: float) -> int:
        """The first index at which the running sum exceeds u."""
        sums = np.cumsum(weights)
        low, index, high = np.searchsorted(sums, np.array([u - NEAR, u, u + NEAR]) * sums[-1], "right")
        clear(index in (low, 0) and high in (index, len(sums)))
        return int(index)

    def _probs(self, text: Text) -> np.ndarray:
        sampler, z = self.case.sampler, self.model.next(text).copy()
        for token in set(text):
            penalty = sampler.repetition_penalty
            z[token] *= penalty if z[token] < 0 else 1 / penalty
        order = np.argsort(-z)
        if not sampler.temperature:
            clear(z[order[0]] - z[order[1]] > NEAR)
            return np.eye(len(z))[order[0]]
        z /= sampler.temperature
        k = sampler.top_k
        if 0 < k < len(z):
            clear(z[order[k - 1]] - z[order[k]] > NEAR)
            z[order[k:]] = -np.inf
        if sampler.top_p < 1:
            before = np.cumsum(softmax(z)[order]) - softmax(z)[order]
            clear(abs(before - sampler.top_p).min() > NEAR)
            z[order[before > sampler.top_p]] = -np.inf
        share = np.exp(z - z.max())
        clear(abs(share - sampler.min_p)[share > 0].min() > NEAR)
        return softmax(np.where(share < sampler.min_p, -np.inf, z))

    def plain(self, row: int, place: int) -> int:
        """The token that plain decoding emits there if nothing ends it."""
        known = self.known[row]
        while len(known) <= place:
            text = *self.prompts[row], *known
            known.append(self.pick(self.probs(text), self.uniform(row, TARGET, len(text))))
        return known[place]

    # -- drafts

    def _tree(self, text: Text) -> Tree:
        dice = Random(f"{self.seed} {text}")
        shape = dice.choice(self.shapes)
        tree = Tree([parent for parent, _ in shape], [], [], {})
        texts: list[Text | None] = [text]  # of each slot, None where there is no node
        fans = [self.fan(dice) for _ in range(len(shape) + 1)]
        left: dict[int, np.ndarray] = {}  # of the distributions, for the next child
        for parent, gap in shape:
            slot, above = parent + 1, texts[parent + 1]
            elders = [t for t, p in zip(tree.tokens, tree.parents, strict=False) if p == parent]
            sampled, token = len(elders) < fans[slot], PAD
            if above and sampled:
                if slot not in tree.q:
                    tree.q[slot] = left[slot] = self.q(above, dice)
                if gap:  # left out before it was drawn, and so are those after it
                    left[slot] = np.zeros(len(self.vocab))
                if left[slot].any():
                    token = dice.choices(self.vocab, left[slot])[0]
                    left[slot] = left[slot] if self.case.replacement else strike(left[slot], token)
            elif above and not gap:
                token = self.chosen(above, elders, dice)
            tree.tokens.append(token)
            tree.sampled.append(sampled)
            texts.append(None if token == PAD else (*above, token))
        return tree

    def fan(self, dice: Random) -> int:
        """How many of a slot's children are sampled, at most."""
        some = {"chosen": 0, "chosen chain": 0, "hybrid": 1, "mixed": dice.choice([0, 1, 2, 9])}
        return some.get(self.case.drafts, 9)

    def q(self, text: Text, dice: Random) -> np.ndarray:
        """A drafter's distribution: the target's own, near it, or nothing like it, and with zeros."""
        noise = np.array([dice.choice([0, 1, 1, 1]) * (0.01 + dice.random() ** 3) for _ in self.vocab])
        noise[dice.choice(self.vocab)] += 0.01
        share = dice.choice([0, 0.2, 0.5, 1])
        return (1 - share) * self.probs(text) + share * noise / noise.sum()

    def chosen(self, text: Text, elders: list[int], dice: Random) -> int:
        """What is to come or likely to, or any token; seldom one that an elder sibling has."""
        free = [t for t in self.vocab if t not in elders or dice.random() < 0.05]
        token = self.foreseen(text) if self.rule == "match" else dice.choices(self.vocab, self.probs(text))[0]
        if token in free and dice.random() < 0.8:
            return token
        return dice.choice(free) if free else PAD

    def foreseen(self, text: Text) -> int:
        """What plain decoding has next, where the text is its own so far."""
        for row, prompt in enumerate(self.prompts):
            place = len(text) - len(prompt)
            if 0 <= place < self.case.limit and text[: len(prompt)] == prompt:
                token = self.plain(row, place)
                if (*prompt, *self.known[row][:place]) == text:
                    return token
        return PAD


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def normal(mass: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    return mass / mass.sum() if mass.any() else otherwise


def strike(probs: np.ndarray, token: int) -> np.ndarray:
    rest = np.where(np.arange(len(probs)) == token, 0, probs)
    return normal(rest, rest)


def clear(sure: bool) -> None:
    """Leave out a case in which rounding decides."""
    if not sure:
        SEEN["cases left out"] += 1
        reject()

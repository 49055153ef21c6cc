"""Proposers whose drafts are known beforehand, references that know nothing of drafts, and a fault."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from exact import Scripted
from torch import Tensor

from decode.draft import PAD, Draft
from decode.model.cache import RowStore


class Oracle(Scripted):
    """Proposes what each sequence is known to become, spoilt at random.

    A tree holds the known continuation down to some level, sometimes not even its first token,
    among siblings and cousins drawn at random; rows have different numbers of nodes.

    Args:
        texts: whole sequences, prompts included; a row's is the one that begins with its tokens.
        vocab: random tokens are below it.
        right: probability that the next known token is among the proposed ones.
        branches: random nodes in a tree; 0 proposes chains.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, right=0.7, branches=6) -> None:
        super().__init__(vocab)
        self.texts, self.right, self.branches = [list(text) for text in texts], right, branches

    def advance(self, state, target, tokens, taps, counts, root):
        assert tokens.shape == taps.shape[:2]
        assert min(counts) >= 1
        super().advance(state, target, tokens, taps, counts, root)

    def propose(self, state, target, sampler, coin, plan):
        drafts = [self.nodes(text, plan.depth) for text in state]
        width = max(len(nodes) for nodes in drafts)
        tokens = torch.full((len(state), width), PAD)
        parents = torch.full((len(state), width), -1)
        for row, nodes in enumerate(drafts):
            for i, (token, parent) in enumerate(nodes):
                tokens[row, i], parents[row, i] = token, parent
        if not self.branches:
            return Draft.chain(tokens)
        return Draft(tokens, parents, depth=plan.depth)

    def nodes(self, text: list[int], depth: int) -> list[tuple[int, int]]:
        """(token, parent) of each node; a function of only the text, so proposing twice is safe."""
        dice = random.Random(repr(text))
        known = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])
        nodes, level, tip = [], [], -1
        for step, token in enumerate(known[:depth]):
            if dice.random() > self.right:
                if not self.branches:
                    token = dice.randrange(self.vocab)
                else:
                    break
            nodes.append((token, tip))
            level.append(step + 1)
            tip = len(nodes) - 1
        while not self.branches and len(nodes) < depth:
            nodes.append((dice.randrange(self.vocab), len(nodes) - 1))
        for _ in range(dice.randint(1, self.branches) if self.branches else 0):
            above = dice.randrange(-1, len(nodes))
            high = level[above] if above >= 0 else 0
            if high < depth:
                nodes.append((dice.randrange(self.vocab), above))
                level.append(high + 1)
        return shuffled(nodes, dice)


def shuffled(nodes: list[tuple[int, int]], dice: random.Random) -> list[tuple[int, int]]:
    """The same tree in another order in which parents still come first."""
    waiting, order = list(range(len(nodes))), []
    while waiting:
        ready = [i for i in waiting if nodes[i][1] < 0 or nodes[i][1] in order]
        order.append(dice.choice(ready))
        waiting.remove(order[-1])
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    return [(nodes[i][0], place[nodes[i][1]]) for i in order]


class AfterThree:
    """A stop test that ends a request at its third token."""

    def __init__(self):
        self.seen = 0

    def __call__(self, token):
        self.seen += 1
        return self.seen == 3


class Watch:
    """Collects, for every emitted token, the row it was drawn from."""

    def __init__(self, requests: int) -> None:
        self.rows: list[list[Tensor]] = [[] for _ in range(requests)]
        self.rounds = []

    def __call__(self, seen) -> None:
        for i, request in enumerate(seen.requests):
            for slot, _ in zip(seen.result.slots[i].tolist(), seen.emitted[i], strict=False):
                self.rows[request].append(seen.logits[i, slot])
        self.rounds.append(seen)


@torch.no_grad()
def rows_of(model, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """(n, V) rows that n tokens follow from: one pass without cache, masks or positions given."""
    return model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]


@torch.no_grad()
def greedy(model, prompt: Sequence[int], count: int) -> list[int]:
    """The plainest greedy decoding there is."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def no_compaction(monkeypatch):
    """A cache that keeps the first slots of a round, whichever were accepted."""
    real = RowStore.keep
    monkeypatch.setattr(RowStore, "keep", lambda self, counts, slots=None: real(self, counts))

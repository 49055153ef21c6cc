"""What a round may take from the one before: a token with its own q, if no rule has looked at it.

A draw that decided something is not used again: neither a rejected token nor the number it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from exact import EXACT, Grown, Node, RealKeys, Scripted, Story, Table, differences, error, grow

from decode.plan import Plan
from decode.sampling import Sampler

V = 3
VISIBLE = 1e-3
Law = Sequence[float]


class Text(list):
    """A row's tokens, and what its first round drafted."""

    past: tuple[int, int, int, Law] | None = None


class Leftover(Scripted):
    """Drafts two tokens; where the first was rejected, the next round reuses some of it (Lyanna,
    arXiv:2602.21224)."""

    def __init__(self, mode: str) -> None:
        super().__init__(V)
        self.mode, self.table = mode, Table(5, Sampler(1.0))

    def new_state(self, rows):
        return [Text() for _ in range(rows)]

    def propose(self, state, target, sampler, coin, plan):
        return grow([self.story(text) for text in state], coin, V)

    def story(self, text: Text) -> Story:
        here = tuple(text)
        if text.past is None:
            q = self.table.q(here)
            a = yield q
            later = self.table.q((*here, a) if "dependent" in self.mode else (*here, -2))
            b = yield later
            text.past = len(text), a, b, later
            return [Node(a, -1, q), Node(b, 0, later)]
        length, a, b, later = text.past
        if len(text) != length + 1:
            return []
        old, new = self.table.q(here[:-1]), self.table.q(here)
        if "drawn again" in self.mode:
            return [Node((yield new), -1, later if "old q" in self.mode else new)]
        if "examined" in self.mode:
            return [Node(a, -1, None if "chosen" in self.mode else old)]
        return [Node(b, -1, new if "new q" in self.mode else later)]


# mode, rule, whether it is lossless
LEFTOVERS = [
    ("drawn again", "token", True),
    ("drawn again", "block", True),
    ("drawn again, old q", "token", False),
    ("own q", "token", True),
    ("own q", "block", False),  # this rule has looked at it
    ("dependent, own q", "token", True),
    ("dependent, new q", "token", False),
    ("examined", "token", False),
    ("examined, chosen", "recursive", True),
]


@pytest.mark.parametrize(("mode", "rule", "lossless"), LEFTOVERS)
def test_reused_token_is_lossless_only_if_no_rule_has_examined_it(tiny_target, mode, rule, lossless):
    proposal = "fixed" if rule == "recursive" else "sampled"
    plan = Plan(2, proposal=proposal, rule=rule)
    found = differences(tiny_target(), Leftover(mode), plan, Sampler(1.0), length=4, rows=[0, 1], abreast=256)
    worst = max(error(got, want) for got, want in found)
    assert worst < EXACT if lossless else worst > VISIBLE


class OncePerPrompt(RealKeys):
    """The keys forget the round, as where noise is drawn when a prompt begins."""

    def at(self, position, rounds):
        return super().at(position, 0 * rounds)


class ByPosition(RealKeys):
    """Every draw is keyed by the position of its token."""

    def number(self, row, key):
        return (key.purpose, self.position[row] + key.slot, key.number)


@pytest.mark.parametrize(
    ("tosses", "rule", "lossless"),
    [
        (RealKeys, "token", True),
        (RealKeys, "block", True),
        (OncePerPrompt, "token", False),
        (OncePerPrompt, "block", False),
        (ByPosition, "token", True),  # what it drafts again, it has not looked at
        (ByPosition, "block", False),
    ],
)
def test_reused_noise_is_lossy(tiny_target, tosses, rule, lossless):
    plan = Plan(2, proposal="sampled", rule=rule)
    options = {"length": 5, "prompts": [[1, 0, 0, 1]], "abreast": 512, "tosses": tosses}
    ((got, want),) = differences(tiny_target(vocab=2), Grown(2, 3), plan, Sampler(0.7), **options)
    assert error(got, want) < EXACT if lossless else error(got, want) > VISIBLE

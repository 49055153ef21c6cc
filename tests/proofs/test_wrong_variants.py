"""Plausible mistakes that change the target's distribution are seen in exact probabilities.

A way is a drafter, written as a `Story`, and a rule of src that verifies what it says. What rules and
plan can refuse, they refuse (tests/decode/test_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from exact import (
    EXACT,
    EnumeratingCoin,
    FixedTrees,
    Grown,
    Node,
    RealKeys,
    Scripted,
    Story,
    Table,
    check_lossless,
    differences,
    error,
    grow,
    struck,
)
from rule_cases import LOSSY, RULES

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.result import VerificationResult
from decode.verification.rule import Rule, verify
from decode.verification.rules.recursive import Recursive
from decode.verification.rules.select import best_path
from decode.verification.target_probs import TargetProbs

V, LENGTH = 3, 3
VISIBLE = 1e-3
Probs = Sequence[float]
Path = tuple[int, ...]


class Way(NamedTuple):
    """How a draft is made and verified."""

    story: Callable[[Table], Story]
    rule: str = "token"
    flags: Mapping[str, bool] = MappingProxyType({})
    judge: Callable[..., VerificationResult] = verify


def ways(stories: Sequence[Callable[[Table], Story]], *rules: str, **options) -> list[Way]:
    """Every story with every rule."""
    return [Way(story, rule, **options) for story in stories for rule in rules]


def errors(way: Way, tables: int) -> Iterator[float]:
    """Of one round, continued by the target, with each of so many tables of distributions."""
    drawn, several = way.rule in ("token", "block", "select"), way.rule == "select"
    plan = Plan(1, proposal="sampled" if drawn else "fixed", drafts=1 + several, rule=way.rule)
    for seed in range(tables):
        table = Table(seed, Sampler(1.0))
        got = table.round(lambda table=table: way.story(table), plan, way.judge, 256, **way.flags)
        yield error(table.complete(got, LENGTH), table.probs(LENGTH))


# -- several drafts ------------------------------------------------------------------------------


def two_chains(table: Table) -> Story:
    """Two whole drafts, as a tree: all that was drawn is put up."""
    nodes = []
    for _ in range(2):
        first = yield table.q(())
        second = yield table.q((first,))
        nodes += [Node(first, -1, table.q(())), Node(second, len(nodes), table.q((first,)))]
    return nodes


def better_of_two(score: str):
    """Of two drafts the one of the higher score, by the drafter's q or the target's p."""

    def story(table: Table) -> Story:
        nodes = yield from two_chains(table)

        def value(one: list[Node]) -> float:
            first, second = (node.token for node in one)
            return getattr(table, score)(())[first] * getattr(table, score)((first,))[second]

        best = nodes[2:] if value(nodes[2:]) > value(nodes[:2]) else nodes[:2]
        return [node._replace(parent=i - 1) for i, node in enumerate(best)]

    return story


def drafts_that_share(table: Table) -> Story:
    """As `expand` grows them: where both begin alike, what either draws next hangs from the first."""
    q = table.q(())
    a = yield q
    b = yield q
    below = table.q((a,)), table.q((b,))
    c = yield below[0]
    d = yield below[1]
    return [Node(a, -1, q), Node(b, -1, q), Node(c, 0, below[0]), Node(d, int(a != b), below[1])]


def selected_and_weighed(rule: Rule, draft: Draft, rows: TargetProbs, coin) -> VerificationResult:
    """Self-selection, and then min(1, p / q) on the draft that is kept."""
    best = best_path(draft, rows.all(draft))
    kept = replace(draft, tokens=draft.tokens.masked_fill(~best, PAD))
    return verify(Recursive(), kept, rows, coin)


# -- siblings ------------------------------------------------------------------------------------


def siblings(second: str):
    """Two children of the root, the second chosen, or drawn and replaced where it repeats the first."""

    def story(table: Table) -> Story:
        q = table.q(())
        a = yield q
        nodes = [Node(a, -1, q)]
        others = struck(q, a)
        likeliest = others.index(max(others))
        if second == "patched":
            b = yield q
            nodes.append(Node(likeliest if b == a else b, -1, q))
        else:
            nodes.append(Node(likeliest))
        return nodes

    return story


def hybrid(drawn_first: bool):
    """A drawn child and the likeliest one; what hangs below both is chosen."""

    def story(table: Table) -> Story:
        q = table.q(())
        top = q.index(max(q))
        rest = struck(q, top)
        drawn = yield rest
        children = [Node(drawn, -1, rest), Node(top)] if drawn_first else [Node(top), Node(drawn, -1, rest)]
        return [*children, Node(0, 0), Node(1, 1)]

    return story


# -- what is kept --------------------------------------------------------------------------------

LOW = 0.45


def stopping(mode: str):
    """A draft that ends where its confidence does."""

    def story(table: Table) -> Story:
        path: Path = ()
        nodes = []
        while len(nodes) < 2:
            q = table.q(path)
            if mode == "before" and max(q) < LOW:
                break
            token = yield q
            if mode == "discard" and q[token] < LOW:
                break
            nodes.append(Node(token, len(nodes) - 1, q))
            path = (*path, token)
            if mode == "keep" and q[token] < LOW:
                break
        return nodes

    return story


def reranked(drawn: bool):
    """EAGLE-2: two children a node, two levels, the best three of all by draft probability."""

    def story(table: Table) -> Story:
        found: list[tuple[float, Path, Probs | None]] = []

        def children(path: Path, score: float):
            q = table.q(path)
            if drawn:
                a = yield q
                b = yield struck(q, a)
            else:
                a, b = sorted(range(V), key=lambda t: -q[t])[:2]
                yield from ()
            return [(score * q[t], (*path, t), q if drawn else None) for t in (a, b)]

        for score, path, probs in (yield from children((), 1.0)):
            found += [(score, path, probs), *(yield from children(path, score))]
        kept = sorted(found, key=lambda node: (-node[0], len(node[1])))[:3]
        kept = sorted((node for node in found if node in kept), key=lambda node: len(node[1]))
        paths = [path for _, path, _ in kept]
        return [Node(p[-1], paths.index(p[:-1]) if len(p) > 1 else -1, probs) for _, p, probs in kept]

    return story


def by_its_child(table: Table) -> Story:
    """A drawn node is dropped when its child is unlikely."""
    q = table.q(())
    token = yield q
    below = table.q((token,))
    child = yield below
    return [Node(token, -1, q), Node(child, 0, below)] if below[child] > LOW else []


REPLACED = {"replacement": True}
EXACT_RULES = ("recursive", "traversal", "match")
# what goes wrong: the wrong way, and the right ones
PAIRS: dict[str, tuple[Way, list[Way]]] = {
    "a repeated sibling replaced by the next best": (
        Way(siblings("patched"), "recursive", REPLACED),
        [Way(siblings("patched"), "match", REPLACED), *ways([siblings("chosen")], "recursive", "traversal")],
    ),
    "the better of two drafts by the draft's score": (
        Way(better_of_two("q")),
        [Way(better_of_two("q"), "match"), *ways([two_chains], *EXACT_RULES, flags=REPLACED)],
    ),
    "the better of two drafts by the target's score": (
        Way(better_of_two("p"), "block"),
        [Way(better_of_two("p"), "match")],
    ),
    "the best of two drafts by what it is expected to keep": (
        Way(drafts_that_share, "select", REPLACED, selected_and_weighed),
        ways([drafts_that_share], "select", *EXACT_RULES, flags=REPLACED),
    ),
    "an unlikely drawn token discarded": (
        Way(stopping("discard")),
        [*ways([stopping("before"), stopping("keep")], "token", "block"), Way(stopping("discard"), "match")],
    ),
    "drawn nodes ranked by their own scores": (
        Way(reranked(drawn=True), "recursive"),
        [Way(reranked(drawn=True), "match"), *ways([reranked(drawn=False)], "match", "traversal")],
    ),
    "drawn nodes ranked by their own scores, by traversal": (Way(reranked(drawn=True), "traversal"), []),
    "a drawn node dropped for its child's score": (Way(by_its_child), [Way(by_its_child, "match")]),
    "the chosen sibling before the drawn one, by traversal": (
        Way(hybrid(drawn_first=False), "traversal"),
        [Way(hybrid(drawn_first=False), "recursive"), *ways([hybrid(drawn_first=True)], *EXACT_RULES)],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_the_wrong_way_loses_exactness(name):
    wrong, right = PAIRS[name]
    assert any(found > VISIBLE for found in errors(wrong, 3))
    for way in right:
        assert max(errors(way, 2)) < EXACT, way


# -- lossy rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.zoo
def test_lossy_rules_change_the_distribution(tiny_target, rule, temperature):
    """And at temperature 0, where it judges tokens by the distribution of temperature 1."""
    drawn = rule == "lenience"  # which weighs drawn tokens
    shape = {"proposal": "sampled"} if drawn else {"width": 2, "nodes": 5}
    shape = {"min_confidence": 0.5} if rule == "sprint" else shape
    plan = Plan(2, **shape, rule=rule, lossy=True)
    drafter = Grown(V) if drawn else FixedTrees(V)
    size = {"length": 4, "rows": [0]} if temperature else {"length": 8}  # at 0 each row is one text
    all_probs = differences(tiny_target(), drafter, plan, Sampler(temperature), **size)
    found = max(error(*probs) for probs in all_probs)
    assert found < EXACT if not temperature and not RULES[rule].changes_greedy else found > 0.01


# -- refusals ------------------------------------------------------------------------------------


def test_traversal_refuses_nodes_ranked_by_their_tokens(tiny_target):
    """A dynamic hybrid's own draft, whoever verifies it."""
    plan = Plan(2, 2, 3, proposal="hybrid")
    drafts = []

    class Kept(Grown):
        def propose(self, *arguments):
            drafts.append(super().propose(*arguments))
            return drafts[-1]

    check_lossless(tiny_target(), Kept(3), plan, Sampler(1.0), length=2, rows=[0])
    assert all(draft.probs.ranked for draft in drafts)
    static = Plan(tree=[[0], [1], [0, 0]], proposal="hybrid", rule="traversal")
    row = TargetProbs(torch.zeros(drafts[0].tokens.shape[0], drafts[0].tokens.shape[1] + 1, V), Sampler(1.0))
    with pytest.raises(UserError, match="tokens drawn elsewhere"):
        verify(static.rule, drafts[0], row, EnumeratingCoin([]))


# -- draws that a later round uses again ----------------------------------------------------------

# A round may take a token with its own q from the one before, if no rule has looked at it. A draw that has
# decided something is not used again: neither a rejected token nor the number it came from.


class Text(list):
    """A row's tokens, and what its first round drafted."""

    past: tuple[int, int, int, Probs] | None = None


class Leftover(Scripted):
    """Drafts two tokens; if the first is rejected, the next round reuses some (Lyanna, arXiv:2602.21224)."""

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

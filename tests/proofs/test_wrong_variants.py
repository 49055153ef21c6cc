"""Plausible ways to lose the target's law: each is seen by its exact law, and its right twin is exact.

A way is a drafter's, written as a `Story`, and a rule of production that verifies what it tells:
where the drafter lies about what it drew, or has a look before it draws, the rule is right and the
output is wrong. What the rules and the plan can refuse, they refuse (tests/decode/test_plan.py).
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
    Story,
    Table,
    check_lossless,
    differences,
    error,
    struck,
)
from rule_cases import LOSSY, RULES
from torch import Tensor

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
WARPED = Sampler(0.8, top_p=0.7)
Law = Sequence[float]
Path = tuple[int, ...]


class Way(NamedTuple):
    """How a draft is made and verified."""

    story: Callable[[Table], Story]
    rule: str = "token"
    flags: Mapping[str, bool] = MappingProxyType({})
    judge: Callable[..., VerificationResult] = verify
    sampler: Sampler = Sampler(1.0)


def errors(way: Way, tables: int) -> Iterator[float]:
    """Of one round, continued by the target, with each of so many tables of laws."""
    drawn, several = way.rule in ("token", "block", "select"), way.rule == "select"
    plan = Plan(1, proposal="sampled" if drawn else "fixed", drafts=1 + several, rule=way.rule)
    for seed in range(tables):
        table = Table(seed, way.sampler)
        got = table.round(lambda table=table: way.story(table), plan, way.judge, 256, **way.flags)
        yield error(table.complete(got, LENGTH), table.law(LENGTH))


# -- chains --------------------------------------------------------------------------------------


def chain(
    draw: Callable[[Table, Path], Law], tell: Callable[[Table, Path], Law] | None = None, depth: int = 2
):
    """Drawn from one law, and told to be from another."""

    def story(table: Table) -> Story:
        path: Path = ()
        nodes = []
        for parent in range(-1, depth - 1):
            law = (tell or draw)(table, path)
            path = (*path, (yield draw(table, path)))
            nodes.append(Node(path[-1], parent, law))
        return nodes

    return story


def honest(table: Table, path: Path) -> Law:
    return table.q(path)


def cold(table: Table, path: Path) -> Law:
    """The draft's law at temperature 0.5."""
    return struck([mass**2 for mass in table.q(path)])


def middle(table: Table, path: Path) -> Law:
    """A model between the two, whose tokens a smaller one has drafted (TriForce, arXiv:2404.11912)."""
    return [(p + q) / 2 for p, q in zip(table.p(path), table.q(path), strict=True)]


def small(table: Table, path: Path) -> Law:
    """Draws from a vocabulary of two tokens."""
    return struck(table.q(path), 2)


def argmax(drawn: bool):
    """The likeliest tokens, told to be drawn or to be chosen."""

    def story(table: Table) -> Story:
        nodes = []
        for parent in range(-1, 1):
            q = table.q([node.token for node in nodes])
            nodes.append(Node(q.index(max(q)), parent, q if drawn else None))
        yield from ()
        return nodes

    return story


def restricted(rule: Rule, draft: Draft, rows: TargetProbs, coin) -> VerificationResult:
    """The target's law is cut to the draft's vocabulary too."""

    class Cut(TargetProbs):
        def at(self, slot):
            law = super().at(slot)
            cut = law.index_fill(1, torch.tensor([2]), 0.0)
            return torch.where((slot < draft.depth)[:, None], cut / cut.sum(1, keepdim=True), law)

    return verify(rule, draft, Cut(rows._logits, rows._sampler, rows._seen), coin)


def after_rejection(wrong: Callable[..., Tensor]) -> Callable[..., VerificationResult]:
    """The rules with another idea of what is left."""

    def judge(rule, draft, rows, coin):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("decode.verification.descent._residual", lambda *a: wrong(rows, *a))
            return verify(rule, draft, rows, coin)

    return judge


def no_residual(rows, law, q, where):
    return law


def raw_residual(rows, law, q, where):
    raw = rows._logits[:, 0].softmax(-1)
    left = (raw - q).clamp_min(0)
    return torch.where(where[:, None], left / left.sum(-1, keepdim=True), law)


# -- several drafts ------------------------------------------------------------------------------


def two_chains(table: Table) -> Story:
    """Two whole drafts, as a tree: all that was drawn is put up."""
    nodes = []
    for _ in range(2):
        first = yield table.q(())
        second = yield table.q((first,))
        nodes += [Node(first, -1, table.q(())), Node(second, len(nodes), table.q((first,)))]
    return nodes


def better_of_two(score: Callable[[Table, Path], Law]):
    """Of two drafts the one of the higher score."""

    def story(table: Table) -> Story:
        nodes = yield from two_chains(table)

        def value(one: list[Node]) -> float:
            return score(table, ())[one[0].token] * score(table, (one[0].token,))[one[1].token]

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


def target_score(table: Table, path: Path) -> Law:
    return table.p(path)


def longest_of_two(rule: Rule, draft: Draft, rows: TargetProbs, coin) -> VerificationResult:
    """Each chain is verified on its own, and the one that got further stands."""
    assert draft.q is not None
    results = []
    for number in range(2):
        nodes = [2 * number, 2 * number + 1]
        own = Draft.chain(draft.tokens[:, nodes], draft.q[:, [0, 1 + number]])
        logits = rows._logits[:, [0, *(node + 1 for node in nodes)]]
        again = coin.at([0] * len(coin.tapes), [number] * len(coin.tapes))
        result = verify(rule, own, TargetProbs(logits, rows._sampler), again)
        results.append(result._replace(slots=result.slots + 2 * number * (result.slots > 0)))
    second = results[1].accepted > results[0].accepted
    return VerificationResult(
        *(torch.where(second.view(-1, *[1] * (a.ndim - 1)), b, a) for a, b in zip(*results, strict=True))
    )


# -- siblings ------------------------------------------------------------------------------------


def siblings(second: str):
    """Two children of the root."""

    def story(table: Table) -> Story:
        q = table.q(())
        a = yield q
        nodes = [Node(a, -1, q)]
        others = struck(q, a)
        likeliest = others.index(max(others))
        if second == "struck":
            nodes.append(Node((yield others), -1, q))
        elif second == "patched":
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
        nodes, sure = [], 1.0
        while len(nodes) < 2:
            q = table.q(path)
            sure *= max(q)
            if (mode == "before" and max(q) < LOW) or (mode == "product before" and sure < LOW):
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
        found: list[tuple[float, Path, Law | None]] = []

        def children(path: Path, score: float):
            q = table.q(path)
            if drawn:
                a = yield q
                b = yield struck(q, a)
            else:
                a, b = sorted(range(V), key=lambda t: -q[t])[:2]
                yield from ()
            return [(score * q[t], (*path, t), q if drawn else None) for t in (a, b)]

        for score, path, law in (yield from children((), 1.0)):
            found += [(score, path, law), *(yield from children(path, score))]
        kept = sorted(found, key=lambda node: (-node[0], len(node[1])))[:3]
        kept = sorted((node for node in found if node in kept), key=lambda node: len(node[1]))
        paths = [path for _, path, _ in kept]
        return [Node(p[-1], paths.index(p[:-1]) if len(p) > 1 else -1, law) for _, p, law in kept]

    return story


def expanded(mode: str):
    """What is drawn decides what hangs below it, or is dropped for its own sake or that of its child."""

    def story(table: Table) -> Story:
        q = table.q(())
        a = yield q
        b = yield struck(q, a)
        nodes = [Node(a, -1, q), Node(b, -1, q)]
        best = 0 if q[a] >= q[b] else 1
        below = table.q((nodes[best].token,))
        token = yield below
        if mode == "drop" and below[token] < LOW:
            return nodes
        return [*nodes, Node(token, best, below)]

    return story


def by_its_child(table: Table) -> Story:
    """A drawn node is dropped when its child is unlikely."""
    q = table.q(())
    token = yield q
    below = table.q((token,))
    child = yield below
    return [Node(token, -1, q), Node(child, 0, below)] if below[child] > LOW else []


def swayed(table: Table) -> Story:
    """A drawn child of the root, dropped for what is drawn below its chosen sibling: ranks do this.

    From the root to the leaves the sibling is reached as often either way. But `traversal` weighs
    the sibling by whether the first child failed before it.
    """
    q = table.q(())
    top = q.index(max(q))
    rest, below = struck(q, top), table.q((top,))
    drawn = yield rest
    token = yield below
    if token == 0:
        return [Node(top), Node(token, 0, below)]
    return [Node(drawn, -1, rest), Node(top), Node(token, 1, below)]


# -- diffusion -----------------------------------------------------------------------------------


def diffusion(mode: str):
    """A block of two tokens of which the second is unmasked first."""

    def story(table: Table) -> Story:
        later = table.q((0, 0))
        b = yield later
        first = table.q((1, b))
        if mode == "one step":
            first = table.q((0,))
        a = yield first
        if mode == "bayes":
            joint = [[later[y] * table.q((1, y))[x] for y in range(V)] for x in range(V)]
            return [Node(a, -1, [sum(row) for row in joint]), Node(b, 0, struck(joint[a]))]
        laws = {"chosen": (None, None), "second chosen": (first, None)}.get(mode, (first, later))
        return [Node(a, -1, laws[0]), Node(b, 0, laws[1])]

    return story


REPLACED = {"replacement": True}
# what goes wrong: the wrong way, and the right ones
PAIRS: dict[str, tuple[Way, list[Way]]] = {
    "q of another temperature": (
        Way(chain(cold, honest)),
        [Way(chain(cold)), Way(chain(cold), "block"), Way(chain(honest))],
    ),
    "q of another temperature, by block": (Way(chain(cold, honest), "block"), [Way(chain(honest), "block")]),
    "argmax with the whole of q": (
        Way(argmax(drawn=True)),
        [Way(argmax(drawn=False), "match"), Way(argmax(drawn=False), "recursive")],
    ),
    "argmax with the whole of q, by block": (
        Way(argmax(drawn=True), "block"),
        [Way(argmax(drawn=False), "traversal")],
    ),
    "p where the residual belongs": (
        Way(chain(honest), judge=after_rejection(no_residual)),
        [Way(chain(honest))],
    ),
    "residual of the raw law": (
        Way(chain(honest, depth=1), judge=after_rejection(raw_residual), sampler=WARPED),
        [Way(chain(rule), name, sampler=WARPED) for rule in (honest, cold) for name in ("token", "block")],
    ),
    "p cut to the draft's vocabulary": (
        Way(chain(small), judge=restricted),
        [Way(chain(small), rule) for rule in ("token", "block", "match")],
    ),
    "a middle model's tokens with the small one's law": (Way(chain(middle, honest)), [Way(chain(middle))]),
    "struck siblings verified with q": (
        Way(siblings("struck"), "recursive", REPLACED),
        [Way(siblings("struck"), rule) for rule in ("recursive", "traversal", "match")],
    ),
    "struck siblings verified with q, by traversal": (Way(siblings("struck"), "traversal", REPLACED), []),
    "a repeated sibling replaced by the next best": (
        Way(siblings("patched"), "recursive", REPLACED),
        [Way(siblings("patched"), "match", REPLACED)]
        + [Way(siblings("chosen"), rule) for rule in ("recursive", "traversal")],
    ),
    "the better of two drafts by the draft's score": (
        Way(better_of_two(honest)),
        [Way(better_of_two(honest), "match"), Way(two_chains, "recursive", REPLACED)],
    ),
    "the better of two drafts by the target's score": (
        Way(better_of_two(target_score), "block"),
        [Way(better_of_two(target_score), "match"), Way(two_chains, "traversal", REPLACED)],
    ),
    "the best of two drafts by what it is expected to keep": (
        Way(drafts_that_share, "select", REPLACED, selected_and_weighed),
        [Way(drafts_that_share, rule, REPLACED) for rule in ("select", "recursive", "traversal", "match")],
    ),
    "two drafts verified apart, the longer one kept": (
        Way(two_chains, "token", REPLACED, longest_of_two),
        [Way(two_chains, rule, REPLACED) for rule in ("recursive", "traversal", "match")],
    ),
    "an unlikely drawn token discarded": (
        Way(stopping("discard")),
        [
            Way(stopping(mode), rule)
            for mode in ("before", "product before", "keep")
            for rule in ("token", "block")
        ]
        + [Way(stopping("discard"), "match")],
    ),
    "drawn nodes ranked by their own scores": (
        Way(reranked(drawn=True), "recursive"),
        [Way(reranked(drawn=False), "match"), Way(reranked(drawn=True), "match")],
    ),
    "drawn nodes ranked by their own scores, by traversal": (
        Way(reranked(drawn=True), "traversal"),
        [Way(reranked(drawn=False), "traversal")],
    ),
    "a drawn node dropped for its own score": (
        Way(expanded("drop"), "recursive"),
        [Way(expanded("keep"), rule) for rule in ("recursive", "traversal")],
    ),
    "a drawn node dropped for its child's score": (Way(by_its_child), [Way(by_its_child, "match")]),
    "drawn nodes ranked against each other, by traversal": (
        Way(swayed, "traversal"),
        [Way(swayed, "recursive"), Way(swayed, "match")],
    ),
    "the chosen sibling before the drawn one, by traversal": (
        Way(hybrid(drawn_first=False), "traversal"),
        [Way(hybrid(drawn_first=True), rule) for rule in ("recursive", "traversal", "match")]
        + [Way(hybrid(drawn_first=False), "recursive")],
    ),
    "laws of the time of unmasking": (
        Way(diffusion("raw")),
        [Way(diffusion(mode)) for mode in ("one step", "bayes")]
        + [Way(diffusion("second chosen"), rule) for rule in ("recursive", "traversal")]
        + [Way(diffusion("chosen"), "match")],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_wrong_way_is_seen(name):
    assert any(found > VISIBLE for found in errors(PAIRS[name][0], 3))


@pytest.mark.parametrize("name", PAIRS)
def test_the_right_ways_are_lossless(name):
    for way in PAIRS[name][1]:
        assert max(errors(way, 2)) < EXACT, way


# -- lossy rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_lossy_rule_is_lossy_where_anything_is_drawn(tiny_target, rule, temperature):
    """And at temperature 0, where it judges tokens by the distribution of temperature 1."""
    drawn = rule == "lenience"  # which weighs drawn tokens
    shape = {"proposal": "sampled"} if drawn else {"width": 2, "nodes": 5}
    shape = {"min_confidence": 0.5} if rule == "sprint" else shape
    plan = Plan(2, **shape, rule=rule, lossy=True)
    drafter = Grown(V) if drawn else FixedTrees(V)
    size = {"length": 4, "rows": [0]} if temperature else {"length": 8}  # at 0 each row is one text
    laws = differences(tiny_target(), drafter, plan, Sampler(temperature), **size)
    found = max(error(*law) for law in laws)
    assert found < EXACT if not temperature and not RULES[rule].changes_greedy else found > 0.01


# -- refusals ------------------------------------------------------------------------------------


def test_what_ranks_tell_of_is_marked_so_that_traversal_refuses_it(tiny_target):
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

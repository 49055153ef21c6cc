"""How many draft tokens every rule accepts in the mean, at known p and q, against plain enumeration.

A rule that loses tokens it might accept stays lossless, so no test of its output sees it. Here all drafts are
enumerated, and for each the expected number of accepted tokens follows from the rule's definition: by sums
over one slot after the other, in plain Python, with none of the production code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import oracle
import pytest
from exact import EXACT, Node, Story, Table, assert_same_law, exact_law, struck
from rule_cases import CHAINS, LOSSY, ONE, RULES, plan_of, sampled_chain

DEPTH, COUNT = 2, 2  # of chains, side by side
Path = tuple[int, ...]
Nodes = list[Node]


# -- drafts ----------------------------------------------------------------------------------------


def siblings(table: Table) -> Story:
    """Two siblings drawn without replacement, and two below the first."""
    nodes: Nodes = []
    for parent in (-1, 0):
        path = () if parent < 0 else (nodes[parent].token,)
        law = table.q(path)
        first = yield law
        second = yield struck(law, first)
        nodes += [Node(first, parent, law), Node(second, parent, law)]
    return nodes


def side_by_side(table: Table) -> Story:
    """Chains drawn independently; the next tokens of twins stand below the first of them."""
    nodes: Nodes = []
    for _ in range(COUNT):
        nodes.append(Node((yield table.q(())), -1, table.q(())))
    tokens = [node.token for node in nodes]
    for token in tokens:
        law = table.q((token,))
        nodes.append(Node((yield law), tokens.index(token), law))
    return nodes


def hybrid(table: Table) -> Story:
    """One drawn child and one chosen one, twice."""
    nodes: Nodes = []
    for parent in (-1, 0, 1):
        path = () if parent < 0 else (nodes[parent].token,)
        chosen = len(path)
        law = struck(table.q(path), chosen)
        nodes += [Node((yield law), parent, law), Node(chosen, parent)]
    return nodes


def chosen(table: Table) -> Story:
    """Nothing is drawn; one token stands there twice."""
    del table
    return [Node(1), Node(0), Node(1), Node(2, 0), Node(1, 0), Node(0, 1), Node(2, 5)]
    yield  # makes it a story


FORMS: dict[str, Callable[[Table], Story]] = {
    "chain": lambda table: sampled_chain(table, DEPTH, 0.0),
    "siblings": siblings,
    "side by side": side_by_side,
    "hybrid": hybrid,
    "chosen": chosen,
}
REPLACED = ("side by side",)


def drafts(tell: Callable[[], Story], drawn: Path = ()) -> Iterator[tuple[float, Nodes]]:
    """Every draft of a story with its probability."""
    story, chance = tell(), 1.0
    try:
        weights = next(story)
        for token in drawn:
            chance *= weights[token] / sum(weights)
            weights = story.send(token)
    except StopIteration as end:
        yield chance, end.value
        return
    for token, weight in enumerate(weights):
        if weight > 0:
            yield from drafts(tell, (*drawn, token))


def below(nodes: Nodes, at: int) -> list[tuple[int, Node]]:
    """Children in their order, with their indices."""
    return [(i, node) for i, node in enumerate(nodes) if node.parent == at]


# -- what the rules accept of one draft ------------------------------------------------------------


def by_match(
    table: Table, nodes: Nodes, at: int = -1, path: Path = (), p: list[float] | None = None
) -> float:
    """The child that has the target's token; of twins the first."""
    p, found = table.p(path) if p is None else p, {}
    for i, node in below(nodes, at):
        found.setdefault(node.token, i)
    return sum(p[t] * (1 + by_match(table, nodes, i, (*path, t))) for t, i in found.items())


def by_rejection(
    table: Table, nodes: Nodes, replaced: bool, lenience: float = 1.0, at: int = -1, path: Path = ()
) -> float:
    """Drawn children in turn, then the chosen ones by what is left of p."""
    left, here, total, taken = table.p(path), 1.0, 0.0, []
    for i, node in below(nodes, at):
        if node.law is None:
            continue
        q = node.law if replaced else struck(node.law, *taken)
        accept = min(1.0, left[node.token] / (lenience * q[node.token]))
        more = by_rejection(table, nodes, replaced, lenience, i, (*path, node.token))
        total, here = total + here * accept * (1 + more), here * (1 - accept)
        rest = [max(r - m, 0.0) for r, m in zip(left, q, strict=True)]
        left = [r / sum(rest) for r in rest] if sum(rest) else left
        taken.append(node.token)
    fixed = {node.token: i for i, node in reversed(below(nodes, at)) if node.law is None}
    for token, i in fixed.items():
        more = by_rejection(table, nodes, replaced, lenience, i, (*path, token))
        total += here * left[token] * (1 + more)
    return total


def by_kseq(table: Table, nodes: Nodes, at: int = -1, path: Path = ()) -> float:
    """Each child with min(1, p / (rho q)); below it is what stands below any twin of it."""
    children = below(nodes, at)
    if not children:
        return 0.0
    p, q, k = table.p(path), children[0][1].law, len(children)
    assert q is not None

    def short(rho: float) -> bool:
        b = sum(min(x, y / rho) for x, y in zip(q, p, strict=True))
        return 1 - (1 - b) ** k > rho * b

    low, rho = 1.0, 1.0
    if short(low):
        rho = float(k)
        for _ in range(60):
            middle = (low + rho) / 2
            low, rho = (middle, rho) if short(middle) else (low, middle)
    total, here = 0.0, 1.0
    for _, node in children:
        first = next(j for j, twin in children if twin.token == node.token)
        accept = min(1.0, p[node.token] / (rho * q[node.token]))
        total += here * accept * (1 + by_kseq(table, nodes, first, (*path, node.token)))
        here *= 1 - accept
    return total


def by_block(table: Table, nodes: Nodes) -> float:
    """Sun et al., algorithm 2: the longest beginning that passes, each with chance h by itself."""
    path, w, passes = tuple(node.token for node in nodes), 1.0, []
    for i, node in enumerate(nodes):
        assert node.law is not None
        w = min(1.0, w * table.p(path[:i])[node.token] / node.law[node.token])
        h = w
        if i + 1 < len(nodes):
            law = nodes[i + 1].law
            assert law is not None
            gain = sum(max(w * a - b, 0.0) for a, b in zip(table.p(path[: i + 1]), law, strict=True))
            h = gain / (gain + 1 - w) if gain + 1 - w else 1.0
        passes.append(h)
    return sum((i + 1) * h * math.prod(1 - later for later in passes[i + 1 :]) for i, h in enumerate(passes))


def by_traversal(table: Table, nodes: Nodes, replaced: bool) -> float:
    """From the leaves, in the paper's order."""
    tree = oracle.tree_of(nodes, table.p, table.vocab, replaced)
    law = exact_law(lambda tapes: [oracle.traversal(oracle.Toss(tape), tree) for tape in tapes])
    return sum(chance * (len(text) - 1) for text, chance in law.items())


def by_selection(table: Table, nodes: Nodes) -> float:
    """`match` on the line with the most tokens that it accepts in expectation."""

    def line(i: int) -> list[int]:
        return [] if i < 0 else [*line(nodes[i].parent), i]

    def kept(i: int) -> float:
        tokens = [nodes[j].token for j in line(i)]
        chances = [table.p(tokens[:j])[token] for j, token in enumerate(tokens)]
        return sum(math.prod(chances[: j + 1]) for j in range(len(chances)))

    return max(kept(i) for i in range(len(nodes)))


def acceptable(rule: str, p: list[float], token: int) -> bool:
    """Whether a lossy rule takes a token though another was drawn; by its default numbers."""
    numbers = plan_of(rule).rule
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return {
        "sprint": lambda: True,
        "topk": lambda: sum(x > p[token] for x in p) < numbers.top and p[token] >= numbers.ratio * max(p),
        "bild": lambda: -math.log(p[token]) <= numbers.rollback,
        "threshold": lambda: p[token] >= numbers.threshold,
        "typical": lambda: p[token] >= min(numbers.threshold, numbers.alpha * math.exp(-entropy)),
    }[rule]()


def by_longest(table: Table, nodes: Nodes, rule: str, at: int = -1, path: Path = ()) -> int:
    """The deepest line of acceptable tokens."""
    p = table.p(path)
    lines = [
        1 + by_longest(table, nodes, rule, i, (*path, node.token))
        for i, node in below(nodes, at)
        if acceptable(rule, p, node.token)
    ]
    return max(lines, default=0)


def by_relaxed(table: Table, nodes: Nodes, rule: str, at: int = -1, path: Path = ()) -> float:
    """The child with the target's token, else the likeliest acceptable one."""
    p, children = table.p(path), {}
    for i, node in below(nodes, at):
        children.setdefault(node.token, i)
    liked = [token for token in children if acceptable(rule, p, token)]
    best = max(liked, key=lambda token: p[token], default=None)
    total = 0.0
    for y, chance in enumerate(p):
        token = y if y in children else best
        if token is not None:
            total += chance * (1 + by_relaxed(table, nodes, rule, children[token], (*path, token)))
    return total


def expected(rule: str, form: str, table: Table, nodes: Nodes) -> float:
    """Accepted tokens of one draft in the mean."""
    replaced = form in REPLACED
    if rule in ("typical", "threshold"):
        return by_longest(table, nodes, rule)
    if rule in ("topk", "bild", "sprint"):
        return by_relaxed(table, nodes, rule)
    if rule == "match" or form == "chosen":  # where nothing is drawn, the lossless rules are one
        return by_match(table, nodes)
    if rule == "select":
        return by_selection(table, nodes)
    if rule in ("token", "recursive"):
        return by_rejection(table, nodes, replaced)
    if rule == "lenience":
        return by_rejection(table, nodes, replaced, plan_of(rule).rule.factor)
    return {
        "kseq": lambda: by_kseq(table, nodes),
        "block": lambda: by_block(table, nodes),
        "traversal": lambda: by_traversal(table, nodes, replaced),
    }[rule]()


def fits(rule: str, form: str) -> bool:
    """Whether a rule verifies such drafts."""
    if rule in CHAINS:
        return form == "chain"
    if rule == "kseq":
        return form in ("chain", "side by side", "chosen")
    return True


CASES = [(rule, form) for rule in RULES for form in FORMS if fits(rule, form)]


def completed(law: dict[Path, float], table: Table, length: int = 3) -> dict[Path, float]:
    """The distribution of texts of this length that begin with a round's, and go on as the target says."""
    whole: dict[Path, float] = {}
    for text, chance in law.items():
        if len(text) >= length:
            whole[text[:length]] = whole.get(text[:length], 0.0) + chance
            continue
        longer = {(*text, y): chance * p for y, p in enumerate(table.p(text)) if p > 0}
        for rest, mass in completed(longer, table, length).items():
            whole[rest] = whole.get(rest, 0.0) + mass
    return whole


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_a_rule_accepts_as_many_tokens_as_its_definition_says_and_keeps_the_law(rule, form):
    # The rho of kseq is the upper end of an interval that was halved 40 times.
    tolerance = 20 * 2.0**-40 if rule == "kseq" else EXACT
    for seed in range(2):
        table = Table(seed, ONE)

        def tell(table=table):
            return FORMS[form](table)

        law = table.round(tell, plan_of(rule), replacement=form in REPLACED)
        if not RULES[rule].lossy:
            assert_same_law(completed(law, table), completed({(): 1.0}, table))
        got = sum(chance * (len(text) - 1) for text, chance in law.items())
        want = sum(chance * expected(rule, form, table, nodes) for chance, nodes in drafts(tell))
        assert abs(got - want) < tolerance, (seed, got, want)
        assert want > 0


def test_every_rule_has_a_case_that_draws():
    assert {rule for rule, form in CASES if form != "chosen"} == set(RULES)
    assert {rule for rule, form in CASES if form == "side by side"} > {"kseq", "select", *LOSSY}


def test_twins_are_worth_more_together():
    """Of chains side by side, what stands below a twin counts for all; else kseq would accept less."""
    for seed in range(3):
        table = Table(seed, ONE)
        found = list(drafts(lambda table=table: side_by_side(table)))
        together = sum(chance * by_kseq(table, nodes) for chance, nodes in found)
        alone = [
            (chance, [node for i, node in enumerate(nodes) if i < COUNT or node.parent == 0])
            for chance, nodes in found
        ]
        assert sum(chance * by_kseq(table, nodes) for chance, nodes in alone) < together - 0.01

"""The verification rules: exact distributions against closed forms and an oracle, edge cases and refusals.

With m_j = min(p_j, q_j), the token rule emits (x_1 .. x_n, y) of a chain of K with measure
m_1(x_1) .. m_n(x_n) r(y), r = (p - q)+ at n + 1 <= K and p after all K (Leviathan et al.,
arXiv:2211.17192). The match rule emits a path and y below it with their probability, where y is
no child. `oracle` has the distribution of what each other rule emits of a given draft.
"""

import itertools
import math
import operator
from collections import defaultdict
from dataclasses import replace

import oracle
import pytest
import torch
import yaml
from exact import (
    EXACT,
    EnumeratingCoin,
    Node,
    Probs,
    Script,
    Story,
    Table,
    Trees,
    assert_same_probs,
    draft_of,
    emitted,
    exact_probs,
    paths_of,
    struck,
)
from rule_cases import CHAINS, LOSSY, ONE, RULES, SAMPLERS, V, plan_of, sampled_chain, told
from workbench import CONF

from decode.draft import PAD, Draft, DraftProbs
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import KeyedCoin, Purpose
from decode.sampling import Sampler
from decode.verification.rule import rule_of, verify
from decode.verification.rules.kseq import smallest_rho
from decode.verification.rules.traversal import _pass_chances
from decode.verification.target_probs import TargetProbs
from drafters.drafting.tree import expand


def emitted_by(rule: str, nodes: list[Node], table: Table, **flags) -> Probs:
    """Distribution of what a rule emits of one draft, in a batch with a row of another form."""
    other = [Node(1, -1, table.q(())), Node(2, 0, table.q((1,))), Node(0, 1, table.q((1, 2)))]
    if rule not in CHAINS:
        other.insert(1, Node(0))

    def play(tapes):
        draft = draft_of([*[nodes] * len(tapes), other], table.vocab, **flags)
        coin = EnumeratingCoin([*tapes, Script(0)], junk=table.vocab)
        return emitted(draft, verify(plan_of(rule).rule, draft, table.rows(draft), coin))[:-1]

    return exact_probs(play, abreast=64)


# -- closed forms --------------------------------------------------------------------------------


def token_probs(table: Table, depth: int) -> Probs:
    """Closed form of the module's docstring."""
    probs = {}
    for n in range(depth + 1):
        for path in itertools.product(range(V), repeat=n):
            mass = 1.0
            for j in range(n):
                mass *= min(table.p(path[:j])[path[j]], table.q(path[:j], 0.3)[path[j]])
            p, q = table.p(path), table.q(path, 0.3)
            for y in range(V):
                probs[(*path, y)] = mass * (p[y] if n == depth else max(p[y] - q[y], 0.0))
    return probs


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_token_has_its_closed_form(sampler):
    for seed in range(3):
        table = Table(seed, SAMPLERS[sampler])
        got = table.round(lambda table=table: sampled_chain(table, 2), plan_of("token"))
        assert_same_probs(got, token_probs(table, 2))


TREES = {
    "chain": ([1, 2], [-1, 0]),
    "siblings": ([2, 0], [-1, -1]),
    "all": ([0, 1, 2], [-1, -1, -1]),
    "deep": ([0, 2, 1, 1, 0, 2], [-1, -1, 0, 1, 2, 2]),
    "padded": ([2, 1, PAD, PAD], [-1, 0, -1, 1]),
    "empty": ([PAD], [-1]),
    "twice": ([1, 1, 0], [-1, -1, 0]),
    "second twice": ([0, 1, 2, 1, 0], [-1, -1, -1, -1, 1]),
    "all below": ([1, 0, 1, 2], [-1, 0, 0, 0]),
}


def match_probs(table: Table, tokens, parents) -> Probs:
    """Closed form of the module's docstring."""
    probs = {}
    inner = {path for path in paths_of(tokens, parents) if PAD not in path}
    for path in inner:
        mass = math.prod(table.p(path[:j])[token] for j, token in enumerate(path))
        for y, p in enumerate(table.p(path)):
            if (*path, y) not in inner:
                probs[(*path, y)] = mass * p
    return probs


def line_of(nodes: list[Node], end: int) -> list[Node]:
    return [*(line_of(nodes, nodes[end].parent) if nodes[end].parent >= 0 else []), nodes[end]]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_select_is_match_on_the_path_with_most_expected_tokens(sampler):
    best = set()
    for seed in range(12):
        table, trees = Table(seed, SAMPLERS[sampler]), Trees(V, seed, drawn=(1, 2, 3), chosen=(0,))
        nodes = told(trees.story([seed]), seed)
        chains = [line_of(nodes, end) for end in range(len(nodes))]

        def kept(chain: list[Node], table=table) -> float:
            tokens = [node.token for node in chain]
            chances = [table.p(tokens[:j])[t] if t != PAD else 0.0 for j, t in enumerate(tokens)]
            return sum(itertools.accumulate(chances, operator.mul))

        chain = max(chains, key=kept)  # of equals the first
        want = match_probs(table, [n.token for n in chain], range(-1, len(chain) - 1))
        assert_same_probs(emitted_by("select", nodes, table), want)
        best.add((len(chain), chains.index(chain)))
    assert len(best) > 3


@pytest.mark.parametrize("rule", ["match", "recursive", "traversal"])
@pytest.mark.parametrize("tree", TREES)
def test_chosen_nodes_are_matched_by_every_rule(rule, tree):
    """Told that nothing was drawn, each rule's own code has to find what `match` finds."""
    tokens, parents = TREES[tree]
    draft = draft_of([[Node(t, p) for t, p in zip(tokens, parents, strict=True)]], V)
    nobody = torch.zeros_like(draft.tokens, dtype=torch.bool)
    no_q = torch.zeros(1, 1, V, dtype=torch.float64), torch.full((1, 1), -1)
    chosen = replace(draft, probs=DraftProbs(*no_q, (1,) + (0,) * (draft.depth - 1), nobody))
    for seed, sampler in enumerate(SAMPLERS.values()):
        table = Table(seed, sampler)

        def play(tapes, table=table):
            coin = EnumeratingCoin(tapes)
            return emitted(chosen, RULES[rule]().verify(chosen, table.rows(chosen), coin))

        assert_same_probs(exact_probs(play), match_probs(table, tokens, parents))


# -- the oracle ----------------------------------------------------------------------------------


FORMS = {
    "with replacement": {"replacement": True},
    "without": {"drawn": (0, 1, 2, 3)},
    "hybrid": {"depth": 3, "drawn": (1,), "chosen": (1, 2)},
    "all chosen below": {"drawn": (0, 1), "chosen": (0, 3)},
    "independent": {"drawn": (0, 1, 2, 3), "chosen": (0,), "replacement": True},
    "side by side": {"replacement": True},
}


def side_by_side(table: Table) -> Story:
    """Two chains drawn independently; the next tokens of twins are below the first of them."""
    q = table.q(())
    tokens = [(yield q), (yield q)]
    nodes = [Node(token, -1, q) for token in tokens]
    for token in tokens:
        q = table.q((token,))
        nodes.append(Node((yield q), tokens.index(token), q))
    return nodes


def kseq(toss: oracle.Toss, tree: oracle.Tree) -> tuple[int, ...]:
    """From the root: K-SEQ of SpecTr (arXiv:2310.15141); what stands below a twin is below its first."""
    out: tuple[int, ...] = ()
    while tree.children:
        p, q, k = tree.p, tree.children[0][1], len(tree.children)
        row = torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
        rho = smallest_rho(*row, torch.tensor([k])).item()
        each = [min(a, b / rho) for a, b in zip(q, p, strict=True)]
        accepted = (t for t, _, _ in tree.children if toss.flip(p[t] / (rho * q[t])))
        if (token := next(accepted, None)) is None:
            any_of = (1 - (1 - sum(each)) ** k) / sum(each) if sum(each) else 1.0
            left, mass = oracle.positive(a - m * any_of for a, m in zip(p, each, strict=True))
            return (*out, toss.draw(left if mass else p))
        out = (*out, token)
        tree = next(child for t, _, child in tree.children if t == token)
    return (*out, toss.draw(tree.p))


BY_ORACLE = oracle.RULES | {"kseq": kseq}


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        (rule, form)
        for rule in BY_ORACLE
        for form in FORMS
        if rule != "kseq" or form in ("independent", "side by side")
    ],
)
def test_every_draft_is_verified_as_by_the_oracle(rule, form):
    """Of five tokens: of three, what is left after a rejection is often a single one."""
    seen = set()
    for seed in range(15):
        sampler = list(SAMPLERS.values())[seed % len(SAMPLERS)]
        table, trees = Table(seed, sampler, vocab=5), Trees(5, seed, **FORMS[form])
        nodes = told(side_by_side(table) if form == "side by side" else trees.story([seed]), seed)
        flags = {"replacement": trees.replacement}

        def play(tapes, nodes=nodes, table=table, flags=flags):
            tree = oracle.tree_of(nodes, table.p, 5, **flags)
            return [BY_ORACLE[rule](oracle.Toss(tape), tree) for tape in tapes]

        got = emitted_by(rule, nodes, table, **flags)
        assert_same_probs(got, exact_probs(play))
        seen |= {len(text) for text in got}
    assert len(seen) > 2


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in LOSSY])
def test_lossless_rule_emits_the_targets_distribution(rule):
    """Over what is drafted and all coins, whatever the oracle of the rule does."""
    verified = set()
    for seed, form in itertools.product(range(3), [*FORMS, "chain"]):
        table = Table(seed, list(SAMPLERS.values())[seed])
        trees = Trees(V, seed, **FORMS.get(form, {"drawn": (1,)}))
        special = {
            "chain": lambda t=table: sampled_chain(t, 2),
            "side by side": lambda t=table: side_by_side(t),
        }
        story = special.get(form, lambda t=trees: t.story([0]))
        try:
            got = table.round(story, plan_of(rule), replacement=trees.replacement)
        except UserError:  # a draft that this rule refuses
            continue
        length = max(map(len, got))
        assert_same_probs(table.complete(got, length), table.probs(length))
        verified.add(form)
    assert verified, "FORMS has no draft that this rule verifies"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_block_verifies_every_chain_as_its_paper_does(sampler):
    for seed in range(6):
        table = Table(seed, SAMPLERS[sampler])
        nodes = told(sampled_chain(table, 3), seed)
        tokens, q = [n.token for n in nodes], [n.probs for n in nodes]
        p = [table.p(tokens[:j]) for j in range(4)]

        def play(tapes, tokens=tokens, q=q, p=p):
            return [oracle.block(oracle.Toss(tape), tokens, q, p) for tape in tapes]

        want = exact_probs(play)
        for rule in ("block", "traversal"):
            assert_same_probs(emitted_by(rule, nodes, table), want)


def accepted(probs: Probs) -> float:
    """Draft tokens accepted, in expectation."""
    return sum(mass * (len(text) - 1) for text, mass in probs.items())


@pytest.mark.parametrize("form", ["chain", "without", "with replacement", "hybrid"])
def test_traversal_accepts_no_less_than_recursive(form):
    """In expectation over drafts and coins, exactly; on a chain these are block and token."""
    options = {
        "chain": {"drawn": (1,), "chosen": (0,)},
        "without": {"drawn": (1, 2), "chosen": (0,)},
        "with replacement": {"drawn": (1, 2), "chosen": (0,), "replacement": True},
        "hybrid": {"drawn": (1,), "chosen": (0, 1)},
    }[form]
    gains = []
    for seed in range(10):
        table, trees = Table(seed, Sampler(0.7)), Trees(V, seed, **options)
        emitted_probs = [
            table.round(lambda trees=trees: trees.story([0]), plan_of(rule), replacement=trees.replacement)
            for rule in ("match", "recursive", "traversal")
        ]
        for probs in emitted_probs:
            assert_same_probs(table.complete(probs, 3), table.probs(3))
        match, recursive, traversal = map(accepted, emitted_probs)
        assert traversal > recursive - EXACT
        assert form != "chain" or recursive > match - EXACT  # several siblings may be better matched
        gains.append((recursive - match, traversal - recursive))
    assert max(g for g, _ in gains) > 0.03
    assert max(g for _, g in gains) > 0.003


def transport(p: list[float], candidates: Probs) -> float:
    """The most that any rule can accept of one token: 1 + min over H of p(H) - Q(all candidates in H)
    (arXiv:2502.18779)."""
    least = 0.0
    for size in range(1, len(p) + 1):
        for some in itertools.combinations(range(len(p)), size):
            inside = sum(mass for tokens, mass in candidates.items() if set(tokens) <= set(some))
            least = min(least, sum(p[t] for t in some) - inside)
    return 1 + least


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("width", [2, 3])
def test_hybrid_node_reaches_the_optimal_transport_bound(width, rule):
    """As `expand` draws it. The same candidates verified chosen first fall short of it."""
    shape = Plan(tree=[(rank,) for rank in range(width)], proposal="hybrid", rule=rule)
    short = []
    for seed in range(8):
        table = Table(seed, Sampler(0.8), vocab=4)
        p, q = table.p(()), table.q((1,))
        logits = torch.tensor([q], dtype=torch.float64).log() * 0.8
        kept, drafts = defaultdict(float), defaultdict(float)

        def play(tapes, logits=logits, table=table):
            rows = logits.expand(len(tapes), -1)
            draft = expand(rows, lambda *_: rows[:, None], Sampler(0.8), EnumeratingCoin(tapes), shape)
            result = verify(shape.rule, draft, table.rows(draft), EnumeratingCoin(tapes))
            emitted(draft, result)
            pairs = zip(draft.tokens.tolist(), result.accepted.tolist(), strict=True)
            return [(*tokens, count) for tokens, count in pairs]

        for (*tokens, count), mass in exact_probs(play, abreast=64).items():
            drafts[tuple(tokens)] += mass
            kept[count] += mass
        best = transport(p, drafts)
        assert abs(kept[1] - best) < EXACT
        top = sorted(range(4), key=lambda t: -q[t])[: width - 1]
        left = 1 - sum(p[t] for t in top)
        chosen_first = (1 - left) + left * sum(map(min, struck(p, *top), struck(q, *top)))
        short.append(best - chosen_first)
    assert min(short) > -EXACT
    assert max(short) > 0.01


def test_smallest_rho_is_where_the_accepted_mass_meets_the_target():
    """p = (1/2, 1/2), q = (1, 0): b = 1 / (2 rho), and 1 - (1 - b)^2 = rho b says 2 - b = rho."""
    p, q = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64).expand(2, 3, 2)
    rho = smallest_rho(p, q, torch.tensor([0, 1, 2]))
    assert rho[:2].tolist() == [1.0, 1.0]
    assert rho[2].item() == pytest.approx(1 + math.sqrt(0.5), abs=1e-9)
    p, q = torch.rand(2, 50, 4, dtype=torch.float64).softmax(-1)
    counts = torch.arange(50) % 3 + 2
    rho = smallest_rho(p, q, counts)

    def enough(rho):
        b = torch.minimum(q, p / rho[:, None]).sum(-1)
        return 1 - (1 - b) ** counts <= rho * b

    assert enough(rho).all()
    assert not enough(rho - 1e-9)[rho > 1].any()


# -- edges ---------------------------------------------------------------------------------------


def rows_of(*probs) -> TargetProbs:
    """One batch row whose slots have these distributions."""
    return TargetProbs(torch.tensor([probs], dtype=torch.float64).log(), ONE)


def certain(junk: int = 0) -> EnumeratingCoin:
    return EnumeratingCoin([Script(0)], junk)


def chain_of(tokens: list[int], q: list[float], rule: str) -> Draft:
    probs = torch.tensor([[q] * len(tokens)], dtype=torch.float64) if RULES[rule].reads_probs else None
    return Draft.chain(torch.tensor([tokens]), probs)


@pytest.mark.parametrize("rule", RULES)
def test_padding_is_never_accepted(rule):
    """The target surely says 0, again and again; an absent node must not be taken for it."""
    certainly_0 = [1.0, 0.0, 0.0]
    rows = rows_of(*[certainly_0] * 3)
    absent = [chain_of([PAD, PAD], [1 / V] * V, rule)]
    if rule not in CHAINS:
        absent.append(Draft.chain(torch.tensor([[PAD, PAD]])))
    for draft, junk in itertools.product(absent, (0, V)):  # V: what is inactive is told "0" and "accepted"
        result = verify(plan_of(rule).rule, draft, rows, certain(junk))
        assert result.tokens.tolist() == [[0, PAD, PAD]]
        assert result.accepted.tolist() == [0]
    result = verify(plan_of(rule).rule, chain_of([0, PAD], certainly_0, rule), rows, certain())
    assert result.tokens.tolist() == [[0, 0, PAD]]
    assert result.slots.tolist() == [[0, 1, 0]]
    assert result.accepted.tolist() == [1]


@pytest.mark.parametrize("value", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "sprint"])  # which does not ask
def test_token_without_mass_is_never_accepted(monkeypatch, rule, value):
    """By the production coin at its smallest and largest value."""
    monkeypatch.setattr(
        KeyedCoin, "_uniforms", lambda self, key, n, device: torch.full((1, n), value, dtype=torch.float64)
    )
    draft, rows = chain_of([0], [1.0, 0.0, 0.0], rule), rows_of([0.0, 0.5, 0.5], [1 / 3] * 3)
    result = verify(plan_of(rule).rule, draft, rows, KeyedCoin(0, [0]))
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0] == (2 if value else 1)


class Contrary(EnumeratingCoin):
    """Rejects everything, as rounding might where p equals q."""

    def flip(self, accept, proposal, key, active):
        return torch.zeros_like(active)


@pytest.mark.parametrize("rule", ["token", "recursive"])
def test_residual_of_zero_falls_back_to_p(rule):
    p = [0.0, 0.3, 0.7]
    draft = chain_of([2], p, rule)

    def play(tapes):
        result = verify(plan_of(rule).rule, draft, rows_of(p, [1, 0, 0]), Contrary(tapes))
        return [(int(result.tokens[0, 0]),)]

    assert_same_probs(exact_probs(play), {(1,): 0.3, (2,): 0.7})


class Last(EnumeratingCoin):
    """Takes the last slot there is, the root, as rounding might where it has no chance."""

    def draw(self, weights, key, active):
        if key.purpose != Purpose.ACCEPT:
            return super().draw(weights, key, active)
        return torch.full_like(active, weights.shape[1] - 1, dtype=torch.long)


def test_root_with_nothing_left_draws_from_p():
    p = [0.0, 0.3, 0.7]
    for nodes in ([Node(2, -1, p)], [Node(1), Node(2)], [Node(2, -1, p), Node(1), Node(0)]):
        draft = draft_of([nodes, [Node(0, -1, p)]], V)  # the second row, so that there is a q
        rows = TargetProbs(torch.tensor([[p] * (len(nodes) + 1)] * 2, dtype=torch.float64).log(), ONE)

        def play(tapes, draft=draft, rows=rows):
            result = verify(plan_of("traversal").rule, draft, rows, Last([*tapes, Script(0)]))
            assert result.accepted[0] == 0
            return [(int(result.tokens[0, 0]),)]

        assert set(exact_probs(play)) <= {(1,), (2,)}


def test_no_chance_is_negative():
    """Chosen children that take all of p leave rounding of either sign."""

    class Wary(EnumeratingCoin):
        def draw(self, weights, key, active):
            assert (weights >= 0).all()
            return super().draw(weights, key, active)

    for seed, dtype in itertools.product(range(40), (torch.float32, torch.float64)):
        table = Table(seed, Sampler(0.7), vocab=5)
        draft = draft_of([[Node(1, -1, table.q(())), *(Node(t, 0) for t in range(5))]], 5)
        rows = table.rows(draft)
        rows._logits = rows._logits.to(dtype)
        verify(plan_of("traversal").rule, draft, rows, Wary([Script(seed)]))


@pytest.mark.parametrize("drawn", [True, False])
def test_small_chance_to_fail_survives_single_precision(drawn):
    """s + (1 - w), which is not s + 1 - w in fp32 where w is close to 1."""
    tiny = 2.0**-24
    below = Node(1, 0, [0.5, 0.5, 0.0]) if drawn else Node(1, 0)
    draft = draft_of([[Node(0, -1, [0.5, 0.5, 0.0]), below]], V)
    left = 0.75 * tiny if drawn else tiny  # of p once the child below has failed
    row = [0.5, 0.5, left] if drawn else [0.0, 1 - left, left]
    p = torch.tensor([[[0.5 * (1 - tiny), 0.5, 0.0], row, row]], dtype=torch.float32)
    stands, _ = _pass_chances(draft, p.clone())
    w = 1 - tiny
    assert abs(float(stands[0, 1]) - w * left / (w * left + tiny)) < 1e-6


# -- rows of a batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in CHAINS])
def test_rows_are_verified_each_by_its_own_draft(rule):
    """In any company and order; and what is drafted or emitted is not yet seen by a penalty."""
    table, trees = Table(0, Sampler(0.8, repetition_penalty=1.3)), Trees(V, 3, chosen=(0, 1, 2))
    nodes = [told(trees.story([row]), row) for row in range(6)]

    def run(order):
        draft = draft_of([nodes[r] for r in order], V, replacement=rule == "kseq")
        seen = torch.zeros(len(order), V, dtype=torch.bool)
        seen[:, 0] = True
        before, rows = seen.clone(), TargetProbs(table.rows(draft)._logits, table.sampler, seen)
        texts = emitted(draft, verify(plan_of(rule).rule, draft, rows, EnumeratingCoin(map(Script, order))))
        assert seen.equal(before)
        return texts

    single = [run([row])[0] for row in range(6)]
    assert len(set(single)) > 3
    for order in ([0, 1, 2, 3, 4, 5], [3, 0, 5, 4, 1, 2], [2, 2, 1]):
        assert run(order) == [single[row] for row in order]


def test_argmax_of_a_slot_is_that_of_its_distribution():
    """With the penalties of its own path; of ties the first."""
    for seed in range(6):
        table = Table(seed, Sampler(0.0, repetition_penalty=1.6), vocab=5)
        draft = draft_of([told(Trees(5, seed, chosen=(1, 2)).story([row]), row) for row in range(4)], 5)
        rows = table.rows(draft)
        rows._logits = rows._logits.round()
        one = rows.all(draft)
        assert one.max(-1).values.eq(1).all()
        assert rows.argmax(draft).equal(one.argmax(-1))


# -- refusals ------------------------------------------------------------------------------------

ONE_NODE, SIBLINGS = [Node(0, -1, [1 / 3] * 3)], [Node(0, -1, [1 / 3] * 3), Node(1, -1, [1 / 3] * 3)]
READING = [rule for rule in RULES if RULES[rule].reads_probs]
# rules that refuse, the draft, what is said, rules that verify it
REFUSED = {
    "trees": (CHAINS, draft_of([SIBLINGS], V), "rule=match", ()),
    "chosen tokens": (CHAINS, Draft.chain(torch.tensor([[0, 1]])), "rule=match", ()),
    "selected": (READING, draft_of([ONE_NODE], V, selected=True), "looking at the", ("match", "select")),
    "ranked": (
        ["traversal"],
        draft_of([[*ONE_NODE, Node(1)]], V, ranked=True),
        "drawn elsewhere",
        ("match", "recursive"),
    ),
    "dependent": (["kseq"], draft_of([SIBLINGS], V), "drawn independently", ("recursive",)),
    "independent": ([], draft_of([SIBLINGS], V, replacement=True), "", ("kseq",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rule_refuses_drafts_that_it_cannot_verify(name):
    rules, draft, said, others = REFUSED[name]
    rows = rows_of(*[[1 / 3] * 3] * 3)
    for rule in rules:
        with pytest.raises(UserError, match=rf"decode\.rule={rule}.*{said}"):
            verify(plan_of(rule).rule, draft, rows, certain())
    for rule in others:
        verify(plan_of(rule).rule, draft, rows, certain())


def test_every_rule_has_a_yaml_and_a_test():
    yamls = {path.stem for path in (CONF / "decode" / "rule").glob("*.yaml")}
    assert yamls == {"auto", *RULES}
    for name, rule in RULES.items():
        settings = yaml.safe_load((CONF / "decode" / "rule" / f"{name}.yaml").read_text())
        assert rule.name == name
        assert rule_of(settings) == rule()
        assert set(settings) == set(rule().settings)
        assert rule.__module__.startswith("decode.lossy." if rule.lossy else "decode.verification.")
    missing = set(RULES) - {*BY_ORACLE, *CHAINS, "select", *LOSSY}
    assert not missing, "write what a new lossless rule accepts in RULES of tests/support/oracle.py"

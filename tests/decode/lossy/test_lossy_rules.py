"""Rules that are not lossless: what each emits, against plain Python, and where it is a lossless one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from exact import (
    EnumeratingCoin,
    Law,
    Node,
    Table,
    Trees,
    assert_same_law,
    draft_of,
    emitted,
    exact_law,
    paths_of,
)
from rule_cases import LOSSY, ONE, RULES, SAMPLERS, V, plan_of, sampled_chain, told

from decode.draft import PAD
from decode.lossy.rules.topk import Tagged
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.verification.rule import verify
from decode.verification.target_probs import TargetProbs


def typical_law(table: Table, nodes: list[Node], threshold: float, alpha: float) -> Law:
    """Medusa's typical acceptance in plain Python: the first of the deepest paths that are typical."""
    best: tuple[int, ...] = ()
    for path in paths_of([n.token for n in nodes], [n.parent for n in nodes]):
        typical = PAD not in path
        for j, token in enumerate(path):
            p = table.p([max(t, 0) for t in path[:j]])
            entropy = -sum(m * math.log(m) for m in p if m > 0)
            typical = typical and p[token] >= min(threshold, alpha * math.exp(-entropy))
        if typical and len(path) > len(best):
            best = path
    return {(*best, y): mass for y, mass in enumerate(table.p(best)) if mass > 0}


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_the_longest_path_above_a_threshold_is_kept(rule):
    for seed in range(12):
        table = Table(seed, list(SAMPLERS.values())[seed % len(SAMPLERS)])
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        numbers = {"alpha": 0.6} if rule == "typical" else {}
        plan = Plan(1, rule={"name": rule, "threshold": 0.5, **numbers}, lossy=True)
        draft = draft_of([nodes], V)

        def play(tapes, draft=draft, plan=plan, table=table):
            return emitted(draft, verify(plan.rule, draft, table.rows(draft), EnumeratingCoin(tapes)))

        alpha = 0.6 if rule == "typical" else math.inf
        assert_same_law(exact_law(play), typical_law(table, nodes, 0.5, alpha))


def lenience_law(table: Table, depth: int, lenience: float) -> Law:
    """As `token_law`, with min(q, p / lenience) of each drawn token accepted and what is left drawn anew."""
    law = {}
    for n in range(depth + 1):
        for path in itertools.product(range(V), repeat=n):
            laws = [(table.p(path[:j]), table.q(path[:j], 0.3)) for j in range(n + 1)]
            mass = math.prod(min(q[t], p[t] / lenience) for (p, q), t in zip(laws, path, strict=False))
            p, q = laws[n]
            rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            rejected = 1 - sum(min(b, a / lenience) for a, b in zip(p, q, strict=True))
            for y in range(V):
                law[(*path, y)] = mass * (p[y] if n == depth else rejected * rest[y] / (sum(rest) or 1))
    return law


def leniently(lenience: float) -> Plan:
    return Plan(1, proposal="sampled", rule={"name": "lenience", "factor": lenience}, lossy=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_lenience_has_the_law_of_its_closed_form(sampler, depth):
    for lenience in (1.0, 0.7, 0.2):
        table = Table(4, SAMPLERS[sampler])
        got = table.round(lambda table=table: sampled_chain(table, depth), leniently(lenience))
        assert_same_law(got, lenience_law(table, depth, lenience))


def test_lenience_of_one_is_the_recursive_rule_draw_for_draw():
    for seed in range(40):
        table = Table(seed, list(SAMPLERS.values())[seed % len(SAMPLERS)])
        draft = draft_of([told(Trees(V, seed, drawn=(1, 2), chosen=(0, 1)).story([seed]), seed)], V)

        def run(plan, seed=seed, table=table, draft=draft):
            return verify(plan.rule, draft, table.rows(draft), KeyedCoin(seed, [seed]))

        for one, other in zip(run(leniently(1.0)), run(plan_of("recursive")), strict=True):
            assert one.equal(other)


def test_more_is_accepted_the_more_lenient():
    table = Table(0, ONE)

    def kept(lenience: float) -> float:
        law = table.round(lambda: sampled_chain(table, 2), leniently(lenience))
        return sum(mass * (len(text) - 1) for text, mass in law.items())

    found = [kept(lenience) for lenience in (1.0, 0.8, 0.5, 0.2, 0.01)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


RELAXED = [rule for rule in RULES if RULES[rule].changes_greedy]
SETTINGS = {
    "topk": {"top": 2, "ratio": 0.5},
    "bild": {"rollback": 1.0},
    "sprint": {},
    "typical": {"threshold": 0.5, "alpha": 0.6},
    "threshold": {"threshold": 0.3},
    "lenience": {"factor": 0.5},
}


def lossy(rule: str, proposal: str = "fixed", **numbers) -> Plan:
    named = {"name": rule, **SETTINGS[rule], **numbers}
    return Plan(1, proposal=proposal, rule=named, lossy=True, min_confidence=0.5 * (rule == "sprint"))


def accepts(rule, p: list[float], token: int) -> bool:
    """What `acceptable` says, in plain Python."""
    entropy = -sum(m * math.log(m) for m in p if m > 0)
    return {
        "topk": lambda: sum(m > p[token] for m in p) < rule.top and p[token] >= rule.ratio * max(p),
        "bild": lambda: p[token] > 0 and -math.log(p[token]) <= rule.rollback,
        "sprint": lambda: True,
        "typical": lambda: p[token] >= min(rule.threshold, rule.alpha * math.exp(-entropy)),
        "threshold": lambda: p[token] >= rule.threshold,
    }[rule.name]()


def relaxed_law(plan: Plan, table: Table, nodes: list[Node], inside: bool = True) -> Law:
    """Of the child with the target's token, else of the likeliest acceptable child, else of that token.

    With tags, 0 opens and 1 closes; outside of them no child is acceptable.
    """
    soft = Table(table.seed, replace(table.sampler, temperature=table.sampler.temperature or 1.0))

    def law(path: tuple[int, ...], parent: int, inside: bool) -> Law:
        children: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if node.parent == parent and node.token != PAD:
                children.setdefault(node.token, i)
        judged = soft.p(path)
        accepted = [t for t in children if inside and accepts(plan.rule, judged, t)]
        best = max(accepted, key=lambda t: (judged[t], -children[t]), default=None)
        found: Law = {}
        for y, mass in enumerate(table.p(path)):
            token = y if y in children or best is None else best
            now = token == 0 if getattr(plan.rule, "within", ()) and token in (0, 1) else inside
            below = law((*path, token), children[token], now) if token in children else {(): 1.0}
            for rest, share in below.items():
                found[(token, *rest)] = found.get((token, *rest), 0.0) + mass * share
        return {text: mass for text, mass in found.items() if mass > 0}

    return law((), -1, inside)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rule", RELAXED)
def test_where_no_child_has_the_targets_token_an_acceptable_one_is_taken(rule, sampler):
    for seed in range(8):
        table = Table(seed, SAMPLERS[sampler])
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        plan, draft = lossy(rule), draft_of([nodes], V)

        def play(tapes, draft=draft, plan=plan, table=table):
            return emitted(draft, verify(plan.rule, draft, table.rows(draft), EnumeratingCoin(tapes)))

        assert_same_law(exact_law(play), relaxed_law(plan, table, nodes))


@pytest.mark.parametrize("rule", LOSSY)
def test_what_a_lossy_rule_emits_behind_one_drawn_token_is_the_stated_law(rule):
    """By which the quality of a scorecard's rows is computed."""
    for seed in range(10):
        table = Table(seed, list(SAMPLERS.values())[seed % 3])
        plan = lossy(rule, proposal="sampled")
        got: dict[int, float] = {}
        for text, mass in table.round(lambda table=table: sampled_chain(table, 1), plan).items():
            got[text[0]] = got.get(text[0], 0.0) + mass
        p, q = (torch.tensor([law], dtype=torch.float64) for law in (table.p(()), table.q((), 0.3)))
        stated = plan.rule.emitted(p, q)[0].tolist()
        assert_same_law({(t,): m for t, m in got.items()}, {(t,): m for t, m in enumerate(stated) if m > 0})


@pytest.mark.parametrize("rule", RELAXED)
def test_what_a_lossy_rule_emits_beside_fixed_children_is_the_stated_law(rule):
    for seed in range(10):
        table, plan = Table(seed, list(SAMPLERS.values())[seed % 3]), lossy(rule)
        children = [seed % V, (seed + 1) % V][: 1 + seed % 2]
        draft = draft_of([[Node(token) for token in children]], V)

        def play(tapes, draft=draft, plan=plan, table=table):
            rows = verify(plan.rule, draft, table.rows(draft), EnumeratingCoin(tapes))
            return [text[:1] for text in emitted(draft, rows)]

        p, tokens = torch.tensor([table.p(())], dtype=torch.float64), torch.tensor([[*children, PAD]])
        stated = plan.rule.emitted_among(p, tokens)[0].tolist()
        assert_same_law(exact_law(play), {(t,): m for t, m in enumerate(stated) if m > 0})


def test_between_tags_more_is_accepted_and_elsewhere_it_is_match():
    """Also where a tag is drafted: 0 opens and 1 closes, beside rows that begin inside and outside."""
    plan = lossy("topk", within=(0, 1))
    for seed in range(20):
        table = Table(seed, ONE)
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        for inside in (False, True):
            draft = draft_of([nodes], V)

            def play(tapes, draft=draft, table=table, inside=inside):
                rows = table.rows(draft)
                tagged = Tagged(torch.full((len(tapes),), inside), 0, 1)
                rows = TargetProbs(rows._logits.expand(len(tapes), -1, -1), ONE, None, tagged)
                return emitted(draft, verify(plan.rule, draft, rows, EnumeratingCoin(tapes)))

            assert_same_law(exact_law(play), relaxed_law(plan, table, nodes, inside))


def test_without_room_bild_is_match_draw_for_draw():
    plan = lossy("bild", rollback=0.0)
    for seed in range(40):
        table = Table(seed, list(SAMPLERS.values())[seed % len(SAMPLERS)])
        draft = draft_of([told(Trees(V, seed, chosen=(1, 2)).story([seed]), seed)], V)

        def run(plan, seed=seed, table=table, draft=draft):
            return verify(plan.rule, draft, table.rows(draft), KeyedCoin(seed, [seed]))

        for one, other in zip(run(plan), run(plan_of("match")), strict=True):
            assert one.equal(other)

"""Rules that are not lossless: the exact distribution that each emits, against plain Python."""

import math
from collections import defaultdict
from dataclasses import replace

import oracle
import pytest
import torch
from exact import (
    EnumeratingCoin,
    Node,
    Probs,
    Table,
    Trees,
    assert_same_probs,
    draft_of,
    emitted,
    exact_probs,
    paths_of,
    struck,
)
from rule_cases import LOSSY, ONE, RULES, SAMPLERS, V, sampled_chain, told

from decode.draft import PAD
from decode.lossy.rules.topk import Tagged
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.rule import verify
from decode.verification.target_probs import TargetProbs

Path = tuple[int, ...]


def emitted_by(plan: Plan, nodes: list[Node], table: Table, inside: bool = False, **flags) -> Probs:
    """Distribution of what a rule emits of one draft; `inside` tags or not."""
    draft = draft_of([nodes], V, **flags)

    def play(tapes):
        rows = table.rows(draft)
        if getattr(plan.rule, "within", ()):
            tagged = Tagged(torch.full((len(tapes),), inside), 0, 1)
            rows = TargetProbs(rows._logits.expand(len(tapes), -1, -1), ONE, None, tagged)
        return emitted(draft, verify(plan.rule, draft, rows, EnumeratingCoin(tapes)))

    return exact_probs(play)


def some_sampler(seed: int) -> Sampler:
    return list(SAMPLERS.values())[seed % len(SAMPLERS)]


def longest_path_probs(plan: Plan, table: Table, nodes: list[Node]) -> Probs:
    """Of the first of the deepest paths of acceptable tokens, and a token of the target's behind it."""
    best: tuple[int, ...] = ()
    for path in paths_of([n.token for n in nodes], [n.parent for n in nodes]):
        taken = PAD not in path
        for j, token in enumerate(path):
            taken = taken and accepts(plan.rule, table.p([max(t, 0) for t in path[:j]]), token)
        if taken and len(path) > len(best):
            best = path
    return {(*best, y): mass for y, mass in enumerate(table.p(best)) if mass > 0}


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_longest_acceptable_path_is_kept(rule):
    for seed in range(12):
        table = Table(seed, some_sampler(seed))
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        plan = lossy(rule, threshold=0.5)
        assert_same_probs(emitted_by(plan, nodes, table), longest_path_probs(plan, table, nodes))


def lenient(toss: oracle.Toss, nodes: list[Node], table: Table, factor: float, replacement: bool) -> Path:
    """Accepts drawn children in turn with min(1, p / (factor q)), then chosen ones by what is left of p."""
    at, out = -1, ()
    while True:
        left, drawn = list(table.p(out)), None
        for i, node in enumerate(nodes):
            if node.parent != at or node.token == PAD:
                continue
            q, weight = [float(t == node.token) for t in range(V)], 1.0
            if node.probs is not None:
                drawn = list(node.probs) if drawn is None else drawn
                q, weight = drawn, factor
                drawn = drawn if replacement else struck(drawn, node.token)
            if toss.flip(left[node.token] / (weight * q[node.token])):
                out, at = (*out, node.token), i
                break
            rest, mass = oracle.positive(r - m for r, m in zip(left, q, strict=True))
            left = [r / mass for r in rest] if mass else left
        else:
            return (*out, toss.draw(left))


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.7, 0.2])
def test_lenience_accepts_drawn_tokens_more_often(factor, replacement):
    plan = lossy("lenience", proposal="sampled", factor=factor)
    for seed in range(20):
        table = Table(seed, some_sampler(seed))
        nodes = told(Trees(V, seed, drawn=(0, 1, 2), chosen=(0, 1)).story([seed]), seed)

        def play(tapes, nodes=nodes, table=table):
            return [lenient(oracle.Toss(tape), nodes, table, factor, replacement) for tape in tapes]

        assert_same_probs(emitted_by(plan, nodes, table, replacement=replacement), exact_probs(play))


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


def relaxed_probs(plan: Plan, table: Table, nodes: list[Node], inside: bool = True) -> Probs:
    """Of the child with the target's token, else of the likeliest acceptable child, else of that token.

    With tags, 0 opens and 1 closes; outside of them no child is acceptable.
    """
    soft = Table(table.seed, replace(table.sampler, temperature=table.sampler.temperature or 1.0))

    def probs_below(path: Path, parent: int, inside: bool) -> Probs:
        children: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if node.parent == parent and node.token != PAD:
                children.setdefault(node.token, i)
        judged = soft.p(path)
        accepted = [t for t in children if inside and accepts(plan.rule, judged, t)]
        best = max(accepted, key=lambda t: (judged[t], -children[t]), default=None)
        found: Probs = {}
        for y, mass in enumerate(table.p(path)):
            token = y if y in children or best is None else best
            now = token == 0 if getattr(plan.rule, "within", ()) and token in (0, 1) else inside
            below = probs_below((*path, token), children[token], now) if token in children else {(): 1.0}
            for rest, share in below.items():
                found[(token, *rest)] = found.get((token, *rest), 0.0) + mass * share
        return {text: mass for text, mass in found.items() if mass > 0}

    return probs_below((), -1, inside)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rule", RELAXED)
def test_acceptable_child_is_taken_where_no_child_has_the_targets_token(rule, sampler):
    for seed in range(8):
        table = Table(seed, SAMPLERS[sampler])
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        assert_same_probs(emitted_by(lossy(rule), nodes, table), relaxed_probs(lossy(rule), table, nodes))


@pytest.mark.parametrize("inside", [False, True])
def test_acceptable_child_is_taken_between_tags_only(inside):
    """Also where a tag is drafted: 0 opens and 1 closes."""
    plan = lossy("topk", within=(0, 1))
    for seed in range(20):
        table = Table(seed, ONE)
        nodes = told(Trees(V, seed, chosen=(1, 2)).story([0]), seed)
        got = emitted_by(plan, nodes, table, inside)
        assert_same_probs(got, relaxed_probs(plan, table, nodes, inside))


@pytest.mark.parametrize("rule", LOSSY)
def test_stated_distribution_behind_one_drawn_token(rule):
    """By which the quality of a scorecard's rows is computed."""
    plan = lossy(rule, proposal="sampled")
    for seed in range(10):
        table = Table(seed, list(SAMPLERS.values())[seed % 3])
        got: Probs = defaultdict(float)
        for text, mass in table.round(lambda table=table: sampled_chain(table, 1), plan).items():
            got[text[:1]] += mass
        p, q = (torch.tensor([probs], dtype=torch.float64) for probs in (table.p(()), table.q((), 0.3)))
        assert_same_probs(got, stated(plan.rule.emitted(p, q)))


@pytest.mark.parametrize("rule", RELAXED)
def test_stated_distribution_behind_fixed_children(rule):
    for seed in range(10):
        table, plan = Table(seed, list(SAMPLERS.values())[seed % 3]), lossy(rule)
        children = [seed % V, (seed + 1) % V][: 1 + seed % 2]
        got: Probs = defaultdict(float)
        for text, mass in emitted_by(plan, [Node(token) for token in children], table).items():
            got[text[:1]] += mass
        p, tokens = torch.tensor([table.p(())], dtype=torch.float64), torch.tensor([[*children, PAD]])
        assert_same_probs(got, stated(plan.rule.emitted_among(p, tokens)))


def stated(probs: torch.Tensor) -> Probs:
    return {(token,): mass for token, mass in enumerate(probs[0].tolist()) if mass > 0}

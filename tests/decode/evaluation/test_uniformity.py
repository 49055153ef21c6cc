"""The statistical tests of sampled tokens: by hand, calibrated on right decoders, failing on wrong ones."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import pad

from decode.draft import PAD, Draft, DraftProbs
from decode.draft_check import draft_fault
from decode.errors import UserError
from decode.evaluation.audit import CHANCE, audit, num_batches
from decode.evaluation.json_records import as_json
from decode.evaluation.sampling_tests import BINS, TILTS, SamplingTests, _chi_square
from decode.generation.generate import generate
from decode.generation.types import Round, Traits
from decode.plan import Plan
from decode.rng import Key, Purpose
from decode.sampling import Sampler
from decode.verification import rule as verification
from decode.verification.descent import match
from decode.verification.result import VerificationResult
from decode.verification.rules.token import Token
from drafters.drafting.tree import expand

VOCAB, ONE = 23, Sampler(1.0)
FIXED, TREE = Plan(depth=3), Plan(depth=3, width=2, nodes=6)
SAMPLED, BLOCK = Plan(depth=3, proposal="sampled"), Plan(depth=3, proposal="sampled", rule="block")
HYBRID = Plan(depth=3, width=2, nodes=6, proposal="hybrid")
SAMPLERS = {"plain": ONE, "nucleus": Sampler(0.7, top_p=0.9), "penalty": Sampler(0.8, repetition_penalty=1.7)}
PLANS = [FIXED, TREE, SAMPLED, BLOCK, HYBRID]


# -- by hand -------------------------------------------------------------------------------------


def one(p, x, draft=None):
    """The tests after one token x drawn from p, with half of what is level with x."""
    tests = SamplingTests(ONE, len(p))
    tests.dice = type("Halves", (), {"random": lambda self, n: torch.full((n,), 0.5).double().numpy()})()
    zero = torch.zeros(1, 1, dtype=torch.long)
    draft = draft or Draft.empty(1, torch.device("cpu"))
    result = VerificationResult(torch.tensor([[x]]), zero, zero[0])
    tests.watch([[0]])(Round([0], torch.tensor([[p]]).double().log(), draft, result, [[x]]))
    return tests


def bins(tests):
    """(place, order) -> bin."""
    return {(place, order): b for place, order, b in tests.counts.nonzero().tolist()}


def at(u):
    return int(u * BINS)


def test_transform_by_hand():
    free = one([0.48, 0.22, 0.3], 0)
    assert bins(free) == {(0, 0): at(0.52 + 0.24), (0, 1): at(0.24), (0, 2): at(0.52 + 0.24)}
    assert free.impossible == 0
    level = one([0.18, 0.32, 0.32, 0.18], 1)
    assert bins(level)[0, 0] == at(0.36 + 0.32), "halfway through the two that are level"
    padding = Draft(torch.tensor([[PAD, PAD]]), torch.tensor([[-1, -1]]), depth=1)
    assert {place for place, _ in bins(one([0.5, 0.5], 1, padding))} == {0}
    draft = Draft(torch.tensor([[2, 0, 1]]), torch.tensor([[-1, 0, -1]]), depth=2)
    child, other = one([0.18, 0.48, 0.34], 2, draft), one([0.18, 0.48, 0.34], 0, draft)
    assert bins(child)[1, 2] == at(0.17), "chosen children come first"
    assert bins(other)[1, 2] == at(0.82 + 0.09), "a grandchild is no child"


def test_drawn_children_are_ordered_by_p_over_q():
    """Whatever was drawn; what q cannot draw comes last, level."""
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]]).double()
    p = [0.14, 0.4, 0.18, 0.28]
    for drawn in (0, 1):
        draft = Draft.chain(torch.tensor([[drawn]]), q)
        places = [bins(one(p, x, draft))[1, 2] for x in range(4)]
        assert places == [at(0.07), at(0.14 + 0.2), at(0.54 + 0.23), at(0.54 + 0.23)]
    probs = DraftProbs(q, torch.tensor([[0]]), (1,), torch.tensor([[True, False]]))
    hybrid = Draft(torch.tensor([[0, 2]]), torch.tensor([[-1, -1]]), depth=1, probs=probs)
    assert [bins(one(p, x, hybrid))[1, 2] for x in range(4)] == places
    # Where q belongs to another slot, the chosen one comes first and the drawn one where it belongs.
    other_slot = replace(hybrid, probs=replace(probs, owner=torch.tensor([[1]])))
    assert [bins(one(p, x, other_slot))[1, 2] for x in (2, 0)] == [at(0.09), at(0.18 + 0.07)]


def test_surprisal_by_hand():
    p = torch.tensor([0.5, 0.2, 0.3, 0.0]).double()
    seen = [one(p.tolist(), x) for x in range(3)]
    entropy = -sum(m * math.log(m) for m in (0.5, 0.2, 0.3))
    variance = sum(m * math.log(m) ** 2 for m in (0.5, 0.2, 0.3)) - entropy**2
    assert seen[1].result("").surprisal_z == pytest.approx((-math.log(0.2) - entropy) / variance**0.5)
    ratios = torch.stack([tests.ratios[0] for tests in seen]).exp()  # (x, tilt)
    assert torch.allclose(p[:3] @ ratios, torch.ones(len(TILTS)).double()), "a ratio's mean is 1"
    hot = p[:3] ** (1 - TILTS[0]) / (p[:3] ** (1 - TILTS[0])).sum()
    assert torch.allclose(ratios[:, 0], hot / p[:3])


@pytest.mark.parametrize("p", [[0.5, 0.0, 0.5], [math.nan] * 3])
def test_token_without_mass_is_impossible(p):
    found = one(p, 1).result("chain")
    assert (found.tokens, found.impossible, found.pit) == (1, 1, {})
    assert (found.surprisal_z, found.surprisal_p) == (0, 1)


def test_chi_square_by_hand():
    counts = torch.full((BINS,), 10)
    assert _chi_square(counts) == 1
    counts[0], counts[1], counts[2] = 30, 0, 0
    assert _chi_square(counts) == pytest.approx(stats.chi2.sf(60, BINS - 1))
    assert _chi_square(torch.full((BINS,), 4)) == 1  # 10 bins
    few = torch.zeros(BINS, dtype=torch.long)
    few[:3] = 3
    assert _chi_square(few) is None
    few[3] = 1  # 10 tokens, 2 bins: a statistic of 10 with one degree
    assert _chi_square(few) == pytest.approx(stats.chi2.sf(10, 1))


# -- where all is right --------------------------------------------------------------------------


def test_p_values_are_uniform_even_for_peaked_rows():
    """300 runs of 240 tokens each: chi-square and the ratio hold where z is not normal."""
    torch.manual_seed(1)
    logits = torch.randn(240, 1, VOCAB).double() * 6
    p, zero = logits[:, 0].softmax(-1), torch.zeros(240, 1, dtype=torch.long)
    draft, found = Draft.empty(240, logits.device), []
    for run in range(300):
        tests = SamplingTests(ONE, VOCAB)
        tests.dice = np.random.default_rng(run)
        x = p.multinomial(1)
        result = VerificationResult(x, zero, zero[:, 0])
        tests.watch([[0]] * 240)(Round(list(range(240)), logits, draft, result, x.tolist()))
        found.append(tests.result(""))
    for order in ("free by p", "free by id"):
        p_values = torch.tensor([f.pit[order] for f in found])
        assert 5 <= int((p_values < 0.05).sum()) <= 28
        assert abs(float((p_values < 0.5).double().mean()) - 0.5) < 0.12
    assert sum(f.surprisal_p < 0.05 for f in found) <= 15


class Bigram:
    """Drafts by the target's rows behind single tokens, as `plan` wishes."""

    traits = Traits()

    def __init__(self, target, spoil=lambda draft: draft):
        ids = torch.arange(VOCAB)[:, None]
        with torch.no_grad():
            self.table = target.model(input_ids=ids, use_cache=False).logits[:, -1]
        self.spoil, self.asked = spoil, {}

    def new_state(self, rows):
        return {}

    def advance(self, state, target, tokens, taps, counts, root):
        state["root"] = root

    def select(self, state, rows):
        state.update({name: kept[list(rows)] for name, kept in state.items()})

    def propose(self, state, target, sampler, coin, plan):
        self.asked[sampler, plan] = True
        return self.spoil(
            expand(self.table[state["root"]], lambda token, _: self.table[token], sampler, coin, plan)
        )


@pytest.fixture(scope="module")
def target(tiny_target):
    """Heeds its last token most, so that a table of bigrams drafts well."""
    target = tiny_target(vocab=VOCAB, hidden=16, seed=3)
    for layer in target.model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.3)
    return target


PROMPTS = [[i % VOCAB, i // VOCAB % VOCAB] for i in range(256)]


def watched(
    target, plan, sampler=ONE, spoil=lambda draft: draft, seed=0, prompts=PROMPTS, length=25, **options
):
    tests = SamplingTests(sampler, VOCAB)
    options |= {"sampler": sampler, "plan": plan, "max_new_tokens": length, "seed": seed}
    drafter = Bigram(target, spoil)
    made = generate(target, drafter, prompts, on_round=tests.watch(prompts), **options)
    found = tests.result(plan.name)
    assert found.tokens == sum(len(o.tokens) for o in made.outputs), "all of them, and none that was cut"
    return found


def corrected(found):
    """P-values times the number of tests."""
    tests = found.pit | {"surprisal": found.surprisal_p}
    return {name: len(tests) * p for name, p in tests.items()}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.covering
def test_lossless_decoder_passes(target, plan, sampler):
    found = watched(target, plan, SAMPLERS[sampler], stop=[4], length=16)
    assert found.tokens > 1500
    assert found.impossible == 0
    drawn = plan.proposal in ("sampled", "hybrid")
    names = {f"{p} by {o}" for p in ("free", "drafted") for o in ("p", "id")} | {"drafted by draft"}
    assert set(found.pit) == names | ({"draft token by q", "draft token by id"} if drawn else set())
    assert bool(found.draft_tokens) == drawn
    assert min(corrected(found).values()) > 1e-3
    assert abs(found.surprisal_z) < 4


# -- wrong decoders ------------------------------------------------------------------------------


def heated(p, temperature):
    p = p ** (1 / temperature)
    return p / p.sum(-1, keepdim=True)


def chain(
    draft,
    rows,
    coin,
    residual=lambda p, q: (p - q).clamp_min(0),
    bonus=lambda p: p,
    toss=Purpose.ACCEPT,
    extra=lambda coin, weights, accepted, every: coin.draw(weights, Key(Purpose.RESIDUAL, 0), every),
):
    """The token rule in its plainest form, with places for bugs."""
    q, count = draft.probs.q, draft.tokens.shape[0]
    every = active = torch.ones(count, dtype=torch.bool)
    accepted = torch.zeros(count, dtype=torch.long)
    weights = torch.zeros_like(q[:, 0])
    for depth in range(draft.depth):
        p, x = rows.at(torch.full_like(accepted, depth)), draft.tokens[:, depth]
        at, real = x.clamp_min(0)[:, None], x != PAD
        weights = torch.where(active[:, None], residual(p, q[:, depth] * real[:, None]), weights)
        keep = coin.flip(p.gather(1, at)[:, 0], q[:, depth].gather(1, at)[:, 0], Key(toss, depth), active)
        active = active & keep & real
        accepted = accepted + active
    p = rows.at(torch.full_like(accepted, draft.depth))
    weights = torch.where(active[:, None], bonus(p), weights)
    steps = torch.arange(draft.depth + 1)
    tokens = torch.where(steps < accepted[:, None], pad(draft.tokens, (0, 1), value=PAD), PAD)
    tokens = tokens.scatter(1, accepted[:, None], extra(coin, weights, accepted, every)[:, None])
    return VerificationResult(tokens, steps * (tokens != PAD), accepted)


def same_coin(coin, weights, accepted, every):
    """Draws the last token with the coin that rejected a draft token."""
    draws = [coin.draw(weights, Key(Purpose.ACCEPT, depth), every) for depth in range(4)]
    return torch.stack(draws, 1).gather(1, accepted[:, None])[:, 0]


def with_q(change):
    """A draft that states another q than its tokens were drawn from."""
    return lambda draft: replace(draft, probs=replace(draft.probs, q=change(draft.probs.q)))


def negative(q):
    return torch.cat([q[..., :1] + q[..., 1:2] + 0.1, -0.1 + 0 * q[..., 1:2], q[..., 2:]], -1)  # sums to 1


def timid(draft):
    """Drops what it was not sure of after it was drawn."""
    sure = draft.probs.q.gather(2, draft.tokens[..., None])[..., 0] > 0.2
    return replace(draft, tokens=draft.tokens.where(sure.cumprod(1).bool(), PAD))


def undrawn(draft):
    """Takes the likeliest, but says it drew them."""
    return replace(draft, tokens=draft.probs.q.argmax(-1))


def believing(draft, rows, coin):
    """Takes a first child that is not too unlikely."""
    result = match(draft, rows, coin)
    if draft.depth:
        p = rows.at(torch.zeros(len(draft.tokens), dtype=torch.long)).gather(1, draft.tokens[:, :1])[:, 0]
        taken = (result.accepted == 0) & (p > 0.2)
        result.tokens[:, 0] = torch.where(taken, draft.tokens[:, 0], result.tokens[:, 0])
    return result


def late(draft, rows, coin):
    probs_at = rows.at
    rows.at = lambda slot: probs_at((slot - 1).clamp_min(0))
    return match(draft, rows, coin)


# bug: plan, rule (its own where None), what is done to drafts, the test that must see it
WRONG = {
    "bonus too hot": (SAMPLED, partial(chain, bonus=lambda p: heated(p, 2.0)), None, "free by p"),
    "p for the residual": (SAMPLED, partial(chain, residual=lambda p, q: p), None, "drafted by draft"),
    "the row before, match": (TREE, late, None, "drafted by p"),
    "drawn colder than said": (SAMPLED, None, with_q(partial(heated, temperature=1.5)), "surprisal"),
    "drawn hotter than said": (SAMPLED, None, with_q(partial(heated, temperature=0.7)), "surprisal"),
    "a coin rejects and draws": (SAMPLED, partial(chain, extra=same_coin), None, "drafted by id"),
    "a coin proposes and accepts": (SAMPLED, partial(chain, toss=Purpose.PROPOSE), None, "drafted by id"),
    "unsure tokens dropped": (SAMPLED, None, timid, "surprisal"),
    "likeliest said to be drawn": (SAMPLED, None, undrawn, "drafted by p"),
    "typical acceptance": (TREE, believing, None, "drafted by draft"),
}


@pytest.fixture
def broken(monkeypatch):
    def install(rule):
        if rule:
            monkeypatch.setattr(Token, "verify", lambda _, *told: rule(*told))
            monkeypatch.setattr(verification, "match", rule)  # of drafts that were not drawn

    return install


def test_plainest_token_rule_passes(target, broken):
    broken(chain)
    assert min(corrected(watched(target, SAMPLED)).values()) > 1e-3


@pytest.mark.parametrize("bug", WRONG)
@pytest.mark.ci(
    *["bonus too hot", "p for the residual", "the row before, match", "a coin rejects and draws"],
    *["unsure tokens dropped", "likeliest said to be drawn"],
)
def test_wrong_decoder_is_found(target, broken, bug):
    plan, rule, spoil, name = WRONG[bug]
    broken(rule)
    found = watched(target, plan, spoil=spoil or (lambda draft: draft))
    assert corrected(found)[name] < CHANCE, corrected(found)


def test_bonus_token_without_warpers_is_impossible(target, broken):
    """The bonus token is drawn from all of p, the others from its nucleus."""

    def careless(draft, rows, coin):
        whole = rows._logits[:, draft.depth].softmax(-1)
        return chain(draft, rows, coin, bonus=lambda p: whole)

    broken(careless)
    assert watched(target, SAMPLED, Sampler(1.0, top_p=0.8), length=8).impossible > 10


def test_one_coin_for_all_requests_is_found(target):
    found = watched(target, TREE, prompts=PROMPTS[:1] * 64, requests=[0] * 64)
    assert min(corrected(found).values()) < CHANCE


# -- drafts that no rule can verify ----------------------------------------------------------------


MISSTATED = {
    "too large": (with_q(lambda q: 1.3 * q), "no distribution"),
    "too small": (with_q(lambda q: 0.7 * q), "no distribution"),
    "all zero": (with_q(torch.zeros_like), "no distribution"),
    "NaN": (with_q(lambda q: q * math.nan), "no distribution"),
    "a negative entry": (with_q(negative), "no distribution"),
    "an id below 0": (lambda draft: replace(draft, tokens=draft.tokens.clamp_max(0) - 5), "token id"),
    "an id above the vocabulary": (lambda draft: replace(draft, tokens=draft.tokens + VOCAB), "token id"),
    "excluded by q": (lambda draft: replace(draft, tokens=draft.probs.q.argmin(-1)), "probability 0"),
    "no q": (lambda draft: replace(draft, probs=replace(draft.probs, owner=draft.probs.owner + 9)), "no q"),
}


@pytest.mark.parametrize("fault", MISSTATED)
def test_misstated_draft_is_refused(target, fault):
    spoil, message = MISSTATED[fault]
    sampler, rules = Sampler(1.0, top_k=5), ("token", "block", "recursive", "traversal")
    for rule in rules if fault in ("NaN", "all zero") else rules[:1]:
        with pytest.raises(UserError, match=f"Bigram drafted .*{message}.*decode.rule={rule}"):
            watched(target, replace(SAMPLED, rule=rule), sampler, spoil, length=4)
    if fault in ("NaN", "all zero"):
        watched(target, replace(SAMPLED, rule="match"), sampler, spoil, length=4)  # does not read q
    if message == "token id":  # of a drafter without q as well
        with pytest.raises(UserError, match=message):
            watched(target, FIXED, sampler, spoil, length=4)


def test_siblings_that_repeat_are_refused_unless_drawn_with_replacement(target):
    def repeated(draft):
        return replace(draft, tokens=draft.tokens.where(draft.parents >= 0, draft.tokens[:, :1]))

    plan = Plan(depth=2, width=2, tree=((0,), (1,), (0, 0)), proposal="sampled", rule="recursive")
    with pytest.raises(UserError, match="siblings with the same token"):
        watched(target, plan, spoil=repeated, length=4)
    watched(target, replace(plan, replacement=True), spoil=repeated, length=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sum_that_is_1_but_for_rounding_is_accepted(dtype):
    torch.manual_seed(0)
    for scale in (0.1, 3, 30):
        q = (scale * torch.randn(2, 3, 151_936, dtype=torch.float64)).softmax(-1).to(dtype)
        draft = Draft.chain(q.argmax(-1), q)
        assert not draft_fault(draft, q.shape[-1], reads_probs=True).any()
        wrong = 1.0001 if dtype in (torch.float32, torch.float64) else 1.04
        draft = Draft.chain(q.argmax(-1), q * wrong)
        assert draft_fault(draft, q.shape[-1], reads_probs=True).all()


# -- the audit -----------------------------------------------------------------------------------


def audited(target, spoil=lambda draft: draft, **options):
    options = {"plan": SAMPLED, "max_new_tokens": 12, "drafter": Bigram(target, spoil)} | options
    return audit(target, **{"prompts": PROMPTS[:20]} | options)


@pytest.mark.parametrize(("rule", "temperature"), [("token", 1.2), ("block", 0.8)])
@pytest.mark.ci("token-1.2")
def test_audit_of_2560_tokens_finds_a_misstated_q(target, monkeypatch, rule, temperature):
    monkeypatch.setattr("decode.evaluation.audit.ROWS", 128)
    plan, wrong = replace(SAMPLED, rule=rule), with_q(partial(heated, temperature=temperature))
    for spoil, passed in ((lambda draft: draft, True), (wrong, False)):
        found = audited(target, spoil, plan=plan, max_new_tokens=20, samples=1, prompts=PROMPTS[:128])
        assert (found.sampled_tokens, found.passed) == (2560, passed)
        assert (found.own_row, found.mismatches) == (found.tokens, 0), "the greedy half is right"
        assert as_json(found)["passed"] is passed
    assert as_json(found)["impossible"] == 0
    assert min(as_json(found)["pit_p"], as_json(found)["surprisal_p"]) < CHANCE


def test_rule_that_does_not_read_q_does_not_test_it(target):
    wrong = with_q(partial(heated, temperature=3.0))
    found = audited(target, wrong, plan=replace(SAMPLED, rule="match"), samples=4)
    assert found.passed
    assert found.sampled[0].draft_tokens == 0


def test_audit_draws_at_temperature_1_unless_told_otherwise(target):
    found = audited(target)
    assert found.passed
    assert [(run.temperature, run.decode, run.tokens) for run in found.sampled] == [(1.0, SAMPLED.name, 240)]
    again = audited(target, seed=1)
    assert again.surprisal_z != found.surprisal_z
    assert again.tokens == found.tokens
    steps, drafter = [], Bigram(target)
    also = [(Sampler(0.0), TREE), (Sampler(0.7), TREE), (Sampler(1.3, top_k=5), SAMPLED)]
    found = audited(target, drafter=drafter, also=also, samples=2, on_batch=lambda: steps.append(1))
    assert list(drafter.asked) == [(Sampler(0.0), SAMPLED), *also]
    assert found.passed
    assert found.tokens == 2 * 240, "greedily with two plans"
    runs = [(run.temperature, run.decode, run.tokens) for run in found.sampled]
    assert runs == [(0.7, TREE.name, 480), (1.3, SAMPLED.name, 480)]
    assert len(steps) == num_batches(20, also, 2) == 3 * 2 + 2 * 3


def test_samples_are_texts_of_their_own(target, monkeypatch):
    seen, real = [], SamplingTests.watch

    def watch(self, prompts):
        watched = real(self, prompts)
        return lambda round_: (seen.extend(map(tuple, round_.emitted)), watched(round_))

    monkeypatch.setattr(SamplingTests, "watch", watch)
    audited(target, samples=3, max_new_tokens=1)
    assert len(seen) == 60
    assert len(set(zip(seen[::3], seen[1::3], seen[2::3], strict=True))) > 10

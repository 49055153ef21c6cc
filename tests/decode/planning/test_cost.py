"""The cost model chooses the optimum where costs and acceptance are given."""

import random
from fractions import Fraction
from itertools import count, product

import numpy as np
import pytest
from exact import Grown

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance
from decode.evaluation.replay import Counts, RoundStarts
from decode.generation.capture.makers import captures_of
from decode.generation.capture.round import FixedRound
from decode.plan import Plan
from decode.planning import round_timing as timing
from decode.planning.auto import Auto, forecast, supported_plans
from decode.planning.cost_model import (
    PLAIN,
    Curve,
    MeasuredCosts,
    RoundTiming,
    batch_seconds,
    fastest,
    representative_plans,
    throughputs,
)
from decode.planning.oracle import least_seconds, min_seconds_per_row
from decode.planning.policy_simulation import fit_policy, simulate
from decode.sampling import Sampler

CHAINS = [Plan(k) for k in range(1, 9)]
TREES = [Plan(depth, width, nodes) for depth, width, nodes in [(2, 2, 4), (3, 3, 9), (4, 4, 16), (5, 4, 32)]]


class Given:
    """Costs by a formula."""

    def __init__(self, slot, level, batch=0.0, fixed=1.0) -> None:
        self.slot, self.level, self.batch, self.fixed = slot, level, batch, fixed

    def round_seconds(self, plan, batch):
        return self.fixed + self.slot * plan.nodes * (1 + self.batch * (batch - 1)) + self.level * plan.depth

    def idle_seconds(self, batch):
        return self.fixed


def counts_of(taus, prompts=6):
    """Every prompt alike: 60 tokens at each tau."""
    return [Counts([60] * prompts, [60 / float(tau)] * prompts) for tau in taus]


def geometric(alpha, depth):
    return sum((Fraction(alpha) ** j for j in range(depth + 1)), Fraction(0))


@pytest.mark.parametrize("alpha", ["1/10", "2/5", "3/5", "4/5", "19/20", "1"])
@pytest.mark.parametrize("level", ["1/100", "1/10", "1/4", "1"])
@pytest.mark.covering
def test_length_of_a_chain_is_the_optimum_of_its_formula(alpha, level):
    plans = [PLAIN, *CHAINS]
    taus = [geometric(alpha, plan.depth) for plan in plans]
    values = [tau / (1 + Fraction(level) * plan.depth) for plan, tau in zip(plans, taus, strict=True)]
    found = throughputs(plans, counts_of(taus), Given(0.0, float(Fraction(level))), 1)
    assert fastest([one.speed for one in found]) == values.index(max(values))
    for one, value in zip(found, values, strict=True):
        assert one.speed == pytest.approx(float(value))
        assert one.speedup == pytest.approx([float(value)] * 3)  # prompts are alike: no interval


def test_larger_batch_wants_fewer_nodes():
    plans, costs = [PLAIN, *CHAINS, *TREES], Given(0.02, 0.05, batch=1.0)
    taus = [geometric("7/10", p.depth) * (1 if p.width == 1 else Fraction(6, 5)) for p in plans]
    chosen = []
    for batch in (1, 4, 64):
        values = [float(tau) / costs.round_seconds(p, batch) for p, tau in zip(plans, taus, strict=True)]
        found = throughputs(plans, counts_of(taus, 64), costs, batch)
        assert [one.speed for one in found] == pytest.approx([batch * value for value in values])
        assert [one.full for one in found] == pytest.approx([batch * value for value in values])
        best = fastest([one.speed for one in found])
        assert plans[best].nodes == plans[values.index(max(values))].nodes
        chosen.append(plans[best].nodes)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 4
    assert chosen[-1] == 0


def test_first_of_equally_fast_plans_is_chosen():
    assert fastest([2.0, 3.0, 3.0]) == 1


def test_rows_leave_as_they_end():
    assert batch_seconds(np.array([[3.0, 1.0]]), np.array([1.0, 1.5])) == pytest.approx([1.5 + 2])
    found = throughputs([PLAIN], [Counts([3, 1], [3.0, 1.0])], Given(0.0, 0.0), 2)[0]
    assert found.speed == pytest.approx(4 / 3)  # a round costs 1 however many rows it has
    assert found.full == pytest.approx(2)
    # Three prompts at batch 2: the first is taken again.
    found = throughputs([PLAIN], [Counts([3, 1, 2], [3.0, 1.0, 2.0])], Given(0.0, 0.0), 2)[0]
    assert found.speed == pytest.approx((3 + 1 + 2 + 3) / (3 + 3))


def test_interval_is_over_prompts():
    counts = [Counts([10, 50], [10.0, 50.0]), Counts([10, 50], [10.0, 20.0])]
    speedup, low, high = throughputs([PLAIN, Plan(1)], counts, Given(0.0, 0.0), 1)[1].speedup
    assert speedup == pytest.approx(2)
    assert (low, high) == pytest.approx((1, 2.5))


# -- curves --------------------------------------------------------------------------------------


def test_curve_pools_what_falls_and_is_extended_past_its_end():
    curve = Curve.fit({1: [1.0, 1.0, 9.0], 2: [3.0], 4: [2.0]})
    assert [curve(x) for x in (1, 2, 3, 4)] == pytest.approx([1, 2.5, 2.5, 2.5])
    assert curve(0) == 1
    assert Curve((1, 2), (1, 3))(5) == pytest.approx(9)
    assert Curve((4,), (2.0,))(9) == 2


def rounds(plans, batches, busy=0.0, slots=lambda plan: [plan.nodes + 1]):
    """Rounds of a machine whose times are linear in slots and depth, some of them slowed by other load."""
    dice, found = random.Random(0), []
    for plan, batch in product(plans, batches):
        drafting = 0.1 + 0.2 * plan.depth + 0.05 * plan.width * bool(plan.depth)
        for n in slots(plan) * 7:
            factor = batch * (1.7 if dice.random() < busy else 1)
            times = (drafting, 1 + 0.03 * n, 0.1 + 0.01 * n)
            found.append(RoundTiming(plan, batch, n, *(time * factor for time in times)))
    return found


def test_few_timed_plans_give_the_costs_of_all():
    plans = [*CHAINS, *[Plan(d, 3, n) for d in (2, 3, 4) for n in (4, 8, 12, 20)]]
    some = representative_plans(plans)
    assert len(some) < len(plans) / 2
    told, all_ = (MeasuredCosts(rounds([PLAIN, *part], [1, 8])) for part in (some, plans))
    for plan in [PLAIN, *plans]:
        for batch in (1, 3, 8):
            assert told.round_seconds(plan, batch) == pytest.approx(all_.round_seconds(plan, batch))
            read = batch * (1.1 + 0.04 * (plan.nodes + 1))
            drafted = batch * (0.1 + 0.2 * plan.depth + 0.05 * plan.width) if plan.depth else 0
            assert told.round_seconds(plan, batch) == pytest.approx(read + drafted)
    assert told.idle_seconds(8) == pytest.approx(8 * (1.14 + 0.1))


def test_drafter_that_drafts_nothing_in_three_rounds_of_four_costs_less():
    one = Plan(4)
    timed = rounds([PLAIN], [1]) + rounds([one], [1], slots=lambda plan: [1, 1, 1, 5])
    read = (3 * (1.1 + 0.04) + (1.1 + 0.2)) / 4
    assert MeasuredCosts(timed).round_seconds(one, 1) == pytest.approx(0.95 + read)


def test_other_load_changes_costs_little():
    """It slows four rounds of ten by 70 %."""
    plans = [PLAIN, *CHAINS, *TREES]
    noisy, clean = (MeasuredCosts(rounds(plans, [1], busy)) for busy in (0.4, 0.0))
    errors = [noisy.round_seconds(p, 1) / clean.round_seconds(p, 1) - 1 for p in plans]
    assert np.median(errors) == pytest.approx(0, abs=1e-9)
    assert max(errors) < 0.2


# -- the oracle ----------------------------------------------------------------------------------


def brute(keeps, prices, t=0):
    """The least of all ways to pick drafts, fixed ones."""
    if t >= len(keeps[0]):
        return 0.0
    kept = [int(np.cumprod(keep[t]).sum()) for keep in keeps]
    return min(price + brute(keeps, prices, t + k + 1) for price, k in zip(prices, kept, strict=True))


def test_oracle_is_the_best_of_all_ways_to_pick_drafts():
    for seed in range(6):
        dice = np.random.default_rng(seed)
        keeps = [np.zeros((9, 0)), *((dice.random((9, k)) < 0.6).astype(float) for k in (1, 3, 4))]
        prices = [1.0, *(1 + dice.random(3))]
        assert least_seconds(keeps, prices) == pytest.approx(brute(keeps, prices))


def test_one_draft_throughout_is_not_faster_than_the_oracle():
    dice = np.random.default_rng(5)
    keeps = [np.zeros((12, 0)), dice.random((12, 2)), dice.random((12, 4))]
    prices = [1.0, 1.2, 1.5]
    least = least_seconds(keeps, prices)
    # One draft throughout, at its price.
    for keep, price in zip(keeps, prices, strict=True):
        assert least_seconds([keep], [price]) == pytest.approx(price * RoundStarts(keep, keep.shape[1]).count)
        assert least <= price * RoundStarts(keep, keep.shape[1]).count


def test_seconds_of_a_row_are_its_least_share():
    assert min_seconds_per_row(np.array([1.0, 1.2, 3.0])) == pytest.approx(0.6)


# -- adaptive chains -----------------------------------------------------------------------------


def moods(seed=0, prompts=6, length=80, depth=6):
    """Texts with easy and hard stretches, which one length cannot suit."""
    dice = np.random.default_rng(seed)
    texts = []
    for row in range(prompts):
        easy = (np.arange(length) // 20 + row) % 2
        keep = dice.random((length, depth)) < np.where(easy, 0.98, 0.02)[:, None]
        texts.append(keep.astype(float))
    return texts


@pytest.mark.parametrize("batch", [1, 2])
def test_adapting_beats_every_length_where_moods_change(batch):
    keeps, costs = moods(), Given(0.0, 0.2)
    plans = [Plan(k) for k in range(1, 7)]
    found = []
    for plan in plans:
        part = [keep[:, : plan.depth] for keep in keeps]
        spent = [RoundStarts(keep, plan.depth).count for keep in part]
        found.append(Acceptance(Counts([80] * 6, spent), [], "", part))
    tokens = Counts([80] * 6, [80.0] * 6)
    rows = forecast(plans, found, costs, batch, adapt=True, tokens=tokens)
    best = rows[fastest([row.throughput.speed for row in rows])]
    assert (best.plan.adapt is not None) == (batch == 1)  # rows in step with one another have one mood
    assert [row.plan for row in forecast(plans, found, costs, batch, False, tokens)] == [PLAIN, *plans]


def test_chain_that_never_pays_is_switched_off_and_tried_again():
    keeps, costs = [np.zeros((200, 4))], Given(0.0, 0.4)
    policy = fit_policy(Plan(4), [np.full((9, 4), 0.6)], costs, 1)
    played = simulate(Plan(4, adapt=policy), keeps, costs, 1)
    assert played.rounds == 200
    assert 200 < played.seconds.sum() < 1.2 * 200
    always = simulate(Plan(4, adapt=policy), [np.ones((200, 4))], costs, 1)
    assert always.rounds <= 200 / 4.2


def test_drafting_begins_when_the_batch_has_shrunk():
    costs = Given(0.05, 0.0, batch=3.0)
    keeps = [np.ones((20, 2)), *[np.ones((5, 2))] * 7]
    policy = fit_policy(Plan(2), keeps, costs, 8)
    assert policy.depths(policy.initial_counts(8), per_row=False) == [0] * 8
    assert policy.depths(policy.initial_counts(1), per_row=False) == [2]
    assert simulate(Plan(2, adapt=policy), keeps, costs, 8).rounds == 8 * 5 + 15 / 3


def test_auto_leaves_out_plans_that_a_drafter_refuses():
    class Shallow:
        def check(self, plan):
            if plan.depth > 1:
                raise UserError("too deep")

    assert supported_plans(Shallow(), Auto([{"depth": 1}, {"depth": 2}]).plans) == [PLAIN, Plan(1)]


# -- the clock -----------------------------------------------------------------------------------


def test_every_rule_is_timed():
    mixed = [Plan(k, proposal="sampled", rule="block" if k == 2 else "token") for k in range(1, 6)]
    timed = rounds([PLAIN, *representative_plans(mixed)], [1])
    assert all(MeasuredCosts(timed).round_seconds(plan, 1) > 0 for plan in mixed)


@pytest.mark.parametrize(("new", "room"), [(2, 64), (40, 3)])
def test_texts_that_end_in_every_round_are_timed(tiny_target, monkeypatch, new, room):
    ticks = count()

    def clock():
        assert next(ticks) < 5000, "it looks for a round that there cannot be"
        return float(next(ticks))

    monkeypatch.setattr(timing, "clock_of", lambda target: clock)
    target = tiny_target(positions=room)
    found = timing.measure(
        target, Grown(3), [[1]], [Plan(1)], Sampler(0.0), [2], max_new_tokens=new, repeats=2
    )
    assert found.round_seconds(Plan(1), 2) > 0


def test_costs_are_those_of_captured_rounds(tiny_target, make_drafter, monkeypatch):
    """Each plan has a text in buffers of its own, and no timed round includes a capture."""
    ticks, made = count(), []
    monkeypatch.setattr(timing, "clock_of", lambda target: lambda: float(next(ticks)))
    make = FixedRound.__init__

    def noted(self, *given):
        made.append(next(ticks))  # a timed round with a capture would take longer
        make(self, *given)

    monkeypatch.setattr(FixedRound, "__init__", noted)
    target = tiny_target(vocab=24, hidden=16, positions=512)
    target.capture = True
    plans = [Plan(2), Plan(3, 3, 7)]
    found = timing.measure(
        target,
        make_drafter("eagle", target),
        [[5, 9, 2], [4, 6]],
        plans,
        Sampler(0.0),
        [1],
        max_new_tokens=12,
        repeats=6,
    )
    table = found.table(1)
    assert table["passes"] == "captured"
    assert table["verify"]["slots"] == [1, 3, 8]
    assert set(table["verify"]["seconds"]) == {1.0}  # the clock moves once a stage
    assert len(made) == len(captures_of(target)._rounds) == 1 + len(plans), "texts share a plan's captures"

"""Speedups from costs and acceptance: Leviathan's equation, ceilings, and the acceptance that is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.engine_costs.costs import EngineCosts, TimedLength, constant


def costs_of(plain: float, seconds: dict[int, float], drafted: dict[int, float] | None = None) -> EngineCosts:
    lengths = [
        TimedLength(length=k, drafted=(drafted or {}).get(k, float(k)), seconds=s, tau=1.0, measured=1.0)
        for k, s in seconds.items()
    ]
    return EngineCosts(
        batch_size=1, plain=plain, lengths=tuple(lengths), prefill=0.001, drafted_prefill=0.001
    )


def test_speedup_is_the_equation_of_leviathan():
    rate, cost = 0.8, 0.1  # of a token; of a drafted token, in plain rounds
    costs = costs_of(2.0, {k: 2.0 * (1 + cost * k) for k in (1, 3, 5, 8)})
    for k in range(1, 9):
        expected = (1 - rate ** (k + 1)) / ((1 - rate) * (1 + cost * k))
        assert costs.speedup(constant(rate, 8), k) == pytest.approx(expected, rel=1e-12)


def test_plain_decoding_is_chosen_where_no_draft_pays():
    costs = costs_of(1.0, {1: 1.6, 3: 2.4})
    assert costs.best(constant(0.3, 3)) == (0, 1.0)
    assert costs.best([1.0] * 3) == (3, 4 / 2.4)


def test_lengths_beyond_a_known_acceptance_are_not_chosen():
    costs = costs_of(1.0, {1: 1.1, 8: 1.2})
    assert costs.choices([0.9, 0.8]) == [0, 1, 2]
    assert costs.choices([]) == [0]


def test_drafts_of_one_length_only():
    costs = costs_of(1.0, {7: 2.0})
    assert costs.choices([0.9] * 7) == [0, 7]
    assert costs.round_seconds(7) == 2.0


def test_a_round_is_placed_by_what_was_drafted():
    """Answers end before the last drafts do: half of the drafts of 3 tokens had 2."""
    costs = costs_of(1.0, {1: 1.1, 3: 1.25}, drafted={1: 1.0, 3: 2.5})
    assert costs.round_seconds(2) == pytest.approx(1.2)
    assert costs.round_seconds(3) == pytest.approx(1.3)


@given(
    st.lists(st.floats(1.0, 3.0), min_size=1, max_size=5),
    st.floats(1.01, 3.0),
)
def test_needed_rate_reaches_the_speedup_and_less_does_not(ratios, wanted):
    costs = costs_of(1.0, dict(enumerate(sorted(ratios), 1)))
    rate, longest = costs.needed(wanted), len(ratios)
    if rate is None:
        assert costs.ceiling()[1] < wanted
        return
    assert costs.best(constant(rate, longest))[1] >= wanted
    assert rate < 1e-6 or costs.best(constant(rate - 1e-6, longest))[1] < wanted


def test_a_speedup_that_plain_decoding_has_needs_no_rate():
    with pytest.raises(ValueError, match="above 1"):
        costs_of(1.0, {1: 1.1}).needed(1.0)

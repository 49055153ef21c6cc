"""Timing plain and drafted decoding in turns: costs are recovered, whatever the pace of the machine."""

import random
from contextlib import contextmanager

import pytest

from decode.errors import UserError
from distill.engine_costs.measure import Counted, measure

PLAIN, DRAFT, PROMPT = 0.010, 0.002, 0.0005  # seconds of a round, a drafted token and a prompt token


class Machine:
    """An engine whose pace changes from prompt to prompt; each round accepts one token."""

    name = "machine 1"

    def __init__(self, silent: bool = False, uneven: bool = False) -> None:
        self.draw, self.silent, self.uneven = random.Random(0), silent, uneven
        self.pace, self.batches, self.open = 1.0, [], []

    @contextmanager
    def plain(self):
        yield Answers(self, 0)

    @contextmanager
    def drafting(self, length):
        self.open.append(length)
        yield Answers(self, length)
        self.open.append(-length)


class Answers:
    def __init__(self, machine: Machine, length: int) -> None:
        self.machine, self.length = machine, length

    def answer(self, prompts, tokens):
        machine, length = self.machine, self.length
        if not length:  # a pair has one pace
            machine.pace = machine.draw.uniform(0.5, 3.0)
            machine.batches.append([prompt[0] for prompt in prompts])
        tau = 1 + prompts[0][0] % 3 if machine.uneven else 2
        rounds = len(prompts) * (tokens - 1) / (tau if length else 1)
        read = sum(map(len, prompts))
        return Counted(
            rounds=rounds,
            tokens=len(prompts) * (tokens - 1),
            drafted=0 if machine.silent else rounds * length,
            seconds=machine.pace * rounds * (PLAIN + DRAFT * length),
            prompt_tokens=read,
            prompt_seconds=machine.pace * read * PROMPT * (2 if length else 1),
        )

    def pass_seconds(self, prompt, tokens):
        assert len(prompt) >= tokens
        return PLAIN + tokens / 1e4


def test_ratios_are_those_of_the_machine():
    machine = Machine()
    found = measure(machine, [[i] * 4 for i in range(7)], [1, 4], [1, 2], [1, 8], 33)
    assert found.engine == "machine 1"
    assert found.passes == {1: PLAIN + 1e-4, 8: PLAIN + 8e-4}
    assert machine.open == [1, -1, 4, -4]  # one drafter at a time
    for costs in found.costs:
        for one in costs.lengths:
            ratio = (PLAIN + DRAFT * one.length) / PLAIN
            assert one.seconds / costs.plain == pytest.approx(ratio)
            assert (one.tau, one.drafted) == (2.0, one.length)
            assert one.measured == pytest.approx(2 / ratio)
            if costs.batch_size == 1:
                assert one.tau_interval == (2.0, 2.0)
                assert one.measured_interval == pytest.approx((2 / ratio, 2 / ratio))
            else:  # four groups are too few
                assert one.tau_interval is one.measured_interval is None


def test_intervals_are_over_prompts():
    """A round has 1, 2 or 3 tokens, of a third of the prompts each: tau is 3 / (1 + 1/2 + 1/3) = 18/11."""
    (costs,) = measure(Machine(uneven=True), [[i] * 4 for i in range(30)], [1], [1], [1], 33).costs
    (one,) = costs.lengths
    assert one.tau == pytest.approx(18 / 11)
    assert one.tau_interval is not None
    assert one.measured_interval is not None
    low, high = one.tau_interval
    assert 1.3 < low < 1.5 < 18 / 11 < 1.8 < high < 2.1
    low, high = one.measured_interval
    assert low < one.measured < high


def test_batches_are_full():
    machine = Machine()
    measure(machine, [[i] * 4 for i in range(3)], [1], [2], [1], 9)
    assert machine.batches[1:] == [[0, 1], [2, 0]]  # the first warms up


def test_an_engine_that_drafts_nothing_is_refused():
    with pytest.raises(UserError, match="drafted nothing"):
        measure(Machine(silent=True), [[1, 2]], [2], [1], [1], 9)

"""A traced round's exact distribution: the uncaptured loop is enumerated, and the traced round replays it.

`EnumeratingCoin` knows of every decision by which numbers in [0, 1) the production coin decides so. The
traced round is given numbers from the middle and from both ends of these intervals. If it emits the same
tokens each time, then each outcome has the probability there that was enumerated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice, product, repeat
from typing import Any

import numpy as np
from exact import EnumeratingCoin, Probs, Tape, assert_same_probs, complete, exact_probs, target_probs
from typing_extensions import override

from decode.generation.capture.makers import Captured, captures_of
from decode.generation.loop import Loop
from decode.generation.types import Output, Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import BLOCK, KeyedCoin, Purpose
from decode.sampling import Sampler

MARGIN = 1e-13  # between the end of an interval and a number near it
WAYS = {"middle": 0.5, "lower end": 0.0, "upper end": 1 - 2**-53}  # and the number that nothing may depend on
LIMIT = 24  # new tokens, so that no text ends


class GivenNumbers(KeyedCoin):
    """The production coin with given numbers.

    Args:
        numbers: of each row, by names as in `EnumeratingCoin`.
        other: all other numbers.
    """

    def __init__(self, numbers: Sequence[Mapping[Any, float]], other: float) -> None:
        super().__init__(0, range(len(numbers)))
        self._key = np.empty(len(numbers), object)  # what follows its row
        self._key[:] = [*zip(numbers, repeat(other))]

    @override
    def _block(self, block_key: tuple[bool, int, int]) -> np.ndarray:
        is_target, block, number = block_key
        purposes = [Purpose.TARGET] if is_target else [p for p in Purpose if p != Purpose.TARGET]
        draws = np.empty((len(self._key), len(purposes), BLOCK))
        for row, (numbers, other) in enumerate(self._key):
            for place in range(BLOCK):
                slot = block * BLOCK + place
                at = (self._position[row] + slot, 0) if is_target else (self._round[row], slot)
                draws[row, :, place] = [numbers.get((p, *map(int, at), number), other) for p in purposes]
        return draws


def number_in(low: float, high: float, way: str) -> float:
    """A number in an interval: in the middle, or near an end if the interval is not too short."""
    near = {"lower end": low + MARGIN, "upper end": high - MARGIN}
    return near[way] if way in near and high - low > 2 * MARGIN else (low + high) / 2


@dataclass
class FirstRounds:
    """The first rounds of every text, captured or not.

    Attributes:
        target: in float64.
        drafter: that proposes.
        plan: with a lossless rule.
        sampler: of the target.
        rounds: number of them.
    """

    target: Target
    drafter: Proposer | None
    plan: Plan
    sampler: Sampler
    rounds: int = 1

    def played(self, capture: bool, prompts: Sequence[Sequence[int]], coin: Any) -> list[Output]:
        """Decode with a coin; the first token, which belongs to no round, is a function of the prompt."""
        self.target.capture, count = capture, len(prompts)
        first = KeyedCoin(0, [0] * count)
        limits = [LIMIT] * count
        loop = Loop(self.target, self.drafter, prompts, limits, self.sampler, self.plan, first, (), None)
        loop.admit()
        loop.batch.coin = coin
        for _ in range(self.rounds):
            loop.round()
        assert len(loop.batch.request) == count, "a text has ended"
        return loop.outputs

    def check(self, prompt: Sequence[int], others: Sequence[Sequence[int]], rows: int = 48) -> int:
        """Rounds traced at some texts decide as the uncaptured loop at another, by the target's distribution.

        Args:
            prompt: of all rows.
            others: prompts at which the rounds are traced, for a row each.
            rows: at a time; where captured rounds have room for more, the other places stand still.

        Returns:
            Number of ways to decide.
        """
        self.played(True, [*islice(cycle(others), rows)], KeyedCoin(1, range(rows)))
        traced = self._traced()
        found: list[tuple[Tape, Output]] = []

        def play(tapes: list[Tape]) -> list[tuple[int, ...]]:
            outputs = self.played(False, [prompt] * len(tapes), EnumeratingCoin(tapes))
            found.extend(zip(tapes, outputs, strict=True))
            return [tuple(output.tokens[1:]) for output in outputs]

        probs = exact_probs(play, rows)
        for start in range(0, len(found), rows):
            self._replay(prompt, [*islice(cycle(found[start : start + rows]), rows)])
        assert self._traced() == traced, "a round was traced at this text"
        self._compare(probs, [*prompt, found[0][1].tokens[0]])
        return len(found)

    def _traced(self) -> list[Captured]:
        captures = captures_of(self.target)
        assert captures is not None
        assert len(captures._rounds) == 1
        return [*captures._rounds.values()]

    def _replay(self, prompt: Sequence[int], found: Sequence[tuple[Tape, Output]]) -> None:
        """Compare what given numbers make of a prompt."""
        for (way, other), capture in product(WAYS.items(), (False, True)):
            numbers = [
                {name: number_in(*ends, way) for name, ends in tape.known.items()} for tape, _ in found
            ]
            outputs = self.played(capture, [prompt] * len(found), GivenNumbers(numbers, other))
            for output, (_, expected) in zip(outputs, found, strict=True):
                made = replace(output, ttft=expected.ttft)
                assert made == expected, f"{'captured' if capture else 'uncaptured'}, {way}"

    def _compare(self, probs: Probs, text: Sequence[int]) -> None:
        """Compare the distribution of tokens after a text with the target's."""

        @cache
        def p(new: tuple[int, ...]) -> list[float]:
            chances = target_probs(self.target.model, [*text, *new], 1, self.sampler)
            return [chances.get((token,), 0.0) for token in range(self.target.vocab_size)]

        longest = max(map(len, probs))
        want = target_probs(self.target.model, text, longest, self.sampler)
        assert_same_probs(complete(probs, p, longest), want)

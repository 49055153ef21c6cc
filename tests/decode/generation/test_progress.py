"""Progress of `generate`: what has ended, and the part of what runs."""

from __future__ import annotations

import itertools

import pytest

from decode.generation.generate import generate
from decode.sampling import Sampler


def test_progress_grows_to_the_number_of_prompts(tiny_target):
    seen = list[float]()
    limits = {"max_new_tokens": 6, "sampler": Sampler(0.0), "batch_size": 2, "progress": seen.append}
    generate(tiny_target(vocab=7), None, [[1, 2], [3], [4, 5, 6]], **limits)
    assert all(a <= b for a, b in itertools.pairwise(seen))
    assert any(0 < value < 1 for value in seen)
    assert seen[-1] == pytest.approx(3)

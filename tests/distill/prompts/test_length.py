"""Which limit of prompts' lengths holds, and what its line advises."""

from __future__ import annotations

import pytest

from distill.prompts.length import strictest


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((None, None, None), None),
        ((40, 256, 256), "40 tokens (prompts.max_tokens=40)"),
        ((None, 128, 256), "127 tokens (max_tokens=128)"),
        ((None, 512, 256), "255 tokens (as many as the target reads)"),
        ((None, 256, 256), "255 tokens (as many as the target reads)"),
        ((255, None, 256), "255 tokens (as many as the target reads)"),
    ],
)
def test_of_equal_limits_that_is_named_which_no_option_raises(limits, said):
    limit = strictest(*limits)
    assert said is None or str(limit) == said
    assert (limit.option == "") == ("target reads" in str(limit))

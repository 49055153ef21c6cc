"""The tests have teeth: each known bug outside the decoder, put into the code, makes a named test fail."""

import pytest
from mutants import killers, mutate, of, run

from decode.errors import UserError

MUTANTS = of("drafters", "distill")
KILLERS = killers(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_is_noticed(monkeypatch, request, name):
    mutate(monkeypatch, MUTANTS[name])
    # The second where nothing was raised; the third is the probe, when it meets a class first.
    with pytest.raises((AssertionError, pytest.fail.Exception, UserError)):
        run(request, MUTANTS[name].killer, MUTANTS[name].arguments)


@pytest.mark.parametrize("name", KILLERS)
def test_what_notices_a_bug_passes_without_it(request, name):
    run(request, *KILLERS[name])

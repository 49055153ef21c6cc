"""Numbers that callers give: of any type the same text, and one line for what is no such number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.lossy.reward_guided import generate_judged
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
from decode.sampling import Sampler

V = 9
PROMPTS = [[1, 2, 3], [4, 5]]
ONE = Sampler(1.0)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(V)


def decoded(target, prompts=PROMPTS, **changes):
    options = {"max_new_tokens": 8, "sampler": ONE, "seed": 3, "requests": [0, 1], "samples": [0, 1]}
    return [o.tokens for o in generate(target, None, prompts, **options | changes).outputs]


SAME = {
    "seed": [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)],
    "samples": [np.arange(2), range(2), torch.arange(2), (np.int32(0), torch.tensor(1))],
    "requests": [np.arange(2), range(2), torch.arange(2), ["0", "1"], np.array(["0", "1"])],
    "max_new_tokens": [np.int64(8), torch.tensor(8)],
    "batch_size": [np.int64(1), torch.tensor(2), 5],
    "prompts": [
        [np.array(p) for p in PROMPTS],
        [torch.tensor(p) for p in PROMPTS],
        [tuple(map(np.int64, p)) for p in PROMPTS],
        [list(torch.tensor(p)) for p in PROMPTS],
    ],
}


@pytest.mark.parametrize("name", SAME)
def test_number_of_another_type_gives_the_same_text(target, name):
    expected = decoded(target)
    for value in SAME[name]:
        assert decoded(target, **{name: value}) == expected, value


def test_end_tokens_of_a_tensor_end_a_text(target):
    end = decoded(target)[0][2]
    expected = decoded(target, stop=[end])
    assert len(expected[0]) <= 3
    for stop in (torch.tensor([end]), np.array([end]), [torch.tensor(end)], (np.int16(end),)):
        assert decoded(target, stop=stop) == expected
        options = {"max_new_tokens": 8, "sampler": ONE, "seed": 3, "stop": stop}
        pieces = stream(target, None, PROMPTS[0], **options)
        assert [token for piece in pieces for token in piece.tokens] == expected[0]
        judged = generate_judged(*judge(target), **options)
        assert judged.outputs[0].stopped


def judge(target):
    """Arguments of `generate_judged`, which likes every step and ends none."""
    return target, target, PROMPTS[:1], lambda *_: 1.0, 0.5, lambda: lambda _: False


BAD = {
    "seed": [3.0, True, np.True_, None, "3", np.float64(3), torch.tensor(3.0)],
    "samples": [[0.0, 1.0], [0]],
    "requests": [[0.5, 1], [0]],
    "max_new_tokens": [0, -1, 2.5, float("nan"), None],
    "batch_size": [0, -2, 1.5],
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_number_is_named_in_one_line(target, name):
    for value in BAD[name]:
        with pytest.raises(UserError, match=f"^{name}") as error:
            decoded(target, **{name: value})
        assert "\n" not in str(error.value)
        assert "context" not in str(error.value)
        options = {"max_new_tokens": 4, "sampler": ONE, name: value}
        if name in ("seed", "max_new_tokens"):
            with pytest.raises(UserError, match=f"^{name}="):
                stream(target, None, [1], **options)
            with pytest.raises(UserError, match=f"^{name}="):
                generate_judged(*judge(target), **options)
        if name in ("batch_size", "max_new_tokens"):  # also where there are no prompts
            with pytest.raises(UserError, match=f"^{name}="):
                generate(target, None, [], **options)


@pytest.mark.parametrize("wrong", [-1, V, V + 100])
def test_token_that_the_target_does_not_have_is_named(target, wrong):
    with pytest.raises(UserError, match=rf"prompt 1 has token {wrong}; the target has tokens 0 to {V - 1}"):
        decoded(target, prompts=[[1], [2, wrong]])


def test_lookup_drafter_finds_the_tokens_of_a_tensor(target, make_drafter):
    """A drafter keeps the text in dicts, where a tensor is equal to nothing."""
    drafter, prompt = make_drafter("suffix", target), [1, 2, 3, 1, 2, 3, 1, 2]
    options = {"max_new_tokens": 8, "sampler": Sampler(0.0), "plan": Plan(3)}
    (expected,) = generate(target, drafter, [prompt], **options).outputs
    (found,) = generate(target, drafter, [list(torch.tensor(prompt))], **options).outputs
    assert (found.tokens, found.drafted) == (expected.tokens, expected.drafted)
    assert sum(found.drafted)


def test_draws_are_the_same_in_every_version():
    key = Key(Purpose.TARGET, 0)
    drawn = [float(KeyedCoin(s, r, n).uniform(key)[0]) for s, r, n in [(0, [0], None), (7, ["a"], [2])]]
    assert drawn == [0.21681354706614353, 0.061978448130017516]


@pytest.mark.parametrize(
    "ids", [[5.7, 3], ["5"], [True, 5], np.array([1.0]), torch.tensor([1.0]), [None]], ids=str
)
def test_ids_that_are_no_integers_are_refused(target, ids):
    with pytest.raises(UserError, match="token ids: give a list of integers"):
        decoded(target, prompts=[ids])

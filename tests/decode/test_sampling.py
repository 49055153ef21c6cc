"""The law is Hugging Face's: the same processors in the order of `generate`."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.errors import UserError
from decode.sampling import Sampler

V = 12


def reference(sampler: Sampler, logits: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """What transformers samples from."""
    if sampler.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(sampler.repetition_penalty)(history, logits)
    logits = TemperatureLogitsWarper(sampler.temperature)(history, logits)
    if sampler.top_k:
        logits = TopKLogitsWarper(sampler.top_k)(history, logits)
    if sampler.top_p < 1:
        logits = TopPLogitsWarper(sampler.top_p)(history, logits)
    if sampler.min_p:
        logits = MinPLogitsWarper(sampler.min_p)(history, logits)
    return logits.softmax(-1)


def rows(ties: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, histories and the same as a mask."""
    logits = 2 * torch.randn(64, V, dtype=torch.float64)
    if ties:
        logits = logits.round()
    history = torch.randint(V, (64, 5))
    return logits, history, torch.zeros(64, V, dtype=torch.bool).scatter_(1, history, value=True)


GRID = [
    Sampler(t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product(
        [0.5, 1.0, 1.7], [0, 1, 3, 20], [1.0, 0.8], [0.0, 0.1], [1.0, 1.3, 0.8]
    )
]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_law_is_that_of_transformers(temperature):
    logits, history, seen = rows(ties=False)
    for sampler in GRID:
        if sampler.temperature == temperature:
            got, want = sampler.probs(logits, seen), reference(sampler, logits, history)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=str(sampler))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"min_p": 0.15}, {"top_k": 4, "min_p": 0.1}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_the_law_is_that_of_transformers_on_ties(options):
    logits, history, seen = rows(ties=True)
    sampler = Sampler(0.7, **options)
    torch.testing.assert_close(
        sampler.probs(logits, seen), reference(sampler, logits, history), rtol=0, atol=1e-12
    )


def test_top_p_keeps_as_many_of_tied_tokens_as_transformers():
    """Which of them it keeps is left to an unstable sort there; here the lowest index is."""
    logits, history, seen = rows(ties=True)
    sampler = Sampler(0.7, top_p=0.8)
    got, want = sampler.probs(logits, seen), reference(sampler, logits, history)
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values, rtol=0, atol=1e-12)
    for law, row in zip(got, logits, strict=True):
        for a, b in itertools.combinations(range(V), 2):
            if row[a] == row[b]:
                assert law[a] >= law[b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("law", "top_p"), [([2, 1, 1], 0.5), ([2, 1, 1], 0.75), ([1, 1, 1, 1], 0.25)])
def test_a_mass_of_exactly_top_p_is_enough_as_in_transformers(law, top_p, dtype):
    law = torch.tensor([law], dtype=dtype) / 4
    assert torch.equal(law.log().softmax(-1), law), "rounding hides where the masses are equal"
    sampler = Sampler(1.0, top_p=top_p)
    got, want = sampler.probs(law.log()), reference(sampler, law.log(), torch.zeros(1, 0))
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values, rtol=0, atol=1e-6)
    assert law[got > 0].sum() == top_p


def test_temperature_zero_takes_the_lowest_index_of_a_tie():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 2.0]])
    law = Sampler(0.0).probs(logits)
    assert law.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
def test_the_greedy_token_survives_every_warper(options):
    logits, _, _ = rows(ties=False)
    assert (Sampler(0.0, **options).probs(logits) == Sampler(0.0).probs(logits)).all()
    assert (Sampler(0.6, **options).probs(logits).argmax(-1) == logits.argmax(-1)).all()


def test_greedy_is_taken_after_the_repetition_penalty():
    logits, seen = torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([[True, False, False]])
    assert Sampler(0.0, repetition_penalty=2.0).probs(logits, seen).argmax() == 1


def test_a_penalty_below_one_favours_what_was_said():
    logits, seen = torch.tensor([[2.0, 2.5, -1.0]]), torch.tensor([[True, False, False]])
    assert Sampler(0.0, repetition_penalty=0.5).probs(logits, seen).argmax() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_law_is_computed_in_fp32_or_wider(dtype):
    logits, _, seen = rows(ties=False)
    for sampler in GRID:
        law = sampler.probs(logits.to(dtype), seen)
        assert law.dtype == torch.float32
        torch.testing.assert_close(law.sum(-1), torch.ones(64), rtol=0, atol=1e-6)


def test_rows_do_not_depend_on_one_another():
    logits, _, seen = rows(ties=True)
    for sampler in GRID:
        law = sampler.probs(logits, seen)
        torch.testing.assert_close(law[3:4], sampler.probs(logits[3:4], seen[3:4]), rtol=0, atol=1e-15)


BAD = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 1.5},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"temperature": float("inf")},
    {"temperature": 1e39},
    {"temperature": True},
    {"temperature": "1"},
    {"top_k": 2.5},
    {"top_k": True},
    {"top_p": float("nan")},
    {"min_p": float("nan")},
    {"repetition_penalty": float("nan")},
    {"repetition_penalty": float("inf")},
    {"repetition_penalty": 1e-40},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_value_out_of_range_is_named(bad):
    (name,) = bad
    with pytest.raises(UserError, match=f"{name}="):
        Sampler(**bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [49_152, 50_000, 50_257, 7])
def test_the_greedy_token_is_the_first_largest_however_many_there_are(size, dtype):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = -3.0
    logits[2, size // 2 :] = 9.0
    logits[3, [1, size - 1]] = torch.inf
    assert Sampler(0.0).argmax(logits).equal(logits.argmax(-1))
    assert logits.argmax(-1)[1:4].tolist() == [0, size // 2, 1]


@pytest.mark.parametrize("temperature", [1e-39, 1e-45, 5e-324, 1.17e-38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_temperature_below_the_smallest_normal_number_is_greedy(temperature, dtype):
    logits, sampler = rows(ties=True)[0].to(dtype), Sampler(temperature)
    assert sampler == Sampler(0.0)
    assert sampler.probs(logits).equal(Sampler(0.0).probs(logits))


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-10])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_small_temperature_makes_no_nan(temperature, options):
    logits = 1e4 * rows(ties=False)[0].float()
    law = Sampler(temperature, **options).probs(logits)
    assert law.equal(Sampler(0.0).probs(logits))


def test_a_large_temperature_is_uniform_over_what_is_not_masked():
    logits = rows(ties=False)[0].float()
    logits[:, 3] = -torch.inf
    law = Sampler(3e38).probs(logits)
    assert (law[:, 3] == 0).all()
    torch.testing.assert_close(law[:, 4:], torch.full_like(law[:, 4:], 1 / (V - 1)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [151_936, 262_144])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 1e-6}, {"top_k": 100_000}], ids=str)
def test_probabilities_over_a_large_vocabulary_sum_to_1_within_a_few_roundings(size, options):
    logits = 4 * torch.randn(4, size)
    law = Sampler(1.0, **options).probs(logits).double()
    assert ((law.sum(-1) - 1).abs() < 8 * torch.finfo(torch.float32).eps).all()


def test_the_mass_that_top_p_keeps_over_a_large_vocabulary_is_that_of_exact_numbers():
    logits = 4 * torch.randn(8, 262_144)
    kept = Sampler(1.0, top_p=0.99999).probs(logits).gt(0).sum(-1)
    exact = Sampler(1.0, top_p=0.99999).probs(logits.double()).gt(0).sum(-1)
    assert ((kept - exact).abs() <= 0.01 * exact).all()

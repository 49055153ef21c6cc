"""The distribution that the target's tokens are drawn from is that of Hugging Face's processors."""

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
NAN, INF = float("nan"), float("inf")


def reference(sampler: Sampler, logits: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """What transformers samples from, its processors in the order of `generate`."""
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


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
def test_distribution_is_that_of_transformers(ties):
    logits, history, seen = rows(ties)
    for sampler in GRID:
        if not ties or sampler.top_p == 1:  # which of tied tokens top_p keeps: the next test
            got, want = sampler.probs(logits, seen), reference(sampler, logits, history)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=str(sampler))
            single = sampler.probs(logits[3:4], seen[3:4])
            torch.testing.assert_close(got[3:4], single, rtol=0, atol=1e-15, msg=str(sampler))


def test_top_p_keeps_as_many_of_tied_tokens_as_transformers():
    """Which of them it keeps is left to an unstable sort there; here the lowest index is."""
    logits, history, seen = rows(ties=True)
    sampler = Sampler(0.7, top_p=0.8)
    got, want = sampler.probs(logits, seen), reference(sampler, logits, history)
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values, rtol=0, atol=1e-12)
    for probs, row in zip(got, logits, strict=True):
        for a, b in itertools.combinations(range(V), 2):
            if row[a] == row[b]:
                assert probs[a] >= probs[b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("probs", "top_p"), [([2, 1, 1], 0.5), ([2, 1, 1], 0.75), ([1, 1, 1, 1], 0.25)])
def test_mass_of_exactly_top_p_is_enough(probs, top_p, dtype):
    probs = torch.tensor([probs], dtype=dtype) / 4
    assert torch.equal(probs.log().softmax(-1), probs), "rounding hides where the masses are equal"
    sampler = Sampler(1.0, top_p=top_p)
    got, want = sampler.probs(probs.log()), reference(sampler, probs.log(), torch.zeros(1, 0))
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values, rtol=0, atol=1e-6)
    assert probs[got > 0].sum() == top_p


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
def test_greedy_token_survives_every_warper(options):
    logits, _, _ = rows(ties=False)
    assert (Sampler(0.0, **options).probs(logits) == Sampler(0.0).probs(logits)).all()
    assert (Sampler(0.6, **options).probs(logits).argmax(-1) == logits.argmax(-1)).all()


def test_greedy_takes_the_lowest_index_behind_the_penalty():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 2.0]])
    assert Sampler(0.0).probs(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    seen = torch.tensor([[True, False, False]])
    for row, penalty, token in (([2.0, 1.5, -1.0], 2.0, 1), ([2.0, 2.5, -1.0], 0.5, 0)):
        sampler = Sampler(0.0, repetition_penalty=penalty)
        assert sampler.probs(torch.tensor([row]), seen).argmax() == token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_distribution_is_computed_in_fp32_or_wider(dtype):
    logits, _, seen = rows(ties=False)
    for sampler in GRID:
        probs = sampler.probs(logits.to(dtype), seen)
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs.sum(-1), torch.ones(64), rtol=0, atol=1e-6)


BAD = {
    "temperature": [-0.1, NAN, INF, 1e39, True, "1", 10**400, None],
    "top_k": [-1, 2.5, True],
    "top_p": [0.0, 1.1, NAN],
    "min_p": [-0.1, 1.5, NAN],
    "repetition_penalty": [0.0, -1.0, NAN, INF, 1e-40],
}


@pytest.mark.parametrize("name", BAD)
def test_value_out_of_range_is_named(name):
    for value in BAD[name]:
        with pytest.raises(UserError, match=f"{name}=.* is out of range: give "):
            Sampler(**{name: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [49_152, 50_000, 50_257, 7])
def test_greedy_token_is_the_first_largest_of_any_vocabulary(size, dtype):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = -3.0
    logits[2, size // 2 :] = 9.0
    logits[3, [1, size - 1]] = torch.inf
    assert Sampler(0.0).argmax(logits).equal(logits.argmax(-1))
    assert logits.argmax(-1)[1:4].tolist() == [0, size // 2, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_temperature_below_the_smallest_normal_number_is_greedy(dtype):
    logits = rows(ties=True)[0].to(dtype)
    for temperature in (1e-39, 1e-45, 5e-324, 1.17e-38):
        sampler = Sampler(temperature)
        assert sampler == Sampler(0.0)
        assert sampler.probs(logits).equal(Sampler(0.0).probs(logits))


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-10])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_small_temperature_makes_no_nan(temperature, options):
    logits = 1e4 * rows(ties=False)[0].float()
    assert Sampler(temperature, **options).probs(logits).equal(Sampler(0.0).probs(logits))


def test_large_temperature_is_uniform_over_what_is_not_masked():
    logits = rows(ties=False)[0].float()
    logits[:, 3] = -torch.inf
    probs = Sampler(3e38).probs(logits)
    assert (probs[:, 3] == 0).all()
    torch.testing.assert_close(probs[:, 4:], torch.full_like(probs[:, 4:], 1 / (V - 1)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [151_936, 262_144])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 1e-6}, {"top_k": 100_000}], ids=str)
def test_probabilities_over_a_large_vocabulary_sum_to_1(size, options):
    probs = Sampler(1.0, **options).probs(4 * torch.randn(4, size)).double()
    assert ((probs.sum(-1) - 1).abs() < 8 * torch.finfo(torch.float32).eps).all()


def test_top_p_keeps_the_mass_of_exact_numbers_over_a_large_vocabulary():
    logits = 4 * torch.randn(8, 262_144)
    kept = Sampler(1.0, top_p=0.99999).probs(logits).gt(0).sum(-1)
    exact = Sampler(1.0, top_p=0.99999).probs(logits.double()).gt(0).sum(-1)
    assert ((kept - exact).abs() <= 0.01 * exact).all()

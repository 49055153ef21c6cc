"""Corners of the divergences; their formulas are checked against the reference, in test_objectives."""

import math

import pytest
import torch
import yaml
from hydra.utils import instantiate
from workbench import CONF

from decode.errors import UserError
from distill.losses.chunked_logits import Student, TargetProbs, Teacher, argmax
from distill.losses.divergences import JSD, NLLTV, LKHybrid, ReverseKL, TopK, ce, kl, lk, tv


def probs(p_logits, q_logits, d2t=None, text_ids=None):
    """Both distributions of (M, V) and (M, V') logits."""
    d2t = None if d2t is None else torch.tensor(d2t)
    target = TargetProbs(
        p_logits, p_logits.softmax(-1), p_logits.logsumexp(-1), p_logits.argmax(-1), d2t, text_ids
    )
    q = q_logits.softmax(-1)
    alpha = torch.minimum(target.p, q).sum(-1)
    student = Student(q_logits.clone(), q, q_logits.logsumexp(-1), q_logits.argmax(-1), alpha)
    return student, Teacher(target, slice(None))


def far(dtype):
    """Distributions with next to no overlap: e^-200 underflows in fp32."""
    p = torch.tensor([[0.0, -1.0, -200.0, -201.0]], dtype=dtype)
    return p, p.flip(-1)


def test_likelihood_of_acceptance_is_lost_at_no_distance():
    expected = lk(*probs(*far(torch.float64)))
    value, slope = lk(*probs(*far(torch.float32)))
    assert value.item() == pytest.approx(expected[0].item(), rel=1e-6)
    assert slope.tolist()[0] == pytest.approx(expected[1].tolist()[0], abs=1e-6)
    assert slope.abs().sum() > 0.5
    assert tv(*probs(*far(torch.float32)))[1].abs().max() == 0  # where tv teaches nothing


def test_likelihood_of_acceptance_is_cross_entropy_to_one_hot_targets():
    p = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    p[0, 1] = p[1, 4] = 0.0
    q = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for actual, expected in zip(lk(*probs(p, q)), ce(*probs(p, q)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_reverse_kl_takes_no_probability_below_its_floor():
    p = torch.tensor([[0.0, -torch.inf]])
    value, slope = ReverseKL(1e-6)(*probs(p, torch.zeros(1, 2)))
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-6)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert slope[0, 1].item() == pytest.approx(0.5 * (math.log(0.5 / 1e-6) - expected), rel=1e-6)


def test_jensen_shannon_is_bounded_and_a_miss_costs_its_share():
    p, q = far(torch.float32)
    value, _ = JSD(0.5)(*probs(p, q))
    assert value.item() == pytest.approx(math.log(2), rel=1e-6)
    value, _ = JSD(0.5)(*probs(p, q[:, 2:], d2t=[2, 3]))  # the draft knows none of what is likely
    assert value.item() == pytest.approx(math.log(2), rel=1e-6)


def test_the_hybrid_is_kl_at_a_distance_and_total_variation_nearby():
    p, q = far(torch.float64)
    for hybrid, plain in zip(LKHybrid(3.0)(*probs(p, q)), kl(*probs(p, q)), strict=True):
        torch.testing.assert_close(hybrid, plain)
    near = p + torch.tensor([[0.0, 0.1, 0.0, 0.0]], dtype=torch.float64)
    for hybrid, plain in zip(LKHybrid(1e3)(*probs(p, near)), tv(*probs(p, near)), strict=True):
        torch.testing.assert_close(hybrid, plain)


def test_a_top_k_longer_than_the_vocabulary_is_all_of_it():
    p, q = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    full_vocabulary, slope = TopK(100)(*probs(p, q))
    student, teacher = probs(p, q)
    torch.testing.assert_close(full_vocabulary, kl(student, teacher)[0] - probs(p, q)[1].negentropy)
    torch.testing.assert_close(slope, kl(*probs(p, q))[1])


def test_where_the_likeliest_token_is_a_miss_nothing_is_taught():
    p, q = far(torch.float64)
    value, slope = ce(*probs(p, q[:, 2:], d2t=[2, 3]))
    assert value.tolist() == [0.0]
    assert slope.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 128, 1000])
def test_argmax_by_blocks_is_the_first_of_the_largest(vocab):
    dice = torch.Generator().manual_seed(vocab)
    rows = torch.randint(7, (50, vocab), generator=dice).float()  # with many ties
    assert argmax(rows).tolist() == [row.index(max(row)) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JSD(1.0), r"objective\.beta=1\.0"),
        (lambda: TopK(0), r"objective\.k=0"),
        (lambda: ReverseKL(0.0), r"objective\.floor=0\.0"),
        (lambda: LKHybrid(-1.0), r"objective\.decay=-1\.0"),
        (lambda: NLLTV(-0.1, 1.0), r"objective: nll=-0\.1, tv=1\.0"),
        (lambda: NLLTV(0.0, 0.0), r"objective: nll=0\.0, tv=0\.0; give none below 0, and one above"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "objective").glob("*.yaml")))
def test_the_gradient_of_every_objective_is_the_slope_of_its_value(name, vocabulary, monkeypatch):
    """By central differences; a new yaml in conf/objective is looked at, too."""
    divergence = instantiate(yaml.safe_load((CONF / "objective" / f"{name}.yaml").read_text()))
    dice = torch.Generator().manual_seed(2)
    ids, size = (None, 6) if vocabulary == "full" else ([0, 2, 3, 5], 4)
    p, z = (torch.randn(3, n, dtype=torch.float64, generator=dice) for n in (6, size))
    text = torch.tensor([1, 3, -1 if ids else 0])  # in draft ids; -1 is no token of the draft vocabulary

    if hasattr(divergence, "weight"):  # which has no gradient
        held = divergence.weight(probs(p, z, ids, text)[0])
        monkeypatch.setattr(type(divergence), "weight", lambda *_: held)

    def given(logits):
        return divergence(*probs(p, logits, ids, text))

    step, (value, slope) = 1e-5, given(z)
    assert value.shape == (3,)
    assert slope.abs().max() > 1e-3
    for row in range(3):
        for token in range(size):
            moved = torch.zeros_like(z)
            moved[row, token] = step
            found = (given(z + moved)[0] - given(z - moved)[0])[row] / (2 * step)
            assert found.item() == pytest.approx(slope[row, token].item(), abs=1e-8)

"""Corners of the divergences; their formulas are checked against the reference, in test_objectives."""

import math
import re

import pytest
import torch

from decode.errors import UserError
from distill.losses.chunked_logits import Student, TargetProbs, Teacher, argmax
from distill.losses.divergences import JSD, NLLTV, LKHybrid, ReverseKL, TopK, kl, lk, tv


def probs(p_logits, q_logits, d2t=None):
    """Both distributions of (M, V) and (M, V') logits."""
    d2t = None if d2t is None else torch.tensor(d2t)
    target = TargetProbs(p_logits, p_logits.softmax(-1), p_logits.logsumexp(-1), p_logits.argmax(-1), d2t)
    q = q_logits.softmax(-1)
    alpha = torch.minimum(target.p, q).sum(-1)
    student = Student(q_logits.clone(), q, q_logits.logsumexp(-1), q_logits.argmax(-1), alpha)
    return student, Teacher(target, slice(None))


def far(dtype):
    """Distributions with next to no overlap: e^-200 underflows in fp32."""
    p = torch.tensor([[0.0, -1.0, -200.0, -201.0]], dtype=dtype)
    return p, p.flip(-1)


def test_likelihood_of_acceptance_has_a_gradient_at_any_distance():
    expected = lk(*probs(*far(torch.float64)))
    value, slope = lk(*probs(*far(torch.float32)))
    assert value.item() == pytest.approx(expected[0].item(), rel=1e-6)
    assert slope.tolist()[0] == pytest.approx(expected[1].tolist()[0], abs=1e-6)
    assert slope.abs().sum() > 0.5
    assert tv(*probs(*far(torch.float32)))[1].abs().max() == 0  # where tv teaches nothing


def test_reverse_kl_takes_no_probability_below_its_floor():
    p = torch.tensor([[0.0, -torch.inf]])
    value, slope = ReverseKL(1e-6)(*probs(p, torch.zeros(1, 2)))
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-6)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert slope[0, 1].item() == pytest.approx(0.5 * (math.log(0.5 / 1e-6) - expected), rel=1e-6)


def test_jensen_shannon_is_bounded_also_where_the_draft_knows_nothing_likely():
    p, q = far(torch.float32)
    for given in (probs(p, q), probs(p, q[:, 2:], d2t=[2, 3])):
        assert JSD(0.5)(*given)[0].item() == pytest.approx(math.log(2), rel=1e-6)


def test_top_k_longer_than_the_vocabulary_is_all_of_it():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    value, slope = TopK(100)(*probs(*logits))
    want, want_slope = kl(*probs(*logits))  # which overwrites what it is given
    torch.testing.assert_close(value, want - probs(*logits)[1].negentropy)
    torch.testing.assert_close(slope, want_slope)


def test_argmax_by_blocks_is_the_first_of_the_largest():
    for vocab in (1, 5, 64, 65, 128, 1000):
        rows = torch.randint(7, (50, vocab)).float()  # with many ties
        assert argmax(rows).tolist() == [row.index(max(row)) for row in rows.tolist()]


def test_numbers_out_of_range_are_refused():
    for kind, values, said in (
        (JSD, [1.0], "objective.beta=1.0"),
        (TopK, [0], "objective.k=0"),
        (ReverseKL, [0.0], "objective.floor=0.0"),
        (LKHybrid, [-1.0], "objective.decay=-1.0"),
        (NLLTV, [-0.1, 1.0], "objective: nll=-0.1, tv=1.0"),
        (NLLTV, [0.0, 0.0], "objective: nll=0.0, tv=0.0"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            kind(*values)

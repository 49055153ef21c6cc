"""Corners of the divergences and weights; their formulas are checked in test_objectives."""

import math
import re
from functools import partial

import pytest
import torch
from dense import steps

from decode.errors import UserError
from decode.model.head import Head
from distill.losses.chunked_logits import Student, TargetProbs, Teacher, argmax
from distill.losses.divergences import JSD, NLLTV, LKHybrid, ReverseKL, TopK, by_autograd, kl, lk, tv
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import DPace, Streak, weighted
from drafters.base import DraftStep


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
        *((kind, [1.5, 0.0], "weights.smoothing=1.5") for kind in (Streak, DPace)),
        *((kind, [0.0, -1.0], "weights.warmup=-1") for kind in (Streak, DPace)),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            kind(*values)


# -- weights of rows -------------------------------------------------------------------------------

EXACT = {"smoothing": 0.0, "warmup": 0.0}
LENGTH = {"tv with streak": (tv, Streak(**EXACT)), "lk with dpace": (lk, DPace(**EXACT))}


def rows(alpha, present=None):
    alpha = torch.tensor(alpha, dtype=torch.float64)
    return alpha, torch.ones_like(alpha, dtype=torch.bool) if present is None else torch.tensor(present)


def weigh(weights, alpha, present, progress=1.0):
    return weights(alpha, present, progress, torch.ones_like(alpha))


@pytest.mark.parametrize("name", LENGTH)
def test_streak_and_dpace_are_the_gradient_of_the_expected_accepted_length(name, ragged):
    head, last, anchors, hidden = ragged
    leaves = [h.clone().requires_grad_() for h in hidden]
    total, _ = Objective(*LENGTH[name], 2)(steps(head, anchors, leaves), last, head, {})
    alive: dict[int, torch.Tensor] = {}  # anchor -> product of its alphas
    length = torch.zeros((), dtype=torch.float64)
    for depth, (anchor, h) in enumerate(zip(anchors, leaves, strict=True), 1):
        p, q = head(last.flatten(0, 1)[anchor + depth]).softmax(-1), head(h).softmax(-1)
        for a, alpha in zip(anchor.tolist(), torch.minimum(p, q).sum(-1), strict=True):
            alive[a] = alive.get(a, 1.0) * alpha
            length = length + alive[a]
    got, want = torch.autograd.grad(total, leaves), torch.autograd.grad(-length, leaves)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LENGTH)
def test_deeper_rows_of_some_anchors_stand_for_all(name):
    """Every anchor has its depth 1, and one of three its others: the mean gradient is that of all rows."""
    head = Head(torch.randn(7, 5, dtype=torch.float64))
    last, *hidden = torch.randn(4, 3, 5, dtype=torch.float64)
    last = torch.cat([last, hidden[0].flip(0)])[None]

    def gradient(chosen: list[int]) -> torch.Tensor:
        leaves = [h.clone().requires_grad_() for h in hidden]
        sampled = torch.tensor(chosen)
        given = [DraftStep(leaves[0], torch.arange(3), 1, head, {})]
        given += [DraftStep(leaves[k][sampled], sampled, k + 1, head, {}, 3 / len(chosen)) for k in (1, 2)]
        total, _ = Objective(*LENGTH[name], 2)(given, last, head, {})
        return torch.stack(torch.autograd.grad(total, leaves))

    mean = torch.stack([gradient([i]) for i in range(3)]).mean(0)
    torch.testing.assert_close(mean, gradient([0, 1, 2]), rtol=0, atol=1e-12)


def test_depth_that_is_never_accepted_stops_what_follows():
    alpha, present = rows([[0.5, 0.0, 0.9]])
    assert weigh(Streak(**EXACT), alpha, present)[0].tolist() == [1.0, 0.5 * 1.9, 0.0]
    assert weigh(DPace(**EXACT), alpha, present)[0].tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("kind", [Streak, DPace])
def test_warm_up_falls_from_counting_depths_to_the_smoothing(kind):
    alpha, present = rows([[1e-3, 1e-3, 1e-3]])
    weights = kind(smoothing=0.1, warmup=0.5)
    assert weigh(weights, alpha, present, 0.0)[0].tolist() == [3.0, 2.0, 1.0]

    def plain(smoothing):
        return weigh(kind(smoothing, 0.0), alpha, present, 0.0)

    torch.testing.assert_close(weigh(weights, alpha, present, 0.25), plain(0.55))
    torch.testing.assert_close(weigh(weights, alpha, present, 0.5), plain(0.1))
    torch.testing.assert_close(weigh(weights, alpha, present, 1.0), plain(0.1))
    assert weigh(kind(**EXACT), alpha, present)[0, 2] < 1e-5  # what the warm-up is there for


@pytest.mark.parametrize("kind", [Streak, DPace])
def test_streak_ends_where_an_anchor_leaves(kind):
    long, present = rows([[0.5, 0.7, 0.2]], [[True, True, False]])
    short, all_of_it = rows([[0.5, 0.7]])
    weights = kind(0.3, 0.0)
    got, want = weigh(weights, long, present)[0, :2], weigh(weights, short, all_of_it)[0]
    assert got.tolist() == pytest.approx(want.tolist(), abs=1e-15)


def test_row_weight_multiplies_its_steps(ragged):
    head, _, anchors, hidden = ragged
    given = [step._replace(weight=0.5) for step in steps(head, anchors, hidden)]
    found = [step.weight.tolist() for step in weighted(iter(given), torch.tensor([2.0, 3.0]), 7)]
    assert found == [[1.0] * 4 + [1.5] * 2, [1.0] * 3 + [1.5], [1.0]]


@pytest.mark.parametrize("d2t", [None, [0, 2, 3]], ids=["whole", "reduced"])
def test_autograd_gives_the_gradient_of_the_closed_formula(d2t):
    def values(log_q, teacher, scale):
        return scale * (teacher.p * (teacher.log_p - log_q)).sum(-1)

    p, q = torch.randn(2, 4, 5, dtype=torch.float64)
    given = p, q[:, : len(d2t or range(5))], d2t
    with torch.no_grad():  # as in the objective
        got = by_autograd(values)(*probs(*given), scale=2.0)
    for one, other in zip(got, kl(*probs(*given)), strict=True):
        torch.testing.assert_close(one, 2 * other)
        assert not one.requires_grad
    assert not Kernels().take(partial(by_autograd(values), scale=2.0))
    for wrong in (lambda log_q, _: log_q.sum(), lambda _, teacher: teacher.mass):
        with pytest.raises(UserError, match=r"must return a value per row, \(4,\), computed from log_q"):
            by_autograd(wrong)(*probs(p, q))

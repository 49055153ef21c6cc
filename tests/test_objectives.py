"""The loss: gradients against finite differences and autograd, chunks, weights, auxiliary losses."""

import dataclasses
from functools import partial

import pytest
import torch

from decode.lm import Head
from distill.divergences import ce, kl
from distill.objectives import Objective, constant, decay
from drafters.base import DraftStep

B, T, D, V = 2, 7, 6, 11
DIVERGENCES = {"kl": kl, "ce": ce}
REDUCED = [7, 2, 9, 4, 0]  # the target's ids of a draft vocabulary


def reference(name: str, logits, teacher, d2t=None):
    """(M, V'), (M, V) -> (M,) by the book, for autograd."""
    ids = torch.arange(V) if d2t is None else d2t
    p, q = teacher.softmax(-1)[:, ids], logits.softmax(-1)
    if name == "ce":
        return -(q.log() * (ids == teacher.argmax(-1, keepdim=True))).sum(-1)
    return (p * (p.log() - q.log())).sum(-1)


@pytest.fixture
def case():
    """Head, last hidden states and three depths of hidden states with ragged anchors, in fp64."""
    dice = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=dice, dtype=torch.float64)  # noqa: E731
    head = Head(draw(V, D), draw(V), scale=0.7, softcap=5.0)
    anchors = [torch.tensor(a) for a in ([0, 1, 2, 3, 8, 9], [0, 1, 2, 9], [1])]
    return head, draw(B, T, D), anchors, [draw(len(a), D) for a in anchors]


def steps(head, anchors, hidden, aux=None):
    return [
        DraftStep(h, a, depth, head, aux[depth - 1] if aux else {})
        for depth, (a, h) in enumerate(zip(anchors, hidden, strict=True), 1)
    ]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("chunk", [2, 0])
def test_gradients_are_those_of_finite_differences(name, chunk, case):
    head, last, anchors, hidden = case
    objective = Objective(DIVERGENCES[name], lambda depth: decay(depth, 0.8), chunk)

    def loss(*hidden):
        return objective(steps(head, anchors, hidden), last, head, {})[0]

    leaves = [h.clone().requires_grad_() for h in hidden]
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_the_weighted_sum_of_divergences_at_the_right_rows(name, case):
    head, last, anchors, hidden = case
    rate = 0.6
    leaves = [h.clone().requires_grad_() for h in hidden]
    objective = Objective(DIVERGENCES[name], lambda depth: decay(depth, rate))
    total, scored = objective(steps(head, anchors, leaves), last, head, {})
    got = torch.autograd.grad(total, leaves)

    again = [h.clone().requires_grad_() for h in hidden]
    want = torch.zeros((), dtype=torch.float64)
    flat = last.flatten(0, 1)
    for depth, (anchor, h) in enumerate(zip(anchors, again, strict=True), 1):
        teacher = head(flat[anchor + depth])  # depth j at anchor t is judged by row t + j
        rows = reference(name, head(h), teacher)
        want = want + rate ** (depth - 1) * rows.sum()
        log = scored[depth - 1]
        assert (log.depth, log.rows) == (depth, len(anchor))
        assert log.divergence == pytest.approx(rows.sum().item(), abs=1e-12)
        assert log.agreed == (head(h).argmax(-1) == teacher.argmax(-1)).sum()
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, torch.autograd.grad(want, again), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_chunks_do_not_change_the_result(name, case):
    head, last, anchors, hidden = case
    results = []
    for chunk in (1, 2, 3, 100, 0):
        leaves = [h.clone().requires_grad_() for h in hidden]
        objective = Objective(DIVERGENCES[name], constant, chunk)
        total, scored = objective(steps(head, anchors, leaves), last, head, {})
        results.append((total, *torch.autograd.grad(total, leaves), torch.tensor(scored)))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, check_dtype=False)


def test_auxiliary_losses_are_weighted_like_their_depth(case):
    head, last, anchors, hidden = case
    aux = [{"feature": torch.ones(len(a), dtype=torch.float64) * 2} for a in anchors]
    objective = Objective(kl, lambda depth: decay(depth, 0.5))
    plain, _ = objective(steps(head, anchors, hidden), last, head, {})
    total, _ = objective(steps(head, anchors, hidden, aux), last, head, {"feature": 3.0})
    want = 3.0 * 2 * sum(0.5**i * len(a) for i, a in enumerate(anchors))
    assert (total - plain).item() == pytest.approx(want, abs=1e-12)


def loss_by_the_book(name, heads, last, target, anchors, hidden, rate=0.7):
    """Every row at once, the teacher cut to each head's tokens; for autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for depth, (head, anchor, h) in enumerate(zip(heads, anchors, hidden, strict=True), 1):
        teacher = target(last.flatten(0, 1)[anchor + depth])
        total = total + rate ** (depth - 1) * reference(name, head(h), teacher, head.d2t).sum()
    return total


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("chunk", [2, 0])
def test_heads_that_train_get_the_gradient_of_the_whole_loss(name, vocabulary, shared, chunk, case):
    target, last, anchors, hidden = case
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64).requires_grad_()  # noqa: E731
    torch.manual_seed(3)
    d2t = torch.tensor(REDUCED) if vocabulary == "reduced" else None
    size = V if d2t is None else len(d2t)
    heads = [Head(leaf(size, D), leaf(size), 0.7, 5.0, d2t) for _ in anchors]
    heads = [heads[0]] * len(anchors) if shared else heads
    frozen = dataclasses.replace(target, weight=target.weight.clone().requires_grad_())
    leaves = [h.clone().requires_grad_() for h in hidden]
    weights = list({id(w): w for head in heads for w in (head.weight, head.bias)}.values())
    given = [
        DraftStep(h, a, j, g, {}) for j, (h, a, g) in enumerate(zip(leaves, anchors, heads, strict=True), 1)
    ]
    total, _ = Objective(DIVERGENCES[name], partial(decay, rate=0.7), chunk)(given, last, frozen, {})
    want = loss_by_the_book(name, heads, last, target, anchors, leaves)
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    got = torch.autograd.grad(total, leaves + weights)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves + weights), rtol=0, atol=1e-12)
    (2 * Objective(DIVERGENCES[name], constant, chunk)(given, last, frozen, {})[0]).backward()
    assert frozen.weight.grad is None
    assert all(w.grad is not None for w in weights)


def test_a_token_outside_the_draft_vocabulary_is_a_miss(case):
    target, last, anchors, _ = case
    ids = torch.tensor(REDUCED)
    teachers = [target(last.flatten(0, 1)[a + j]) for j, a in enumerate(anchors, 1)]
    # Logits are the hidden states: the draft that is the target's own row, cut to what it knows.
    head = Head(torch.eye(len(REDUCED), dtype=torch.float64), d2t=ids)
    given = steps(head, anchors, [t[:, ids] for t in teachers])
    _, scored = Objective(kl, constant)(given, last, target, {})
    for row, teacher in zip(scored, teachers, strict=True):
        p = teacher.softmax(-1)
        known = sum(best in REDUCED for best in p.argmax(-1).tolist())
        assert row.agreed == known
        assert row.alpha == pytest.approx(p[:, ids].sum().item(), abs=1e-12)  # never more than p's own mass
    assert sum(row.agreed for row in scored) < sum(row.rows for row in scored)


def test_a_perfect_draft_costs_nothing(case):
    head, last, anchors, _ = case
    flat = last.flatten(0, 1)
    perfect = [flat[a + depth].clone().requires_grad_() for depth, a in enumerate(anchors, 1)]
    total, scored = Objective(kl, constant)(steps(head, anchors, perfect), last, head, {})
    assert abs(total.item()) < 1e-12
    assert all(row.agreed == row.rows for row in scored)
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(total, perfect))


def test_a_token_the_target_rules_out_adds_nothing(case):
    _, last, anchors, hidden = case
    bias = torch.zeros(V, dtype=torch.float64)
    bias[3] = -torch.inf
    head = Head(torch.ones(V, D, dtype=torch.float64), bias)
    plain = dataclasses.replace(head, bias=torch.zeros(V, dtype=torch.float64))
    leaves = [h.clone().requires_grad_() for h in hidden]
    total, _ = Objective(kl, constant)(steps(plain, anchors, leaves), last, head, {})
    assert torch.isfinite(total)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, leaves))


def test_nothing_supervised_is_zero(case):
    head, last, _, _ = case
    total, scored = Objective(kl, constant)([], last, head, {})
    assert total.item() == 0.0
    assert scored == []


def test_autocast_leaves_the_sum_in_full_precision(case):
    head, last, anchors, hidden = case
    head = Head(head.weight.float(), head.bias.float())
    leaves = [h.float().requires_grad_() for h in hidden]
    objective = Objective(kl, lambda depth: decay(depth, 0.8))
    with torch.autocast("cpu", torch.bfloat16):
        total, scored = objective(steps(head, anchors, leaves), last.float(), head, {})
    assert total.dtype == torch.float32
    want = sum(decay(row.depth, 0.8) * row.divergence for row in scored)
    assert total.item() == pytest.approx(want, rel=1e-6)


def test_weights():
    assert [constant(j) for j in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert [decay(j, 0.5) for j in (1, 2, 3)] == [1.0, 0.5, 0.25]

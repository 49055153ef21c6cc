"""The loss: gradients against finite differences and autograd, chunks, weights, auxiliary losses."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model.head import Head
from distill.losses.divergences import JSD, LKHybrid, ReverseKL, TopK, ce, kl, lk, tv
from distill.losses.objective import Objective
from distill.losses.weights import DPace, Streak, constant, decay
from drafters.base import DraftStep

V = 11
REDUCED = [7, 2, 9, 4, 0]  # the target's ids of a draft vocabulary
FLOOR, BETA, K, FADE = 1e-10, 0.3, 3, 3.0
DIVERGENCES = {
    "kl": kl,
    "ce": ce,
    "topk": TopK(K),
    "reverse_kl": ReverseKL(FLOOR),
    "jsd": JSD(BETA),
    "tv": tv,
    "lk": lk,
    "lk_hybrid": LKHybrid(FADE),
}
WEIGHTS = {"decay": partial(decay, rate=0.7), "streak": Streak(0.1, 0.0), "dpace": DPace(0.5, 0.0)}


def reference(name: str, logits, teacher, d2t=None):
    """(M, V'), (M, V) -> (M,) by the book and over the target's whole vocabulary, for autograd."""
    ids = torch.arange(V) if d2t is None else d2t
    p, known = teacher.softmax(-1), logits.softmax(-1)
    q = torch.zeros_like(p).index_copy(1, ids, known)  # 0 where the draft has no token
    alpha = torch.minimum(p, q).sum(-1)
    log_q = torch.zeros_like(p).index_copy(1, ids, known.log())  # misses left out
    m = BETA * p + (1 - BETA) * q

    def log_ratio(a, b):
        return torch.where(a > 0, (a.clamp_min(1e-300) / b).log(), 0.0)

    forward = (p[:, ids] * (p[:, ids] / known).log()).sum(-1)
    if name == "kl":
        return forward
    if name == "ce":
        return -log_q.gather(1, teacher.argmax(-1, keepdim=True))[:, 0]
    if name == "topk":
        top = p.topk(K).indices
        return -(p * log_q).gather(1, top).sum(-1)
    if name == "reverse_kl":
        return (q * log_ratio(q, p.clamp_min(FLOOR))).sum(-1)
    if name == "jsd":
        return BETA * (p * log_ratio(p, m)).sum(-1) + (1 - BETA) * (q * log_ratio(q, m)).sum(-1)
    if name == "tv":
        return (p - q).abs().sum(-1) / 2
    if name == "lk":
        return -alpha.log()
    w = (-FADE * alpha.detach()).exp()
    return w * forward + (1 - w) * (1 - alpha)


def steps(head, anchors, hidden, aux=None):
    return [
        DraftStep(h, a, depth, head, aux[depth - 1] if aux else {})
        for depth, (a, h) in enumerate(zip(anchors, hidden, strict=True), 1)
    ]


def drafted(head, vocabulary: str):
    """The target's head, or one that reads but five of its tokens."""
    if vocabulary == "full":
        return head
    ids = torch.tensor(REDUCED)
    return dataclasses.replace(head, weight=head.weight[ids], bias=head.bias[ids], d2t=ids)


@pytest.mark.parametrize("name", sorted(DIVERGENCES.keys() - {"lk_hybrid"}))  # one factor is held constant
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("chunk", [2, 0])
def test_gradients_are_those_of_finite_differences(name, vocabulary, chunk, ragged):
    head, last, anchors, hidden = ragged
    objective = Objective(DIVERGENCES[name], lambda depth: decay(depth, 0.8), chunk)
    own = drafted(head, vocabulary)

    def loss(h):
        return objective(steps(own, anchors, h), last, head, {})[0]

    leaves = [h.clone().requires_grad_() for h in hidden]
    got = torch.autograd.grad(loss(leaves), leaves)
    step = 1e-5
    for leaf, gradient in zip(leaves, got, strict=True):
        values = leaf.detach().view(-1)
        for i, slope in enumerate(gradient.flatten().tolist()):
            kept = values[i].item()
            ends = []
            for end in (kept + step, kept - step):
                values[i] = end
                ends.append(loss(leaves).item())
            values[i] = kept
            assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
def test_the_loss_is_the_weighted_sum_of_divergences_at_the_right_rows(name, vocabulary, ragged):
    head, last, anchors, hidden = ragged
    own = drafted(head, vocabulary)
    rate = 0.6
    leaves = [h.clone().requires_grad_() for h in hidden]
    objective = Objective(DIVERGENCES[name], lambda depth: decay(depth, rate))
    total, scored = objective(steps(own, anchors, leaves), last, head, {})
    got = torch.autograd.grad(total, leaves)

    again = [h.clone().requires_grad_() for h in hidden]
    want = torch.zeros((), dtype=torch.float64)
    flat = last.flatten(0, 1)
    for depth, (anchor, h) in enumerate(zip(anchors, again, strict=True), 1):
        teacher = head(flat[anchor + depth])  # depth j at anchor t is judged by row t + j
        rows = reference(name, own(h), teacher, own.d2t)
        want = want + rate ** (depth - 1) * rows.sum()
        log = scored[depth - 1]
        assert (log.depth, log.rows) == (depth, len(anchor))
        assert log.divergence == pytest.approx(rows.sum().item(), abs=1e-12)
        assert log.agreed == (own.target_ids(own(h).argmax(-1)) == teacher.argmax(-1)).sum()
        alpha = 1 - reference("tv", own(h), teacher, own.d2t)
        assert log.alpha == pytest.approx(alpha.sum().item(), abs=1e-12)
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, torch.autograd.grad(want, again), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_chunks_do_not_change_the_result(name, weights, ragged):
    head, last, anchors, hidden = ragged
    results = []
    for chunk in (1, 2, 3, 100, 0):
        leaves = [h.clone().requires_grad_() for h in hidden]
        objective = Objective(DIVERGENCES[name], WEIGHTS[weights], chunk)
        total, scored = objective(steps(head, anchors, leaves), last, head, {})
        results.append((total, *torch.autograd.grad(total, leaves), torch.tensor(scored)))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, check_dtype=False)


def test_auxiliary_losses_are_weighted_like_their_depth(ragged):
    head, last, anchors, hidden = ragged
    aux = [{"feature": torch.ones(len(a), dtype=torch.float64) * 2} for a in anchors]
    objective = Objective(kl, lambda depth: decay(depth, 0.5))
    plain, _ = objective(steps(head, anchors, hidden), last, head, {})
    total, _ = objective(steps(head, anchors, hidden, aux), last, head, {"feature": 3.0})
    want = 3.0 * 2 * sum(0.5**i * len(a) for i, a in enumerate(anchors))
    assert (total - plain).item() == pytest.approx(want, abs=1e-12)


def loss_by_the_book(name, weights, heads, last, target, anchors, hidden):
    """Every row at once, the weights by hand; for autograd."""
    values, alphas = {}, {}
    for depth, (head, anchor, h) in enumerate(zip(heads, anchors, hidden, strict=True), 1):
        teacher = target(last.flatten(0, 1)[anchor + depth])
        rows = reference(name, head(h), teacher, head.d2t)
        accepted = 1 - reference("tv", head(h), teacher, head.d2t).detach()
        for a, value, alpha in zip(anchor.tolist(), rows, accepted.tolist(), strict=True):
            values[a, depth], alphas[a, depth] = value, alpha
    return sum(weight_by_hand(weights, alphas, a, depth) * value for (a, depth), value in values.items())


def weight_by_hand(weights, alphas, anchor, depth) -> float:
    """Sum over the depths from this one on of the product up to there."""
    if weights == "decay":
        return 0.7 ** (depth - 1)
    s = {"streak": 0.1, "dpace": 0.5}[weights]
    last = max(j for a, j in alphas if a == anchor)
    smooth = {j: (1 - s) * alphas[anchor, j] + s for j in range(1, last + 1)}
    if weights == "streak":
        smooth[depth] = 1.0  # the derivative with respect to its own
    return sum(math.prod(smooth[i] for i in range(1, j + 1)) for j in range(depth, last + 1))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("heads", ["frozen", "shared", "own"])
@pytest.mark.parametrize("chunk", [2, 0])
def test_every_gradient_is_that_of_the_whole_loss(name, weights, vocabulary, heads, chunk, ragged):
    target, last, anchors, hidden = ragged
    torch.manual_seed(3)
    own = [drafted(target, vocabulary) for _ in anchors]
    if heads != "frozen":
        drawn = [(torch.randn_like(g.weight), torch.randn_like(g.bias)) for g in own]
        own = [
            dataclasses.replace(g, weight=w.requires_grad_(), bias=b.requires_grad_())
            for g, (w, b) in zip(own, drawn, strict=True)
        ]
    if heads == "shared":
        own = own[:1] * len(anchors)
    leaves = [h.clone().requires_grad_() for h in hidden]
    if heads != "frozen":
        leaves += list({id(w): w for head in own for w in (head.weight, head.bias)}.values())
    given = [
        DraftStep(h, a, j, g, {}) for j, (h, a, g) in enumerate(zip(leaves, anchors, own, strict=False), 1)
    ]
    total, _ = Objective(DIVERGENCES[name], WEIGHTS[weights], chunk)(given, last, target, {})
    want = loss_by_the_book(name, weights, own, last, target, anchors, leaves[:3])
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    got = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves), rtol=0, atol=1e-12)


def test_a_head_that_trains_leaves_the_targets_alone(ragged):
    """Nor does what is upstream of frozen hidden states get anything."""
    target, last, anchors, hidden = ragged
    mine = dataclasses.replace(target, weight=target.weight.clone().requires_grad_(), bias=None)
    theirs = dataclasses.replace(target, weight=target.weight.clone().requires_grad_())
    total, _ = Objective(kl, constant)(steps(mine, anchors, hidden), last, theirs, {})
    (2 * total).backward()
    assert mine.weight.grad.abs().max() > 1e-3
    assert theirs.weight.grad is None
    assert all(h.grad is None for h in hidden)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_rounds_and_no_more(name, vocabulary, dtype, ragged):
    """Against full precision on the same, rounded numbers."""
    target, last, anchors, hidden = ragged
    results = []
    for cast in (lambda t: t.to(dtype), lambda t: t.to(dtype).double()):
        head = dataclasses.replace(target, weight=cast(target.weight), bias=cast(target.bias))
        own = drafted(head, vocabulary)
        own = dataclasses.replace(own, weight=own.weight.clone().requires_grad_())
        leaves = [cast(h).requires_grad_() for h in hidden]
        total, _ = Objective(DIVERGENCES[name], WEIGHTS["dpace"], 3)(
            steps(own, anchors, leaves), cast(last), head, {}
        )
        total.backward()
        assert all(w.grad.dtype == w.dtype for w in (*leaves, own.weight))
        results.append((total, own.weight.grad, *(h.grad for h in leaves)))
    limit = 1e-5 if dtype == torch.float32 else 0.06
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= limit * want.abs().max().clamp_min(0.1)


def test_no_block_is_larger_than_a_chunk():
    """Neither logits nor a head's gradient are ever made for all rows at once."""
    tokens, width, vocab, chunk = 96, 8, 160, 12
    target = Head(torch.randn(vocab, width))
    own = Head(torch.randn(vocab, width).requires_grad_(), torch.zeros(vocab, requires_grad=True))
    anchors = [torch.arange(tokens - j) for j in (1, 2, 3)]
    hidden = [torch.randn(len(a), width, requires_grad=True) for a in anchors]

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    for name in DIVERGENCES:
        for weights in WEIGHTS.values():
            with Largest() as seen:
                objective = Objective(DIVERGENCES[name], weights, chunk)
                objective(steps(own, anchors, hidden), torch.randn(1, tokens, width), target, {})[
                    0
                ].backward()
            assert seen.numel == chunk * vocab, name


def test_a_token_outside_the_draft_vocabulary_is_a_miss(ragged):
    target, last, anchors, _ = ragged
    ids = torch.tensor(REDUCED)
    teachers = [target(last.flatten(0, 1)[a + j]) for j, a in enumerate(anchors, 1)]
    # Logits are the hidden states: the draft that is the target's own row, cut to what it knows.
    head = Head(torch.eye(len(REDUCED), dtype=torch.float64), d2t=ids)
    given = steps(head, anchors, [t[:, ids] for t in teachers])
    _, scored = Objective(tv, constant)(given, last, target, {})
    for row, teacher in zip(scored, teachers, strict=True):
        p = teacher.softmax(-1)
        known = sum(best in REDUCED for best in p.argmax(-1).tolist())
        assert row.agreed == known
        assert row.alpha == pytest.approx(p[:, ids].sum().item(), abs=1e-12)  # never more than p's own mass
    assert sum(row.agreed for row in scored) < sum(row.rows for row in scored)


def test_a_perfect_draft_costs_nothing(ragged):
    head, last, anchors, _ = ragged
    flat = last.flatten(0, 1)
    perfect = [flat[a + depth].clone().requires_grad_() for depth, a in enumerate(anchors, 1)]
    total, scored = Objective(kl, constant)(steps(head, anchors, perfect), last, head, {})
    assert abs(total.item()) < 1e-12
    assert all(row.agreed == row.rows for row in scored)
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(total, perfect))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_token_the_target_rules_out_leaves_all_finite(name, dtype, ragged):
    _, last, anchors, hidden = ragged
    bias = torch.zeros(V, dtype=dtype)
    bias[3] = -torch.inf
    head = Head(torch.ones(V, last.shape[-1], dtype=dtype), bias)
    plain = dataclasses.replace(head, bias=torch.zeros(V, dtype=dtype))
    leaves = [h.to(dtype).requires_grad_() for h in hidden]
    total, _ = Objective(DIVERGENCES[name], constant)(steps(plain, anchors, leaves), last.to(dtype), head, {})
    assert torch.isfinite(total)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, leaves))


def test_nothing_supervised_is_zero(ragged):
    head, last, _, _ = ragged
    total, scored = Objective(kl, constant)([], last, head, {})
    assert total.item() == 0.0
    assert scored == []


def test_autocast_leaves_the_sum_in_full_precision(ragged):
    head, last, anchors, hidden = ragged
    head = Head(head.weight.float(), head.bias.float())
    leaves = [h.float().requires_grad_() for h in hidden]
    objective = Objective(kl, lambda depth: decay(depth, 0.8))
    with torch.autocast("cpu", torch.bfloat16):
        total, scored = objective(steps(head, anchors, leaves), last.float(), head, {})
    assert total.dtype == torch.float32
    want = sum(decay(row.depth, 0.8) * row.divergence for row in scored)
    assert total.item() == pytest.approx(want, rel=1e-6)

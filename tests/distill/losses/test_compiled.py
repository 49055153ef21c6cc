"""The compiled passes of the objective: against the reference, and what happens where nothing compiles."""

import dataclasses
import shutil

import pytest
import torch
from dense import steps

from decode.model.head import Head
from distill.losses import reference
from distill.losses.divergences import JSD, NLLTV, LKHybrid, ReverseKL, TopK, kl, lk, nll
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import DPace, Streak, constant
from drafters.base import DraftStep

compiled = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler, and so nothing to compile"
)
REDUCED = [7, 2, 9, 4, 0]  # the target's ids of a draft vocabulary
TEXT = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(4))
WEIGHTS = {
    "constant": (constant, reference.constant),
    "streak": (Streak(0.1, 0.0), lambda a, c, i: reference.streak(a, c, i, 0.1)),
    "dpace by token": (DPace(0.5, 0.0, "token"), lambda a, c, i: reference.dpace(a, c, i, 0.5)),
}
CASES = [  # divergence, the same in the reference, draft vocabulary, weights, soft cap
    (kl, reference.kl, "full", "streak", None),
    (kl, reference.kl, "reduced", "constant", 2.0),
    (LKHybrid(3.0), lambda r: reference.lk_hybrid(r, 3.0), "reduced", "dpace by token", None),
    (lk, reference.lk, "full", "constant", None),
    (JSD(0.3), lambda r: reference.jsd(r, 0.3), "full", "constant", None),
    (ReverseKL(1e-10), lambda r: reference.reverse_kl(r, 1e-10), "full", "constant", None),
    (nll, reference.nll, "reduced", "constant", None),
    (NLLTV(0.1, 1.8), lambda r: reference.nll_tv(r, 0.1, 1.8), "reduced", "constant", None),
]


@compiled
@pytest.mark.ci("kl-kl-reduced-constant-2.0", "divergence2-<lambda>-reduced-dpace by token-None")
@pytest.mark.parametrize(("divergence", "plain", "vocabulary", "weights", "softcap"), CASES)
def test_value_and_gradients_are_those_of_the_reference(
    divergence, plain, vocabulary, weights, softcap, ragged
):
    target, last, anchors, hidden = ragged
    target = dataclasses.replace(target, softcap=softcap)
    ids = torch.arange(11) if vocabulary == "full" else torch.tensor(REDUCED)
    weight, bias = (t[ids].clone().requires_grad_() for t in (target.weight, target.bias))
    d2t = None if vocabulary == "full" else ids
    own = dataclasses.replace(target, weight=weight, bias=bias, d2t=d2t)
    leaves = [*(h.clone().requires_grad_() for h in hidden), weight, bias]
    given = [DraftStep(h, a, j, own, {}) for j, (h, a) in enumerate(zip(leaves, anchors, strict=False), 1)]
    objective = Objective(divergence, WEIGHTS[weights][0], 3, kernels := Kernels())
    total, scored = objective(given, last, target, {}, tokens=TEXT)
    assert kernels.take(divergence)  # it did compile
    parts = plain, WEIGHTS[weights][1]
    want = reference.loss(given, last, target, *parts, tokens=TEXT, by_token="token" in weights)
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    got = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves), rtol=0, atol=1e-12)
    _, eager = Objective(divergence, WEIGHTS[weights][0])(given, last, target, {}, tokens=TEXT)
    for row, same in zip(scored, eager, strict=True):
        assert tuple(row) == pytest.approx(tuple(same), abs=1e-12)


def wide(dtype, rows=9, width=8, vocab=100):
    """Target head, own head, hidden states of the target, anchors and hidden states of the draft."""
    dice = torch.Generator().manual_seed(0)
    heads = [torch.randn(vocab, width, generator=dice).to(dtype) for _ in range(2)]
    last = torch.randn(1, rows, width, generator=dice).to(dtype)
    anchors = [torch.arange(rows - j) for j in (1, 2)]
    hidden = [torch.randn(len(a), width, generator=dice).to(dtype) for a in anchors]
    return Head(heads[0]), Head(heads[1]), last, anchors, hidden


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_rounds_and_no_more(dtype):
    results = []
    for cast, kernels in ((lambda t: t, Kernels()), (lambda t: t.double(), None)):
        target, own, last, anchors, hidden = wide(dtype)
        heads = [dataclasses.replace(h, weight=cast(h.weight)) for h in (target, own)]
        leaves = [cast(h).requires_grad_() for h in hidden]
        objective = Objective(kl, constant, 4, kernels)
        total, _ = objective(steps(heads[1], anchors, leaves), cast(last), heads[0], {})
        results.append((total, *torch.autograd.grad(total, leaves)))
    limit = 1e-5 if dtype == torch.float32 else 0.06
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= limit * want.abs().max().clamp_min(0.1)


@compiled
def test_a_token_the_target_rules_out_leaves_all_finite():
    target, own, last, anchors, hidden = wide(torch.float32)
    bias = torch.zeros(100)
    bias[3] = -torch.inf
    leaves = [h.requires_grad_() for h in hidden]
    for divergence in (kl, lk):
        objective = Objective(divergence, constant, 4, Kernels())
        total, _ = objective(steps(own, anchors, leaves), last, dataclasses.replace(target, bias=bias), {})
        assert torch.isfinite(total)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, leaves))


@compiled
def test_the_same_numbers_come_out_whatever_was_there_before():
    """A run that is resumed compiles anew, and has had other rows in its blocks."""
    results = []
    for warm_up in (False, True):
        objective = Objective(kl, constant, 4, Kernels())
        target, own, last, anchors, hidden = wide(torch.bfloat16)
        if warm_up:
            objective(steps(own, anchors, [3 * h for h in hidden]), 2 * last, target, {})
        leaves = [h.requires_grad_() for h in hidden]
        total, _ = objective(steps(own, anchors, leaves), last, target, {})
        results.append((total, *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_a_compiler_it_goes_on_and_says_so(monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    target, own, last, anchors, hidden = wide(torch.float32)
    kernels = Kernels()
    given = steps(own, anchors, hidden)
    results = [Objective(kl, constant, 4, k)(given, last, target, {})[1] for k in (kernels, kernels, None)]
    assert results[0] == results[1] == results[2]
    assert capsys.readouterr().out == "compile_objective: RuntimeError: no C++ compiler; it goes on without\n"
    assert not kernels.take(kl)


def test_a_failure_after_the_first_pass_is_not_hidden():
    kernels = Kernels()
    assert kernels.attempt(lambda: 1, lambda: 2) == 1
    with pytest.raises(ZeroDivisionError):
        kernels.attempt(lambda: 1 // 0, lambda: 2)


def test_top_k_is_left_to_torch():
    assert not Kernels().take(TopK(3))

"""The chunked loss, compiled or not: values and gradients against the plain reference."""

import dataclasses
from itertools import cycle, product

import pytest
import torch
from compilers import needs_compiler
from dense import steps
from loss_pairs import (
    DIVERGENCES,
    FADE,
    OBJECTIVES,
    PAIRS,
    TEXT,
    WEIGHT_PAIRS,
    WEIGHTS,
    V,
    acceptance_of,
    drafted,
    rounded,
    trainable,
)
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model.head import Head
from distill.losses import reference
from distill.losses.chunked_logits import Student, TargetProbs, Teacher
from distill.losses.divergences import TopK, kl
from distill.losses.objective import Objective
from distill.losses.row_plan import RowPlan
from distill.losses.row_scores import Kernels
from distill.losses.weights import constant, decay, weigh
from drafters.base import DraftStep


def test_every_objective_is_compared():
    """Write its formula plainly, as a function of its yaml's name in `distill.losses.reference`."""
    assert set(PAIRS) == set(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_is_the_slope_of_the_value(name):
    generator = torch.Generator().manual_seed(1)
    p, q, direction = torch.randn(3, 20, V, generator=generator, dtype=torch.float64)
    text = torch.randint(V, (20,), generator=generator)

    def given(logits):
        target = TargetProbs(p, p.softmax(-1), p.logsumexp(-1), p.argmax(-1), None, text)
        draft = logits.softmax(-1)
        alpha = torch.minimum(target.p, draft).sum(-1)
        student = Student(logits.clone(), draft, logits.logsumexp(-1), logits.argmax(-1), alpha)
        return student, Teacher(target, slice(None))

    def slope(name):
        ahead, behind = (OBJECTIVES[name][0](*given(q + sign * direction))[0] for sign in (1e-6, -1e-6))
        return (ahead - behind) / 2e-6

    want = slope(name)
    if name == "lk_hybrid":  # its weight takes no gradient
        weight = torch.exp(-FADE * given(q)[0].alpha)
        want = weight * slope("kl") + (1 - weight) * slope("tv")
    got = (OBJECTIVES[name][0](*given(q))[1] * direction).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
def test_what_is_logged_of_a_depth_is_summed_over_its_rows(name, vocabulary, ragged):
    head, last, anchors, hidden = ragged
    given = steps(drafted(head, vocabulary), anchors, hidden)
    chunked, plain = PAIRS[name]
    _, scored = Objective(chunked, constant, 3)(given, last, head, {}, tokens=TEXT)
    alive: dict[int, float] = {}  # anchor -> chance to accept all depths so far
    for step, log in zip(given, scored, strict=True):
        rows = reference.distributions(step, last, head, TEXT)
        assert (log.depth, log.rows) == (step.depth, len(step.anchor))
        assert log.divergence.item() == pytest.approx(plain(rows).sum().item(), abs=1e-12)
        agreed = step.head.target_ids(step.head(step.hidden).argmax(-1)) == rows.p.argmax(-1)
        assert log.agreed == agreed.sum()
        assert log.alpha.item() == pytest.approx(rows.overlap.sum().item(), abs=1e-12)
        for anchor, alpha in zip(step.anchor.tolist(), rows.overlap.tolist(), strict=True):
            alive[anchor] = alive.get(anchor, 1.0) * alpha
        assert log.survival.item() == pytest.approx(sum(alive[a] for a in step.anchor.tolist()), abs=1e-12)


def test_auxiliary_losses_and_row_weights_are_of_the_reference(ragged):
    head, last, anchors, hidden = ragged
    torch.manual_seed(5)
    given = [
        step._replace(aux={"feature": torch.rand(len(a)).double()}, weight=torch.rand(len(a)).double())
        for step, a in zip(steps(head, anchors, hidden), anchors, strict=True)
    ]
    total, _ = Objective(kl, WEIGHTS["streak"])(given, last, head, {"feature": 3.0})
    plain = WEIGHT_PAIRS["streak"][1]
    want = reference.loss(given, last, head, reference.kl, plain, aux_weights={"feature": 3.0})
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_steps_that_are_no_drafts_have_their_depths_weight_times_their_own(weights, ragged):
    head, _, anchors, hidden = ragged
    given, kind = steps(head, anchors, hidden), WEIGHTS[weights]
    chances = [torch.linspace(0.2, 0.9, len(a), dtype=torch.float64) for a in anchors]
    want = weigh(kind, given, RowPlan(given, 4, torch.device("cpu")), chances, 0.0)
    others = [given[1]._replace(training_only=True, weight=0.25), given[0]._replace(depth=0, weight=0.5)]
    every = [*given, *others]
    plan = RowPlan(every, 4, torch.device("cpu"))
    got = weigh(kind, every, plan, [*chances, chances[1], chances[0]], 0.0)
    torch.testing.assert_close(got, [*want, 0.25 * want[1], torch.full_like(want[0], 0.5)])


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("heads", ["frozen", "shared", "own"])
@pytest.mark.parametrize("chunk", [3, 0])  # of six, four and one rows; all at once
@pytest.mark.covering(pairs=True)
def test_value_and_gradients_are_of_the_reference(name, weights, vocabulary, heads, chunk, ragged):
    target, last, anchors, hidden = ragged
    own = [drafted(target, vocabulary) for _ in anchors]
    if heads != "frozen":
        own = [trainable(head, torch.randn_like) for head in own]
    if heads == "shared":
        own = own[:1] * len(anchors)
    leaves = [h.clone().requires_grad_() for h in hidden]
    given = [DraftStep(*row, {}) for row in zip(leaves, anchors, (1, 2, 3), own, strict=True)]
    if heads != "frozen":
        leaves += list({id(w): w for head in own for w in (head.weight, head.bias)}.values())
    total, _ = Objective(DIVERGENCES[name], WEIGHTS[weights], chunk)(given, last, target, {}, tokens=TEXT)
    assert_is_reference(total, leaves, given, last, target, name, weights)


def assert_is_reference(total, leaves, given, last, target, name: str, weights: str) -> None:
    parts = PAIRS[name][1], WEIGHT_PAIRS[weights][1]
    want = reference.loss(given, last, target, *parts, tokens=TEXT, acceptance=acceptance_of(weights))
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    got = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves), rtol=0, atol=1e-12)


COMPILED = [  # divergence, draft vocabulary, weights, soft cap
    ("kl", "full", "streak", None),
    ("kl", "reduced", "constant", 2.0),
    ("lk_hybrid", "reduced", "dpace by token", None),
    ("lk", "full", "constant", None),
    ("jsd", "full", "constant", None),
    ("reverse_kl", "full", "constant", None),
    ("nll", "reduced", "constant", None),
    ("nll_tv", "reduced", "constant", None),
]


@needs_compiler
@pytest.mark.parametrize(("name", "vocabulary", "weights", "softcap"), COMPILED)
@pytest.mark.ci("kl-reduced-constant-2.0", "lk_hybrid-reduced-dpace by token-None")
def test_compiled_value_and_gradients_are_of_the_reference(name, vocabulary, weights, softcap, ragged):
    target, last, anchors, hidden = ragged
    target = dataclasses.replace(target, softcap=softcap)
    own = trainable(drafted(target, vocabulary))
    leaves = [*(h.clone().requires_grad_() for h in hidden), own.weight, own.bias]
    given, kernels = steps(own, anchors, leaves[:3]), Kernels()
    objective = Objective(DIVERGENCES[name], WEIGHTS[weights], 3, kernels)
    total, scored = objective(given, last, target, {}, tokens=TEXT)
    assert kernels.take(DIVERGENCES[name]), "it did not compile"
    assert_is_reference(total, leaves, given, last, target, name, weights)
    _, eager = Objective(DIVERGENCES[name], WEIGHTS[weights])(given, last, target, {}, tokens=TEXT)
    for row, same in zip(scored, eager, strict=True):
        torch.testing.assert_close(row, same, rtol=0, atol=1e-12)


def test_head_that_trains_leaves_the_targets_unchanged(ragged):
    """Nor does what is upstream of frozen hidden states get anything."""
    target, last, anchors, hidden = ragged
    mine = dataclasses.replace(target, weight=target.weight.clone().requires_grad_(), bias=None)
    theirs = dataclasses.replace(target, weight=target.weight.clone().requires_grad_())
    total, _ = Objective(kl, constant)(steps(mine, anchors, hidden), last, theirs, {})
    (2 * total).backward()
    assert mine.weight.grad.abs().max() > 1e-3
    assert theirs.weight.grad is None
    assert all(h.grad is None for h in hidden)


EAGER = [*product(DIVERGENCES, ["full", "reduced"], [None])]
KERNELS = [pytest.param("kl", "full", Kernels, marks=needs_compiler, id="kl-compiled")]


@pytest.mark.parametrize(("name", "vocabulary", "kernels"), EAGER + KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_rounds_and_no_more(name, vocabulary, kernels, dtype, ragged):
    """Against full precision on the same, rounded numbers."""
    results = []
    low = rounded(ragged, dtype)
    for given, kernel in ((low, kernels and kernels()), (rounded(low, torch.float64), None)):
        head, last, anchors, hidden = given
        own, leaves = trainable(drafted(head, vocabulary)), [h.clone().requires_grad_() for h in hidden]
        objective = Objective(DIVERGENCES[name], WEIGHTS["dpace"], 3, kernel)
        total, _ = objective(steps(own, anchors, leaves), last, head, {}, tokens=TEXT)
        total.backward()
        assert all(w.grad.dtype == w.dtype for w in (*leaves, own.weight))
        results.append((total, own.weight.grad, *(h.grad for h in leaves)))
    limit = 1e-5 if dtype == torch.float32 else 0.06
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= limit * want.abs().max().clamp_min(0.1)


def test_no_block_is_larger_than_a_chunk():
    """Neither logits nor a head's gradient are ever made for all rows at once."""
    tokens, width, vocab, chunk = 96, 8, 160, 12
    target, last = Head(torch.randn(vocab, width)), torch.randn(1, tokens, width)
    own = Head(torch.randn(vocab, width).requires_grad_(), torch.zeros(vocab, requires_grad=True))
    text = torch.randint(vocab, (1, tokens))
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

    for name, weights in zip(DIVERGENCES, cycle(WEIGHTS.values()), strict=False):
        objective = Objective(DIVERGENCES[name], weights, chunk)
        with Largest() as seen:
            objective(steps(own, anchors, hidden), last, target, {}, tokens=text)[0].backward()
        assert seen.numel == chunk * vocab, name


COMPILED_LK = pytest.param("lk", Kernels, marks=needs_compiler, id="lk-compiled")


@pytest.mark.parametrize(("name", "kernels"), [*product(DIVERGENCES, [None]), COMPILED_LK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_token_that_the_target_rules_out_leaves_all_finite(name, kernels, dtype, ragged):
    head, last, anchors, hidden = rounded(ragged, dtype)
    bias = torch.zeros(V, dtype=dtype)
    own = dataclasses.replace(head, weight=torch.ones_like(head.weight), bias=bias, softcap=None)
    target = dataclasses.replace(own, bias=bias.index_fill(0, torch.tensor(3), -torch.inf))
    leaves = [h.requires_grad_() for h in hidden]
    objective = Objective(DIVERGENCES[name], constant, 4, kernels and kernels())
    total, _ = objective(steps(own, anchors, leaves), last, target, {}, tokens=TEXT)
    assert torch.isfinite(total)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, leaves))


@needs_compiler
def test_compiled_numbers_do_not_depend_on_earlier_ones(ragged):
    """A run that is resumed compiles again, and has had other rows in its blocks."""
    target, last, anchors, hidden = rounded(ragged, torch.bfloat16)
    results = []
    for warm_up in (False, True):
        objective = Objective(kl, constant, 4, Kernels())
        if warm_up:
            objective(steps(target, anchors, [3 * h for h in hidden]), 2 * last, target, {})
        leaves = [h.clone().requires_grad_() for h in hidden]
        total, _ = objective(steps(target, anchors, leaves), last, target, {})
        results.append((total, *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_missing_compiler_is_said_and_nothing_compiles(monkeypatch, capsys, ragged):
    def broken(*arguments):
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    target, last, anchors, hidden = ragged
    given, kernels = steps(target, anchors, hidden), Kernels()
    results = [Objective(kl, constant, 4, k)(given, last, target, {})[1] for k in (kernels, kernels, None)]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert "compile_objective: RuntimeError: no C++ compiler" in line
    assert not kernels.take(kl)
    assert not Kernels().take(TopK(3)), "which is left to torch"


def test_failure_after_the_first_compiled_pass_is_not_hidden():
    kernels = Kernels()
    assert kernels.attempt(lambda: 1, lambda: 2) == 1
    with pytest.raises(ZeroDivisionError):
        kernels.attempt(lambda: 1 // 0, lambda: 2)


def test_nothing_supervised_is_zero(ragged):
    head, last, *_ = ragged
    total, scored = Objective(kl, constant)([], last, head, {})
    assert total.item() == 0.0
    assert scored == []


def test_autocast_leaves_the_sum_in_full_precision(ragged):
    head, last, anchors, hidden = rounded(ragged, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        given = steps(head, anchors, [h.requires_grad_() for h in hidden])
        total, scored = Objective(kl, lambda depth: decay(depth, 0.8))(given, last, head, {})
    assert total.dtype == torch.float32
    want = sum(decay(row.depth, 0.8) * row.divergence.item() for row in scored)
    assert total.item() == pytest.approx(want, rel=1e-6)

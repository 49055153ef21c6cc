"""Sums of terms: values and gradients against their terms, the plain reference and plain autograd."""

from __future__ import annotations

import resource
from functools import partial
from itertools import cycle

import pytest
import torch
from compilers import needs_compiler
from dense import steps
from loss_pairs import (
    DIVERGENCES,
    PAIRS,
    TEXT,
    WEIGHT_PAIRS,
    WEIGHTS,
    acceptance_of,
    drafted,
    rounded,
    trainable,
)
from torch.nn import functional as F

from decode.errors import UserError
from decode.model.head import Head
from distill.losses import reference
from distill.losses.chunked_logits import Sweep
from distill.losses.divergences import JSD, TopK, by_autograd, hit, kl, nll, tv
from distill.losses.mix import Mix, MixedTerm, terms_of
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import DPace, Focal, Streak, constant, decay, first
from drafters.base import DraftStep

EXACT = Streak(smoothing=0.0, warmup=0.0, acceptance="token")
HALF = partial(decay, rate=0.5)


def mix(**terms) -> Mix:
    """A mix of (divergence, weights, factor)."""
    return Mix({name: MixedTerm(*term) for name, term in terms.items()})


def computed(objective, weights, given, chunk=3, kernels=None):
    """Total, gradients and logged values of an objective; the head trains."""
    target, last, anchors, hidden, own = given
    leaves = [h.clone().requires_grad_() for h in hidden]
    head = trainable(own)
    total, scored = Objective(objective, weights, chunk, kernels)(
        steps(head, anchors, leaves), last, target, {}, 0.3, TEXT
    )
    total.backward()
    return [total.detach(), *(leaf.grad for leaf in (*leaves, head.weight, head.bias))], scored


def frozen(objective, weights, given, chunk=3, kernels=None):
    """The same with the target's head, which does not train."""
    target, last, anchors, hidden, own = given
    leaves = [h.clone().requires_grad_() for h in hidden]
    total, scored = Objective(objective, weights, chunk, kernels)(
        steps(own, anchors, leaves), last, target, {}, 0.3, TEXT
    )
    return [total.detach(), *torch.autograd.grad(total, leaves)], scored


@pytest.fixture(params=["full", "reduced"])
def given(request, ragged):
    return (*ragged, drafted(ragged[0], request.param))


@pytest.mark.parametrize("run", [computed, frozen])
@pytest.mark.parametrize(("divergence", "weights"), [*zip(DIVERGENCES, cycle(WEIGHTS), strict=False)])
@pytest.mark.covering(pairs=True)
def test_mix_of_one_term_is_that_term_bit_for_bit(divergence, weights, run, given):
    assert_same(DIVERGENCES[divergence], WEIGHTS[weights], run, given, lambda: None)


@needs_compiler
@pytest.mark.parametrize("run", [computed, frozen])
@pytest.mark.proof
def test_compiled_mix_of_one_term_is_that_term_bit_for_bit(run, ragged):
    assert_same(nll, WEIGHTS["dpace by token"], run, (*ragged, ragged[0]), Kernels)


def assert_same(divergence, weights, run, given, kernels) -> None:
    plain, scored = run(divergence, weights, given, 3, kernels())
    mixed, logged = run(mix(only=(divergence,)), weights, given, 3, kernels())
    assert all(torch.equal(one, other) for one, other in zip(plain, mixed, strict=True))
    for row, same in zip(scored, logged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row[2:], same[2:], strict=True))


PARTNERS = list(zip(DIVERGENCES, reversed(DIVERGENCES), strict=True))


@pytest.mark.parametrize("pair", PARTNERS, ids="+".join)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("others", WEIGHTS)
@pytest.mark.parametrize("chunk", [1, 0])
@pytest.mark.covering(pairs=True, rest=False)
def test_mix_of_two_is_the_sum_of_both(pair, weights, others, chunk, given):
    """Every divergence and every weighting: values, and gradients of states and of heads."""
    one, two = (DIVERGENCES[name] for name in pair)
    both = mix(a=(one, None, 0.7), b=(two, WEIGHTS[others], 2.5))
    for run in (computed, frozen):
        mixed, logged = run(both, WEIGHTS[weights], given, chunk)
        parts = run(one, WEIGHTS[weights], given, chunk), run(two, WEIGHTS[others], given, chunk)
        for got, a, b in zip(mixed, parts[0][0], parts[1][0], strict=True):
            torch.testing.assert_close(got, 0.7 * a + 2.5 * b, rtol=0, atol=1e-12)
        torch.testing.assert_close(sum(row.losses.sum() for row in logged), mixed[0], rtol=0, atol=1e-12)
        for row, a, b in zip(logged, parts[0][1], parts[1][1], strict=True):
            torch.testing.assert_close(row.divergences, torch.stack([a.divergence, b.divergence]))
            torch.testing.assert_close(row.losses, torch.cat([0.7 * a.losses, 2.5 * b.losses]))
            torch.testing.assert_close(row.divergence, 0.7 * a.divergence + 2.5 * b.divergence)
            assert (row.agreed, row.alpha) == (a.agreed, a.alpha)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.covering(pairs=True)
def test_mix_is_of_the_reference(name, weights, given):
    """With `kl`, by the plain formulas and autograd."""
    target, last, anchors, hidden, own = given
    head = trainable(own)
    leaves = [h.clone().requires_grad_() for h in hidden]
    rows = steps(head, anchors, leaves)
    objective = Objective(mix(a=(kl, None, 0.5), b=(DIVERGENCES[name], WEIGHTS[weights], 3.0)), HALF, 3)
    total, _ = objective(rows, last, target, {}, tokens=TEXT)
    plain = partial(reference.loss, rows, last, target, tokens=TEXT)
    want = 0.5 * plain(reference.kl, partial(reference.decay, rate=0.5))
    want = want + 3 * plain(PAIRS[name][1], WEIGHT_PAIRS[weights][1], acceptance=acceptance_of(weights))
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)
    all_leaves = [*leaves, head.weight, head.bias]
    got, wanted = torch.autograd.grad(total, all_leaves), torch.autograd.grad(want, all_leaves)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def chain(logits: list[torch.Tensor], labels: list[list[int]]) -> torch.Tensor:
    """Sum of q(x) products over the depths of one anchor each, straight from logits."""
    total = logits[0].new_zeros(())
    for anchor in range(len(logits[0])):
        alive = 1.0
        for depth, rows in enumerate(logits):
            alive = alive * rows[anchor].softmax(-1)[labels[depth][anchor]]
            total = total + alive
    return total


def test_cross_entropy_plus_chain_is_plain_autograds():
    """CE with decay + focal CE + expected accepted length, written with F.cross_entropy; float64."""
    generator = torch.Generator().manual_seed(3)
    width, vocab, length, depths = 4, 9, 8, 4
    head = Head(torch.randn(vocab, width, generator=generator, dtype=torch.float64))
    text = torch.randint(vocab, (1, length), generator=generator)
    last = torch.randn(1, length, width, generator=generator, dtype=torch.float64)
    anchors = torch.arange(length - depths - 1)
    leaves = [
        torch.randn(len(anchors), width, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(depths)
    ]
    terms = mix(ce=(nll,), focal=(nll, Focal(1.0), 4.5), chain=(hit, EXACT, 40.0))
    rows = [DraftStep(leaf, anchors, j, head, {}) for j, leaf in enumerate(leaves, 1)]
    total, scored = Objective(terms, HALF, 2)(rows, last, head, {}, tokens=text)

    logits = [leaf @ head.weight.T for leaf in leaves]
    labels = [text[0, anchors + depth + 1] for depth in range(1, depths + 1)]
    teacher = [(last[0, anchors + depth] @ head.weight.T).argmax(-1) for depth in range(1, depths + 1)]
    entropy = torch.stack(
        [F.cross_entropy(z, x, reduction="none") for z, x in zip(logits, labels, strict=True)], 1
    )
    want = (entropy * 0.5 ** torch.arange(depths)).sum()
    for anchor in range(len(anchors)):
        wrong = [j for j in range(depths) if logits[j][anchor].argmax() != teacher[j][anchor]]
        want = want + (4.5 * entropy[anchor, wrong[0]] if wrong else 0.0)
    length_of = chain(logits, [x.tolist() for x in labels])
    got = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want - 40 * length_of, leaves), rtol=0, atol=1e-12)
    assert sum(row.survival for row in scored).item() == pytest.approx(length_of.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("divergence", "weights"), [(hit, EXACT), (tv, Streak(0.0, 0.0)), (nll, DPace(0.0, 0.0, "token"))]
)
def test_chain_term_has_the_numeric_slope_of_the_expected_length(divergence, weights, ragged):
    """`gradcheck` of the length itself, with the gradient of the term: weights are constants to autograd."""
    head, last, anchors, hidden = ragged
    token = weights.acceptance == "token"

    class Length(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            with torch.enable_grad():
                own = [leaf.detach().requires_grad_() for leaf in leaves]
                mixed = mix(kl=(kl, None, 0.0), chain=(divergence, weights))
                total, _ = Objective(mixed, constant, 2)(
                    steps(head, anchors, own), last, head, {}, tokens=TEXT
                )
                ctx.slopes = torch.autograd.grad(total, own)
            alive: dict[int, torch.Tensor] = {}
            length = last.new_zeros(())
            for step in steps(head, anchors, list(leaves)):
                rows = reference.distributions(step, last, head, TEXT)
                alphas = rows.at_text(rows.q) if token else rows.overlap
                for anchor, alpha in zip(step.anchor.tolist(), alphas, strict=True):
                    alive[anchor] = alive.get(anchor, 1.0) * alpha
                    length = length + alive[anchor]
            return -length

        @staticmethod
        def backward(ctx, grad):
            return tuple(grad * slope for slope in ctx.slopes)

    leaves = [h.clone().requires_grad_() for h in hidden]
    assert torch.autograd.gradcheck(Length.apply, leaves, atol=1e-7)


COMPILED = [
    mix(ce=(nll,), chain=(hit, EXACT, 2.0)),
    mix(ce=(nll,), focal=(nll, Focal(1.0), 4.5), chain=(hit, EXACT, 40.0)),
    mix(kl=(kl,), tv=(tv, None, 0.5), jsd=(JSD(0.3), Focal(2.0, "overlap"), 2.0)),
    mix(kl=(kl,), tv=(tv, None, 0.5)),
]


@needs_compiler
@pytest.mark.parametrize(
    ("objective", "run", "vocabulary"),
    list(zip(COMPILED, cycle([computed, frozen]), ["full", "full", "reduced", "reduced"], strict=False)),
    ids=lambda given: "+".join(given.terms) if isinstance(given, Mix) else None,
)
@pytest.mark.ci("ce+focal+chain-frozen-full")
def test_compiled_mix_is_the_eager_one(objective, run, vocabulary, ragged):
    given, kernels = (*ragged, drafted(ragged[0], vocabulary)), Kernels()
    compiled, logged = run(objective, HALF, given, 3, kernels)
    assert kernels.attempt.works, "it did not compile"
    eager, scored = run(objective, HALF, given, 3)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
    for row, same in zip(logged, scored, strict=True):
        torch.testing.assert_close(row, same, rtol=0, atol=1e-12)


def test_mix_with_a_divergence_that_stays_in_torch_is_not_compiled():
    assert Kernels().take(kl, tv)
    assert not Kernels().take(kl, TopK(3))
    assert not Kernels().take(by_autograd(lambda log_q, teacher: -log_q[:, 0]), kl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("objective", COMPILED, ids=lambda m: "+".join(m.terms))
def test_lower_precision_of_a_mix_rounds_and_no_more(objective, dtype, ragged):
    low = rounded(ragged, dtype)
    results = []
    for row in (low, rounded(low, torch.float64)):
        results.append(computed(objective, HALF, (*row, row[0]))[0])
    limit = 1e-5 if dtype == torch.float32 else 0.06
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= limit * want.abs().max().clamp_min(0.1)


@pytest.mark.parametrize(("terms", "sweeps"), [(1, 1), (2, 1), (3, 2)])
def test_number_of_products_does_not_grow_with_the_terms(terms, sweeps, ragged, monkeypatch):
    """One product a chunk and depth; two where divergences with different weights need acceptances first."""
    head, last, anchors, hidden = ragged
    seen = []
    product_of = Sweep._logits
    monkeypatch.setattr(Sweep, "_logits", lambda *given: seen.append(given[1]) or product_of(*given))
    kinds = {"ce": (nll,), "focal": (nll, Focal(1.0), 4.5), "chain": (hit, EXACT, 40.0)}
    some = mix(**dict(list(kinds.items())[:terms]))
    Objective(some, HALF, 64)(
        steps(head, anchors, [h.requires_grad_() for h in hidden]), last, head, {}, tokens=TEXT
    )
    assert (seen.count("target"), seen.count("draft")) == (sweeps, sweeps * len(anchors))


def test_vocabulary_of_gemma_has_logits_of_one_chunk_at_a_time():
    """262,144 tokens, 3 terms: some blocks of 8 rows, where 7 depths x 120 rows would be 880 MB each."""
    vocab, width, tokens, chunk = 262_144, 2, 128, 8
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(vocab, width, generator=generator))
    last = torch.randn(1, tokens, width, generator=generator)
    text = torch.randint(vocab, (1, tokens), generator=generator)
    anchors = torch.arange(0, tokens - 9, 8)
    leaves = [torch.randn(len(anchors), width, generator=generator).requires_grad_() for _ in range(7)]
    rows = [DraftStep(leaf, anchors, depth, head, {}) for depth, leaf in enumerate(leaves, 1)]
    terms = mix(ce=(nll,), focal=(nll, Focal(1.0), 4.5), chain=(hit, EXACT, 40.0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total, _ = Objective(terms, HALF, chunk)(rows, last, head, {}, tokens=text)
    total.backward()
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    block = 4 * vocab * chunk
    assert used < 14 * block
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


# -- weights ---------------------------------------------------------------------------------------


def test_focal_weight_is_on_the_first_error_only():
    accepted = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    given = accepted, torch.ones_like(accepted, dtype=torch.bool), 0.0, torch.ones_like(accepted)
    assert Focal(1.0)(*given).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert Focal(0.0)(*given).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_focal_weights_by_probability_are_those_of_the_first_error_and_sum_to_its_probability():
    alpha = torch.rand(5, 4, dtype=torch.float64)
    weight = Focal(1.0, "overlap")(alpha, alpha >= 0, 0.0, torch.ones_like(alpha))
    torch.testing.assert_close(weight.sum(1), 1 - alpha.prod(1))
    doubled = Focal(1.0, "overlap")(alpha, alpha >= 0, 0.0, torch.full_like(alpha, 2.0))
    torch.testing.assert_close(doubled, 2 * weight)


def test_first_is_decay_with_rate_0():
    assert [first(depth) for depth in (1, 2, 3)] == [decay(depth, 0) for depth in (1, 2, 3)] == [1, 0, 0]


# -- what is refused -------------------------------------------------------------------------------

ONE = MixedTerm(kl)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "objective.terms: give at least one"),
        ({"a": MixedTerm(kl, None, -1.0)}, "objective.terms.a.factor=-1.0: must be a number, at least 0"),
        ({"a": MixedTerm(kl, None, float("nan"))}, "objective.terms.a.factor=nan"),
        ({"a": MixedTerm(kl, None, float("inf"))}, "objective.terms.a.factor=inf"),
        ({"a": MixedTerm(kl, None, True)}, "objective.terms.a.factor=True"),
        ({"a": MixedTerm(kl, None, 0.0)}, "objective.terms: every factor is 0"),
        ({"a": MixedTerm(kl, constant)}, "objective.terms: every term has weights of its own"),
        ({"a b": ONE}, "objective.terms.a b: the name of a term"),
        ({"a": MixedTerm(Mix({"b": ONE}))}, "objective.terms.a.objective: is a mix itself"),
    ],
)
def test_mix_without_sense_is_refused(terms, said):
    with pytest.raises(UserError) as error:
        Mix(terms)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda: Focal(-1.0), "weights.gamma=-1.0"),
        (lambda: Focal(float("nan")), "weights.gamma=nan"),
        (lambda: Focal(1.0, "text"), "weights.acceptance=text: choose greedy or overlap or token"),
        (lambda: Streak(0.0, 0.0, "greedy"), "weights.acceptance=greedy: choose overlap or token"),
        (lambda: terms_of(kl, partial(decay, rate=-1)), "weights: depth 2 has weight -1"),
        (
            lambda: terms_of(mix(a=(kl,), b=(tv, partial(decay, rate=float("nan")))), constant),
            "objective.terms.b.weights: depth 2 has weight nan",
        ),
    ],
)
def test_weights_without_sense_are_refused(weights, said):
    with pytest.raises(UserError) as error:
        weights()
    assert str(error.value).startswith(said)

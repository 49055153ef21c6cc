"""The chunked loss: values and gradients against the plain reference, chunks, weights, auxiliary losses."""

import dataclasses
from functools import partial
from itertools import cycle

import pytest
import torch
from dense import steps
from torch.utils._python_dispatch import TorchDispatchMode
from workbench import CONF

from decode.model.head import Head
from distill.losses import reference
from distill.losses.divergences import JSD, NLLTV, LKHybrid, ReverseKL, TopK, ce, hit, kl, lk, nll, tv
from distill.losses.objective import Objective
from distill.losses.weights import DPace, Streak, constant, decay
from drafters.base import DraftStep

V = 11
REDUCED = [7, 2, 9, 4, 0]  # the target's ids of a draft vocabulary
FLOOR, BETA, K, FADE = 1e-10, 0.3, 3, 3.0
TEXT = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(4))
# Name -> what trains, and the same in the reference.
PAIRS = {
    "kl": (kl, reference.kl),
    "ce": (ce, reference.ce),
    "nll": (nll, reference.nll),
    "hit": (hit, reference.hit),
    "topk": (TopK(K), partial(reference.topk, k=K)),
    "reverse_kl": (ReverseKL(FLOOR), partial(reference.reverse_kl, floor=FLOOR)),
    "jsd": (JSD(BETA), partial(reference.jsd, beta=BETA)),
    "tv": (tv, reference.tv),
    "nll_tv": (NLLTV(0.1, 1.8), partial(reference.nll_tv, of_nll=0.1, of_tv=1.8)),
    "lk": (lk, reference.lk),
    "lk_hybrid": (LKHybrid(FADE), partial(reference.lk_hybrid, decay=FADE)),
}
WEIGHT_PAIRS = {
    "constant": (constant, reference.constant),
    "decay": (partial(decay, rate=0.7), partial(reference.decay, rate=0.7)),
    "streak": (Streak(0.1, 0.0), partial(reference.streak, smoothing=0.1)),
    "streak by token": (Streak(0.1, 0.0, "token"), partial(reference.streak, smoothing=0.1)),
    "dpace": (DPace(0.5, 0.0), partial(reference.dpace, smoothing=0.5)),
    "dpace by token": (DPace(0.5, 0.0, "token"), partial(reference.dpace, smoothing=0.5)),
}
DIVERGENCES = {name: pair[0] for name, pair in PAIRS.items()}
WEIGHTS = {name: pair[0] for name, pair in WEIGHT_PAIRS.items()}


def test_every_objective_is_compared():
    """One that is not in PAIRS yet needs its formula in `distill.losses.reference`, written plainly."""
    assert set(PAIRS) == {path.stem for path in (CONF / "objective").glob("*.yaml")}


def drafted(head, vocabulary: str):
    """The target's head, or one that reads but five of its tokens."""
    if vocabulary == "full":
        return head
    ids = torch.tensor(REDUCED)
    return dataclasses.replace(head, weight=head.weight[ids], bias=head.bias[ids], d2t=ids)


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
        assert log.divergence == pytest.approx(plain(rows).sum().item(), abs=1e-12)
        agreed = step.head.target_ids(step.head(step.hidden).argmax(-1)) == rows.p.argmax(-1)
        assert log.agreed == agreed.sum()
        assert log.alpha == pytest.approx(rows.overlap.sum().item(), abs=1e-12)
        for anchor, alpha in zip(step.anchor.tolist(), rows.overlap.tolist(), strict=True):
            alive[anchor] = alive.get(anchor, 1.0) * alpha
        assert log.survival == pytest.approx(sum(alive[a] for a in step.anchor.tolist()), abs=1e-12)


def test_auxiliary_losses_and_row_weights_are_those_of_the_reference(ragged):
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


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("vocabulary", ["full", "reduced"])
@pytest.mark.parametrize("heads", ["frozen", "shared", "own"])
@pytest.mark.parametrize("chunk", [3, 0])  # of six, four and one rows; all at once
@pytest.mark.covering(pairs=True)
def test_value_and_gradients_are_those_of_the_reference(name, weights, vocabulary, heads, chunk, ragged):
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
    total, _ = Objective(DIVERGENCES[name], WEIGHTS[weights], chunk)(given, last, target, {}, tokens=TEXT)
    parts = PAIRS[name][1], WEIGHT_PAIRS[weights][1]
    want = reference.loss(given, last, target, *parts, tokens=TEXT, by_token="token" in weights)
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
            steps(own, anchors, leaves), cast(last), head, {}, tokens=TEXT
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
        with Largest() as seen:
            total, _ = Objective(DIVERGENCES[name], weights, chunk)(
                steps(own, anchors, hidden), torch.randn(1, tokens, width), target, {}, tokens=text
            )
            total.backward()
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
    objective = Objective(DIVERGENCES[name], constant)
    total, _ = objective(steps(plain, anchors, leaves), last.to(dtype), head, {}, tokens=TEXT)
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

"""The confidence head learns alpha, changes no draft's probs, and ends chains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from drafter_checks import (
    CHAIN,
    CHUNKS,
    SAMPLED,
    Follower,
    K,
    V,
    batch_of,
    both,
    equal,
    plans_of,
    random_texts,
    unrolled,
)
from exact import check_lossless
from workbench import same, weights

from decode.draft import PAD
from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import Streak, constant
from drafters.checkpoint import io as checkpoint_io


def stateful(pair):
    """A pair whose drafter can have a head."""
    if pair[1].state_size is None:
        pytest.skip("has no states")
    return pair


def lend(pair, seed=0):
    """The pair, with a random head."""
    target, drafter = stateful(pair)
    drafter.add_confidence()
    dice = torch.Generator().manual_seed(seed)
    for weight in drafter.confidence.parameters():
        weight.data = torch.randn(weight.shape, generator=dice).to(weight)
    return target, drafter


@torch.no_grad()
def confidences(drafter, target, texts) -> dict[tuple[int, int, int], float]:
    """(row, anchor, depth) -> what the head says of a state of training."""
    found, length = {}, texts.shape[1]
    for step in drafter.unroll(batch_of(target, texts), target):
        if not step.depth or step.training_only:
            continue
        for flat, logit in zip(step.anchor.tolist(), drafter.confidence(step.hidden), strict=True):
            row, t = divmod(flat, length)
            places = [(row, t, step.depth)]
            if drafter.traits.depth_invariant:
                places += [(row, t - ahead, 1 + ahead) for ahead in range(1, min(K, t + 1))]
            found |= dict.fromkeys(places, float(logit.sigmoid()))
    return found


def test_a_head_changes_no_draft(pair):
    target, drafter = stateful(pair)
    texts = random_texts()

    def drafts():
        follower = Follower(drafter, target, texts, (5, 3))
        return [follower.propose(plan) for plan in plans_of(drafter)]

    before = unrolled(drafter, target, texts), drafts()
    lend(pair)
    after = unrolled(drafter, target, texts), drafts()
    assert before[0].keys() == after[0].keys()
    assert all(probs.equal(after[0][place]) for place, probs in before[0].items())
    assert all(equal(*one) for one in zip(before[1], after[1], strict=True))


@pytest.mark.parametrize("weighting", [constant, Streak(0.1, 0.0)], ids=["constant", "streak"])
@pytest.mark.covering
def test_teaching_a_head_reaches_no_other_weight(pair, weighting):
    target, drafter = stateful(pair)
    if drafter.traits.depth_invariant:
        weighting = constant
    objective, texts, grown = Objective(kl, weighting), random_texts(), []
    trained = {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}
    lend(pair)
    for head in (None, drafter.confidence):
        drafter.zero_grad()
        batch = batch_of(target, texts)
        steps = drafter.unroll(batch, target)
        total, _ = objective(
            steps, batch.last, target.head, drafter.aux_weights_at(1.0), tokens=texts, confidence=head
        )
        if total.requires_grad:
            total.backward()
        grown.append({name: weight.grad.clone() for name, weight in trained.items()})
    assert all(gradient.equal(grown[1][name]) for name, gradient in grown[0].items())
    assert all(weight.grad.abs().max() > 0 for weight in drafter.confidence.parameters())
    assert all(weight.grad is None for weight in target.model.parameters())


def test_a_head_reads_the_states_of_training_and_ends_chains(pair):
    target, drafter = lend(pair)
    plan = replace(SAMPLED if "sampled" in drafter.traits.proposals else CHAIN, min_confidence=0.2)
    follower, told = Follower(drafter, target, random_texts()), []
    head, lengths = drafter.confidence, set()
    asks = getattr(drafter, "first", drafter)  # of a union
    asks.confidence_of = lambda newest: lambda: told.append(head(newest())) or told[-1]
    for counts in CHUNKS:
        follower.advance(counts)
        told.clear()
        draft = follower.propose(plan)
        for row, end in enumerate(follower.settled):
            chain = [token for token in draft.tokens[row].tolist() if token != PAD]
            text = torch.tensor([[*follower.texts[row, : end + 1].tolist(), *chain, 0, 0]])
            assert len(told) > len(chain) or len(chain) == K
            found, reached = confidences(drafter, target, text), 1.0
            for depth in range(1, min(len(chain) + 1, K) + 1):
                want = found[0, end - 1, depth]
                assert float(told[depth - 1][row, 0].sigmoid()) == pytest.approx(want, abs=1e-4)
                reached *= want
                assert depth <= len(chain) or reached < 0.2 + 1e-4
                assert depth > len(chain) or reached > 0.2 - 1e-4
            lengths.add(len(chain))
    assert len(lengths) > 1


def test_a_head_comes_back_with_its_drafter(pair, tmp_path):
    target, drafter = lend(pair)
    drafter.requires_grad_(False)
    checkpoint_io.save(drafter, target, tmp_path)
    loaded = checkpoint_io.load(tmp_path, target)
    assert same(loaded.state_dict(), drafter.state_dict())
    states = torch.randn(3, drafter.state_size + 2)
    assert loaded.confidence(states).equal(drafter.confidence(states))


def test_a_drafter_without_states_refuses_a_head(pair):
    _, drafter = pair
    if drafter.state_size is not None:
        pytest.skip("has states")
    with pytest.raises(UserError, match=r"drafter\.confidence=true: .* leave it false"):
        drafter.add_confidence()
    assert drafter.confidence is None


def test_rows_count_by_their_weights_and_columns_of_a_side_are_not_read(tiny_target, make_drafter):
    target, drafter = both(
        tiny_target, make_drafter, "medusa", token_info="vanilla", info_rank=4, hot_tokens=V
    )
    lend((target, drafter))
    batch = batch_of(target, random_texts())
    drafter.requires_grad_(False)
    steps = list(drafter.unroll(batch, target))
    assert steps[0].hidden.shape[1] == drafter.state_size + 4
    teacher, want = target.head(batch.last).flatten(0, 1).softmax(-1), 0.0
    for step in steps:
        alpha = torch.minimum(teacher[step.anchor + step.depth], step.head(step.hidden).softmax(-1)).sum(-1)
        logits = step.hidden[:, : drafter.state_size] @ drafter.confidence.weight + drafter.confidence.bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, alpha, reduction="sum")
        want += loss.item() * 0.5 ** (step.depth - 1)
    halves = [step._replace(weight=0.5 ** (step.depth - 1)) for step in steps]
    objective = Objective(kl, constant)
    totals = [
        objective(halves, batch.last, target.head, {}, confidence=head)[0]
        for head in (drafter.confidence, None)
    ]
    assert float(totals[0] - totals[1]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["eagle", "lyanna"])
def test_chains_that_a_head_ends_are_lossless(tiny_target, make_drafter, name, rule):
    target = tiny_target()
    drafter = make_drafter(name, target)
    lend((target, drafter))
    plan = Plan(2, proposal="sampled", rule=rule, min_confidence=0.3)
    ended = set()
    propose = drafter.propose

    def watch(*arguments):
        draft = propose(*arguments)
        ended.update((draft.tokens != PAD).sum(1).tolist())
        return draft

    drafter.propose = watch
    check_lossless(target, drafter, plan, Sampler(0.7), rows=[0, 2])
    assert len(ended) > 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_a_row_draws_where_it_drafts_nothing_is_its_own(tiny_target, make_drafter, rule):
    """Whether or not another row of the batch drafts something."""
    target = tiny_target()
    drafter = make_drafter("eagle", target)
    lend((target, drafter))
    plan = Plan(2, proposal="sampled", rule=rule, min_confidence=0.3)
    prompts = [[i % 3, i // 3 % 3, i // 9] for i in range(18)]
    options = {"max_new_tokens": 8, "sampler": Sampler(1.0), "plan": plan, "seed": 3}
    together = generate(target, drafter, prompts, requests=list(range(18)), **options).outputs
    single = [generate(target, drafter, [prompts[i]], requests=[i], **options).outputs[0] for i in range(18)]
    assert any(0 in output.draft_lengths for output in together)
    assert [output.tokens for output in together] == [output.tokens for output in single]


CONFIDENT = {"drafter__confidence": True, "decode__min_confidence": 0.3}


@pytest.mark.proof
def test_a_run_trains_the_same_drafter_with_and_without_a_head(bench, tmp_path):
    """Its gradient is no part of the norm that gradients are clipped by, either."""
    clip = {"trainer__gradient_clip_val": 0.01}
    bench.run(tmp_path / "with", **CONFIDENT, **clip)
    bench.run(tmp_path / "without", **clip)
    ours, plain = (weights(tmp_path / name / "checkpoints" / "6") for name in ("with", "without"))
    head = {name: ours.pop(name) for name in list(ours) if name.startswith("confidence.")}
    assert set(head) == {"confidence.weight", "confidence.bias"}
    assert all(weight.abs().max() > 0 for weight in head.values())
    assert ours.keys() == plain.keys()
    assert all(weight.equal(plain[name]) for name, weight in ours.items())
    assert "train/confidence_1" in (tmp_path / "with" / "csv" / "metrics.csv").read_text()
    card = json.loads((tmp_path / "with" / "checkpoints" / "6" / "score.json").read_text())
    assert card["headline"]["decode"] == "chain-2 (confidence 0.3)"
    assert card["replay_agrees"]
    assert card["rows"][0]["offered"][1] < 1

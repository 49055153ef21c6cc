"""On-policy rows: which, whose answers, how far they count; a run stays a function of its seed."""

from __future__ import annotations

import csv
import os
from types import SimpleNamespace

import pytest
import torch
from draft_models import quick
from faces import V
from workbench import final, fork, kill_in_training, same, train

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.target import Target
from decode.sampling import Sampler
from distill.data import on_policy as on_policy_module
from distill.data.batches import MicroBatch
from distill.data.on_policy import OnPolicy, accepted_prefix
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
from distill.training.module import DistillModule
from drafters.base import supervised_anchors
from drafters.models.lm import DraftLM

PROMPT, ROWS, ANSWER = 5, 6, 12


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)


@pytest.fixture
def drafter(target) -> DraftLM:
    return DraftLM.for_target(target, layers=1)


def micro(seed=1, rows=ROWS, length=14) -> MicroBatch:
    tokens = torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(length).expand(rows, -1) >= PROMPT
    mask = mask & (torch.arange(length) < length - torch.arange(rows)[:, None])
    return MicroBatch(
        tokens * (mask | (torch.arange(length) < PROMPT)), mask, int(mask[:, 2:].sum()), 3, seed
    )


def policy(share=1.0, cut=0.0, **changes) -> OnPolicy:
    options = {"sampler": Sampler(1.0), "max_new_tokens": ANSWER, "max_tokens": 64} | changes
    return OnPolicy(share, cut, **options)


def test_the_answer_is_the_drafters_own_to_the_same_prompt(target, drafter):
    before = micro()
    before = before._replace(target_states=target.read(before.tokens))
    with torch.autocast("cpu", torch.bfloat16):  # as in training
        (after,) = policy()([before], drafter, target)
    prompts = before.tokens[:, :PROMPT].tolist()
    options = {"max_new_tokens": ANSWER, "sampler": Sampler(1.0), "seed": before.seed}
    student = Target(drafter.requires_grad_(False).model)
    want = [
        p + o.tokens
        for p, o in zip(prompts, generate(student, None, prompts, **options).outputs, strict=True)
    ]
    assert after.tokens.tolist() == want
    assert after.loss_mask.tolist() == [[False] * PROMPT + [True] * ANSWER] * ROWS
    assert after.on_policy == int(after.loss_mask[:, 2:].sum()) == ROWS * ANSWER
    assert (after.step, after.seed, after.anchors, after.target_states) == (
        3,
        before.seed,
        before.anchors,
        None,
    )


def test_training_state_is_left_alone(target, drafter):
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    torch.manual_seed(5)
    dice = torch.random.get_rng_state()
    policy()([micro()], drafter, target)
    assert torch.equal(torch.random.get_rng_state(), dice)
    assert drafter.trains
    assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())


def test_a_share_of_the_rows_is_replaced_by_their_seed(target, drafter):
    half = policy(0.5)
    counts = torch.bincount(torch.tensor([len(half.chosen(micro(seed))) for seed in range(300)]))
    assert 2.8 < (counts * torch.arange(len(counts))).sum() / 300 < 3.2
    assert len(counts) > 4, "rows are chosen one by one"
    before = micro(seed=8)
    chosen = half.chosen(before)
    assert 0 < len(chosen) < ROWS
    (after,) = half([before], drafter, target)
    for row in set(range(ROWS)) - set(chosen):
        end = int(before.loss_mask[row].sum()) + PROMPT
        assert torch.equal(after.tokens[row, :end], before.tokens[row, :end])
        assert torch.equal(after.loss_mask[row, :end], before.loss_mask[row, :end])
        assert not after.loss_mask[row, end:].any()
    assert after.on_policy == len(chosen) * ANSWER
    (again,) = half([before], drafter, target)
    assert torch.equal(after.tokens, again.tokens)
    (other,) = half([before._replace(seed=9)], drafter, target)
    assert not torch.equal(after.tokens, other.tokens)


def test_a_share_of_nothing_changes_nothing(target, drafter):
    before = micro()
    assert policy(0.0)([before], drafter, target)[0] is before


def test_an_answer_ends_after_the_token_that_loses_the_target():
    p = torch.tensor([0.5, 0.9, 0.1, 0.2, 0.9])
    q = torch.tensor([0.5, 0.3, 0.5, 0.4, 0.1])  # min(1, p / q): 1, 1, 0.2, 0.5, 1
    assert accepted_prefix(p, q, 0.0).tolist() == [True] * 5
    assert accepted_prefix(p, q, 0.1).tolist() == [True] * 5
    assert accepted_prefix(p, q, 0.15).tolist() == [True, True, True, True, False]
    assert accepted_prefix(p, q, 0.3).tolist() == [True, True, True, False, False]
    assert accepted_prefix(p, q, 1.0).tolist() == [True, True, True, False, False]
    assert accepted_prefix(p[:0], q[:0], 0.5).tolist() == []


def test_rows_are_cut_by_the_laws_they_were_drawn_under(target, drafter, monkeypatch):
    sampler = Sampler(0.8, top_k=9)
    monkeypatch.setattr(on_policy_module, "ROWS", 5)
    before, cut = micro()._replace(lengths=list(range(14, 8, -1))), 0.2
    (whole,) = policy(sampler=sampler)([before], drafter, target)
    (short,) = policy(cut=cut, sampler=sampler)([before], drafter, target)
    with torch.no_grad():
        p, q = (m(input_ids=whole.tokens, use_cache=False).logits for m in (target.model, drafter.model))
    lengths = []
    for row in range(ROWS):
        chance, end = 1.0, PROMPT
        while end < PROMPT + ANSWER and chance >= cut:
            token = whole.tokens[row, end]
            law = [sampler.probs(x[row, end - 1 : end])[0, token] for x in (p, q)]
            chance, end = chance * min(1.0, (law[0] / law[1]).item()), end + 1
        lengths.append(end)
        assert short.loss_mask[row].nonzero()[:, 0].tolist() == list(range(PROMPT, end))
        assert torch.equal(short.tokens[row, :end], whole.tokens[row, :end])
    assert len(set(lengths)) > 1
    assert short.lengths == lengths, "a packed read would be of the rows that were replaced"
    assert max(lengths) == short.tokens.shape[1], "nothing is read that is not taught"
    assert short.on_policy < whole.on_policy


def test_an_answer_ends_with_its_end_token_its_row_or_what_the_drafter_reads(target, drafter, tiny_target):
    (whole,) = policy()([micro()], drafter, target)
    for room in (PROMPT, PROMPT + 4):
        (after,) = policy(max_tokens=room)([micro()], drafter, target)
        assert torch.equal(
            after.tokens, (micro() if room == PROMPT else whole).tokens[:, :14][:, : after.tokens.shape[1]]
        )
    reader = DraftLM.for_target(tiny_target(vocab=V, positions=PROMPT, dtype=torch.float32), layers=1)
    before = micro()
    assert policy()([before], reader, target)[0] is before, "its prompts fill what the drafter reads"
    end = whole.tokens[0, PROMPT + 3].item()
    (ended,) = policy(stop=[end])([micro()], drafter, target)
    assert ended.loss_mask[0].sum() == 1 + whole.tokens[0, PROMPT:].tolist().index(end)


def test_all_micro_batches_of_all_ranks_are_answered_and_counted_anew(target, drafter):
    """Of answers that end early; a second rank has as many anchors."""
    micros = [micro(seed) for seed in (1, 2)]
    module = DistillModule(
        target, drafter, Objective(kl, constant), torch.optim.SGD, 0.0, 1.0, policy(cut=0.2)
    )
    strategy = SimpleNamespace(
        batch_to_device=lambda m: m, reduce=lambda t, reduce_op: {"sum": 2 * t}[reduce_op]
    )
    module._trainer = SimpleNamespace(
        strategy=strategy, datamodule=SimpleNamespace(micros=lambda step: micros)
    )
    mixed = [module._mix(m, module.on_policy) for m in micros]
    counts = [int(supervised_anchors(m.loss_mask, 1).sum()) for m in mixed]
    assert [m.anchors for m in mixed] == 2 * [2 * sum(counts)]
    assert sum(counts) < sum(m.anchors for m in micros), "no answer ended early"
    assert [m.seed for m in mixed] == [1, 2]
    for before, after in zip(micros, mixed, strict=True):
        assert torch.equal(before.tokens[:, :PROMPT], after.tokens[:, :PROMPT])


def test_the_target_as_its_own_drafter_is_never_cut(target):
    twin = DraftLM.for_target(target, layers=3)
    (after,) = policy(cut=0.9)([micro()], twin, target)
    assert after.on_policy == ROWS * ANSWER


def test_a_row_with_nothing_to_learn_stays_the_targets(target, drafter):
    """A prompt of one token: its first answer token has no anchor, and the cut leaves no other."""
    before = micro()._replace(loss_mask=torch.ones(ROWS, 14, dtype=torch.bool))
    none = policy(cut=1.0, max_new_tokens=1)([before], drafter, target)[0]
    assert none is before
    some = policy()([before], drafter, target)[0]
    assert torch.equal(some.tokens[:, 0], before.tokens[:, 0])
    assert not some.loss_mask[:, 0].any()


@pytest.mark.parametrize("changes", [{"share": 1.5}, {"cut": -0.1}], ids=str)
def test_a_share_that_is_none_is_refused(changes):
    with pytest.raises(UserError, match=rf"on_policy\.{next(iter(changes))}=.*: must be from 0 to 1"):
        policy(**changes)


def test_ids_that_only_pad_the_drafters_head_end_an_answer(target, tiny_target):
    bigger = tiny_target(vocab=V + 9, layers=1, hidden=16, dtype=torch.float32)
    drafter = DraftLM.for_target(bigger, layers=1)
    (after,) = policy()([micro()], drafter, target)
    assert after.tokens.max() < V
    assert 0 < after.on_policy < ROWS * ANSWER


# -- whole runs ------------------------------------------------------------------------------------


MORE = ["drafter.layers=1", "on_policy.share=0.6", "score.every=2", "score.enabled=false"]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.proof), 2])
@pytest.mark.proof
def test_a_killed_run_ends_with_the_same_bits(bench, monkeypatch, accumulate):
    argv = quick(bench, *MORE, f"trainer.accumulate_grad_batches={accumulate}")
    straight = train([*argv, "resume=never"]).succeeded()
    with monkeypatch.context() as patch:
        kill_in_training(patch)
        status = fork(lambda: train(argv).code)
    assert os.WIFSIGNALED(status)
    again = train(argv)
    assert again.out.startswith("resuming: ")
    assert "resuming from step 2" in again.out
    assert same(final(straight.folder), final(again.folder))
    without = train([a for a in argv if "on_policy" not in a])
    assert not same(final(straight.folder), final(without.folder))
    with (straight.folder / "csv" / "metrics.csv").open() as lines:
        shares = [float(row["train/on_policy"]) for row in csv.DictReader(lines) if row["train/on_policy"]]
    assert len(shares) == 6
    assert all(0 <= share <= 1 for share in shares)
    assert 0.1 < sum(shares) / 6 < 0.9


def test_a_drafter_that_writes_nothing_is_refused_before_any_work(bench):
    done = bench.train("on_policy.share=0.5")
    done.refused("set on_policy.share=0")


def test_the_denominator_counts_what_is_trained_on(bench, tmp_path, monkeypatch):
    """Anchors of all micro-batches of the step, after the drafter has answered."""
    from distill.training import module as module_module

    seen, stored = [], []
    mix = module_module.DistillModule._mix

    def spy(self, batch, on_policy):
        mixed = mix(self, batch, on_policy)
        stored.append(batch.anchors)
        seen.append((mixed.step, mixed.anchors, int(supervised_anchors(mixed.loss_mask, 1).sum())))
        return mixed

    monkeypatch.setattr(module_module.DistillModule, "_mix", spy)
    train(quick(bench, *MORE, "trainer.accumulate_grad_batches=2", "seed=5", "on_policy.cut=0.5")).succeeded()
    assert len(seen) == 12
    assert [anchors for _, anchors, _ in seen] != stored, "no answer ended early"
    for step in range(6):
        own = [(anchors, here) for s, anchors, here in seen if s == step]
        assert {anchors for anchors, _ in own} == {sum(here for _, here in own)}

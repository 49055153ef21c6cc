"""Medusa-2: the given target stays as it is, the tuned copy, the loss, and runs that name both."""

from __future__ import annotations

import copy
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_checks import K, batch_of, random_texts
from medusas import LORA, fresh, moved
from torch import nn
from workbench import changed, final, same

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.evaluation.scorecard import TargetDrift
from decode.generation.generate import generate
from decode.model.fused_forward import Fused
from decode.model.load import load_target, load_tokenizer
from decode.plan import Plan
from decode.sampling import Sampler
from distill.losses.objective import Objective
from distill.losses.weights import Streak, decay
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.scoring.scorer import Scorer
from distill.scoring.tables import settings_table
from distill.scoring.target_drift import only_untuned
from distill.scoring.target_drift import target_drift as how_far
from distill.training.optim import warm_up_and_decay
from drafters.checkpoint import io as checkpoint_io
from drafters.hf import tuned_target as tuned


def test_fresh_adapters_change_nothing(tiny_target):
    target, drafter = fresh(tiny_target)
    texts = random_texts()
    assert torch.equal(drafter.lora.read(target, texts), target.read(texts).last)
    assert torch.equal(drafter.verifier(target).read(texts).last, target.read(texts).last)
    linear = {name for name, module in target.model.named_modules() if isinstance(module, nn.Linear)}
    assert set(drafter.lora.shapes) == linear - {"lm_head"}
    assert len(linear) == 3 * 7 + 1


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_merged_adapters_compute_the_same(tiny_target, targets):
    target, drafter = moved(tiny_target, lora=LORA | {"targets": targets})
    texts = random_texts()
    unmerged, merged = drafter.lora.read(target, texts), drafter.verifier(target).read(texts).last
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-12)
    assert (merged - target.read(texts).last).abs().max() > 0.1


def test_given_target_stays_bit_for_bit(tiny_target):
    """Through the fused pass too, which stacks weights in place."""
    target, drafter = moved(tiny_target, dtype=torch.float32)
    generate(target, None, [[1, 2, 3]], max_new_tokens=4, sampler=Sampler(0.0))
    assert Fused.of(target.base, target.layers, target.config) is not None
    before, rows = copy.deepcopy(target.model.state_dict()), target.read(random_texts()).last
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    for _ in range(2):
        steps = drafter.unroll(batch_of(target, random_texts()), target)
        sum(step.head(step.hidden).log_softmax(-1)[:, 0].sum() for step in steps).backward()
        optimizer.step()
    verifier = drafter.verifier(target)
    run = generate(verifier, drafter, [[1, 2, 3]], max_new_tokens=8, sampler=Sampler(0.0), plan=Plan(depth=2))
    again = generate(verifier, None, [[1, 2, 3]], max_new_tokens=8, sampler=Sampler(0.0))
    assert run.outputs[0].tokens == again.outputs[0].tokens
    assert Fused.of(verifier.base, verifier.layers, verifier.config) is not None
    assert same(target.model.state_dict(), before)
    assert torch.equal(target.read(random_texts()).last, rows)
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not any(hasattr(module, "lora_A") for module in target.model.modules())


def test_slow_dtype_is_tuned_in_fp32(tiny_target, monkeypatch):
    monkeypatch.setattr(tuned, "product_dtype", lambda *_: torch.float32)
    target, drafter = moved(tiny_target, dtype=torch.bfloat16)
    drafter.float()
    before, texts = copy.deepcopy(target.model.state_dict()), random_texts()
    wide = drafter.lora.read(target, texts)
    assert wide.dtype == torch.float32
    wide.sum().backward()
    merged = drafter.verifier(target).read(texts).last
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged.float(), wide, rtol=0, atol=0.05 * wide.abs().max().item())
    steps = drafter.unroll(batch_of(target, texts), target)
    assert all(step.hidden.dtype == torch.float32 for step in steps)
    assert same(target.model.state_dict(), before)


def test_tuned_target_has_another_fingerprint(tiny_target):
    """Samples of the weights would not show a change elsewhere, nor one below bf16's rounding."""
    target, drafter = moved(tiny_target, lora=LORA | {"targets": ["down_proj"]})
    names = [one.fingerprint() for one in (target, drafter.verifier(target), drafter.verifier(target))]
    assert names.pop() == names[1]
    with torch.no_grad():
        next(iter(drafter.lora.pairs.values())).up.weight[0, 0] += 1e-4
    names.append(drafter.verifier(target).fingerprint())
    assert len(set(names)) == 3


def test_only_tuning_drafters_change_the_verifier(pair):
    target, drafter = pair
    texts, verifier = random_texts(), drafter.verifier(target)
    is_target = torch.equal(verifier.read(texts).last, target.read(texts).last)
    assert is_target is not drafter.traits.tunes_target
    assert (verifier.fingerprint() == target.fingerprint()) is is_target


def test_loaded_drafter_has_the_same_tuned_target_without_peft(tiny_target, tmp_path, monkeypatch):
    target, drafter = moved(tiny_target, dtype=torch.float32)
    checkpoint_io.save(drafter, target, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    loaded, texts = checkpoint_io.load(tmp_path, target), random_texts()
    ours, theirs = drafter.verifier(target), loaded.verifier(target)
    assert torch.equal(ours.read(texts).last, theirs.read(texts).last)
    assert ours.fingerprint() == theirs.fingerprint()


def test_copies_with_adapters_are_freed_with_the_drafter(tiny_target):
    target, drafter = moved(tiny_target)
    before = len(tuned._TWINS)
    for _ in range(2):
        drafter.lora.read(target, random_texts())
    assert len(tuned._TWINS) == before + 1
    del drafter
    assert len(tuned._TWINS) == before


def test_depth_zero_trains_the_tuned_target(tiny_target):
    target, drafter = moved(tiny_target)
    texts, mask = random_texts(1, 8), torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    steps = list(drafter.unroll(batch_of(target, texts, mask), target))
    assert [(step.depth, step.weight) for step in steps] == [(0, 1.0), (1, 0.2), (2, 0.2)]
    first = steps[0]
    assert first.anchor.tolist() == [1, 2, 5, 6]  # the rows that predict what the target wrote
    want = drafter.verifier(target).read(texts).last[0, first.anchor]
    torch.testing.assert_close(first.hidden, want, rtol=0, atol=1e-12)
    assert first.head is target.head


class Squared:
    """A divergence of which everything is known: (z_0)^2 / 2."""

    def __call__(self, student, teacher):
        slope = torch.zeros_like(student.logits)
        slope[:, 0] = student.logits[:, 0]
        return student.logits[:, 0] ** 2 / 2, slope


@pytest.mark.parametrize(
    "weights", [lambda depth: decay(depth, 0.5), Streak(1.0, 0.0)], ids=["decay", "streak"]
)
def test_loss_is_the_targets_plus_the_weighted_heads(tiny_target, weights):
    target, drafter = moved(tiny_target)
    batch = batch_of(target, random_texts())
    steps = list(drafter.unroll(batch, target))
    total, scored = Objective(Squared(), weights)(steps, batch.last, target.head, {})
    each = [(step.head(step.hidden)[:, 0] ** 2 / 2).double() for step in steps]
    if isinstance(weights, Streak):  # smoothed to the end: a depth counts those that follow it, and itself
        length = batch.tokens.shape[1]
        reach = torch.zeros(batch.tokens.numel())
        for step in steps[1:]:
            reach[step.anchor] += 1
        assert length * 2 == len(reach)
        factors = [reach[step.anchor] - (step.depth - 1) for step in steps[1:]]
    else:
        factors = [0.5 ** (step.depth - 1) for step in steps[1:]]
    want = each[0].sum() + 0.2 * sum((f * e).sum() for f, e in zip(factors, each[1:], strict=True))
    torch.testing.assert_close(total, want.to(total.dtype))
    assert [row.depth for row in scored] == list(range(K + 1))
    names = dict(drafter.named_parameters())
    found = torch.autograd.grad(total, list(names.values()), retain_graph=True)
    for name, one, two in zip(names, found, torch.autograd.grad(want, list(names.values())), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, msg=name)
        assert one.abs().max() > 0, name


def test_adapters_wait_for_the_warmup_and_learn_slower(tiny_target):
    _, drafter = fresh(tiny_target)
    heads, lora = drafter.param_groups()
    assert {id(w) for w in lora.weights} == {id(w) for w in drafter.lora.parameters()}
    assert len(heads.weights) + len(lora.weights) == len(list(drafter.parameters()))
    assert not {id(w) for w in heads.weights} & {id(w) for w in lora.weights}
    optimizer = torch.optim.SGD([{"params": g.weights} for g in (heads, lora)], lr=2.0)
    schedule = warm_up_and_decay(optimizer, 8, 0.0, 1.0, factors=[heads.rate, lora.rate])
    rates = []
    for _ in range(8):
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    assert [rate for rate, _ in rates] == [2.0] * 8
    assert [rate for _, rate in rates] == [0, 0, 0, 0.25, 0.5, 0.5, 0.5, 0.5]
    assert fresh(tiny_target, warmup=0.0)[1].param_groups()[1].rate(0.0) == 0.25


@pytest.fixture(scope="module")
def scored(bench) -> Path:
    before = {p.name: p.read_bytes() for p in bench.target.iterdir()}
    # In fp32: a tuned target under autocast is not read as the untuned one is, which is in its own precision.
    sizes = ["drafter.lora.r=4", "drafter.lora_lr=1", "trainer.precision=32-true"]
    done = bench.train("drafter=medusa2", *sizes, "score.temperatures=[0.0,1.0]").succeeded()
    assert {p.name: p.read_bytes() for p in bench.target.iterdir()} == before
    (bench.root / "said.txt").write_text(done.out)
    return done.folder


@pytest.mark.proof
def test_run_tunes_the_target(scored):
    ups = [w for name, w in final(scored).items() if name.endswith(".up.weight")]
    assert len(ups) == 2 * 7
    assert all(w.abs().max() > 0 for w in ups)
    with (scored / "csv" / "metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["train/divergence_0"]]
    first, *_, last = [float(row["train/divergence_0"]) for row in rows]
    assert abs(first) < 1e-6 < last
    assert rows[0]["train/divergence_1"]


def card_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "score.json").read_text())


def test_every_save_point_is_scored_with_its_tuned_target_and_the_drift(bench, scored):
    manifests = (bench.root / "outputs" / "heldout").rglob("manifest.json")
    answered = {json.loads(path.read_text())["plan"]["target"] for path in manifests}
    original = load_target(str(bench.target))
    names = {original.fingerprint()}
    for step in ("3", "6"):
        checkpoint = scored / "checkpoints" / step
        names.add(checkpoint_io.load(checkpoint, original).verifier(original).fingerprint())
        card = card_of(checkpoint)
        assert card["audit_passed"] is card["replay_agrees"] is True
        assert card["lossless_to"] == "tuned target"
        far = card["target_drift"]
        assert far["prompts"] == 4
        assert min(far["kl"], far["reverse_kl"]) > 0
    assert names <= answered
    assert len(names) == 3
    assert (bench.root / "said.txt").read_text().count("lossless to the tuned target") == 2
    with (scored / "csv" / "metrics.csv").open() as lines:
        assert [row for row in csv.DictReader(lines) if row["score/target_drift_kl"] == str(far["kl"])]


def test_rescored_checkpoint_has_the_same_drift(bench, scored):
    run = changed(bench.base, score__temperatures=[0.0, 1.0])
    target = load_target(str(bench.target), "float32")
    chat = Chat(load_tokenizer(str(bench.target)), "chat")
    held, answers = read_prompts(bench.heldout), bench.root / "outputs" / "heldout"
    named = {"seed": run.seed, "target_name": run.target.name}
    given = []

    def engine(card, drafter, target, answers):
        given.append(target)
        return []

    scorer = Scorer(run.score, run.decode, target, chat, held, answers, engine=engine, **named)
    before, card = copy.deepcopy(target.model.state_dict()), scorer(scored / "checkpoints" / "6", 6)
    saved = card_of(scored / "checkpoints" / "6")
    assert card.checkpoint.target_drift == TargetDrift(**saved["target_drift"])
    assert [row.tau for row in card.rows] == [row["tau"] for row in saved["rows"]]
    assert same(target.model.state_dict(), before)
    assert "lossless to the tuned target" in settings_table(card)
    assert given == [target]  # an export tunes it: of a tuned one it would be tuned twice


def test_tuning_twice_is_refused(tiny_target):
    target, drafter = moved(tiny_target)
    with pytest.raises(ValueError, match="twice"):
        drafter.verifier(drafter.verifier(target))


def test_drift_is_the_mean_over_the_originals_answers(tiny_target):
    target, drafter = moved(tiny_target)
    verifier = drafter.verifier(target)
    rollouts = [Rollout([1, 2, 3], [4, 5, 6, 7]), Rollout([8], [9, 10, 11])]
    kl, reverse, agreed, prefixes = 0.0, 0.0, 0, []
    for prompt, answer in rollouts:
        equal = []
        for i in range(len(answer)):
            text = torch.tensor([prompt + answer[:i]])
            p, q = (t.head(t.read(text).last[0, -1]).softmax(-1).tolist() for t in (target, verifier))
            kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            reverse += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            equal.append(p.index(max(p)) == q.index(max(q)))
        agreed += sum(equal)
        prefixes.append(equal.index(False) / len(answer) if False in equal else 1.0)
    found = how_far(target, verifier, rollouts)
    assert found.kl == pytest.approx(kl / 7, rel=1e-9)
    assert found.reverse_kl == pytest.approx(reverse / 7, rel=1e-9)
    assert found.top1_agreement == agreed / 7
    assert found.greedy_prefix == pytest.approx(sum(prefixes) / 2)
    assert 0 < agreed < 7
    assert (found.prompts, found.tokens) == (2, 7)


def test_races_with_a_tuned_target_are_refused(tiny_target, make_drafter):
    target, drafter = moved(tiny_target)
    only_untuned(make_drafter("eagle", target), "checkpoint")
    only_untuned(make_drafter("prompt", target), "checkpoint")
    with pytest.raises(UserError, match="a target of its own"):
        only_untuned(drafter, "checkpoint")

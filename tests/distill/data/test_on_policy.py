"""On-policy rows and rollouts that are made again in phases: a run stays a function of its seed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from drafter_checks import V
from workbench import options_of, same

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer
from decode.model.target import Target
from decode.sampling import Sampler
from distill.data import on_policy as on_policy_module
from distill.data.batches import MicroBatch
from distill.data.datamodule import PhasedBatches
from distill.data.on_policy import OnPolicy, accepted_prefix
from distill.engines import base as engine
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
from distill.prompts.chat_template import Chat
from distill.rollouts import produce
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
    """Rows of one prompt length, whose answers are each a token shorter than the last."""
    tokens = torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(seed))
    place, end = torch.arange(length), length - torch.arange(rows)[:, None]
    mask = (place >= PROMPT) & (place < end)
    return MicroBatch(tokens * (place < end), mask, int(mask[:, 2:].sum()), 3, seed)


def policy(share=1.0, cut=0.0, **changes) -> OnPolicy:
    options = {"sampler": Sampler(1.0), "max_new_tokens": ANSWER, "max_tokens": 64} | changes
    return OnPolicy(share, cut, **options)


def test_answer_is_the_drafters_own_to_the_same_prompt(target, drafter):
    before = micro()
    before = before._replace(target_states=target.read(before.tokens))
    with torch.autocast("cpu", torch.bfloat16):  # as in training
        (after,) = policy()([before], drafter, target)
    prompts = before.tokens[:, :PROMPT].tolist()
    options = {"max_new_tokens": ANSWER, "sampler": Sampler(1.0), "seed": before.seed}
    answers = generate(Target(drafter.requires_grad_(False).model), None, prompts, **options).outputs
    want = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    assert after.tokens.tolist() == want
    assert after.loss_mask.tolist() == [[False] * PROMPT + [True] * ANSWER] * ROWS
    assert after.on_policy == int(after.loss_mask[:, 2:].sum()) == ROWS * ANSWER
    kept = (after.step, after.seed, after.anchors, after.target_states)
    assert kept == (3, before.seed, before.anchors, None)


def test_training_state_is_unchanged(target, drafter):
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    dice = torch.random.get_rng_state()
    policy()([micro()], drafter, target)
    assert torch.equal(torch.random.get_rng_state(), dice)
    assert drafter.trains
    assert same(before, drafter.state_dict())


def test_share_of_the_rows_is_replaced_by_their_seed(target, drafter):
    half, before = policy(0.5), micro(seed=8)
    counts = torch.tensor([len(half.chosen(micro(seed))) for seed in range(300)])
    assert 2.8 < counts.double().mean() < 3.2
    assert counts.max() > 3, "rows are chosen one by one"
    chosen = half.chosen(before)
    assert 0 < len(chosen) < ROWS
    (after,), (again,) = (half([before], drafter, target) for _ in range(2))
    for row in set(range(ROWS)) - set(chosen):
        end = int(before.loss_mask[row].sum()) + PROMPT
        assert torch.equal(after.tokens[row, :end], before.tokens[row, :end])
        assert torch.equal(after.loss_mask[row, :end], before.loss_mask[row, :end])
        assert not after.loss_mask[row, end:].any()
    assert after.on_policy == len(chosen) * ANSWER
    assert torch.equal(after.tokens, again.tokens)
    (other,) = half([before._replace(seed=9)], drafter, target)
    assert not torch.equal(after.tokens, other.tokens)
    assert policy(0.0)([before], drafter, target)[0] is before


def test_rows_are_cut_by_the_distributions_they_were_drawn_from(target, drafter, monkeypatch):
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
            accepted, drawn = (sampler.probs(x[row, end - 1 : end])[0, token].item() for x in (p, q))
            chance, end = chance * min(1.0, accepted / drawn), end + 1
        lengths.append(end)
        assert short.loss_mask[row].nonzero()[:, 0].tolist() == list(range(PROMPT, end))
        assert torch.equal(short.tokens[row, :end], whole.tokens[row, :end])
    assert len(set(lengths)) > 1
    assert short.lengths == lengths, "a packed read would be of the rows that were replaced"
    assert max(lengths) == short.tokens.shape[1], "nothing is read that is not taught"
    assert short.on_policy < whole.on_policy


def test_answer_ends_after_the_token_that_loses_the_target():
    p, q = torch.tensor([[0.5, 0.9, 0.1, 0.2, 0.9], [0.5, 0.3, 0.5, 0.4, 0.1]])  # min(1, p / q): 1 1 .2 .5 1
    kept = {cut: int(accepted_prefix(p, q, cut).sum()) for cut in (0.0, 0.1, 0.15, 0.3, 1.0)}
    assert kept == {0.0: 5, 0.1: 5, 0.15: 4, 0.3: 3, 1.0: 3}


def test_answer_ends_with_its_end_token_or_what_the_drafter_reads(target, drafter, tiny_target):
    before, (whole,) = micro(), policy()([micro()], drafter, target)
    assert torch.equal(policy(max_tokens=PROMPT)([before], drafter, target)[0].tokens, before.tokens)
    (after,) = policy(max_tokens=PROMPT + 4)([before], drafter, target)
    assert torch.equal(after.tokens, whole.tokens[:, : after.tokens.shape[1]])
    reader = DraftLM.for_target(tiny_target(vocab=V, positions=PROMPT, dtype=torch.float32), layers=1)
    assert policy()([before], reader, target)[0] is before, "its prompts fill what the drafter reads"
    end = whole.tokens[0, PROMPT + 3].item()
    (ended,) = policy(stop=[end])([before], drafter, target)
    assert ended.loss_mask[0].sum() == 1 + whole.tokens[0, PROMPT:].tolist().index(end)


def test_denominator_counts_the_answers_of_all_micro_batches_and_ranks(target, drafter):
    """Of answers that end early; a second rank has as many anchors."""
    micros, answers = [micro(seed) for seed in (1, 2)], policy(cut=0.2)
    module = DistillModule(target, drafter, Objective(kl, constant), torch.optim.SGD, 0.0, 1.0, answers)
    strategy = SimpleNamespace(
        batch_to_device=lambda m: m, reduce=lambda t, reduce_op: {"sum": 2 * t}[reduce_op]
    )
    data = SimpleNamespace(micros=lambda step: micros)
    module._trainer = SimpleNamespace(strategy=strategy, datamodule=data)
    mixed = [module._mix(m, answers) for m in micros]
    counts = [int(supervised_anchors(m.loss_mask, 1).sum()) for m in mixed]
    assert [m.anchors for m in mixed] == 2 * [2 * sum(counts)]
    assert sum(counts) < sum(m.anchors for m in micros), "no answer ended early"
    assert [m.seed for m in mixed] == [1, 2]
    for before, after in zip(micros, mixed, strict=True):
        assert torch.equal(before.tokens[:, :PROMPT], after.tokens[:, :PROMPT])


def test_row_with_nothing_to_learn_stays_the_targets(target, drafter):
    """A prompt of one token: its first answer token has no anchor, and the cut leaves no other."""
    before = micro()._replace(loss_mask=torch.ones(ROWS, 14, dtype=torch.bool))
    none = policy(cut=1.0, max_new_tokens=1)([before], drafter, target)[0]
    assert none is before
    some = policy()([before], drafter, target)[0]
    assert torch.equal(some.tokens[:, 0], before.tokens[:, 0])
    assert not some.loss_mask[:, 0].any()


@pytest.mark.parametrize("changes", [{"share": 1.5}, {"cut": -0.1}], ids=str)
def test_share_out_of_range_is_refused(changes):
    with pytest.raises(UserError, match=rf"on_policy\.{next(iter(changes))}=.*: must be from 0 to 1"):
        policy(**changes)


def test_ids_that_only_pad_the_drafters_head_end_an_answer(target, tiny_target):
    bigger = tiny_target(vocab=V + 9, layers=1, hidden=16, dtype=torch.float32)
    drafter = DraftLM.for_target(bigger, layers=1)
    (after,) = policy()([micro()], drafter, target)
    assert after.tokens.max() < V
    assert 0 < after.on_policy < ROWS * ANSWER


def test_drafter_that_writes_nothing_is_refused_before_any_work(bench):
    bench.train("on_policy.share=0.5").refused("set on_policy.share=0")


def test_prompts_are_answered_again_with_the_newest_checkpoint_as_drafter(bench, tmp_path, monkeypatch):
    drafters, loaded = [], []
    call, load = engine.generate, produce.checkpoint_io.load

    def record(target, drafter, prompts, **options):
        if not drafters or drafters[-1] is not drafter:
            drafters.append(drafter)
        return call(target, drafter, prompts, **options)

    def noted(folder, *more, **options):
        loaded.append(Path(folder).name)
        return load(folder, *more, **options)

    monkeypatch.setattr(engine, "generate", record)
    monkeypatch.setattr(produce.checkpoint_io, "load", noted)
    root, options = tmp_path / "out", {"score__every": 1, "score__enabled": False}
    said = bench.run(tmp_path / "run", output_dir=str(root), rollout__refresh_every=2, **options)
    assert loaded == ["2", "4"]
    assert drafters[0] is None
    assert all(drafters[1:])
    assert said.count("drafted by") == 2
    stores = sorted((root / "rollouts").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    texts = []
    for store in stores:
        files = [str(path) for path in sorted(store.parent.glob("*.parquet"))]
        texts.append(datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path))["tokens"][:])
    first, second, third = texts
    assert first != second != third
    prompts = [[row[:5] for row in rows] for rows in texts]
    assert prompts[0] == prompts[1] == prompts[2]


def test_phase_has_its_own_seed_that_follows_from_the_runs(bench):
    target, chat = load_target(str(bench.target)), Chat(load_tokenizer(str(bench.target)))
    options = [options_of(*bench.command, f"rollout.seed={seed}") for seed in (0, 1)]
    seeds = {produce.rollout_plan(o, target, chat, [], phase).seed for o in options for phase in (0, 1, 2)}
    assert len(seeds) == 6


def test_phase_lasts_its_steps_and_batches_are_numbered_through():
    loaded = []

    def load(step):
        loaded.append(step)
        return [(step, index) for index in range(24)]

    batches = PhasedBatches(load, every=3, accumulate=2, steps=12)
    assert [batches[i] for i in range(24)] == [(i // 6 * 3, i) for i in range(24)]
    assert loaded == [0, 3, 6, 9]
    one = PhasedBatches(load, every=0, accumulate=2, steps=12)
    assert {one[i][0] for i in range(24)} == {0}


def test_refresh_that_could_not_help_is_refused_before_work(bench, tmp_path):
    given = {"rollout__answers": "given", "prompts__path": str(tmp_path / "answered.jsonl")}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    record = json.dumps({"id": "a", "messages": talk})
    (tmp_path / "answered.jsonl").write_text(f"{record}\n" * 8)
    lossy = {"decode__rule": "typical", "decode__lossy": True, "score__enabled": False}
    for options, said in ((given, "refresh_every"), (lossy, "one lossless plan")):
        with pytest.raises(UserError, match=said):
            bench.run(tmp_path / said, rollout__refresh_every=2, output_dir=str(tmp_path), **options)
    assert not list(tmp_path.glob("*/checkpoints/*"))

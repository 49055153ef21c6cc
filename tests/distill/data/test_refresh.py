"""Online distillation: the rollouts are made anew every few steps, drafted by the newest checkpoint."""

import json
import os
from pathlib import Path

import datasets
import pytest
from workbench import final, fork, options_of, same

from decode.errors import UserError
from decode.model.load import load_target, load_tokenizer
from distill.data.datamodule import PhasedBatches
from distill.engines import base as engine
from distill.prompts.chat_template import Chat
from distill.rollouts import produce
from distill.training import checkpointing as callbacks


def stores(root: Path) -> list[Path]:
    return sorted((root / "rollouts").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)


def test_the_prompts_are_answered_anew_with_the_newest_checkpoints_help(bench, tmp_path, monkeypatch):
    drafters, loaded = [], []
    call, load = engine.generate, produce.hub.load

    def record(target, drafter, prompts, **options):
        if not drafters or drafters[-1] is not drafter:
            drafters.append(drafter)
        return call(target, drafter, prompts, **options)

    monkeypatch.setattr(engine, "generate", record)
    monkeypatch.setattr(
        produce.hub,
        "load",
        lambda folder, *more, **options: loaded.append(folder) or load(folder, *more, **options),
    )
    root = tmp_path / "out"
    said = bench.run(
        tmp_path / "run", output_dir=str(root), rollout__refresh_every=2, score__every=1, score__enabled=False
    )
    assert [Path(folder).name for folder in loaded] == ["2", "4"]
    assert drafters[0] is None
    assert all(drafters[1:])
    assert said.count("drafted by") == 2
    first, *later = stores(root)
    assert len(later) == 2
    texts = [
        datasets.Dataset.from_parquet(
            [str(f) for f in sorted(s.parent.glob("*.parquet"))], cache_dir=str(tmp_path)
        )["tokens"]
        for s in (first, *later)
    ]
    prompts = [[row[:5] for row in rows] for rows in texts]
    assert prompts[0] == prompts[1] == prompts[2]
    assert all(list(a) != list(b) for a, b in ((texts[0], texts[1]), (texts[1], texts[2])))


def test_a_phase_has_a_seed_of_its_own_that_follows_from_the_runs(bench):
    target, chat = load_target(str(bench.target)), Chat(load_tokenizer(str(bench.target)))
    options = [options_of(*bench.command, f"rollout.seed={seed}") for seed in (0, 1)]
    seeds = {produce.rollout_plan(o, target, chat, [], phase).seed for o in options for phase in (0, 1, 2)}
    assert len(seeds) == 6


@pytest.mark.proof
def test_a_run_that_is_killed_in_a_later_phase_ends_with_the_same_bits(bench, tmp_path, monkeypatch):
    options = {"rollout__refresh_every": 2, "score__every": 2, "score__enabled": False}
    bench.run(tmp_path / "a", **options, output_dir=str(tmp_path / "a"))
    end = callbacks.TrainingBar.on_train_batch_end

    def die(self, trainer, *rest):
        if trainer.global_step == 3:
            os.kill(os.getpid(), 9)
        end(self, trainer, *rest)

    with monkeypatch.context() as spoilt:
        spoilt.setattr(callbacks.TrainingBar, "on_train_batch_end", die)
        assert fork(lambda: bench.run(tmp_path / "b", **options, output_dir=str(tmp_path / "b")) and 0) == 9
    bench.run(tmp_path / "b", **options, output_dir=str(tmp_path / "b"))
    assert same(final(tmp_path / "a"), final(tmp_path / "b"))
    bench.run(tmp_path / "c", score__every=2, score__enabled=False)
    assert not same(final(tmp_path / "a"), final(tmp_path / "c")), "fresh rollouts changed nothing"


def test_a_phase_lasts_its_steps_and_its_batches_are_numbered_through():
    seen = []

    def load(step):
        seen.append(step)
        return [(step, index) for index in range(24)]

    batches = PhasedBatches(load, every=3, accumulate=2, steps=12)
    assert [batches[i] for i in range(24)] == [(i // 6 * 3, i) for i in range(24)]
    assert seen == [0, 3, 6, 9]
    one = PhasedBatches(load, every=0, accumulate=2, steps=12)
    assert {one[i][0] for i in range(24)} == {0}


def test_given_answers_cannot_be_made_anew(bench, tmp_path):
    answered = tmp_path / "answered.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    answered.write_text("".join(json.dumps({"id": i, "messages": talk}) + "\n" for i in range(8)))
    with pytest.raises(UserError, match="refresh_every"):
        bench.run(
            tmp_path / "run",
            rollout__refresh_every=2,
            rollout__answers="given",
            prompts__path=str(answered),
            output_dir=str(tmp_path),
        )


def test_a_plan_that_could_not_help_is_refused_before_work(bench, tmp_path):
    lossy = {"decode__rule": "typical", "decode__lossy": True}
    with pytest.raises(UserError, match="one lossless plan"):
        bench.run(tmp_path, rollout__refresh_every=2, score__enabled=False, **lossy)
    assert not list(tmp_path.glob("checkpoints/*"))

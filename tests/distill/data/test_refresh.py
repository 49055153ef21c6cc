"""Online distillation: the rollouts are made again every few steps, drafted by the newest checkpoint."""

import json
from pathlib import Path

import datasets
import pytest
from workbench import options_of

from decode.errors import UserError
from decode.model.load import load_target, load_tokenizer
from distill.data.datamodule import PhasedBatches
from distill.engines import base as engine
from distill.prompts.chat_template import Chat
from distill.rollouts import produce


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

"""run.json has what a run chose for each option that its command left open, and all readers show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from workbench import CONF, ROOT, Bench, make_target, options_of

from decode.model.load import load_target
from distill.config import target_size
from distill.config.build import build_drafter
from distill.config.run_choices import record_drafter
from distill.export import recipe_of
from distill.report.history import read
from distill.report.html import build
from distill.utils.run_record import ResolvedOptions, RunRecord, read_options

DECIDED = re.compile(r"^( *)(\w+): null +#(.*(?:\n +#.*)*)", re.MULTILINE)
_OPEN = """
    trainer.max_steps=null trainer.precision=null score.every=null optimizer.optimizer.lr=null
    rollout.samples=null rollout.max_new_tokens=null score.max_new_tokens=4
"""
OPEN = _OPEN.split()


def decided(path: Path) -> Iterator[str]:
    """Names in a yaml file whose comment says `null: by ...`: others mean none or all."""
    for _, name, comment in DECIDED.findall(path.read_text()):
        if "null: by " in re.sub(r"\s*#?\s+", " ", comment):
            yield name


# skip searches its sublayers on answers.
FOLLOWING = [p.stem for p in sorted((CONF / "drafter").glob("*.yaml")) if [*decided(p)] and p.stem != "skip"]


def select(options: dict, name: str):
    for key in name.split("."):
        options = options[key]
    return options


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    bench = Bench(tmp_path_factory.mktemp("choices"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STEPS", 2), ("PASSES", 1), ("SAVE_EVERY", 2)):
            patch.setattr(target_size, name, value)
        return bench.train(*OPEN).succeeded().folder


def test_no_option_that_the_run_decides_is_null_in_its_record(run):
    record = read_options(run)
    files = ("config", "optimizer/adamw", "trainer/cpu", "rollout/hf", "score/default", "prompts/jsonl")
    names = {name for file in files for name in decided(CONF / f"{file}.yaml")}
    assert {"lr", "max_steps", "precision", "max_new_tokens", "samples", "every", "max_tokens"} <= names
    wanted = {name for name in nulls(yaml.safe_load(json.dumps(given(run)))) if name.split(".")[-1] in names}
    assert len(wanted) >= len(names)
    for name in wanted:
        assert select(record.values, name) is not None, name
        assert record.chosen[name], name
    assert {"taps", "target.dtype", "drafter.draft_vocab_size"} <= record.chosen.keys(), "left to `auto`"


def given(run: Path) -> dict:
    """The composed configuration, as Hydra wrote it."""
    return yaml.safe_load((run / ".hydra" / "config.yaml").read_text())


def nulls(node: dict, place: str = "") -> Iterator[str]:
    for key, value in node.items():
        name = f"{place}.{key}" if place else key
        if value is None:
            yield name
        elif isinstance(value, dict):
            yield from nulls(value, name)


def test_given_options_are_not_chosen(run):
    record = read_options(run)
    assert not record.chosen.keys() & {"seed", "batch_size", "drafter.depth", "trainer.log_every_n_steps"}
    assert record.values["batch_size"] == 2


def test_recipe_report_and_curves_have_the_chosen_learning_rate(run):
    rate = read_options(run).values["optimizer"]["optimizer"]["lr"]
    recipe = recipe_of(run / "checkpoints" / "best")
    assert recipe["optimizer"]["optimizer"]["lr"] == rate == 0.006
    assert recipe["max_tokens"] == 256
    assert recipe["trainer"]["precision"]
    assert recipe["chosen"]["optimizer.optimizer.lr"] == "a target of hidden size 32"
    page = build(read(run))
    assert "lr: 0.006  # chosen by a target of hidden size 32" in page
    assert "<h2>Learning rate</h2>" in page
    steps, rates = read(run).curves["lr"]
    assert len(steps) == len(rates) > 2
    assert max(rates) == pytest.approx(rate)
    assert rates[-1] < rate / 2


@pytest.mark.parametrize("name", FOLLOWING)
def test_settings_that_follow_the_target_are_recorded(name, deep, tmp_path):
    options = options_of(f"target={deep[0]}", f"drafter={name}")
    record = RunRecord(tmp_path, options.config)
    record_drafter(record, build_drafter(options.drafter, deep[1]), deep[1])
    names = list(decided(CONF / "drafter" / f"{name}.yaml"))
    assert names
    for key in names:
        assert record.options.values["drafter"][key] is not None, key
        assert f"drafter.{key}" in record.options.chosen


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A target of eight layers, and its folder."""
    folder = make_target(tmp_path_factory.mktemp("deep"), layers=8)
    return folder, load_target(str(folder))


def test_choice_that_differs_after_a_resume_is_named(tmp_path, capsys):
    for precision in ("bf16-mixed", "32-true"):
        options = ResolvedOptions({"trainer": {"precision": None}})
        record = RunRecord(tmp_path, options.choose("the device", {"trainer.precision": precision}))
        record.begin()
    said = "resume: trainer.precision=32-true is chosen here, and trainer.precision=bf16-mixed was when"
    assert capsys.readouterr().out.startswith(said)


def test_run_of_an_older_version_is_named_in_one_line(capsys):
    folder = ROOT / "tests" / "fixtures" / "run_a0da26c"
    assert "its run.json has no options: a run of an older version." in build(read(folder))
    capsys.readouterr()
    assert recipe_of(folder / "checkpoints" / "6") is None
    (line,) = capsys.readouterr().out.splitlines()
    assert "a run of an older version" in line

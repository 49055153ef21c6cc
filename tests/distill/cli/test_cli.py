"""The command line: what becomes of the overrides a person types, and what they are told of mistakes."""

import copy
import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from workbench import CONF, QUICK, ROOT, command, make_target, options_of, train, write_prompts

from decode.errors import UserError
from distill.cli.main import main, rewrite
from distill.config.build import quiet, read_chat
from distill.config.compose import compose, configurations, options
from distill.config.read import checked_options
from distill.config.validate import check_ranges
from distill.main import run
from distill.options import SearchOptions, TrainOptions
from distill.prompts import split as inputs
from distill.prompts.length import Limit

ODD = [
    "plain.jsonl",
    "two words.jsonl",
    "a=b.jsonl",
    "a,b.jsonl",
    "it's.jsonl",
    'so "called".jsonl',
    "a (copy) [2] {x}.jsonl",
    "back\\slash.jsonl",
    "back\\'both.jsonl",
    "ends in a backslash\\",
    "a:b;c#d%e&f$g.jsonl",
    "ünï.jsonl",
    "'quoted'",
    "null",
]


def value(override: str):
    """What Hydra reads out of `key=value`."""
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("absolute", [True, False])
def test_any_path_survives_the_command_line(name, absolute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("{}")
    path = str(tmp_path / name) if absolute else name
    group, where = rewrite([f"prompts={path}"], CONF)
    assert group == "prompts=jsonl"
    assert where.startswith("prompts.path=")
    assert value(where) == path
    (heldout,) = rewrite([f"prompts.heldout=./{name}"], CONF)
    assert value(heldout) == f"./{name}"


def test_rewriting_twice_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    once = rewrite([f"prompts={tmp_path}/{name}" for name in ODD] + ["target=owner/name", "seed=3"], CONF)
    assert rewrite(once, CONF) == once


@pytest.mark.parametrize(
    "text",
    [
        *ODD,
        "How do I use grep, and what is a=b?",
        "",
        "-",
        "~/home",
        " spaces and\ttabs ",
        "two\nlines, and one ends in \\\n",
        "{a: [1, 2]}",
        "[1,2",
        "${x}",
        "\\${x}",
        "\\\\${oc.env:HOME}'s \\",
        "a ${ in a shell's ${x:-y}",
        "#comment",
        "'a' and 'b'",
        "1e5",
        "true",
    ],
)
def test_any_text_survives_the_command_line(text):
    """Literally: the shell's quotes are the only ones."""
    for sweep in ([], ["-m"]):
        *_, override = rewrite([*sweep, f"prompt={text}"], CONF)
        assert OmegaConf.create({"prompt": value(override)}).prompt == text


def test_a_hub_id_a_folder_and_a_group_option_are_told_apart():
    assert rewrite(["target=owner/name"], CONF) == ["target=hf", "target.path='owner/name'"]
    assert rewrite(["target=/a/folder"], CONF) == ["target=hf", "target.path='/a/folder'"]
    assert rewrite(["target=pocket"], CONF) == ["target=pocket"]
    assert rewrite(["prompts=self"], CONF) == ["prompts=self"]
    assert rewrite(["drafter.first=medusa"], CONF) == ["drafter@drafter.first=medusa"]
    assert rewrite(["-m", "drafter.second=ngram,suffix"], CONF) == [
        "-m",
        "drafter@drafter.second=ngram,suffix",
    ]
    assert rewrite(["drafter.first=owner/name"], CONF) == ["drafter.first='owner/name'"]
    assert rewrite(["prompts.heldout=null"], CONF) == ["prompts.heldout=null"]


def test_a_home_folder_is_spelled_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert rewrite(["target=~/model"], CONF)[1] == "target.path='/home/me/model'"
    assert rewrite(["output_dir=~/runs"], CONF) == ["output_dir='/home/me/runs'"]


def test_quotes_that_hydra_knows_are_left_alone():
    assert rewrite(["target='/a b'"], CONF) == ["target=hf", "target.path='/a b'"]


def test_only_a_sweep_splits_at_commas():
    assert rewrite(["-m", "target=pocket,hf"], CONF) == ["-m", "target=pocket,hf"]
    assert rewrite(["seed=1,2", "-m", "batch_size=2"], CONF) == ["-m", "seed=1,2", "batch_size=2"]
    assert rewrite(["-m", "target=/a,/b"], CONF) == ["-m", "target=hf", "target.path='/a','/b'"]
    assert rewrite(["target=/a,/b"], CONF) == ["target=hf", "target.path='/a,/b'"]


def test_the_folder_that_lightning_repeats_for_its_ranks_is_dropped():
    argv = ["hydra.run.dir='/it\\'s \"here\"'", 'hydra.run.dir="/it\'s "here""', "hydra.output_subdir=null"]
    assert rewrite(argv, CONF) == [argv[0], argv[2]]


def test_every_group_option_composes():
    groups = {p.name: options(CONF, p.name) for p in sorted(CONF.iterdir()) if p.is_dir() and p.name != "lab"}
    sizes = ["optimizer.optimizer.lr=1e-3", "rollout.max_new_tokens=8", "max_tokens=9"]  # reads no target
    for turn in range(max(map(len, groups.values()))):
        chosen = [f"{name}={found[turn % len(found)]}" for name, found in groups.items() if found]
        more = ["rollout.url=http://a/v1"] * ("rollout=openai" in chosen)
        more += ["drafter.first=eagle"] * ("drafter=boosted" in chosen)
        kind = SearchOptions if "drafter=auto" in chosen else TrainOptions
        with configurations(CONF):
            cfg = hydra.compose("config", [*chosen, *more, *sizes, "target.path=a/b", "prompts.path=p.jsonl"])
        assert checked_options(kind, cfg).target.path == "a/b"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter=eagl", ["drafter=eagl", "did you mean eagle?"]),
        ("objective=hinge", ["objective=hinge", "choose one of", "ce, hit, jsd, kl, lk"]),
        ("drafter=null", ["drafter=null", "eagle"]),
        ("trainer.max_step=3", ["trainer.max_step", "in trainer", "did you mean max_steps?"]),
        ("tariner.max_steps=3", ["tariner", "did you mean trainer?"]),
        ("rollout.max_prompt_tokens=3", ["rollout.max_prompt_tokens is prompts.max_tokens now"]),
        ("batchsize=3", ["batchsize", "did you mean batch_size?"]),
        ("drafter.depth=abc", ["drafter.depth=abc", "whole number"]),
        ("drafter.depth=1.5", ["drafter.depth=1.5", "whole number"]),
        ("drafter.depth=true", ["whole number"]),
        ("trainer.max_steps=abc", ["trainer.max_steps=abc", "a number"]),
        ("batch_size=null", ["batch_size=null", "whole number"]),
        ("score.enabled=maybe", ["score.enabled=maybe", "true or false"]),
        ("rollout.temperature=warm", ["rollout.temperature=warm", "a number"]),
        ("rollout.temperature=nan", ["rollout.temperature=nan", "a number"]),
        ("score.temperatures=1.0", ["score.temperatures=1.0", "like [0.0"]),
        ("score.temperatures=[a]", ["score.temperatures", "like [0.0"]),
        ("score.temperatures=[1", ["score.temperatures=[1"]),
        ("decode.rule=[token]", ["decode.rule", "text"]),
        ("target=hf", ["target.path", "must be given"]),
        ("eagle", ["eagle", "option=value"]),
        ("prompts.path=${nothing}", ["nothing"]),
    ],
)
def test_a_mistake_is_named(override, said):
    with pytest.raises(UserError) as refused:
        check_ranges(compose(rewrite([override], CONF), CONF))
    assert "\n" not in str(refused.value)
    assert all(text in str(refused.value) for text in said), refused.value


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = train(["trainer.max_step=3"])
    done.refused("trainer.max_step", "in trainer", "did you mean max_steps?")
    assert done.out == ""
    assert not list(tmp_path.iterdir())


def test_what_lightning_takes_in_several_kinds_is_free():
    for override in ("trainer.devices=auto", "trainer.devices=[0,1]", "trainer.precision=32"):
        compose([override, "trainer.gradient_clip_val=null", "trainer.gradient_clip_val=1"], CONF)


@pytest.fixture(scope="module")
def bench_target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("models") / "target")


GROUPS = ("rollout=given", "prompts=mix")
SHORT = (*QUICK, "trainer.max_steps=1", "score.every=1", "score.enabled=false")


@pytest.fixture(scope="module")
def ready(bench_target, tmp_path_factory) -> Callable[..., DictConfig]:
    """Composes the configuration of a run that could begin, with these groups."""
    root = tmp_path_factory.mktemp("ready")
    files = [f"prompts={write_prompts(root / 'prompts.jsonl', 3)}", f"target={bench_target}", "logger=csv"]
    files += [
        f"prompts.heldout={write_prompts(root / 'held.jsonl', 1, first=50)}",
        f"output_dir={root / 'out'}",
    ]
    return cache(lambda *groups: compose(rewrite([*files, *groups], CONF), CONF))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1"]),
        (["batch_size=0"], ["batch_size=0"]),
        (["rollout.answers=guess"], ["rollout.answers=guess", "write or given"]),
        (["prompts.template=jinja"], ["prompts.template=jinja", "chat or none"]),
        (["score.temperatures=[-1]"], ["temperature=-1"]),
        (["rollout.temperature=-1"], ["temperature=-1"]),
        (["decode.proposal=foo"], ["decode.proposal=foo", "fixed, sampled, hybrid"]),
        (["optimizer.optimizer.lr=-1"], ["Invalid learning rate"]),
        (["+drafter.colour=red"], ["colour"]),
        (["trainer.precision=17"], ["17"]),
        (["trainer.accelerator=abacus"], ["abacus"]),
        (["+trainer.colour=red"], ["colour"]),
        (["prompts.heldout=null", "prompts.heldout_share=0"], ["held out", "prompts.heldout_share"]),
        (["rollout=given"], ["does not end with an answer"]),
        (["rollout=given", "prompts.self=2", "score.enabled=false"], ["does not end with an answer"]),
        (["rollout=given", "prompts.answers=drop"], ["prompts.answers=drop", "set it to keep"]),
        (
            ["prompts.path=null", "prompts.self=2", "score.enabled=false", "prompts.max_tokens=2"],
            ["prompts.max_tokens", "no room"],
        ),
        (["prompts.answers=some"], ["prompts.answers=some", "keep or drop"]),
        (["prompts.columns={prompt: qestion}"], ["no column 'qestion'", "it has id, messages"]),
        (["prompts.columns={colour: x}"], ["no colour", "fields are messages"]),
        (["prompts.columns=x"], ["prompts.columns=x"]),
        (["prompts.limit=-1"], ["prompts.limit=-1"]),
        (["prompts.sources=[{path: a}]"], ["one of them"]),
        (["prompts=mix", "prompts.path=null", "prompts.heldout=null"], ["none are named", "prompts.sources"]),
        (
            ["prompts.path=null", "prompts.sources=[{pth: a.jsonl}]"],
            ["pth", "an object of path"],
        ),
        (["prompts.path=null", "prompts.sources=[{path: nowhere.jsonl}]"], ["nowhere.jsonl: no such file"]),
        (["prompts.path=null", "prompts.dataset=./nowhere"], ["prompts.dataset=./nowhere"]),
    ],
)
def test_a_bad_value_is_found_before_any_work(overrides, said, ready, tmp_path):
    cfg = copy.deepcopy(ready(*(o for o in overrides if o in GROUPS)))
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if override not in GROUPS:
            OmegaConf.update(cfg, key, yaml.safe_load(value), merge=False, force_add=True)
    with pytest.raises(UserError) as refused:
        run(cfg, tmp_path)
    assert "\n" not in str(refused.value)
    assert all(text in str(refused.value) for text in said), refused.value
    assert not Path(cfg.output_dir).exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch_size=0", "batch_size=0"),
        ("optimizer.optimizer.lr=-1", "Invalid learning rate"),
        ("prompts.heldout=nowhere.jsonl", "no such file"),
        ("resume=/nowhere", "no run there"),
    ],
)
def test_a_command_with_a_bad_value_leaves_nothing(override, said, bench_target, tmp_path):
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 20), tmp_path / "outputs"
    done = train(
        [f"target={bench_target}", f"prompts={prompts}", f"output_dir={out}", "logger=csv", override]
    )
    done.refused(said)
    assert not [p for p in out.rglob("*") if p.is_file()], "something was left behind"
    assert not list(out.glob("*/*"))


def broken_target(kind: str, folder: Path, whole: Path) -> Path:
    shutil.copytree(whole, folder)
    if kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no causal model":
        (folder / "config.json").write_text('{"model_type": "t5"}')
    elif kind == "no tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    elif kind == "damaged weights":
        (folder / "model.safetensors").write_bytes(b"nonsense")
    elif kind == "no template":
        (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no folder", "no such folder"),
        ("no config", "no config.json"),
        ("no causal model", "no causal language model"),
        ("no tokenizer", "tokenizer"),
        ("no weights", "target="),
        ("damaged weights", "target="),
        ("no template", "prompts.template=none"),
    ],
)
def test_what_is_wrong_with_a_target_is_one_line(kind, said, ready, bench_target, tmp_path):
    cfg = copy.deepcopy(ready())
    cfg.target.path = str(broken_target(kind, tmp_path / "my target", bench_target))
    with pytest.raises(UserError) as refused:
        run(cfg, tmp_path)
    assert "\n" not in str(refused.value)
    assert said in str(refused.value)
    assert not Path(cfg.output_dir).exists()


def test_a_malformed_prompt_names_file_and_line(bench_target, tmp_path):
    file = write_prompts(tmp_path / "my, prompts.jsonl", 2)
    file.write_bytes(file.read_bytes() + b"\n{\n")
    out = f"output_dir={tmp_path / 'out'}"
    done = train([f"target={bench_target}", f"prompts={file}", out, "prompts.strict=true"])
    done.refused(f"{file}:4: ", "not JSON")
    assert not list((tmp_path / "out").glob("*"))


def test_malformed_prompts_are_set_aside_listed_and_said(bench_target, tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", 24)
    bad = [b"{", b"\xff", b'{"prompt": 3}', b'{"prompt": "q", "weight": NaN}']
    file.write_bytes(b"\n".join([bad[0], file.read_bytes().strip(), *bad[1:], file.read_bytes()]))
    heldout = write_prompts(tmp_path / "heldout.jsonl", 4, first=20)
    held = [f"target={bench_target}", f"prompts={file}", f"prompts.heldout={heldout}"]
    done = train([*held, f"output_dir={tmp_path / 'out'}", *SHORT]).succeeded()
    listed = done.folder / "quarantine.jsonl"
    said = done.out.splitlines()
    first = said.index(f"prompts: 4 of 56 records are malformed and left out, listed in {listed}")
    lines = [1, 26, 27, 28]
    shown = [line.split(": ")[0] for line in said[first + 1 : first + 5]]
    assert shown[:3] == [f"  {file}:{n}" for n in lines[:3]]
    assert shown[3] == "prompts", "more than three reasons are shown"
    assert "prompts: 24 duplicates dropped" in said
    kept = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(k["file"], k["line"]) for k in kept] == [(str(file), n) for n in lines]
    assert [k["raw"] for k in kept] == ["{", "\\xff", bad[2].decode(), bad[3].decode()]
    assert "finite number" in kept[3]["reason"]
    record = json.loads((done.folder / "prompts.json").read_text())
    (counts,) = record["sources"]
    expected = {"source": str(file), "records": 52, "quarantined": 4, "duplicates": 24, "used": 24}
    assert counts == expected | {"revision": None, "weight": 1.0, "unread": {}, "lost": 0}
    assert (record["train"]["prompts"], record["held_out"]["prompts"]) == (20, 4)
    assert record["held_out_of_sources"] == 4, "four questions are in both files"


def test_several_sources_and_the_turns_of_each_are_mixed(bench_target, tmp_path):
    many = write_prompts(tmp_path / "many.jsonl", 30)
    turns = [{"question_id": i, "turns": [f"ask {i}", f"ask {i} again"]} for i in range(30)]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(t) + "\n" for t in turns))
    sources = f"[{{path: {many}}}, {{path: {tmp_path}/turns.jsonl, weight: 2}}]"
    options = ["prompts=mix", f"prompts.sources={sources}", "prompts.limit=18", "prompts.heldout_share=0.4"]
    done = train([f"target={bench_target}", *options, f"output_dir={tmp_path / 'out'}", *SHORT]).succeeded()
    assert f"prompts: 6 of {many}, 12 of {tmp_path}/turns.jsonl" in done.out
    record = json.loads((done.folder / "prompts.json").read_text())
    assert record["train"]["prompts"] + record["held_out"]["prompts"] == 18
    assert [s["used"] for s in record["sources"]] == [6, 12]


def read_prompts(*overrides: str) -> inputs.Inputs:
    run = options_of(*overrides)
    return inputs.read(run.prompts, read_chat(run.target, "chat"), Limit(), run.rollout.answers, score=True)


def test_held_out_prompts_end_where_the_target_answers_first_and_stand_once(tmp_path):
    records = [{"turns": ["q", "r"]}, {"turns": ["q", "s"]}, *({"turns": [f"q{i}", "r"]} for i in range(9))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    train_on = write_prompts(tmp_path / "train.jsonl", 3)
    held = read_prompts(f"prompts={train_on}", f"prompts.heldout={tmp_path}/p.jsonl").held
    assert sorted(p.messages[0]["content"] for p in held) == ["q", *(f"q{i}" for i in range(9))]
    assert all(len(p.messages) == 1 for p in held)


def test_held_out_prompts_keep_the_answer_of_their_record_for_judges(tmp_path):
    records = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)] + [{"prompt": "why?"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    train_on = write_prompts(tmp_path / "train.jsonl", 3)
    held = read_prompts(f"prompts={train_on}", f"prompts.heldout={tmp_path}/p.jsonl").held
    found = {p.messages[-1]["content"]: p.reference for p in held}
    assert found == {"0 + 1?": "#### 1", "1 + 1?": "#### 2", "2 + 1?": "#### 3", "why?": ""}


def test_a_run_does_not_go_on_with_other_held_out_prompts(bench_target, tmp_path, monkeypatch):
    prompts = f"prompts={write_prompts(tmp_path / 'p.jsonl', 40)}"
    found = read_prompts(prompts)
    inputs.keep_record(found, tmp_path)
    inputs.keep_record(read_prompts(prompts), tmp_path)
    assert not (tmp_path / "quarantine.jsonl").exists()
    heldout = f"prompts.heldout={write_prompts(tmp_path / 'held.jsonl', 4, first=90)}"
    found.record["held_out"] = read_prompts(prompts, heldout).record["held_out"]
    with pytest.raises(UserError, match="held-out prompts have changed since this run began; resume=never"):
        inputs.keep_record(found, tmp_path)
    # Rank 0 may discard the folder when another rank has just seen what is in it.
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(inputs, "first_rank", lambda: False)
    inputs.keep_record(found, tmp_path / "discarded")


def test_an_empty_prompts_file_is_refused(bench_target, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    done = train([f"target={bench_target}", f"prompts={tmp_path}/empty.jsonl", f"output_dir={tmp_path}/out"])
    assert done.code == 2
    assert "no prompts in it" in done.err


def test_an_output_folder_that_cannot_be_is_refused(bench_target, tmp_path):
    (tmp_path / "file").write_text("")
    done = train([f"target={bench_target}", "prompts=self", f"output_dir={tmp_path / 'file'}"])
    done.refused("output_dir")


@pytest.mark.parametrize("names", [("3.71.tmp/a",), ("3.71.tmp/a", None, "3/a")], ids=["write", "rename"])
def test_a_full_disk_is_named_in_one_line_with_exit_code_1(names, tmp_path):
    """By the file that was to be, not a temporary one."""
    paths = [name and str(tmp_path / "gone" / name) for name in names]

    def full(cfg, folder):
        raise RuntimeError("writing failed") from OSError(28, "No space left on device", *paths)

    done = command(lambda: main(full, CONF), ["train.py", f"output_dir={tmp_path}"])
    assert done.code == 1
    disk = r"the disk at (\S+) has \d+ MiB left; make room, and run the same command again"
    line = rf"error: No space left on device \({tmp_path}/gone/3/a\): {disk}\n"
    match = re.fullmatch(line, done.err)
    assert match, done.err
    assert os.path.ismount(match[1])
    assert tmp_path.is_relative_to(match[1])


def test_a_disk_that_may_not_be_written_to_is_one_line(tmp_path):
    def refused(cfg, folder):
        raise PermissionError(13, "Permission denied", "/x/run.json.12.tmp")

    done = command(lambda: main(refused, CONF), ["train.py", f"output_dir={tmp_path}"])
    assert (done.code, done.err) == (1, "error: Permission denied (/x/run.json)\n")


def test_a_bug_keeps_its_traceback(tmp_path):
    def bug(cfg, folder):
        raise FileNotFoundError("ours")

    with pytest.raises(FileNotFoundError, match="ours"):
        command(lambda: main(bug, CONF), ["train.py", f"output_dir={tmp_path}"])


def test_help_and_the_printed_configuration_still_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = command(lambda: main(lambda cfg, folder: 0.0, CONF), ["train.py", "--help"])
    assert shown.code == 0
    assert "drafter: " in shown.out
    shown = command(lambda: main(lambda cfg, folder: 0.0, CONF), ["train.py", "--cfg", "job", "seed=7"])
    assert shown.code == 0
    assert "seed: 7" in shown.out
    assert not list(tmp_path.iterdir())


def shown(*words: str) -> str:
    done = command(lambda: main(lambda cfg, folder: 0.0, CONF), ["train.py", *words])
    assert (done.code, done.err) == (0, "")
    return done.out


def test_help_lists_the_settings_of_chosen_groups_and_explains_those_that_are_named():
    text = shown("--help")
    for setting in ("trainer.max_steps=null", "batch_size=5", "drafter.depth=2"):
        assert setting in text
    assert "forward passes; the paper's code: 3" not in text
    text = shown("drafter=hass", "--help")
    assert "drafter: hass" in text
    assert re.search(r"drafter\.depth=3 +forward passes; the paper's code: 3", text)
    assert "drafter.feature_noise=0.1" in text, "hass is based on eagle"
    assert re.search(r"drafter\.second=suffix +suffix \| ngram", shown("drafter=union", "--help"))


def test_every_group_can_be_explained():
    for path in CONF.glob("*/*.yaml"):
        shown(f"{path.parent.name}={path.stem}", "--help")


def test_a_command_needs_no_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run: list[int] = []
    done = command(lambda: main(lambda cfg, folder: run.append(cfg.seed), CONF), ["train.py"])
    assert (done.code, run) == (0, [0]), done.err


def test_the_version_is_printed():
    assert shown("--version") == f"foredraft {importlib.metadata.version('foredraft')}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--drafter", "eagle"], "--drafter: options have no dashes; write drafter=eagle"),
        (["--seed=3"], "--seed=3: options have no dashes; write seed=3"),
        (["lr=1e-4"], "lr: no such option; did you mean optimizer.optimizer.lr?"),
        (["drafter.steps=3"], "drafter.steps: no such option in drafter; choose one of"),
        (
            ["target=/nowhere"],
            "target=/nowhere: no such folder; give a model folder, a GGUF file or a hub id (owner/name)",
        ),
        (["prompts=/nowhere.jsonl"], "prompts=/nowhere.jsonl: no such file; give a JSONL file"),
        (["drafter.init_from=./nowhere"], "drafter.init_from=./nowhere: no such folder"),
        (["prompts=data/none.jsonl"], "prompts=data/none.jsonl: no such file; give a JSONL file"),
        (["prompts.heldout=none.jsonl"], "prompts.heldout=none.jsonl: no such file"),
        (["target=models/a/b"], "target=models/a/b: no such folder; give a model folder, a GGUF file"),
        (["trainer.max_steps=0"], "trainer.max_steps=0: must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_is_found_before_the_command_is_imported(argv, said, tmp_path):
    def body(cfg, folder):
        raise AssertionError("imported")

    done = command(lambda: main(body, CONF), ["train.py", *argv, f"output_dir={tmp_path / 'o'}"])
    done.refused(f"error: {said}")
    assert not (tmp_path / "o").exists()


def test_a_dataset_of_the_hub_is_prompts_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = ["prompts=jsonl", "prompts.path=null", "prompts.dataset=owner/name.v2"]
    assert rewrite(["prompts=owner/name.v2"], CONF) == dataset
    assert compose(dataset, CONF).prompts.dataset == "owner/name.v2"
    for file in ("data/none.jsonl", "a/b.parquet", "gsm8k"):
        assert not any("dataset" in word for word in rewrite([f"prompts={file}"], CONF))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name.v2").touch()
    assert "prompts.path='owner/name.v2'" in rewrite(["prompts=owner/name.v2"], CONF)


@pytest.mark.parametrize("words", ["train --help", "--help", "--version"])
def test_a_reader_that_ends_early_is_no_error(words):
    line = f"{sys.executable} -m foredraft {words} | true"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_a_request_prints_no_line(caplog, library):
    caplog.set_level(logging.INFO)  # as Hydra does
    quiet()
    logging.getLogger(library).info("HTTP Request: POST ...")
    assert not caplog.records

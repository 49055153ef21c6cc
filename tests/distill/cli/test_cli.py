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
from workbench import CONF, QUICK, ROOT, Outcome, command, make_target, options_of, train, write_prompts

from decode.errors import UserError
from distill.cli.main import main, rewrite
from distill.config.build import TargetSource, quiet
from distill.config.choices import options
from distill.config.compose import compose, configurations
from distill.config.read import checked_options
from distill.main import run
from distill.options.run import SearchOptions, TrainOptions
from distill.prompts import split
from distill.prompts.length import Limit

ODD = [
    "plain.jsonl",
    "two words.jsonl",
    "a=b,c.jsonl",
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
TEXTS = [
    "How do I use grep, and what is a=b?",
    "",
    "-",
    "two\nlines, and one ends in \\\n",
    "${x}",
    "\\${x}",
    "\\\\${oc.env:HOME}'s \\",
    "a ${ in a shell's ${x:-y}",
]


def value(override: str):
    """What Hydra reads out of `key=value`."""
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("absolute", [True, False])
def test_any_path_survives(name, absolute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("{}")
    path = str(tmp_path / name) if absolute else name
    group, where = once = rewrite([f"prompts={path}"], CONF)
    assert group == "prompts=jsonl"
    assert where.startswith("prompts.path=")
    assert value(where) == path
    assert rewrite(once, CONF) == once
    (heldout,) = rewrite([f"prompts.heldout=./{name}"], CONF)
    assert value(heldout) == f"./{name}"


@pytest.mark.parametrize("text", ODD + TEXTS)
@pytest.mark.parametrize("sweep", [[], ["-m"]], ids=["job", "sweep"])
def test_any_text_survives(text, sweep):
    *_, override = rewrite([*sweep, f"prompt={text}"], CONF)
    assert OmegaConf.create({"prompt": value(override)}).prompt == text


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["target=owner/name"], ["target=hf", "target.path='owner/name'"]),
        (["target=/a/folder"], ["target=hf", "target.path='/a/folder'"]),
        (["target='/a b'"], ["target=hf", "target.path='/a b'"]),
        (["target=~/model"], ["target=hf", "target.path='/home/me/model'"]),
        (["output_dir=~/runs"], ["output_dir='/home/me/runs'"]),
        (["target=pocket"], ["target=pocket"]),
        (["prompts=self"], ["prompts=self"]),
        (["prompts.heldout=null"], ["prompts.heldout=null"]),
        (["drafter.first=medusa"], ["drafter@drafter.first=medusa"]),
        (["drafter.first=owner/name"], ["drafter.first='owner/name'"]),
        (["-m", "drafter.second=ngram,suffix"], ["-m", "drafter@drafter.second=ngram,suffix"]),
        # Only a sweep splits at commas.
        (["-m", "target=pocket,hf"], ["-m", "target=pocket,hf"]),
        (["seed=1,2", "-m", "batch_size=2"], ["-m", "seed=1,2", "batch_size=2"]),
        (["-m", "target=/a,/b"], ["-m", "target=hf", "target.path='/a','/b'"]),
        (["target=/a,/b"], ["target=hf", "target.path='/a,/b'"]),
        # Lightning repeats the folder for its ranks.
        (["hydra.run.dir='/it\\'s'", "hydra.run.dir=/it's"], ["hydra.run.dir='/it\\'s'"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_names_and_paths_are_told_apart(argv, found, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert rewrite(argv, CONF) == rewrite(found, CONF) == found


def test_every_group_option_composes():
    groups = {p.name: options(CONF, p.name) for p in sorted(CONF.iterdir()) if p.is_dir() and p.name != "lab"}
    groups["decode"].remove("fastest")  # of foredraft generate
    named = [[f"experiment={name}"] for name in groups.pop("experiment")]  # of their own choices
    sizes = ["optimizer.optimizer.lr=1e-3", "rollout.max_new_tokens=8", "max_tokens=9"]  # reads no target
    turns = range(max(map(len, groups.values())))
    mixed = [[f"{name}={found[i % len(found)]}" for name, found in groups.items() if found] for i in turns]
    for chosen in [*mixed, *named]:
        more = ["rollout.url=http://a/v1"] * ("rollout=openai" in chosen)
        more += ["drafter.first=eagle"] * ("drafter=boosted" in chosen)
        more += ["+objective.terms.kl={objective: kl}"] * ("objective=mix" in chosen)  # has none itself
        kind = SearchOptions if "drafter=auto" in chosen else TrainOptions
        with configurations(CONF):
            cfg = hydra.compose("config", [*chosen, *more, *sizes, "target.path=a/b", "prompts.path=p.jsonl"])
        assert checked_options(kind, cfg).target.path == "a/b"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter=eagl", "did you mean eagle?"),
        ("objective=hinge", "choose one of"),
        ("trainer.max_step=3", "did you mean max_steps?"),
        ("batchsize=3", "did you mean batch_size?"),
        ("lr=1e-4", "did you mean optimizer.optimizer.lr?"),
        ("rollout.max_prompt_tokens=3", "renamed; write prompts.max_tokens"),
        ("drafter.depth=1.5", "whole number"),
        ("batch_size=null", "whole number"),
        ("trainer.max_steps=abc", "a number"),
        ("trainer.max_steps=0", "at least 1"),
        ("score.enabled=maybe", "true or false"),
        ("rollout.temperature=nan", "a number"),
        ("score.temperatures=1.0", "like [0.0"),
        ("decode.rule=[token]", "text"),
        ("target=hf", "must be given"),
        ("eagle", "option=value"),
        ("--drafter=eagle", "write drafter=eagle"),
        ("--model=a/b", "write target=a/b"),
        ("--max-steps=5", "write trainer.max_steps=5"),
        ("--num-train-epochs=3", "write trainer.max_steps=...: steps of the optimizer"),
        ("--per-device-train-batch-size=3", "write batch_size=3"),
        ("model=a/b", "write target=/path/or/hub-id"),
        ("epochs=3", "write trainer.max_steps=..."),
        ("trainer.max_epochs=3", "write trainer.max_steps=..."),
        ("gpus=8", "write trainer=ddp trainer.devices=..."),
        ("trainer.batch_size=8", "did you mean batch_size?"),
        ("dataset=a/b", "write prompts=/path/to/prompts.jsonl"),
        ("optimizer.optimizer.lr=0", "must be more than 0"),
        ("drafter.depth=100000", "must be at most 256"),
        ("optimizer.warmup=7", "optimizer.warmup=7: must be from 0 to 1"),
        ("decode.depth=-1", "decode.depth=-1: must be at least 0"),
        ("taps=engine", "give engine.python, an interpreter that has vLLM"),
        ("prompts.path=${nothing}", "nothing"),
        ("target=/nowhere", "no such folder"),
        ("target=models/a/b", "no such folder"),
        ("drafter.init_from=./nowhere", "no such folder"),
        ("prompts=data/none.jsonl", "no such file"),
        ("resume=/nowhere", "no run there"),
    ],
)
def test_mistake_is_named_before_the_command_is_imported(override, said, tmp_path):
    def body(cfg, folder):
        raise AssertionError("imported")

    done = command(lambda: main(body, CONF), ["train.py", override, f"output_dir={tmp_path / 'o'}"])
    done.refused(override.strip("-").partition("=")[0].rpartition(".")[2], said)
    assert done.out == ""
    assert not list((tmp_path / "o").glob("*/*"))


def test_trainer_options_of_several_types_are_taken():
    for override in ("trainer.devices=auto", "trainer.devices=[0,1]", "trainer.precision=32"):
        compose([override, "trainer.gradient_clip_val=null", "trainer.gradient_clip_val=1"], CONF)


@pytest.mark.parametrize(
    ("argv", "unknown"),
    [
        ("experiment=spire drafter=suffix", "drafter.sinks drafter.start drafter.window"),
        ("experiment=qwen_coder drafter=union drafter.first=lyanna", "drafter.draft_vocab_size"),
        ("experiment=llama_cpp drafter=medusa", "drafter.fc_norm drafter.norm_before_fc"),
    ],
)
def test_experiment_with_options_of_another_drafter_is_refused(argv, unknown):
    words = rewrite(argv.split(), CONF)
    left_out = " ".join(f"~{name}" for name in unknown.split())
    with pytest.raises(UserError, match=rf"sets {', '.join(unknown.split())}, which .*; add {left_out}$"):
        compose(words, CONF)
    assert compose([*words, *left_out.split()], CONF)


def test_experiment_takes_another_drafter_with_the_same_options():
    assert compose(rewrite(["experiment=qwen_coder", "drafter=p_eagle"], CONF), CONF).drafter.draft_vocab_size
    assert compose(rewrite(["experiment=smollm2", "drafter=union", "drafter.first=/a/b"], CONF), CONF)


@pytest.fixture(scope="module")
def bench_target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("models") / "target")


GROUPS = ("rollout=given", "prompts=mix")
SHORT = (*QUICK, "trainer.max_steps=1", "score.every=1", "score.enabled=false")
SELF = ("prompts.path=null", "prompts.self=2", "score.enabled=false")


@pytest.fixture(scope="module")
def ready(bench_target, tmp_path_factory) -> Callable[..., DictConfig]:
    """Composes the configuration of a run that could begin, with these groups."""
    root = tmp_path_factory.mktemp("ready")
    prompts, heldout = write_prompts(root / "p.jsonl", 3), write_prompts(root / "held.jsonl", 1, first=50)
    files = [f"prompts={prompts}", f"prompts.heldout={heldout}", f"output_dir={root / 'out'}"]
    argv = [*files, f"target={bench_target}", "logger=csv"]
    return cache(lambda *groups: compose(rewrite([*argv, *groups], CONF), CONF))


def refusal(cfg: DictConfig, folder: Path) -> str:
    """The line by which a run is refused before any work."""
    with pytest.raises(UserError) as refused:
        run(cfg, folder)
    assert "\n" not in str(refused.value)
    assert not Path(cfg.output_dir).exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.answers=guess"], "rollout.answers=guess"),
        (["score.temperatures=[-1]"], "score.temperatures=[-1]: must be at least 0"),
        (["optimizer.optimizer.lr=-1"], "must be more than 0"),
        (["+drafter.colour=red"], "colour"),
        (["trainer.accelerator=abacus"], "abacus"),
        (["+trainer.colour=red"], "colour"),
        (["prompts.heldout=null", "prompts.heldout_share=0"], "prompts.heldout_share"),
        (["rollout=given"], "does not end with an answer"),
        (["rollout=given", "prompts.self=2", "score.enabled=false"], "does not end with an answer"),
        (["rollout=given", "prompts.answers=drop"], "prompts.answers=drop"),
        ([*SELF, "prompts.max_tokens=2"], "prompts.max_tokens"),
        (["prompts.columns={prompt: qestion}"], "no column 'qestion'"),
        (["prompts.columns={colour: x}"], "no colour"),
        (["prompts.limit=-1"], "prompts.limit=-1"),
        (["prompts.sources=[{path: a}]"], "one of them"),
        (["prompts=mix", "prompts.path=null", "prompts.heldout=null"], "prompts.sources"),
        (["prompts.path=null", "prompts.sources=[{pth: a.jsonl}]"], "pth"),
        (["prompts.path=null", "prompts.sources=[{path: nowhere.jsonl}]"], "nowhere.jsonl: no such file"),
        (["prompts.path=null", "prompts.dataset=./nowhere"], "prompts.dataset=./nowhere"),
    ],
)
def test_bad_value_is_refused_before_any_work(overrides, said, ready, tmp_path):
    cfg = copy.deepcopy(ready(*(o for o in overrides if o in GROUPS)))
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if override not in GROUPS:
            OmegaConf.update(cfg, key, yaml.safe_load(value), merge=False, force_add=True)
    assert said in refusal(cfg, tmp_path)


@pytest.mark.parametrize(
    ("files", "content", "said"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", '{"model_type": "t5"}', "no causal language model"),
        ("token*", None, "tokenizer"),
        ("model.safetensors", None, "target="),
        ("model.safetensors", "nonsense", "target="),
        ("chat_template.jinja", None, "prompts.template=none"),
    ],
)
def test_broken_target_is_one_line(files, content, said, ready, bench_target, tmp_path):
    cfg = copy.deepcopy(ready())
    cfg.target.path = str(shutil.copytree(bench_target, tmp_path / "my target"))
    for file in (tmp_path / "my target").glob(files):
        file.unlink()
        if content:
            file.write_text(content)
    assert said in refusal(cfg, tmp_path)


@pytest.mark.parametrize(
    ("content", "override", "said"),
    [
        ('{"prompt": "a"}\n\n{\n', "prompts.strict=true", "my, prompts.jsonl:3: "),
        ("\n\n", "seed=0", "no prompts in it"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "optimizer.optimizer.lr=-1", "must be more than 0"),
        ('{"prompt": "a"}\n', "output_dir={file}", "output_dir"),
    ],
)
def test_refused_run_leaves_no_folder(content, override, said, bench_target, tmp_path):
    file, out = tmp_path / "my, prompts.jsonl", tmp_path / "out"
    file.write_text(content)
    argv = [f"target={bench_target}", f"prompts={file}", "prompts.heldout_share=0.8", f"output_dir={out}"]
    train([*argv, "logger=csv", override.format(file=f"'{file}'")]).refused(said)
    assert not [path for path in out.rglob("*") if path.is_file()]
    assert not list(out.glob("*/*"))


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_malformed_prompts_are_set_aside_and_listed(bench_target, tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", 24)
    bad = [b"{", b"\xff", b'{"prompt": 3}', b'{"prompt": "q", "weight": NaN}']
    file.write_bytes(b"\n".join([bad[0], file.read_bytes().strip(), *bad[1:], file.read_bytes()]))
    heldout = write_prompts(tmp_path / "heldout.jsonl", 4, first=20)
    held = [f"target={bench_target}", f"prompts={file}", f"prompts.heldout={heldout}"]
    done = train([*held, f"output_dir={tmp_path / 'out'}", *SHORT]).succeeded()
    listed = done.folder / "quarantine.jsonl"
    assert f"4 of 56 records are malformed and left out, listed in {listed}" in done.out
    assert f"  {file}:1: " in done.out
    assert "24 duplicates" in done.out
    kept = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(k["file"], k["line"]) for k in kept] == [(str(file), n) for n in (1, 26, 27, 28)]
    assert [k["raw"] for k in kept] == ["{", "\\xff", bad[2].decode(), bad[3].decode()]
    assert "finite number" in kept[3]["reason"]
    record = json.loads((done.folder / "prompts.json").read_text())
    (counts,) = record["sources"]
    expected = {"records": 52, "quarantined": 4, "duplicates": 24, "used": 24, "lost": 0, "weight": 1.0}
    assert counts == expected | {"source": str(file), "revision": None, "unread": {}}
    assert (record["train"]["prompts"], record["held_out"]["prompts"]) == (20, 4)
    assert record["held_out_of_sources"] == 4, "four questions are in both files"


def test_several_sources_and_the_turns_of_each_are_mixed(bench_target, tmp_path):
    many = write_prompts(tmp_path / "many.jsonl", 30)
    asked = [{"question_id": i, "turns": [f"ask {i}", f"ask {i} again"]} for i in range(30)]
    turns = write_records(tmp_path / "turns.jsonl", asked)
    sources = f"[{{path: {many}}}, {{path: {turns}, weight: 2}}]"
    options = ["prompts=mix", f"prompts.sources={sources}", "prompts.limit=18", "prompts.heldout_share=0.4"]
    done = train([f"target={bench_target}", *options, f"output_dir={tmp_path / 'out'}", *SHORT]).succeeded()
    assert f"prompts: 6 of {many}, 12 of {turns}" in done.out
    record = json.loads((done.folder / "prompts.json").read_text())
    assert record["train"]["prompts"] + record["held_out"]["prompts"] == 18
    assert [s["used"] for s in record["sources"]] == [6, 12]


def read_prompts(*overrides: str) -> split.Inputs:
    run = options_of(*overrides)
    chat = TargetSource(run.target).chat("chat")
    return split.read(run.prompts, chat, Limit(), run.rollout.answers, score=True)


def test_held_out_prompts_are_first_turns_with_references(tmp_path):
    records = [{"turns": ["q", "r"]}, {"turns": ["q", "s"]}, {"turns": ["q1", "r"]}]
    records += [{"question": "1 + 1?", "answer": "#### 2"}, {"prompt": "why?"}]
    heldout = write_records(tmp_path / "p.jsonl", records)
    train_on = write_prompts(tmp_path / "train.jsonl", 3)
    held = read_prompts(f"prompts={train_on}", f"prompts.heldout={heldout}").held
    found = sorted((p.messages[-1]["content"], p.reference, len(p.messages)) for p in held)
    assert found == [("1 + 1?", "#### 2", 1), ("q", "r", 1), ("q1", "r", 1), ("why?", "", 1)]


def test_run_does_not_resume_with_other_held_out_prompts(tmp_path, monkeypatch):
    prompts = f"prompts={write_prompts(tmp_path / 'p.jsonl', 40)}"
    found = read_prompts(prompts)
    split.keep_record(found, tmp_path)
    split.keep_record(read_prompts(prompts), tmp_path)
    assert not (tmp_path / "quarantine.jsonl").exists()
    heldout = f"prompts.heldout={write_prompts(tmp_path / 'held.jsonl', 4, first=90)}"
    found.record["held_out"] = read_prompts(prompts, heldout).record["held_out"]
    with pytest.raises(UserError, match="held-out prompts have changed"):
        split.keep_record(found, tmp_path)
    # Rank 0 may discard the folder when another rank has just seen what is in it.
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(split, "first_rank", lambda: False)
    split.keep_record(found, tmp_path / "discarded")


def failing(error: Exception, folder: Path) -> Outcome:
    """A command that ends with this error."""

    def body(cfg, folder):
        raise error

    return command(lambda: main(body, CONF), ["train.py", f"output_dir={folder}"])


@pytest.mark.parametrize("names", [("3.71.tmp/a",), ("3.71.tmp/a", None, "3/a")], ids=["write", "rename"])
def test_full_disk_is_named_in_one_line_with_exit_code_1(names, tmp_path):
    """By the final file's name, not a temporary one's."""
    error = RuntimeError("writing failed")
    paths = [name and str(tmp_path / "gone" / name) for name in names]
    error.__cause__ = OSError(28, "No space left on device", *paths)
    done = failing(error, tmp_path)
    assert done.code == 1
    line = (
        rf"error: No space left on device \({tmp_path}/gone/3/a\): the disk at (\S+) has \d+ MiB left; .*\n"
    )
    match = re.fullmatch(line, done.err)
    assert match, done.err
    assert os.path.ismount(match[1])
    assert tmp_path.is_relative_to(match[1])


def test_read_only_disk_is_one_line_and_a_bug_has_a_traceback(tmp_path):
    done = failing(PermissionError(13, "Permission denied", "/x/run.json.12.tmp"), tmp_path)
    assert (done.code, done.err) == (1, "error: Permission denied (/x/run.json)\n")
    with pytest.raises(FileNotFoundError, match="ours"):
        failing(FileNotFoundError("ours"), tmp_path)


def shown(*words: str) -> str:
    done = command(lambda: main(lambda cfg, folder: 0.0, CONF), ["train.py", *words])
    assert (done.code, done.err) == (0, "")
    return done.out


def test_help_lists_groups_and_explains_named_ones():
    text = shown("--help")
    for group in [p for p in CONF.iterdir() if p.is_dir() and p.name != "lab"]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {group.name}: ")]
        assert re.search(r"\(\w.*\)$", line), line
        assert {p.stem for p in group.glob("*.yaml")} <= set(re.findall(r"\w+", text))
    assert "drafter.depth=2" in text
    explained = r"drafter\.depth=3 +depths unrolled"
    assert not re.search(explained, text)
    text = shown("drafter=hass", "--help")
    assert re.search(explained, text)
    assert "drafter.feature_noise=0.1" in text, "hass is based on eagle"
    assert re.search(r"drafter\.second=suffix +suffix \| ngram", shown("drafter=union", "--help"))


def test_every_group_and_every_command_can_be_explained():
    for path in CONF.glob("*/*.yaml"):
        shown(f"{path.parent.name}={path.stem}", "--help")
    for path in CONF.glob("*.yaml"):
        done = command(lambda name=path.stem: main(lambda cfg, folder: 0.0, CONF, name), ["x", "-h"])
        assert (done.code, done.out.partition(":")[0]) == (0, "usage"), path


def test_version_and_configuration_are_printed_and_no_argument_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown("--version") == f"foredraft {importlib.metadata.version('foredraft')}\n"
    assert "seed: 7" in shown("--cfg", "job", "seed=7")
    assert not list(tmp_path.iterdir())
    run: list[int] = []
    command(lambda: main(lambda cfg, folder: run.append(cfg.seed), CONF), ["train.py"]).succeeded()
    assert run == [0]


def test_dataset_of_the_hub_is_prompts_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = ["prompts=jsonl", "prompts.path=null", "prompts.dataset=owner/name.v2"]
    assert rewrite(["prompts=owner/name.v2"], CONF) == dataset
    assert compose(dataset, CONF).prompts.dataset == "owner/name.v2"
    for file in ("data/none.jsonl", "a/b.parquet", "gsm8k"):
        assert not any("dataset" in word for word in rewrite([f"prompts={file}"], CONF))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name.v2").touch()
    assert "prompts.path='owner/name.v2'" in rewrite(["prompts=owner/name.v2"], CONF)


@pytest.mark.parametrize("words", ["train --help", "--version"])
def test_reader_that_ends_early_is_no_error(words):
    line = f"{sys.executable} -m foredraft {words} | true"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_request_prints_no_line(caplog, library):
    caplog.set_level(logging.INFO)  # as Hydra does
    quiet()
    logging.getLogger(library).info("HTTP Request: POST ...")
    assert not caplog.records

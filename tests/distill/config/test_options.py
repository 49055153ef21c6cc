"""Configurations of conf/ and their dataclasses, and sizes that follow the target and the answers."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from workbench import CONF, make_target, options_of

from decode.errors import UserError
from decode.plan import Plan
from distill.config import target_size
from distill.config.compose import compose
from distill.config.read import read_options
from distill.config.target_size import fill_precision, fill_size_settings, size_settings, with_length
from distill.options.answers import (
    OpenAIRolloutOptions,
    RayRolloutOptions,
    RolloutOptions,
    VLLMRolloutOptions,
)
from distill.options.commands import (
    AdviseEngineOptions,
    AdviseOptions,
    ExportCommandOptions,
    GenerateOptions,
    InspectOptions,
    InspectTargetOptions,
    LimitOptions,
    PassportOptions,
    RolloutCommandOptions,
    ScoreCommandOptions,
    VerifyOptions,
    WatchOptions,
)
from distill.options.run import TrainOptions

COMMANDS = {
    "config": TrainOptions,
    "advise": AdviseOptions,
    "advise_engine": AdviseEngineOptions,
    "export": ExportCommandOptions,
    "generate": GenerateOptions,
    "inspect": InspectTargetOptions,
    "inspect_data": InspectOptions,
    "limit": LimitOptions,
    "passport": PassportOptions,
    "rollout_alone": RolloutCommandOptions,
    "score_checkpoint": ScoreCommandOptions,
    "verify_served": VerifyOptions,
    "watch": WatchOptions,
}
REQUIRED = {
    "advise_engine": ["engine=vllm"],
    "export": ["checkpoint=c", "to=vllm"],
    "generate": ["prompt=x"],
    "passport": ["checkpoint=c"],
    "score_checkpoint": ["checkpoint=c"],
    "verify_served": ["checkpoint=c", "url=http://host:1"],
    "watch": ["checkpoint=c", "url=http://host:1"],
}


def test_every_command_is_here():
    # A base, one that Hydra does not compose, and one with two classes of options (test_make.py).
    names = {path.stem for path in CONF.glob("*.yaml")} - {"command", "plan", "make"}
    assert names == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_configuration_has_the_names_of_its_options(name):
    cfg = compose(REQUIRED.get(name, []), CONF, name)
    fill_size_settings(cfg)
    options = read_options(COMMANDS[name], cfg)
    values = {key: value for key, value in cfg.items() if not OmegaConf.is_config(value)}
    assert {key: getattr(options, str(key)) for key in values} == values


def test_no_option_has_the_name_of_a_group():
    """`key=value` would then ask for one of the group's choices."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    files = {path: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    files |= {path: yaml.safe_load(path.read_text()) for path in CONF.glob("lab/*.yaml")}
    found = [
        (path.stem, key)
        for path, options in files.items()
        for key, value in options.items()
        if key in groups and not isinstance(value, dict)
    ]
    assert found == [("plan", "prompts")]  # a number, or a file, before Hydra reads it


def test_setting_that_only_one_of_both_has_is_named():
    cfg = compose([], CONF)
    fill_size_settings(cfg)
    for key in ("new", "score.new", "rollout.new", "prompts.new"):
        more = copy.deepcopy(cfg)
        OmegaConf.update(more, key, 1, force_add=True)
        with pytest.raises(UserError, match=f"^{key}: no such option$"):
            read_options(TrainOptions, more)
    del cfg.score.every
    with pytest.raises(UserError, match=r"^score\.every: must be given$"):
        read_options(TrainOptions, cfg)


@dataclass(frozen=True)
class Sizes:
    many: int
    share: float
    name: str | None
    parts: tuple[int, ...]


SIZES = {"many": 3, "share": 1, "name": None, "parts": [1, 2]}


def test_values_are_of_the_fields_types():
    assert read_options(Sizes, OmegaConf.create(SIZES)) == Sizes(3, 1, None, (1, 2))
    assert read_options(Sizes, OmegaConf.create(SIZES | {"name": 7})).name == "7"
    wrong = [("many", True), ("many", 1.5), ("share", "x"), ("parts", 3), ("many", None)]
    for key, value in wrong:
        with pytest.raises(UserError, match=f"^{key}={value}: must be "):
            read_options(Sizes, OmegaConf.create(SIZES | {key: value}))


def test_only_options_that_may_be_null_are():
    overrides = ["drafter=eagle", "drafter.draft_vocab_size=null"]
    assert compose(overrides, CONF, "config").drafter.draft_vocab_size is None
    with pytest.raises(UserError, match=r"target\.dtype=null: must be text"):
        compose(["target.dtype=null"], CONF, "config")


@pytest.mark.parametrize("engine", ["hf", "given", "openai", "ray", "vllm"])
def test_each_engine_has_its_own_settings(engine):
    url = ["rollout.url=http://a/v1"] * (engine == "openai")
    rollout = options_of(f"rollout={engine}", *url).rollout
    kinds = {"openai": OpenAIRolloutOptions, "ray": RayRolloutOptions, "vllm": VLLMRolloutOptions}
    assert type(rollout) is kinds.get(engine, RolloutOptions)
    assert rollout.until == ("answer" if engine in ("openai", "vllm") else "length")


def test_objects_are_made_once_with_plain_arguments():
    run = options_of("decode=static", "drafter=lyanna", "weights=dpace", "seed=5")
    assert isinstance(run.decode, Plan)
    assert type(run.decode.tree) is tuple
    assert run.weights.smoothing == 0.5
    assert (run.seed, run.rollout.seed, run.drafter.depth) == (5, 5, 4)


NAMES = ("optimizer.optimizer.lr", "rollout.max_new_tokens", "max_tokens")


def test_choice_of_another_command_is_one_line():
    with pytest.raises(UserError, match="decode=fastest: is for foredraft generate"):
        options_of("decode=fastest")


def test_sizes_of_real_targets():
    for hidden, context, *expected in (
        (32, 2048, 6e-3, 192, 512),
        (256, 256, 6e-3, 128, 256),  # half of the context, and all of it
        (576, 8192, 1.8e-3, 512, 1024),
        (896, None, 9.2e-4, 512, 1024),
        (2048, 131_072, 2.7e-4, 1024, 2048),
        (8192, 131_072, 3.3e-5, 1024, 2048),
    ):
        assert list(size_settings(hidden, context).items()) == list(zip(NAMES, expected, strict=True))


def test_only_null_is_filled_in_and_one_line_says_so(tmp_path, capsys):
    folder = make_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 4096, "head_dim": 8}))
    target = ["target=hf", f"target.path={folder}"]

    def filled(*overrides: str, name: str = "config") -> tuple[DictConfig, str]:
        fill_size_settings(cfg := compose([*target, *overrides], CONF, name))
        return cfg, capsys.readouterr().out

    cfg, said = filled("max_tokens=77")
    assert [OmegaConf.select(cfg, name) for name in NAMES] == [9.4e-5, 128, 77]
    assert said.endswith("hidden size 4096: optimizer.optimizer.lr=9.4e-05 rollout.max_new_tokens=128\n")
    fill_size_settings(cfg)  # nothing is null
    assert capsys.readouterr().out == filled("prompt=x", name="generate")[1] == ""
    cfg, said = filled("drafter.init_from=trained")
    assert cfg.optimizer.optimizer.lr == 3.1e-5
    assert "a trained drafter: optimizer.optimizer.lr=3.1e-05" in said
    cfg, _ = filled(name="rollout_alone")
    assert (cfg.rollout.max_new_tokens, cfg.max_tokens) == (128, 256)


@pytest.mark.parametrize(
    ("fastest", "overrides", "precision"),
    [
        (torch.bfloat16, [], "bf16-mixed"),
        (torch.float32, ["trainer=ddp"], "32-true"),
        (torch.float32, ["trainer.precision=bf16-mixed"], "bf16-mixed"),
    ],
)
def test_cpu_that_is_slow_in_bf16_trains_in_fp32(fastest, overrides, precision, monkeypatch, capsys):
    monkeypatch.setattr(target_size, "training_dtype", lambda device: fastest)
    cfg = compose(overrides, CONF)
    fill_precision(cfg)
    assert cfg.trainer.precision == precision
    assert ("trainer.precision=32-true" in capsys.readouterr().out) == (precision == "32-true")
    fill_precision(compose(["prompt=x"], CONF, "generate"))  # trains nothing


@pytest.mark.parametrize(
    ("overrides", "answers", "steps", "every"),
    [
        ([], 300, 800, 200),
        (["prompts.self=9000"], 300, 2_100, 200),
        (["rollout.samples=4"], 2_000, 2_000, 200),
        (["rollout.samples=8"], 2_000, 3_200, 200),
        ([], 10_001, 10_001, 501),
        (["batch_size=4", "trainer.accumulate_grad_batches=2", "trainer.devices=2"], 60_000, 18_750, 938),
        (["trainer.max_steps=60"], 60_000, 60, 200),
        (["trainer.max_steps=60", "score.every=20"], 60_000, 60, 20),
    ],
)
def test_steps_are_passes_over_the_answers(overrides, answers, steps, every, capsys):
    common = ("trainer=ddp", "trainer.accelerator=cpu", "prompts.self=0")  # of two, the later counts
    options = with_length(options_of(*common, *overrides), answers)
    said = capsys.readouterr().out
    assert (options.trainer.max_steps, options.score.every) == (steps, every)
    recorded = options.config.values
    assert (recorded["trainer"]["max_steps"], recorded["score"]["every"]) == (steps, every)
    assert ("score.every=" in said) == ("score.every=20" not in overrides)
    assert ("trainer.max_steps=" in said) == ("trainer.max_steps=60" not in overrides)
    assert options.trainer.build(logger=False, devices=1).max_steps == steps


def test_few_prompts_are_answered_several_times():
    for overrides, samples in (
        ([], {0: 1, 12: 4, 300: 4, 301: 3, 600: 2, 601: 1, 10_000: 1}),
        (["rollout.samples=1"], {300: 1}),
        (["rollout.samples=8"], {10_000: 8}),
        (["rollout.temperature=0"], {300: 1}),
        (["rollout.temperature=0", "rollout.samples=2"], {300: 2}),
        (["rollout=given"], {300: 1}),
    ):
        rollout = options_of(*overrides).rollout
        assert {prompts: rollout.answers_each(prompts) for prompts in samples} == samples, overrides

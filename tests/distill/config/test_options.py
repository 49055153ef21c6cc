"""Configurations of conf/ and the dataclasses of their options have the same names."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf
from workbench import CONF, options_of

from decode.errors import UserError
from decode.plan import Plan
from distill import options as o
from distill.config.compose import compose
from distill.config.read import read_options
from distill.config.target_size import fill_size_settings

COMMANDS = {
    "config": o.TrainOptions,
    "advise": o.AdviseOptions,
    "export": o.ExportCommandOptions,
    "generate": o.GenerateOptions,
    "inspect": o.InspectTargetOptions,
    "inspect_data": o.InspectOptions,
    "limit": o.LimitOptions,
    "rollout_alone": o.RolloutCommandOptions,
    "score_checkpoint": o.ScoreCommandOptions,
    "verify_served": o.VerifyOptions,
}
REQUIRED = {
    "export": ["checkpoint=c", "to=vllm"],
    "generate": ["prompt=x"],
    "score_checkpoint": ["checkpoint=c"],
    "verify_served": ["checkpoint=c", "url=http://host:1"],
}


def test_every_command_is_here():
    names = {path.stem for path in CONF.glob("*.yaml")} - {"command"}  # a base of the others
    assert names == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_configuration_has_the_names_of_its_options(name):
    cfg = compose(REQUIRED.get(name, []), CONF, name)
    fill_size_settings(cfg)
    options = read_options(COMMANDS[name], cfg)
    values = {key: value for key, value in cfg.items() if not OmegaConf.is_config(value)}
    assert {key: getattr(options, str(key)) for key in values} == values


def test_setting_that_only_one_of_both_has_is_named():
    cfg = compose([], CONF)
    fill_size_settings(cfg)
    for key in ("new", "score.new", "rollout.new", "prompts.new"):
        more = copy.deepcopy(cfg)
        OmegaConf.update(more, key, 1, force_add=True)
        with pytest.raises(UserError, match=f"^{key}: no such option$"):
            read_options(o.TrainOptions, more)
    del cfg.score.every
    with pytest.raises(UserError, match=r"^score\.every: must be given$"):
        read_options(o.TrainOptions, cfg)


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


@pytest.mark.parametrize("engine", ["hf", "given", "openai", "ray"])
def test_each_engine_has_its_own_settings(engine):
    url = ["rollout.url=http://a/v1"] * (engine == "openai")
    rollout = options_of(f"rollout={engine}", *url).rollout
    kinds = {"openai": o.OpenAIRolloutOptions, "ray": o.RayRolloutOptions}
    assert type(rollout) is kinds.get(engine, o.RolloutOptions)
    assert rollout.until == ("answer" if engine == "openai" else "length")


def test_objects_are_made_once_with_plain_arguments():
    run = options_of("decode=static", "drafter=lyanna", "weights=dpace", "seed=5")
    assert isinstance(run.decode, Plan)
    assert type(run.decode.tree) is tuple
    assert run.weights.smoothing == 0.5
    assert (run.seed, run.rollout.seed, run.drafter.depth) == (5, 5, 4)

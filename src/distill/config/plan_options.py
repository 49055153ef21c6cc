"""Options of `foredraft plan`, apart from those of the run that it plans.

Hydra cannot compose them: `prompts` is a number here, and a group of conf/ there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.config.choices import experiment, options
from distill.utils.paths import CONF

if TYPE_CHECKING:
    from distill.options.commands import PlanOptions

TEXTS = ("run", "card", "out")  # free text, which may look like a number
LEAST = {
    "prompts": 1,
    "gpus": 0,
    "samples": 1,
    "steps": 1,
    "saves": 0,
    "prompt_tokens": 1,
    "answer_tokens": 1,
}
POSITIVE = ("disk", "network", "faster")
# What other programs, and `foredraft train`, call these options
OTHER_NAMES = {
    "gpus": (
        *("gpu", "n_gpus", "num_gpus", "ngpu", "gpu_count", "devices", "num_devices", "processes"),
        *("num_processes", "nproc_per_node", "world_size"),
    ),
    "card": ("cards", "gpu_type", "gpu_name", "device", "hardware"),
    "steps": ("max_steps", "num_steps", "n_steps"),
    "samples": ("num_samples", "n_samples"),
    "prompts": ("num_prompts", "n_prompts", "prompt_count"),
    "saves": ("num_saves", "save_points"),
    "network": ("bandwidth", "interconnect"),
}


def plan_option_names() -> list[str]:
    """Names of the options in conf/plan.yaml."""
    return [str(name) for name in _defaults()]


def plan_option(name: str, value: str) -> str:
    """How to write what is called `name` elsewhere; empty if no option of a plan is meant."""
    if name == "gpu" and value and not value.isdigit():
        return f"card={value}"
    meant = next((own for own, others in OTHER_NAMES.items() if name.replace("-", "_") in others), "")
    return meant and f"{meant}={value or '...'}"


def value_of(name: str, words: Sequence[str]) -> str:
    """The last value that options, written as name=value, give to a name; "" if none does."""
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{name}=")), "")


def drafter_choice(words: Sequence[str]) -> str:
    """The name in conf/drafter that options of a run choose."""
    if name := value_of("drafter", words):
        return name
    name = value_of("experiment", words)
    choices = experiment(CONF, name).choices if name in options(CONF, "experiment") else {}
    if "drafter" in choices:
        return choices["drafter"]
    config: Any = OmegaConf.load(CONF / "config.yaml")
    return next(entry["drafter"] for entry in config.defaults if "drafter" in entry)


def plan_settings(given: Sequence[str]) -> DictConfig:
    """Settings of conf/plan.yaml with options, written as name=value; a later one replaces an earlier one.

    Raises:
        UserError: a number of another kind, or out of its range.
    """
    config = _defaults()
    for word in given:
        name, _, value = word.partition("=")
        config[name] = value if name in TEXTS else OmegaConf.from_dotlist([word])[name]
    for name, least in LEAST.items():
        if (number := config[name]) is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            raise UserError(f"{name}={number}: must be a whole number")
        if number < least:
            raise UserError(f"{name}={number}: give {least} or more")
    for name in POSITIVE:
        number = config[name]
        if isinstance(number, int | float) and not isinstance(number, bool) and number <= 0:
            raise UserError(f"{name}={number:g}: give more than 0")
    return config


def read_plan_options(settings: DictConfig) -> PlanOptions:
    """The options as a dataclass.

    Raises:
        UserError: a value of another type.
    """
    from distill.config.read import read_options  # slow imports of torch, which checks do not wait for
    from distill.options.commands import PlanOptions

    return read_options(PlanOptions, settings)


def _defaults() -> DictConfig:
    config = OmegaConf.load(CONF / "plan.yaml")
    assert isinstance(config, DictConfig)
    del config["defaults"]
    return config

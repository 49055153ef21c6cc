"""Options of `foredraft plan`, apart from those of the run that it plans.

Hydra cannot compose them: `prompts` is a number here, and a group of conf/ there.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from distill.config.read import read_options
from distill.options import PlanOptions
from distill.utils.paths import CONF

TEXTS = ("run", "card", "out")  # free text, which may look like a number


def plan_option_names() -> set[str]:
    """Names of the options in conf/plan.yaml."""
    return {str(name) for name in _defaults()}


def read_plan_options(given: Sequence[str]) -> PlanOptions:
    """Read options of conf/plan.yaml, written as name=value; a later one replaces an earlier one.

    Raises:
        UserError: a value of another type.
    """
    config = _defaults()
    for word in given:
        name, _, value = word.partition("=")
        config[name] = value if name in TEXTS else OmegaConf.from_dotlist([word])[name]
    return read_options(PlanOptions, config)


def _defaults() -> DictConfig:
    config = OmegaConf.load(CONF / "plan.yaml")
    assert isinstance(config, DictConfig)
    del config["defaults"]
    return config

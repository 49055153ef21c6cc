"""What can be wrong with a `drafter=auto`, found before any work."""

from __future__ import annotations

from hydra.utils import get_class
from omegaconf import DictConfig

from decode.errors import UserError
from distill.config.validate import processes
from distill.search import trials as families
from distill.search.trials import Place
from distill.utils.launcher import launch
from drafters.base import Drafter


def jobs(cfg: DictConfig, place: Place) -> tuple[dict[str, list[str]], dict[str, DictConfig]]:
    """Of every family the overrides of its own run, and what they compose to.

    Args:
        cfg: of the search.
        place: of the command.

    Raises:
        UserError: a setting of the search or of a family that cannot be; a family that tunes the target.
    """
    chosen, settings = names(cfg, place), families.plain(cfg.drafter.options) or {}
    overrides = {name: families.overrides_of(place, name, settings.get(name, {})) for name in chosen}
    configs = {name: families.composed(place, own) for name, own in overrides.items()}
    for name, config in configs.items():
        if get_class(config.drafter._target_.rpartition(".")[0]).verifier is not Drafter.verifier:
            raise UserError(f"drafter.families: {name} tunes the target, and is lossless to another one")
    return overrides, configs


def names(cfg: DictConfig, place: Place) -> list[str]:
    """The families, if all that the configuration of the search itself can tell is well.

    Raises:
        UserError: what is not.
    """
    auto = cfg.drafter
    chosen = [str(name) for name in auto.families]
    known = sorted(p.stem for p in (place.conf / "drafter").glob("*.yaml") if p.stem != "auto")
    for name in chosen:
        if name not in known:
            raise UserError(f"drafter.families: {name}: no such family; choose of {', '.join(known)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError("drafter.families: name at least one family, and none twice")
    settings = families.plain(auto.options) or {}
    if not (isinstance(settings, dict) and all(isinstance(own, dict) for own in settings.values())):
        raise UserError(f"drafter.options={settings}: write it as {{eagle: {{depth: 3}}}}")
    if others := sorted(set(map(str, settings)) - set(chosen)):
        raise UserError(f"drafter.options: {', '.join(others)}: not among drafter.families")
    _check_rest(cfg)
    return chosen


def _check_rest(cfg: DictConfig) -> None:
    """What has nothing to do with which families they are."""
    auto, score = cfg.drafter, cfg.score
    for name in ("search", "cooldown"):
        if not 0 < auto[name] < 1:
            raise UserError(f"drafter.{name}={auto[name]}: must be between 0 and 1")
    if not auto.plans:
        raise UserError("drafter.plans: give at least one to compare families by, such as {depth: 2}")
    if auto.init_from or auto.confidence:
        raise UserError(
            "drafter=auto: init_from and confidence are a family's: drafter.options={eagle: {...}}"
        )
    if not score.enabled or not len(score.batch_sizes) or not len(score.temperatures):
        raise UserError("drafter=auto decides by scores: score.enabled=true, a batch size and a temperature")
    if processes(cfg.trainer) > 1 or launch():
        raise UserError(
            "drafter=auto trains its families in one process; set trainer.devices=1, and train the family "
            "that wins on more devices by itself (drafter=<family>)"
        )
    if cfg.rollout.refresh_every:
        raise UserError("drafter=auto: rollouts are made once for all families; set rollout.refresh_every=0")

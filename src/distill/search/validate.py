"""Checks of the options of a `drafter=auto`, before any work."""

from __future__ import annotations

from pkgutil import resolve_name

from decode.errors import UserError
from distill.config.validate import processes
from distill.options import SearchOptions, TrainOptions
from distill.search import trials as families
from distill.search.trials import Place
from distill.utils.launcher import launch
from drafters.base import Drafter


def jobs(options: SearchOptions, place: Place) -> tuple[dict[str, list[str]], dict[str, TrainOptions]]:
    """The overrides of every family's own run, and the options that they give.

    Args:
        options: of the search.
        place: of the command.

    Raises:
        UserError: a setting of the search or of a family that cannot be; a family that tunes the target.
    """
    chosen, settings = names(options, place), options.drafter.options or {}
    overrides = {name: families.overrides_of(place, name, settings.get(name, {})) for name in chosen}
    runs = {name: families.composed(place, words) for name, words in overrides.items()}
    for name, run in runs.items():
        if resolve_name(run.drafter.factory.rpartition(".")[0]).verifier is not Drafter.verifier:
            raise UserError(f"drafter.families: {name} tunes the target, and is lossless to another one")
    return overrides, runs


def names(options: SearchOptions, place: Place) -> list[str]:
    """The families, if all that the configuration of the search itself can tell is well.

    Raises:
        UserError: what is not.
    """
    auto = options.drafter
    chosen = [str(name) for name in auto.families]
    known = sorted(p.stem for p in (place.conf / "drafter").glob("*.yaml") if p.stem != "auto")
    for name in chosen:
        if name not in known:
            raise UserError(f"drafter.families: {name}: no such family; choose of {', '.join(known)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError("drafter.families: name at least one family, and none twice")
    settings = auto.options or {}
    if not (isinstance(settings, dict) and all(isinstance(own, dict) for own in settings.values())):
        raise UserError(f"drafter.options={settings}: write it as {{eagle: {{depth: 3}}}}")
    if others := sorted(set(map(str, settings)) - set(chosen)):
        raise UserError(f"drafter.options: {', '.join(others)}: not among drafter.families")
    _check_rest(options)
    return chosen


def _check_rest(options: SearchOptions) -> None:
    """Everything but the names of the families."""
    auto, score, trainer = options.drafter, options.score, options.trainer
    for name, share in {"search": auto.search, "cooldown": auto.cooldown}.items():
        if not 0 < share < 1:
            raise UserError(f"drafter.{name}={share}: must be between 0 and 1")
    if not auto.plans:
        raise UserError("drafter.plans: give at least one to compare families by, such as {depth: 2}")
    if auto.init_from or auto.confidence:
        raise UserError(
            "drafter=auto: init_from and confidence are a family's: drafter.options={eagle: {...}}"
        )
    if not (score.enabled and score.batch_sizes and score.temperatures):
        raise UserError("drafter=auto decides by scores: score.enabled=true, a batch size and a temperature")
    if processes(trainer.accelerator, trainer.devices, trainer.num_nodes) > 1 or launch():
        raise UserError(
            "drafter=auto trains its families in one process; set trainer.devices=1, and train the family "
            "that wins on more devices by itself (drafter=<family>)"
        )
    if options.rollout.refresh_every:
        raise UserError("drafter=auto: rollouts are made once for all families; set rollout.refresh_every=0")

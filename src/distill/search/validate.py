"""Check the options of `drafter=auto` before any work."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from decode.errors import UserError
from distill.config.choices import options as choices
from distill.config.engine import check_engine
from distill.config.validate import processes
from distill.export import RunExport, check_options
from distill.options.run import SearchOptions, TrainOptions
from distill.search import trials
from distill.search.trials import JobContext
from distill.utils.launcher import launch


def family_jobs(
    options: SearchOptions, context: JobContext
) -> tuple[dict[str, list[str]], dict[str, TrainOptions]]:
    """Overrides and options of every family's run.

    Raises:
        UserError: an invalid setting of the search or of a family; a family that tunes the target; no family
            that the export has a format for.
    """
    auto, selected = options.drafter, family_names(options, context)
    given = {name: {**auto.priors.get(name, {}), **(auto.options or {}).get(name, {})} for name in selected}
    overrides = {name: trials.family_overrides(context, name, given[name]) for name in selected}
    runs = {name: trials.family_options(context, words) for name, words in overrides.items()}
    for name, run in runs.items():
        if resolve_name(run.drafter.factory.rpartition(".")[0]).traits.tunes_target:
            raise UserError(f"drafter.families: {name} tunes the target, so its output is another model's")
    _check_export(options, runs)
    return overrides, runs


def _check_export(options: SearchOptions, runs: Mapping[str, TrainOptions]) -> None:
    """Check that the program of `export.to` has a format for a family; settings are checked with the target.

    Raises:
        UserError: it has none for any family, or see `check_options`.
    """
    check_options(options.export)
    faults = []
    for name, run in runs.items():
        try:
            RunExport(options.export).check_kind(run.drafter.factory)
        except UserError as error:
            faults.append(f"{name}: {error}")
    if len(faults) == len(runs):
        raise UserError(f"drafter=auto: no family is left ({'; '.join(faults)})")


def family_names(options: SearchOptions, context: JobContext) -> list[str]:
    """Names of the families, after a check of the search's own settings.

    Raises:
        UserError: an invalid setting.
    """
    auto = options.drafter
    selected = [str(name) for name in auto.families]
    available = [name for name in choices(context.conf, "drafter") if name != "auto"]
    for name in selected:
        if name not in available:
            raise UserError(f"drafter.families: {name}: no such family; choose from {', '.join(available)}")
    if not selected or len(set(selected)) < len(selected):
        raise UserError("drafter.families: name at least one family, each once")
    settings = auto.options or {}
    if not (isinstance(settings, dict) and all(isinstance(value, dict) for value in settings.values())):
        raise UserError(f"drafter.options={settings}: write it as {{eagle: {{depth: 3}}}}")
    if others := sorted(set(map(str, settings)) - set(selected)):
        raise UserError(f"drafter.options: {', '.join(others)}: not among drafter.families")
    _check_rest(options)
    return selected


def _check_rest(options: SearchOptions) -> None:
    """Check everything but the names of the families."""
    auto, score, trainer = options.drafter, options.score, options.trainer
    for name, share in {"search": auto.search, "cooldown": auto.cooldown}.items():
        if not 0 < share < 1:
            raise UserError(f"drafter.{name}={share}: must be between 0 and 1")
    if not auto.plans:
        raise UserError("drafter.plans: give at least one plan to compare families with, such as {depth: 2}")
    if auto.init_from or auto.confidence:
        raise UserError(
            "drafter=auto: set init_from and confidence for a family: drafter.options={eagle: {...}}"
        )
    if not (score.enabled and score.batch_sizes and score.temperatures):
        raise UserError("drafter=auto needs scores: score.enabled=true, a batch size and a temperature")
    if processes(trainer.accelerator, trainer.devices, trainer.num_nodes) > 1 or launch():
        raise UserError(
            "drafter=auto trains its families in one process; set trainer.devices=1, then train the winning "
            "family on more devices by itself (drafter=<family>)"
        )
    check_engine(options)
    if options.rollout.refresh_every:
        raise UserError("drafter=auto: rollouts are made once for all families; set rollout.refresh_every=0")

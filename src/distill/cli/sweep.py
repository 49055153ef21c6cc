"""Sweeps with Hydra's multirun: checks options first, continues after failed jobs, prints one table.

Slow imports such as torch are inside functions, since every command imports this file.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decode.errors import UserError
from distill.config.compose import configurations
from distill.config.recorded import settings
from distill.config.validate import processes
from distill.utils.atomic_files import read_json, write_json
from distill.utils.redact import hidden, printable
from distill.utils.run_folder import occupy

ERROR = "error.json"  # in the folder of a job that failed
FLAGS = ("-m", "--multirun")
Compose = Callable[[Sequence[str]], DictConfig]
Errors = Callable[..., AbstractContextManager[None]]


class Sweep(NamedTuple):
    """A prepared sweep.

    Attributes:
        folder: folder of all jobs.
        fixed: options that all jobs share.
    """

    folder: Path
    fixed: list[str]


def wanted(argv: Sequence[str], config_dir: Path, config_name: str) -> bool:
    """Whether a command asks for a sweep, by a flag or by its experiment."""
    if any(argument.startswith("-") for argument in argv):
        return all(argument in FLAGS for argument in argv if argument.startswith("-"))
    own = [argument for argument in argv if argument.startswith(("experiment=", "hydra.mode="))]
    if not own:
        return False
    try:
        return _hydra(own, config_dir, config_name).mode == RunMode.MULTIRUN
    except (HydraException, OmegaConfBaseException):  # reported when the options are checked
        return False


def prepare(argv: Sequence[str], config_dir: Path, config_name: str, compose: Compose) -> Sweep:
    """Check every job of a sweep before the first one runs.

    Args:
        argv: arguments of the command.
        config_dir: folder of configurations.
        config_name: the primary configuration.
        compose: composes the configuration of a job from its options.

    Raises:
        UserError: an unknown option or a value out of range, named with the job's options; a launcher
            that is not installed; jobs of several processes.
    """
    overrides = [argument for argument in argv if argument not in FLAGS]
    if "RANK" in os.environ:
        raise UserError(
            "a sweep under torchrun: each rank would run its own sweep; start torchrun once for each setting"
        )
    try:
        given = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(str(error).splitlines()[0]) from None
    ours = ("experiment", "hydra")
    own = [str(o.input_line) for o in given if not o.is_sweep_override()]
    own = [line for line in own if line.startswith(ours)]
    settings = _settings(own, config_dir, config_name, compose)
    if settings.launcher._target_.endswith("SlurmLauncher") and not shutil.which("srun"):
        raise UserError(
            "hydra/launcher=submitit_slurm: no srun on this machine; start the sweep on the cluster"
        )
    params = settings.sweeper.get("params") or {}
    swept = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    every = [*swept, *given]
    fixed = [o for o in every if not o.is_sweep_override()]
    # Hydra's basic sweeper runs the whole grid. The jobs of other sweepers are unknown, so each value is
    # checked separately.
    choices = _choices(every)
    basic = settings.sweeper._target_.endswith("BasicSweeper")
    jobs = list(map(list, product(*choices))) if basic else list(_singly(choices))
    _check_jobs(jobs, {o.get_key_element() for o in every if o.is_sweep_override()}, compose)
    # Hydra omits names by group, and a nested drafter has the same group as the outer one.
    inner = {str(o.key_or_group) for o in every if o.is_sweep_override() and o.package}
    return Sweep(_folder(settings), [key for o in fixed if (key := str(o.key_or_group)) not in inner])


def run_folder(argv: Sequence[str], config_dir: Path, config_name: str) -> Path | None:
    """The folder that `hydra.run.dir` names in a command; None if absent."""
    given = [argument for argument in argv if argument.startswith("hydra.run.dir=")]
    return Path(_hydra(given, config_dir, config_name).run.dir) if given else None


def _hydra(overrides: Sequence[str], config_dir: Path, config_name: str) -> Any:
    with configurations(config_dir):
        return hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True).hydra


def _settings(overrides: Sequence[str], config_dir: Path, config_name: str, compose: Compose) -> Any:
    try:
        return _hydra(overrides, config_dir, config_name)
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group not in ("hydra/launcher", "hydra/sweeper"):
            compose(overrides)  # raises a clearer error
            raise UserError(" ".join(str(error).split())) from None
        there = ", ".join(error.options or ())
        raise UserError(
            f"{group}={name}: not installed; pip install 'foredraft[sweeps]' has launchers. Here are {there}"
        ) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from None


def _choices(overrides: Sequence[Override]) -> list[list[str]]:
    """Assignments that jobs choose from, per option; the last value of a repeated option counts."""
    return list(
        {
            o.get_key_element(): [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_discrete_sweep()
            else [str(o.input_line)]
            for o in overrides
            if o.is_discrete_sweep() or not o.is_sweep_override()  # not intervals
        }.values()
    )


def _singly(choices: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield job options that vary one choice at a time, with the first value of all other choices."""
    first = [values[0] for values in choices]
    yield first
    for i, values in enumerate(choices):
        for value in values[1:]:
            yield [*first[:i], value, *first[i + 1 :]]


def _check_jobs(jobs: Sequence[Sequence[str]], varying: set[str], compose: Compose) -> None:
    for job in jobs:
        name = ",".join(o for o in job if o.partition("=")[0] in varying)
        try:
            check_job(compose(job))
        except UserError as error:
            raise UserError(f"{name}: {error}" if name else str(error)) from None


def check_job(cfg: DictConfig) -> None:
    """Check a job's configuration.

    Raises:
        UserError: a value out of range; several processes.
    """
    from distill.config.validate import check_ranges

    check_ranges(cfg)
    trainer = cfg.get("trainer") or {}
    place = trainer.get("accelerator", "cpu"), trainer.get("devices", 1), trainer.get("num_nodes", 1)
    if processes(*place) > 1:
        raise UserError(
            f"trainer.devices={cfg.trainer.devices} in a sweep: Lightning would run the whole sweep again in "
            "every process it starts; set trainer.devices=1, or start torchrun once for each setting"
        )


def _folder(settings: Any) -> Path:
    folder = Path(settings.sweep.dir)
    raw: Any = OmegaConf.to_container(settings.sweep, resolve=False)
    if "${now:" not in raw["dir"]:
        return folder  # named by the user, to continue a sweep
    for suffix in ("", *(f"-{i}" for i in range(1, 100))):
        named = folder.with_name(folder.name + suffix)
        try:
            named.mkdir(parents=True)
        except FileExistsError:  # another sweep started in the same second
            continue
        except OSError as error:
            raise UserError(f"{named}: {error.strerror}") from None
        return named
    raise UserError(f"{folder}: a hundred sweeps have begun in this second")


def run_job(
    task: Callable[[DictConfig, Path], float], cfg: DictConfig, folder: Path, errors: Errors
) -> float:
    """Run one job; a failure is printed and recorded, and the sweep continues.

    Args:
        task: task of the command.
        cfg: configuration of the job.
        folder: folder of the job.
        errors: `cli.one_line_errors`.

    Returns:
        The task's result; NaN if it failed.
    """
    name = hidden(HydraConfig.get().job.override_dirname)
    (folder / ERROR).unlink(missing_ok=True)

    def fail(code: int, text: str) -> None:
        if code > 2:  # interrupted: end the whole sweep
            print(printable(hidden(text)), file=sys.stderr, flush=True)
            raise SystemExit(code)
        text = f"error: {name}: {text.removeprefix('error: ')}" if name else text
        text = printable(hidden(text))
        print(text, flush=True)
        write_json(folder / ERROR, {"job": name, "code": code, "error": text})

    try:
        with errors(leave=fail):
            if "output_dir" not in cfg:
                return task(cfg, folder)
            config: Any = OmegaConf.to_container(cfg, resolve=True)
            with closing(occupy(folder, config, name, partial(settings, current=cfg))) as run:
                value = task(cfg, folder)
                run.finish()
            return value
    except Exception as error:  # Hydra's launchers would end the other jobs too
        traceback.print_exc()
        fail(1, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return math.nan


@contextmanager
def summed_up(folder: Path) -> Iterator[None]:
    """After the jobs, print a table of the scored jobs, sorted by tau, and the sweep's folder.

    Raises:
        SystemExit: a job failed; with code 2 if all failures are user errors, else 1.
    """
    try:
        yield
    finally:
        summary = table(folder)
        if summary:
            print(summary)
        print(folder, flush=True)
    advice = "run the sweep again"
    notes = [read_json(path, advice, code=int, error=str) for path in _of_jobs(folder, ERROR)]
    failed = [note for note in notes if note]
    for one in failed:
        print(one["error"], file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(min(one["code"] for one in failed))


def _of_jobs(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"*/{name}"), key=lambda path: (len(path.parent.name), path))


def table(folder: Path) -> str:
    """Format a sweep's jobs, sorted by descending acceptance length; empty if none was scored.

    Uses the first temperature and batch size that all jobs were scored at.
    """
    from decode.evaluation.scorecard import read_scorecard
    from distill.scoring import compare

    scored = []
    for record in _of_jobs(folder, "run.json"):
        file = record.parent / "checkpoints" / "best" / "score.json"
        if file.exists():
            try:
                job = (read_json(record, "it names the job") or {}).get("job") or record.parent.name
                scored.append(compare.Scored(job, read_scorecard(file)))
            except UserError as error:
                print(f"left out of the table: {error}", file=sys.stderr)
    if not scored:
        return ""
    first, *others = (one.settings() for one in scored)
    temperature, batch = next((s for s in first if all(s in other for other in others)), first[0])
    try:
        return compare.table(scored, compare.Choice([temperature], batch, by="tau"))
    except UserError as error:  # jobs were scored at different settings
        return f"no table: {error}"

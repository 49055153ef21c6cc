"""Run drafter families as jobs of Hydra's launcher: each is an ordinary run with a time budget."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.callbacks import Callbacks  # private API: HydraContext requires it
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from decode.errors import FollowUpError, TooLargeError, UserError
from decode.plan import Plan
from distill.config.compose import compose, configurations
from distill.config.read import checked_options
from distill.options.run import TrainOptions
from distill.search.halving import LAST, SCORE
from distill.search.time_budget import Budget
from distill.train import Shared, train
from distill.utils.atomic_files import read_json, write_json
from distill.utils.reports import NO_REPORTS, Reports
from distill.utils.run_folder import checkpoints

FOLDER, LOG = "families", "log.txt"
NEVER = 10**9  # steps between save points: more than any run has


class TimeSlice(NamedTuple):
    """One job of a family: a rung and its time budget.

    Attributes:
        rung: see `halving`.
        seconds: of training; None: until trainer.max_steps.
        cooldown: share of the seconds in which the learning rate falls.
    """

    rung: int
    seconds: float | None
    cooldown: float = 0.0


class JobContext(NamedTuple):
    """Configuration and output folder of the command that starts the jobs.

    Attributes:
        conf: folder of configuration groups.
        name: of the primary configuration.
        overrides: given by the user, without `drafter`'s.
        launcher: overrides of Hydra's launcher.
        folder: run folder.
        in_sweep: the command is itself a job of a sweep.
    """

    conf: Path
    name: str
    overrides: list[str]
    launcher: list[str]
    folder: Path
    in_sweep: bool = False

    @classmethod
    def of(cls, folder: Path) -> JobContext:
        """The context of the current Hydra job."""
        config = HydraConfig.get()
        conf = next(s.path for s in config.runtime.config_sources if s.provider == "main")
        overrides = drop_overrides(config.overrides.task, "drafter")
        launcher = [o for o in config.overrides.hydra if o.startswith(("hydra/launcher=", "hydra.launcher."))]
        in_sweep = config.mode == RunMode.MULTIRUN  # then the launcher is for the sweep's jobs
        name = str(config.job.config_name)
        return cls(Path(conf), name, overrides, [] if in_sweep else launcher, folder.absolute(), in_sweep)


def task_overrides() -> list[str]:
    """Overrides of the current Hydra job, without Hydra's own."""
    return list(HydraConfig.get().overrides.task)


def override_key(override: str) -> str:
    """The key of an override, without its value."""
    return override.lstrip("+~").partition("=")[0]


def drop_overrides(overrides: Sequence[str], *keys: str) -> list[str]:
    """Overrides without the given keys and keys below them."""
    return [
        o
        for o in overrides
        if not any(override_key(o) == k or override_key(o).startswith(f"{k}.") for k in keys)
    ]


def family_overrides(context: JobContext, family: str, settings: Mapping[str, Any]) -> list[str]:
    """Overrides of a family's run: its own recipe, a time budget, no scores yet."""
    family_settings = [
        f"drafter={family}",
        *(f"drafter.{k}={override_value(v)}" for k, v in settings.items()),
    ]
    replaced = ("score.every", "score.enabled", "export", "logger", "resume")
    jobs = [f"score.every={NEVER}", "score.enabled=false", "export.to=null", "export.push_to=null"]
    return [
        *drop_overrides(context.overrides, *replaced),
        *family_settings,
        *jobs,
        "logger=csv",
        f"hydra.sweep.subdir={family}",
    ]


def with_user_loggers(context: JobContext, overrides: Sequence[str]) -> list[str]:
    """Overrides with the loggers that the user chose."""
    user = [o for o in context.overrides if override_key(o).split(".")[0] == "logger"]
    return [*drop_overrides(overrides, "logger"), *user]


def scoring_overrides(context: JobContext, overrides: Sequence[str], plan: Plan, steps: int) -> list[str]:
    """Overrides of a run that scores the trained checkpoint with one plan, then exports it."""
    user = [o for o in context.overrides if override_key(o).split(".")[0] == "export"]
    shape = [f"decode.{name}={override_value(value)}" for name, value in plan.settings.items()]
    rest = drop_overrides(overrides, "decode", "export", "score.enabled", "trainer.max_steps")
    return [*rest, *user, "score.enabled=true", f"trainer.max_steps={max(1, steps)}", "decode=chain", *shape]


def override_value(value: Any) -> str:
    """A value in the syntax of Hydra's overrides."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}: {override_value(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)


class Jobs:
    """Runs families with Hydra's launcher, in `families/<name>` of the run folder.

    Raises:
        UserError: the launcher's jobs do not run on this machine.
    """

    def __init__(self, context: JobContext, shared: Shared, reports: Reports = NO_REPORTS) -> None:
        self.context, self.reports = context, reports
        root = context.folder / FOLDER
        overrides = [
            *context.launcher,
            f"hydra.sweep.dir={override_value(str(root))}",
            "hydra/hydra_logging=disabled",
        ]
        with configurations(context.conf) as reader:
            self.master = reader.compose_config(context.name, overrides, run_mode=RunMode.RUN)
            self.hydra_context = HydraContext(config_loader=reader.config_loader, callbacks=Callbacks())
        kind = self.master.hydra.launcher._target_.rpartition(".")[2]
        if kind not in ("BasicLauncher", "JoblibLauncher"):
            raise UserError(
                "drafter=auto: jobs must run on this machine, whose speed is measured; leave hydra/launcher "
                "out, or choose a local one (docs/auto.md)"
            )
        # Other processes load their own target.
        self.shared = shared if kind == "BasicLauncher" else None
        count = 1 if kind == "BasicLauncher" else int(self.master.hydra.launcher.n_jobs)
        self.parallel = count if count > 0 else NEVER

    def __call__(self, overrides: Mapping[str, Sequence[str]], time_slices: Mapping[str, TimeSlice]) -> None:
        """Run a job for each family with a time slice, unless that job is already done."""
        due = [f for f, s in time_slices.items() if self.done(f, s.rung) is None]
        for family in due:
            (folder := self.folder(family)).mkdir(parents=True, exist_ok=True)
            if not (folder / "run.json").exists():  # identifies the run on W&B
                write_json(folder / "run.json", {"started": time.time(), "job": family})
        if due:
            task = partial(job, time_slices=dict(time_slices), shared=self.shared, reports=self.reports)
            self._launcher(task).launch([list(overrides[f]) for f in due], initial_job_idx=0)

    def _launcher(self, task: Any) -> Launcher:
        return Plugins.instance().instantiate_launcher(self.hydra_context, task, self.master)

    def folder(self, family: str) -> Path:
        """Folder of a family's run."""
        return self.context.folder / FOLDER / family

    def done(self, family: str, rung: int) -> dict[str, Any] | None:
        """Result of a rung: `steps`, `seconds`, those `before` a kill, or the reason it `failed`.

        None if the job is not done.
        """
        advice = "remove it to have this job done again"
        return read_json(_note(self.folder(family), rung), advice, steps=int, seconds=(int, float))

    def checkpoint(self, family: str) -> Path:
        """The newest checkpoint of a family."""
        return checkpoints(self.folder(family))[-1]

    def remove_trainer_state(self, family: str) -> None:
        """Delete the trainer state of a family that does not continue."""
        for state in self.folder(family).glob("checkpoints/*/trainer/*"):
            if state.is_file():
                state.unlink()


def _note(folder: Path, rung: int) -> Path:
    return folder / f"rung-{ {LAST: 'last', SCORE: 'score'}.get(rung, rung) }.json"


def job(
    cfg: DictConfig, time_slices: Mapping[str, TimeSlice], shared: Shared | None, reports: Reports
) -> None:
    """Train one family for its time slice; its output goes to its log file."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    time_slice = time_slices[folder.name]
    begun = time.monotonic()
    budget = None
    if time_slice.seconds is not None:
        budget = Budget(time_slice.seconds, time_slice.rung, time_slice.cooldown)
    note: dict[str, Any] = {}
    # Only the final scorecard is printed on the terminal.
    with (folder / LOG).open("a") as log, nullcontext() if time_slice.rung == SCORE else redirect_stdout(log):
        try:
            options = checked_options(TrainOptions, cfg)
            if budget and options.compile_objective == "auto":  # compiling does not pay within its seconds
                options = replace(options, compile_objective="never")
            train(options, folder, reports, shared, budget and budget.attach)
        except FollowUpError as error:
            note["follow up"] = str(error)
        except (UserError, TooLargeError) as error:
            note["failed"] = str(error)
        except OSError:  # a full disk would end the others as well
            raise
        except Exception as error:  # this family failed; the others continue
            traceback.print_exc(file=log)
            first = (str(error).splitlines() or [""])[0]
            note["failed"] = f"{type(error).__name__}: {first}; see {folder / LOG}"
    gc.collect()  # free memory held in reference cycles for the next family
    saved = checkpoints(folder)
    note |= {"steps": int(saved[-1].name) if saved else 0, "seconds": time.monotonic() - begun}
    if budget:
        note |= {"seconds": budget.used, "setup": budget.waited, "before": budget.before}
    write_json(_note(folder, time_slice.rung), note)


def family_options(context: JobContext, overrides: Sequence[str]) -> TrainOptions:
    """Options of a family's run."""
    settings = [o for o in overrides if not o.startswith("hydra.")]
    return checked_options(TrainOptions, compose(settings, context.conf, context.name), announce=False)

"""Families of drafters as jobs of Hydra's launcher: each the ordinary run, for a stretch of time."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.callbacks import Callbacks  # private API: a launcher's context cannot be made without
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from decode.errors import TooLargeError, UserError
from decode.plan import Plan
from distill.config.compose import compose
from distill.config.read import checked_options, read_options
from distill.options import TrainOptions
from distill.search.halving import LAST, SCORE
from distill.train import Shared, train
from distill.training.time_budget import Budget
from distill.utils.atomic_files import read_json, write_json
from distill.utils.run_folder import checkpoints

FOLDER, LOG = "families", "log.txt"
NEVER = 10**9  # optimizer steps between save points of what the clock ends


class Stretch(NamedTuple):
    """What a family is to do next.

    Attributes:
        rung: it is of; see `halving`.
        seconds: of training; None: as its configuration says.
        cooldown: share of them.
    """

    rung: int
    seconds: float | None
    cooldown: float = 0.0


class Place(NamedTuple):
    """Where this command's configuration comes from, and its jobs go.

    Attributes:
        conf: folder of the groups.
        name: of the primary configuration.
        overrides: that the user gave, those of `drafter` aside.
        launcher: Hydra's, that the user chose.
        folder: of the run.
        in_sweep: this command is a job of a sweep.
    """

    conf: Path
    name: str
    overrides: list[str]
    launcher: list[str]
    folder: Path
    in_sweep: bool = False

    @classmethod
    def of(cls, folder: Path) -> Place:
        """Of the job that Hydra runs now."""
        config = HydraConfig.get()
        conf = next(s.path for s in config.runtime.config_sources if s.provider == "main")
        given = without(config.overrides.task, "drafter")
        ours = [o for o in config.overrides.hydra if o.startswith(("hydra/launcher=", "hydra.launcher."))]
        swept = config.mode == RunMode.MULTIRUN  # whose launcher is for the sweep's jobs
        name = str(config.job.config_name)
        return cls(Path(conf), name, given, [] if swept else ours, folder.absolute(), swept)


def key_of(override: str) -> str:
    """Without its value."""
    return override.lstrip("+~").partition("=")[0]


def without(overrides: Sequence[str], *keys: str) -> list[str]:
    """Overrides but those of these keys, and of what is in them."""
    return [o for o in overrides if not any(key_of(o) == k or key_of(o).startswith(f"{k}.") for k in keys)]


def overrides_of(place: Place, family: str, settings: Mapping[str, Any]) -> list[str]:
    """Of a family's own run, with its own recipe, that is trained by the clock and not yet scored."""
    own = [f"drafter={family}", *(f"drafter.{k}={written(v)}" for k, v in settings.items())]
    apart = ("score.every", "score.enabled", "export", "logger", "resume")
    jobs = [f"score.every={NEVER}", "score.enabled=false", "export.to=null", "export.push_to=null"]
    return [*without(place.overrides, *apart), *own, *jobs, "logger=csv", f"hydra.sweep.subdir={family}"]


def at_last(place: Place, overrides: Sequence[str]) -> list[str]:
    """The same as the user wants it to be logged."""
    user = [o for o in place.overrides if key_of(o).split(".")[0] == "logger"]
    return [*without(overrides, "logger"), *user]


def scored(place: Place, overrides: Sequence[str], plan: Plan, steps: int) -> list[str]:
    """The same once more, to score what was trained, by one plan; and what becomes of the best."""
    user = [o for o in place.overrides if key_of(o).split(".")[0] == "export"]
    shape = [f"decode.{name}={written(value)}" for name, value in shape_of(plan).items()]
    kept = without(overrides, "decode", "export", "score.enabled", "trainer.max_steps")
    return [*kept, *user, "score.enabled=true", f"trainer.max_steps={max(1, steps)}", "decode=chain", *shape]


def shape_of(plan: Plan) -> dict[str, Any]:
    """A plan's fields, as JSON has them."""
    return asdict(plan)


def written(value: Any) -> str:
    """A plain value as Hydra's overrides have it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}: {written(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)


class Jobs:
    """Runs families by Hydra's launcher, in `families/<name>` of the run's folder.

    Args:
        place: see there.
        shared: with jobs of this process.

    Raises:
        UserError: a launcher whose jobs do not run on this machine.
    """

    def __init__(self, place: Place, shared: Shared) -> None:
        self.place = place
        root = place.folder / FOLDER
        wanted = [*place.launcher, f"hydra.sweep.dir={written(str(root))}", "hydra/hydra_logging=disabled"]
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(place.conf), version_base="1.3"):
            inner = GlobalHydra.instance().hydra
            assert inner
            self.master = inner.compose_config(place.name, wanted, run_mode=RunMode.RUN)
            self.context = HydraContext(config_loader=inner.config_loader, callbacks=Callbacks())
        kind = self.master.hydra.launcher._target_.rpartition(".")[2]
        if kind not in ("BasicLauncher", "JoblibLauncher"):
            raise UserError(
                "drafter=auto: its jobs run on this machine, whose costs are measured, within a budget of "
                "time; leave hydra/launcher, or choose one of this machine (docs/auto.md)"
            )
        # Other processes load a target of their own.
        self.shared = shared if kind == "BasicLauncher" else None
        count = 1 if kind == "BasicLauncher" else int(self.master.hydra.launcher.n_jobs)
        self.parallel = count if count > 0 else NEVER

    def __call__(self, overrides: Mapping[str, Sequence[str]], stretches: Mapping[str, Stretch]) -> None:
        """Run a job of each family that has a stretch before it, unless it has been through it."""
        due = [f for f, s in stretches.items() if self.done(f, s.rung) is None]
        for family in due:
            (folder := self.folder(family)).mkdir(parents=True, exist_ok=True)
            if not (folder / "run.json").exists():  # names its run on W&B
                write_json(folder / "run.json", {"started": time.time(), "job": family})
        if due:
            task = partial(job, stretches=dict(stretches), shared=self.shared)
            self._launcher(task).launch([list(overrides[f]) for f in due], initial_job_idx=0)

    def _launcher(self, task: Any) -> Launcher:
        return Plugins.instance().instantiate_launcher(self.context, task, self.master)

    def folder(self, family: str) -> Path:
        """Of a family's run."""
        return self.place.folder / FOLDER / family

    def done(self, family: str, rung: int) -> dict[str, Any] | None:
        """What came of a rung: `steps`, `seconds`, those `before` a kill, or why it `failed`.

        None: it is not through.
        """
        return read_json(_note(self.folder(family), rung))

    def checkpoint(self, family: str) -> Path:
        """The newest."""
        return checkpoints(self.folder(family))[-1]

    def forget(self, family: str) -> None:
        """Remove what only a family that goes on needs."""
        for state in self.folder(family).glob("checkpoints/*/trainer/*"):
            if state.is_file():
                state.unlink()


def _note(folder: Path, rung: int) -> Path:
    return folder / f"rung-{ {LAST: 'last', SCORE: 'score'}.get(rung, rung) }.json"


def job(cfg: DictConfig, stretches: Mapping[str, Stretch], shared: Shared | None) -> None:
    """Train one family for its stretch; what it prints goes to its log."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    stretch = stretches[folder.name]
    begun = time.monotonic()
    budget = None
    if stretch.seconds is not None:
        budget = Budget(stretch.seconds, stretch.rung, stretch.cooldown)
    note: dict[str, Any] = {}
    # The scorecard is what the terminal is for.
    with (folder / LOG).open("a") as log, nullcontext() if stretch.rung == SCORE else redirect_stdout(log):
        try:
            train(checked_options(TrainOptions, cfg), folder, budget, shared)
        except (UserError, TooLargeError) as error:
            note["failed"] = str(error)
        except OSError:  # a disk; it would end the others as well
            raise
        except Exception as error:  # of one family, which is out; the others go on
            traceback.print_exc(file=log)
            first = (str(error).splitlines() or [""])[0]
            note["failed"] = f"{type(error).__name__}: {first}; see {folder / LOG}"
    gc.collect()  # what one family holds in cycles, the next one needs
    found = checkpoints(folder)
    note |= {"steps": int(found[-1].name) if found else 0, "seconds": time.monotonic() - begun}
    if budget:
        note |= {"seconds": budget.used, "setup": budget.waited, "before": budget.before}
    write_json(_note(folder, stretch.rung), note)


def composed(place: Place, overrides: Sequence[str]) -> TrainOptions:
    """The options of a family's run; ranges are checked when it runs."""
    settings = [o for o in overrides if not o.startswith("hydra.")]
    return read_options(TrainOptions, compose(settings, place.conf, place.name))

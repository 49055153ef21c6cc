"""Ranks of a training run: launch, detection of lost ranks, world size, and checks on resume."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

# private API: Lightning has no public hook around the processes that it starts for trainer.devices=2.
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed
from typing_extensions import override

from decode.errors import UserError
from distill.distributed.graceful_shutdown import EXIT_CODE
from distill.utils.atomic_files import write_json
from distill.utils.launcher import PARENT, LostRankError, watch
from distill.utils.run_folder import checkpoints

T = TypeVar("T")
PROCESSES_FILE = "state.json"  # next to the trainer state


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher with our own monitoring of the ranks that it starts.

    Lightning kills all processes five seconds after a rank exits with a code other than 0, also after a
    graceful shutdown, and prints nothing.
    """

    started: tuple[subprocess.Popen, ...] = ()

    @override  # private API: Lightning has no public hook for starting processes
    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()  # private API: as above
        self.started, self.procs = tuple(self.procs), []  # an empty list disables Lightning's observer
        watch(self._dead_rank)

    def _dead_rank(self) -> str | None:
        codes = [process.poll() for process in self.started]
        dead = next((rank for rank, code in enumerate(codes, 1) if code not in (None, 0, EXIT_CODE)), None)
        return None if dead is None else f"rank {dead} of this run has ended with code {codes[dead - 1]}"

    @override
    def kill(self, signum: Any) -> None:
        started, self.started = self.started, ()  # these exits are intended
        for process in started:
            process.send_signal(signum)


def watch_ranks(trainer: L.Trainer) -> None:
    """Replace Lightning's launcher by `Launcher`."""
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        trainer.strategy._launcher = Launcher(  # private API: `launcher` has no setter
            launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
        )


@contextmanager
def explain_lost_ranks(folder: Path) -> Iterator[None]:
    """Turn errors of gloo and NCCL about another process into one line.

    Args:
        folder: folder of the run.

    Raises:
        LostRankError: instead of their errors.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors that name its source files.
        if not isinstance(error, distributed.DistError) and "gloo/transport" not in str(error):
            raise
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(" [")[0]
        raise LostRankError(
            f"another process of this run has ended, or is out of reach ({reason}); {resume_hint(folder)}"
        ) from None


def resume_hint(folder: Path) -> str:
    """Sentence on where the same command resumes."""
    paths = checkpoints(folder)
    where = f"continues from {paths[-1].relative_to(folder)}" if paths else "begins again"
    return f"the same command {where}"


def gather(value: T) -> list[T]:
    """A value of every process that has joined, by rank; every one of them must call this.

    Args:
        value: is pickled for the others, which trust this process.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def check_world_size(trainer: L.Trainer) -> None:
    """Compare the number of started processes with the configuration.

    Raises:
        UserError: they differ.
    """
    configured, started = trainer.num_devices * trainer.num_nodes, _world_started()
    if started not in (None, configured):
        raise UserError(
            f"trainer: devices={trainer.num_devices} on num_nodes={trainer.num_nodes} are "
            f"{configured} processes, but {started} have been started; change one or the other"
        )


def _world_started() -> int | None:
    """World size of a launcher, in Lightning's order of detection; None if Lightning starts the processes."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment):
        if environment.detect():
            return environment().world_size()
    return None


def write_processes(trainer: L.Trainer, folder: Path) -> None:
    """Record world size, strategy and precision next to a trainer state."""
    if trainer.is_global_zero:
        write_json(folder / PROCESSES_FILE, _processes(trainer))


def read_processes(folder: Path) -> dict[str, Any]:
    """Read the record of `write_processes` next to a trainer state.

    Raises:
        FileNotFoundError: there is no record.
        ValueError: it is damaged.
    """
    values = json.loads((folder / PROCESSES_FILE).read_text())
    kinds = {"processes": int, "strategy": str, "precision": str}
    if not isinstance(values, dict) or any(not isinstance(values.get(k), t) for k, t in kinds.items()):
        raise ValueError(f"{folder / PROCESSES_FILE}: no record of processes")
    return values


def check_processes(trainer: L.Trainer, state: Path) -> None:
    """Compare the processes that saved a trainer state with the current ones.

    With another world size, ranks get other batches, so the run would not be reproducible, and sharded states
    cannot be loaded.

    Args:
        trainer: trainer of the resumed run.
        state: file or folder of the state, in the checkpoint's folder `trainer`.

    Raises:
        UserError: they differ.
    """
    saved, current = read_processes(state.parent), _processes(trainer)
    if saved != current:
        checkpoint = state.parents[1]
        raise UserError(
            f"resume: {checkpoint} was saved by {_describe(saved)}, and these are {_describe(current)}; "
            f"start as many, or a new run with resume=never drafter.init_from={checkpoint}"
        )


def _processes(trainer: L.Trainer) -> dict[str, Any]:
    return {
        "processes": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
    }


def _describe(processes: dict[str, Any]) -> str:
    count = processes["processes"]
    return f"{count} process{'es' * (count > 1)} ({processes['strategy']}, {processes['precision']})"

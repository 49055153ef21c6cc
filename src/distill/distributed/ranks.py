"""Several processes that train one drafter: started alike, watched, and the same when the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from distill.distributed.graceful_shutdown import CODE
from distill.utils.atomic_files import write_json
from distill.utils.launcher import PARENT, LostRankError, watch
from distill.utils.run_folder import checkpoints

WRITTEN_BY = "state.json"  # beside the state


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a watch of our own over the ranks that it starts.

    Its own kills every process five seconds after a rank has ended with another code than 0, be it that
    of a run that was asked to stop, and says nothing.
    """

    started: tuple[subprocess.Popen, ...] = ()

    @override  # private API: it is where processes start, and Lightning has no public hook there
    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()  # private API: as above
        self.started, self.procs = tuple(self.procs), []  # Lightning's observer has nobody to watch
        watch(self._died)

    def _died(self) -> str | None:
        codes = [process.poll() for process in self.started]
        bad = next((rank for rank, code in enumerate(codes, 1) if code not in (None, 0, CODE)), None)
        return None if bad is None else f"rank {bad} of this run has ended with code {codes[bad - 1]}"

    @override
    def kill(self, signum: Any) -> None:
        started, self.started = self.started, ()  # how these end is nobody's fault
        for process in started:
            process.send_signal(signum)


def watched(trainer: L.Trainer) -> None:
    """Have ranks that Lightning is going to start watched by us."""
    lightnings = trainer.strategy.launcher
    if isinstance(lightnings, _SubprocessScriptLauncher):
        trainer.strategy._launcher = Launcher(  # private API: `launcher` has no setter
            lightnings.cluster_environment, lightnings.num_processes, lightnings.num_nodes
        )


@contextmanager
def lost_ranks(folder: Path) -> Iterator[None]:
    """Say in one line what gloo and NCCL say in many when another process has died.

    Args:
        folder: of the run.

    Raises:
        LostRankError: in place of their errors.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo's are plain RuntimeErrors that name its sources.
        if not isinstance(error, distributed.DistError) and "gloo/transport" not in str(error):
            raise
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(" [")[0]
        raise LostRankError(
            f"another process of this run has ended, or is out of reach ({reason}); {again(folder)}"
        ) from None


def again(folder: Path) -> str:
    """Where the same command goes on."""
    found = checkpoints(folder)
    where = f"goes on from {found[-1].relative_to(folder)}" if found else "begins anew"
    return f"the same command {where}"


def check_world(trainer: L.Trainer) -> None:
    """Compare what a launcher has started with what the configuration asks for.

    Raises:
        UserError: they differ.
    """
    asked, started = trainer.num_devices * trainer.num_nodes, _world_started()
    if started not in (None, asked):
        raise UserError(
            f"trainer: devices={trainer.num_devices} on num_nodes={trainer.num_nodes} are {asked} processes, "
            f"but {started} have been started; change one or the other"
        )


def _world_started() -> int | None:
    """Processes that a launcher has started; None where Lightning starts them. In Lightning's own order."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment):
        if environment.detect():
            return environment().world_size()
    return None


def write_state(trainer: L.Trainer, folder: Path) -> None:
    """Write down, beside a trainer's state, what processes it is of."""
    if trainer.is_global_zero:
        write_json(folder / WRITTEN_BY, _processes(trainer))


def check_state(trainer: L.Trainer, state: Path) -> None:
    """Compare the processes that a state is of with these.

    Other processes get other batches, so the run would not end as it began, even where its state
    could be read (a sharded one cannot).

    Args:
        trainer: that is to go on.
        state: file or folder of the state, in the checkpoint's folder `trainer`.

    Raises:
        UserError: they differ.
    """
    then, now = json.loads((state.parent / WRITTEN_BY).read_text()), _processes(trainer)
    if then != now:
        checkpoint = state.parents[1]
        raise UserError(
            f"resume: {checkpoint} was saved by {_words(then)}, and these are {_words(now)}; start as many "
            f"as then, or a new run with resume=never drafter.init_from={checkpoint}"
        )


def _processes(trainer: L.Trainer) -> dict[str, Any]:
    return {
        "processes": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
    }


def _words(of: dict[str, Any]) -> str:
    return f"{of['processes']} process{'es' * (of['processes'] > 1)} ({of['strategy']}, {of['precision']})"

"""Estimate hours, disk, memory and network of a large run from a small one: foredraft plan RUN --prompts N.

The small run uses the same target, drafter and options as the large run, on one device of the same kind; a
hundred prompts and about fifty steps are enough. Its phases.json records the work and time of each phase. The
estimate scales them to the large run's prompts and processes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from decode.errors import UserError
from distill.config.recorded import shown_settings
from distill.config.target_size import steps_between_saves, training_steps
from distill.options import answers_each
from distill.scoring.tables import grid
from distill.training.trainer_state import STATE
from distill.utils.atomic_files import put
from distill.utils.phase_log import FILE, Phase, read_phases
from distill.utils.run_folder import checkpoints

GIB = 2**30
# CPU time to read, check and count one prompt (scripts/lab/benchmark.py scale)
PROMPT_SECONDS = 1.0e-3
PROMPT_BYTES = 700  # memory of one prompt in a process
ARROW_BYTES = 5  # per token in the memory-mapped copy: an id and its mask
WEIGHTS = "model.safetensors"
STATES = 2  # checkpoints that keep the trainer's state
WORK = ("made", "tokens", "anchors", "steps", "checkpoints")  # amounts summed over the starts of a run


class Job(NamedTuple):
    """The large run.

    Attributes:
        prompts: number of prompts.
        samples: answers per prompt; None: derived from the small run's options.
        steps: optimizer steps; None: the default of a run.
        processes: number of processes, with one device each.
        faster: speed of one device, relative to the small run's.
        network: gigabytes a second between processes.
        saves: number of scored checkpoints; None: the default of a run.
    """

    prompts: int
    samples: int | None
    steps: int | None
    processes: int
    faster: float
    network: float
    saves: int | None


@dataclass(frozen=True)
class Part:
    """One line of the estimate: phase, amount of work, rate of one device, and wall time."""

    name: str
    amount: str
    rate: str
    hours: float


@dataclass(frozen=True)
class Estimate:
    """Time, disk, memory and network traffic of a large run; sizes in GiB."""

    parts: Sequence[Part]
    disk: Mapping[str, float]
    memory: Mapping[str, float]
    sent: float  # GiB that one process sends in a step

    @property
    def hours(self) -> float:
        """Wall time."""
        return sum(part.hours for part in self.parts)


def main() -> None:
    """Print the estimate."""
    parser = argparse.ArgumentParser("foredraft plan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a small run that has ended")
    parser.add_argument("--prompts", type=int, required=True, metavar="N", help="of the large run")
    parser.add_argument("--samples", type=int, metavar="N", help="answers to each; default: by its options")
    parser.add_argument("--steps", type=int, metavar="N", help="default: five passes over the prompts")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="with a device each; default 1")
    parser.add_argument(
        "--faster", type=float, default=1.0, metavar="X", help="than the small run's device; default 1"
    )
    parser.add_argument(
        "--network", type=float, default=10.0, metavar="GB", help="a second, between processes; default 10"
    )
    parser.add_argument("--saves", type=int, metavar="N", help="checkpoints; default: by the steps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the estimate as JSON")
    given = vars(parser.parse_args())
    run, out = given.pop("run"), given.pop("out")
    estimate = plan(run, Job(**given))
    print(as_text(estimate))
    if out:
        put(out, json.dumps(asdict(estimate) | {"hours": estimate.hours}, indent=1) + "\n")


def plan(run: Path, job: Job) -> Estimate:
    """Extrapolate the phases of a small run.

    Raises:
        UserError: a number out of range, no such run, or an unfinished run.
    """
    if min(job.prompts, job.processes, job.samples or 1, job.steps or 1) < 1 or (job.saves or 0) < 0:
        raise UserError("foredraft plan: --prompts, --processes, --samples and --steps are 1 or more")
    if job.faster <= 0 or job.network <= 0:
        raise UserError("foredraft plan: --faster and --network are above 0")
    config, phases = shown_settings(run), _sums(read_phases(run))
    if config is None or not {"prompts", "rollouts", "training"} <= phases.keys():
        raise UserError(f"{run}: no {FILE} of a run that has ended; train a small one first")
    return _Extrapolation(run, config, phases, job).estimate()


def _sums(phases: Sequence[Phase]) -> dict[str, Phase]:
    """Merge phases by name: sums of work and seconds over all starts of a run, sizes of the last start."""
    found: dict[str, Phase] = {}
    for phase in phases:
        before = found.get(phase.name, Phase(phase.name, 0.0))
        amounts = {
            name: value + (before.amounts.get(name, 0) if name in WORK else 0)
            for name, value in phase.amounts.items()
        }
        found[phase.name] = Phase(phase.name, before.seconds + phase.seconds, phase.processes, amounts)
    return found


class _Extrapolation:
    """Extrapolates a small run's phases to a large run.

    Args:
        run: folder of the small run.
        config: configuration of the small run.
        phases: phases of the small run, by name.
        job: the large run.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], phases: Mapping[str, Phase], job: Job) -> None:
        self.run, self.config, self.phases, self.job = run, config, phases, job
        rollout, stored = config["rollout"], phases["rollouts"].amounts
        kinds = rollout["answers"], rollout["samples"], rollout["temperature"]
        small, written = int(phases["prompts"].amounts["prompts"]), config["prompts"]["self"]
        self.samples = job.samples or answers_each(*kinds, job.prompts)
        # Rows per answer: more than one if a template rewrites earlier turns.
        of_answer = (stored["rows"] - written) / (small * answers_each(*kinds, small))
        self.more = (job.prompts * self.samples * of_answer + written) / stored["rows"]
        self.tokens = stored["row_tokens"] * self.more
        batch = config["batch_size"] * config["trainer"]["accumulate_grad_batches"]
        self.steps = job.steps or training_steps(job.prompts, self.samples, written, batch * job.processes)
        self.saves = ceil(self.steps / steps_between_saves(self.steps)) if job.saves is None else job.saves
        self.on_disk = config["taps"] in ("cache", "engine")
        # Shares of tokens with stored hidden states; the others are computed in every step.
        self.share = self.small_share = self.taps_gib = 0.0
        if taps := phases.get("taps"):
            self.small_share = taps.amounts.get("share", 1.0)
            whole = taps.amounts["bytes"] / self.small_share * self.more / GIB
            self.taps_gib = min(whole, config["taps_gb"])
            self.share = self.taps_gib / whole

    def estimate(self) -> Estimate:
        """Return the estimate of all phases."""
        weights, state, parameters = _checkpoint(self.run)
        # A ring sends and receives the gradients, in fp32, almost twice.
        sent = 2 * (self.job.processes - 1) / self.job.processes * 4 * parameters
        stored, training = self.phases["rollouts"].amounts, self.phases["training"].amounts
        kept = self.phases["taps"].amounts["bytes"] if "taps" in self.phases and not self.on_disk else 0
        disk = {"rollouts": (stored["bytes"] * self.more + ARROW_BYTES * self.tokens) / GIB}
        disk["checkpoints"] = (weights * self.saves + state * STATES) / GIB
        memory = {"target, drafter and a step": (training["peak_bytes"] - kept) / GIB}
        memory["prompts"] = PROMPT_BYTES * self.job.prompts / GIB
        (disk if self.on_disk else memory)["taps"] = self.taps_gib
        parts = [self._prompts(), *self._rollouts(), *self._taps(), self._training(), self._gradients(sent)]
        return Estimate([*parts, *self._checkpoints()], disk, memory, sent / GIB)

    def _prompts(self) -> Part:
        count = self.job.prompts
        return Part("prompts", f"{count:,} prompts", "", PROMPT_SECONDS * count / 3600)

    def _rollouts(self) -> list[Part]:
        phase = self.phases["rollouts"]
        if not (made := phase.amounts["made"]):
            return []  # answers were given or already stored
        rate = made / phase.seconds / phase.processes
        tokens = phase.amounts["answer_tokens"] * self.more
        return [self._part("rollouts", tokens, "tokens", rate, self.job.processes)]

    def _taps(self) -> list[Part]:
        if not self.taps_gib:
            return []
        # On disk, each process computes its share; in memory, each process computes and stores all rows.
        shared = self.job.processes if self.on_disk else 1
        return [self._part("taps", self.tokens * self.share, "tokens", self._reading(), shared)]

    def _reading(self) -> float:
        """Hidden states that a process computes, in tokens a second."""
        phase = self.phases["taps"]
        return phase.amounts["tokens"] / phase.seconds / phase.processes

    def _training(self) -> Part:
        phase = self.phases["training"]
        seconds = phase.seconds
        if "taps" in self.phases:
            read = phase.amounts["tokens"] * (self.small_share - self.share)
            seconds += read / phase.processes / self._reading()
        return self._part("training", self.steps, "steps", phase.amounts["steps"] / seconds, 1)

    def _gradients(self, sent: float) -> Part:
        seconds = self.steps * sent / 1e9 / self.job.network
        return Part("gradients", f"{sent / 1e6:,.1f} MB a step", f"{self.job.network:g} GB/s", seconds / 3600)

    def _checkpoints(self) -> list[Part]:
        phase = self.phases.get("checkpoints")
        if phase is None:
            return []
        rate = phase.amounts["checkpoints"] / phase.seconds
        return [self._part("checkpoints", self.saves, "saves", rate, 1)]

    def _part(self, name: str, amount: float, unit: str, rate: float, shared: int) -> Part:
        hours = amount / rate / shared / self.job.faster / 3600
        return Part(name, f"{amount:,.0f} {unit}", f"{rate:,.4g} {unit}/s", hours)


def _checkpoint(run: Path) -> tuple[int, int, int]:
    """Newest checkpoint: bytes of its weights, bytes of its trainer state, and number of weights."""
    folder = next(reversed(checkpoints(run)), None)
    if folder is None:
        raise UserError(f"{run}: it has no checkpoint; train a small run first")
    with safe_open(folder / WEIGHTS, "pt") as file:
        names = file.keys()
        parameters = sum(prod(file.get_slice(name).get_shape()) for name in names)
    state = sum(path.stat().st_size for path in (folder / STATE).rglob("*") if path.is_file())
    return (folder / WEIGHTS).stat().st_size, state, parameters


def as_text(estimate: Estimate) -> str:
    """Format tables of hours, disk and memory, and the longest phase."""
    lines = [[p.name, p.amount, p.rate, _time(p.hours)] for p in estimate.parts]
    lines.append(["all", "", "", _time(estimate.hours)])
    table = grid(["phase", "amount", "of a device", "time"], lines)
    longest = max(estimate.parts, key=lambda part: part.hours)
    share = f"{longest.hours / estimate.hours:.0%}" if estimate.hours else "0%"
    return "\n".join(
        [
            table,
            f"disk: {_sizes(estimate.disk)}",
            f"memory of a process: {_sizes(estimate.memory)}",
            f"bottleneck: {longest.name}, {share} of the time",
        ]
    )


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 2 else f"{60 * hours:.1f} min"


def _sizes(sizes: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name} {size:,.2f}" for name, size in sizes.items() if size)
    return f"{sum(sizes.values()):,.2f} GiB ({shown})"

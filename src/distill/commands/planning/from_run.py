"""A plan from the phases of a small run, which its phases.json records.

The small run uses the same target, drafter and options as the large run, on one device of the same kind; a
hundred prompts and about fifty steps are enough. The estimate scales its phases to the large run's prompts
and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from decode.errors import UserError
from distill.commands.planning.constants import GIB, PROMPT_BYTES, PROMPT_SECONDS
from distill.commands.planning.estimate import Estimate, Part
from distill.config.recorded import shown_settings
from distill.config.target_size import steps_between_saves, training_steps
from distill.options import answers_each
from distill.training.trainer_state import STATE
from distill.utils.phase_log import FILE, Phase, read_phases
from distill.utils.run_folder import checkpoints

ARROW_BYTES = 5  # per token in the memory-mapped copy: an id and its mask
WEIGHTS = "model.safetensors"
STATES = 2  # checkpoints that keep the trainer's state
OWN_PROMPTS = "{run} wrote its own prompts: the plan's prompts are self-written too, one answer each"
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


def plan_from_run(run: Path, job: Job) -> Estimate:
    """Extrapolate the phases of a small run.

    Raises:
        UserError: no such run, an unfinished one, or one that trained nothing.
    """
    config, phases = shown_settings(run), _sums(read_phases(run))
    if config is None or "rollouts" not in phases:
        raise UserError(f"{run}: no {FILE} of a run that has ended; train a small one first")
    if "training" not in phases:
        raise UserError(
            f"{run}: its {FILE} has no training, so it has not ended, or its drafter is not trained"
        )
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
        # A run without prompts of its user logs no such phase: all of its rows are self-written ones.
        small = int(phases["prompts"].amounts["prompts"]) if "prompts" in phases else 0
        written = config["prompts"]["self"]
        if small:
            self.samples = job.samples or answers_each(*kinds, job.prompts)
            # Rows per answer: more than one if a template rewrites earlier turns.
            of_answer = (stored["rows"] - written) / (small * answers_each(*kinds, small))
            self.more = (job.prompts * self.samples * of_answer + written) / stored["rows"]
            asked = job.prompts
        else:
            self.samples, self.more = 1, job.prompts / stored["rows"]
            asked, written = 0, job.prompts
        self.tokens = stored["row_tokens"] * self.more
        batch = config["batch_size"] * config["trainer"]["accumulate_grad_batches"]
        self.steps = job.steps or training_steps(asked, self.samples, written, batch * job.processes)
        self.saves = ceil(self.steps / steps_between_saves(self.steps)) if job.saves is None else job.saves
        self.choices = () if small else (OWN_PROMPTS.format(run=run),)
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
        return Estimate([*parts, *self._checkpoints()], disk, memory, sent / GIB, self.choices)

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

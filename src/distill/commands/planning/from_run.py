"""A plan from the phases of a small run, which its phases.json records.

The small run uses the same target, drafter and options as the large run, on one device of the same kind; a
hundred prompts and about fifty steps are enough. The estimate scales its phases to the large run's prompts
and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from distill.commands.planning.command import Chosen, Job, from_small, purpose
from distill.commands.planning.constants import (
    GIB,
    GPUS_OF_MACHINE,
    NETWORK,
    PROMPT_BYTES,
    PROMPT_SECONDS,
    known_card,
)
from distill.commands.planning.estimate import Estimate, Part
from distill.commands.planning.expected_tau import expected_tau
from distill.commands.planning.known_models import known
from distill.commands.planning.shape import empty_target, target_shape
from distill.config.plan_options import drafter_choice
from distill.config.recorded import readable_overrides, shown_settings
from distill.config.target_size import steps_between_saves, training_steps
from distill.options.answers import answers_each
from distill.scoring.compare import scorecard
from distill.training.trainer_state import STATE
from distill.utils.phase_log import FILE, STARTING, Phase, read_phases
from distill.utils.run_folder import checkpoints

ARROW_BYTES = 5  # per token in the memory-mapped copy: an id and its mask
WEIGHTS = "model.safetensors"
STATES = 2  # checkpoints that keep the trainer's state
OWN_PROMPTS = "{run} wrote its own prompts: the plan's prompts are self-written too, one answer each"
ENGINE = "engine"  # its start
WORK = ("made", "tokens", "anchors", "steps", "checkpoints")  # amounts summed over the starts of a run


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
    """Merge phases by name: sums of work and seconds over all starts of a run, sizes of the last start.

    The start of an engine is a phase of its own, since it does not grow with the work.
    """
    found: dict[str, Phase] = {}
    starts: dict[str, float] = {}  # an engine starts once in each of these phases
    for phase in phases:
        before = found.get(phase.name, Phase(phase.name, 0.0))
        amounts = {
            name: value + (before.amounts.get(name, 0) if name in WORK else 0)
            for name, value in phase.amounts.items()
        }
        seconds = before.seconds + phase.seconds
        if start := amounts.pop(STARTING, 0.0):
            starts[phase.name] = start
            seconds -= start
        found[phase.name] = Phase(phase.name, seconds, phase.processes, amounts)
    if starts:
        found[ENGINE] = Phase(ENGINE, sum(starts.values()))
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
        self.asked, self.written = asked, written
        self.card = _scorecard(run)
        self.network, network = _network(job, self.card)
        self.notes = [*([] if small else [OWN_PROMPTS.format(run=run)]), *network]
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
        parts = [self._prompts(), *self._engine(), *self._rollouts(), *self._taps()]
        parts += [self._training(), self._gradients(sent), *self._checkpoints()]
        said = [*self._choices(), *self.notes]
        return Estimate(parts, disk, memory, sent / GIB, said, self._tau(), *self._run())

    def _prompts(self) -> Part:
        count = self.job.prompts
        return Part("prompts", f"{count:,} prompts", "", PROMPT_SECONDS * count / 3600)

    def _engine(self) -> list[Part]:
        phase = self.phases.get(ENGINE)
        return [Part(ENGINE, "start", "", phase.seconds / 3600)] if phase else []

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
        seconds = self.steps * sent / 1e9 / self.network
        return Part("gradients", f"{sent / 1e6:,.1f} MB a step", f"{self.network:g} GB/s", seconds / 3600)

    def _checkpoints(self) -> list[Part]:
        phase = self.phases.get("checkpoints")
        if phase is None:
            return []
        rate = phase.amounts["checkpoints"] / phase.seconds
        return [self._part("checkpoints", self.saves, "saves", rate, 1)]

    # -- what is said ----------------------------------------------------------------------------

    def _choices(self) -> list[str]:
        """What the small run measured, and what of it the hours do not contain."""
        steps = self.phases["training"].amounts["steps"]
        where = f", {self.card.conditions.hardware}" if self.card else ""
        faster = f"; devices {self.job.faster:g} times as fast" if self.job.faster != 1 else ""
        rows = self.phases["rollouts"].amounts["rows"]
        return [
            f"measured: {self.run}, {rows:,.0f} answers and {steps:,.0f} steps{where}{faster}",
            self._answers(),
            self._hidden_states(),
        ]

    def _answers(self) -> str:
        rollout, made = self.config["rollout"], self.phases["rollouts"].amounts["made"]
        if rollout["answers"] == "given":
            return "answers: given"
        if not made:
            return (
                "answers: the small run found them stored, so this plan lacks their time; a small run "
                "with another output_dir measures it"
            )
        if rollout["engine"] == "ray" and rollout.get("engine_python"):
            return "answers: by engines of Ray's workers, whose start counts as a part of the answers"
        return f"answers: by rollout={rollout['engine']}, as in the small run"

    def _hidden_states(self) -> str:
        taps = self.config["taps"]
        if not self.taps_gib:
            how = "taps=auto found them cheaper" if taps == "auto" else f"taps={taps}"
            return f"hidden states: computed in each step of training, {how}; their time is in training"
        place = "stored on disk" if self.on_disk else "held in memory"
        rest = f"; {1 - self.share:.0%} do not fit taps_gb and are computed in each step"
        return f"hidden states: {place} (taps={taps}){rest * (self.share < 1)}"

    def _tau(self) -> str:
        if self.card is None:
            return "the small run has no score (score.enabled=false)"
        said = f"the small run has {self.card.headline.tau_text}, {self.card.headline.setting}"
        public = _public_tau(self.config, drafter_choice(readable_overrides(self.run)), self.job.prompts)
        return f"{said}; more prompts and steps raise it{public and f'; {public}'}"

    def _run(self) -> tuple[str, str]:
        """What the large run is, and its command."""
        overrides = readable_overrides(self.run)
        name, taps = drafter_choice(overrides), self.config["taps"]
        chosen = Chosen(self.steps, self.saves)
        shown = purpose(self.config, name, self.job.processes, taps)
        return shown, from_small(self.job, self.config, overrides, chosen)

    def _part(self, name: str, amount: float, unit: str, rate: float, shared: int) -> Part:
        hours = amount / rate / shared / self.job.faster / 3600
        return Part(name, f"{amount:,.0f} {unit}", f"{rate:,.4g} {unit}/s", hours)


def _public_tau(config: Mapping[str, Any], drafter: str, prompts: int) -> str:
    """Public figures for a run's target and drafter; "" for a target outside the table of known models."""
    name = str(config["target"]["path"])
    if not (settings := known(name)):
        return ""
    shape = target_shape(empty_target(AutoConfig.for_model(**settings), name), name, "")
    return expected_tau(name, shape.parameters, drafter, prompts)


def _scorecard(run: Path) -> Scorecard | None:
    """The scorecard of the run's best checkpoint; None for a run without scores."""
    try:
        return scorecard(run)
    except UserError:
        return None


def _network(job: Job, card: Scorecard | None) -> tuple[float, list[str]]:
    """Gigabytes a second between processes, and what is assumed for it."""
    if job.network or job.processes == 1:
        return job.network or NETWORK / 1e9, []
    found = known_card(card.conditions.hardware) if card else None
    if found and job.processes <= GPUS_OF_MACHINE:
        speed, what = found.link / 1e9, f"the link between cards of one machine ({found.name})"
    elif job.processes <= GPUS_OF_MACHINE:
        speed, what = NETWORK / 1e9, "since the small run's device is none of the known cards"
    else:
        speed, what = NETWORK / 1e9, f"between machines of {GPUS_OF_MACHINE} devices"
    return speed, [f"network: {speed:g} GB/s is assumed, {what}; network=<GB/s> gives another speed"]


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

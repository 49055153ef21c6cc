"""A plan before any run: what a target's shape and a card's data sheet say of a large run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from decode.errors import UserError
from distill.commands.planning import constants as c
from distill.commands.planning.command import Chosen
from distill.commands.planning.estimate import Estimate, Part
from distill.commands.planning.expected_tau import expected_tau
from distill.commands.planning.shape import HALF, DrafterShape, TargetShape
from distill.commands.planning.sharing import OTHERS, WHOLE, Sharing, line
from distill.config.target_size import steps_between_saves, training_steps
from distill.losses.logits_rows import BLOCKS, CACHED_BYTES, rows_on_card

GIB = c.GIB
# Depths and anchors of EAGLE-3: the paper's code, and conf/drafter/eagle3.yaml
PAPER, DEFAULT = (7, 0), (3, 64)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The large run.

    Attributes:
        prompts: number of prompts, without self-written ones.
        written: self-written prompts.
        samples: answers to each prompt.
        answers: vllm | own, our loop | given.
        prompt_tokens, answer_tokens: mean lengths.
        row_tokens: limit on a training row.
        gpus: number of devices, one process each.
        card: of each of them.
        batch, accumulate: rows of a micro-batch, and micro-batches of a step.
        rollout_batch: answers that our loop decodes together.
        steps, saves: None: as a run chooses.
        taps: auto | memory | cache | online | engine.
        taps_memory: bytes of hidden states that a process may hold in memory.
        disk: bytes that they may take on disk.
        network: bytes a second between processes; None: by the card.
        scored: whether save points are scored.
        sharing: of the drafter among processes; None: as the plan chooses.
        on_cpu: whether the device is this machine's processor.
    """

    prompts: int
    written: int
    samples: int
    answers: str
    prompt_tokens: int
    answer_tokens: int
    row_tokens: int
    gpus: int
    card: c.Card
    batch: int
    accumulate: int
    rollout_batch: int
    steps: int | None
    saves: int | None
    taps: str
    taps_memory: float
    disk: float
    network: float | None
    scored: bool
    sharing: Sharing | None = None
    on_cpu: bool = False

    @property
    def rows(self) -> int:
        """Answers that are trained on."""
        return self.prompts * self.samples + self.written

    @property
    def row(self) -> int:
        """Mean tokens of a training row."""
        return min(self.row_tokens, self.prompt_tokens + self.answer_tokens)

    @property
    def supervised(self) -> int:
        """Mean tokens of a row that are trained on."""
        return min(self.answer_tokens, self.row)

    @property
    def machines(self) -> int:
        """Number of machines."""
        return ceil(self.gpus / c.GPUS_OF_MACHINE)


class Taps(NamedTuple):
    """One way to hidden states.

    Attributes:
        way: option that chooses it.
        hours: until they are stored.
        reading: hours of reading them from disk, in all passes.
        forward: seconds of the target's pass in each micro-batch.
        disk, memory: bytes of hidden states; memory is of one process.
        resident: bytes of the target in each process.
        why: of a choice by force.
    """

    way: str
    hours: float
    reading: float
    forward: float
    disk: float
    memory: float
    resident: float
    why: str = ""


class BeforeRun:
    """Estimates a large run before any run.

    Args:
        target: sizes of the target.
        drafter: sizes of the drafter.
        work: the large run.
    """

    def __init__(self, target: TargetShape, drafter: DrafterShape, work: Work) -> None:
        self.target, self.drafter, self.work, self.card = target, drafter, work, work.card
        self.group = self._group()
        in_step = work.batch * work.accumulate * work.gpus
        samples = work.samples
        self.steps = work.steps or training_steps(work.prompts, samples, work.written, in_step)
        self.passes = self.steps * in_step / work.rows
        self.saves = ceil(self.steps / steps_between_saves(self.steps)) if work.saves is None else work.saves
        self.sharing = work.sharing or WHOLE
        if work.sharing is None and drafter.trains and work.gpus > 1 and not self._fitting():
            self.sharing = next(one for one in OTHERS if one.trainer == "fsdp")  # torch's own

    def chosen(self) -> Chosen:
        """What this plan chose, for the command that starts the run.

        Raises:
            UserError: see `estimate`.
        """
        vllm = self.work.answers == "vllm"
        if not self.drafter.trains:
            return Chosen(self.steps, self.saves, vllm=vllm)
        taps = self._cheapest()
        sharded = taps.resident < self.target.bytes and taps.way == "online"
        return Chosen(self.steps, self.saves, taps.way, taps.disk / GIB, sharded, vllm, self.sharing.trainer)

    def estimate(self) -> Estimate:
        """Return the estimate of all phases.

        Raises:
            UserError: the target does not fit these devices, or hidden states the disk.
        """
        work, drafter = self.work, self.drafter
        parts = [Part("prompts", f"{work.prompts:,} prompts", "", c.PROMPT_SECONDS * work.prompts / 3600)]
        parts += self._rollouts()
        disk = {"target": self.target.bytes, "rollouts": c.ROLLOUT_BYTES * work.rows * work.row}
        memory = {"target": min(self.target.bytes / self.group, self.card.memory)}
        choices, sent, scored = [self._setup()], 0.0, work.scored
        if drafter.trains:
            taps = self._cheapest()
            trained, sent = self._training(taps)
            parts += [*self._taps(taps), *trained]
            disk |= {"hidden states": taps.disk}
            memory = self._memory(taps)
            choices += [self._taps_choice(taps), *self._depths(taps)]
            if work.gpus > 1:
                choices.append(line(self.sharing, drafter.parameters, work.gpus))
            scored = work.scored and taps.way != "engine"  # which has no target to score with
        disk["checkpoints"] = drafter.parameters * (4 * max(1, self.saves) + 24)  # and two trainer states
        parts += self._checkpoints(scored)
        choices += self._assumptions()
        tau = expected_tau(
            self.target.name, self.target.parameters, drafter.name, work.prompts or work.written
        )
        return Estimate(
            parts,
            {name: size / GIB for name, size in disk.items()},
            {name: size / GIB for name, size in memory.items()},
            sent / GIB,
            choices,
            tau,
        )

    # -- answers -----------------------------------------------------------------------------------

    def _group(self) -> int:
        """Devices that hold the target together: the smallest power of two that fits.

        Raises:
            UserError: more than there are.
        """
        room, group = c.ENGINE_MEMORY * self.card.memory, 1
        least = self.target.bytes + 16 * self._row_bytes()
        while least / group > room:
            group *= 2
        if group > self.work.gpus:
            size = f"{self.target.bytes / 1e9:,.0f} GB of {self.target.name}"
            have = f"{self.work.gpus} x {self.card.name}" if self.work.gpus > 1 else self.card.name
            raise UserError(
                f"foredraft plan: {size} do not fit {have}; give gpus={group} or more, or a larger card"
            )
        return group

    def _row_bytes(self) -> float:
        """Keys and values of one answer with its prompt."""
        return self.target.kv_bytes * (self.work.prompt_tokens + self.work.answer_tokens)

    def _rollouts(self) -> list[Part]:
        work, engine = self.work, self.work.answers == "vllm"
        if work.answers == "given":
            return []
        copies = max(1, work.gpus // self.group)
        room = (c.ENGINE_MEMORY * self.card.memory - self.target.bytes / self.group) * self.group
        limit = c.ENGINE_SEQUENCES if engine else work.rollout_batch
        together = max(1, min(limit, int(room / self._row_bytes()), ceil(work.rows / copies)))
        rate = together / self._decoding_step(together, engine)
        tokens = work.rows * work.answer_tokens
        made = Part(
            "answers",
            f"{tokens:,} tokens",
            f"{rate / self.group:,.4g} tokens/s",
            tokens / rate / copies / 3600,
        )
        return [*([Part("engine", "start", "", c.ENGINE_START / 3600)] if engine else []), made]

    def _decoding_step(self, together: int, engine: bool) -> float:
        """Seconds of one token of all answers that are decoded together, their prompts' passes included."""
        work, target, card = self.work, self.target, self.card
        length = work.prompt_tokens + work.answer_tokens / 2
        read = (target.bytes + together * length * target.kv_bytes) / (card.bandwidth * card.reading)
        prompt = work.prompt_tokens / work.answer_tokens * target.forward(work.prompt_tokens / 2)
        flop = together * (target.forward(length) + target.head + prompt)
        seconds = max(read, flop / (card.flops * card.decoding)) / self.group
        return seconds if engine else max(seconds, target.layers * card.layer_seconds)

    # -- hidden states and training ------------------------------------------------------------------

    def _cheapest(self) -> Taps:
        """The fastest way to hidden states of those that fit, and that the options allow.

        Raises:
            UserError: none does.
        """
        fitting = self._fitting()
        if not fitting:
            states = self._state_bytes() / GIB
            raise UserError(
                f"foredraft plan: taps={self.work.taps} does not fit: hidden states take {states:,.0f} GiB, "
                f"disk={self.work.disk / GIB:,.0f}; give more disk, more gpus, or taps=online"
            )
        return min(fitting, key=self._hours_of)

    def _fitting(self) -> list[Taps]:
        """Ways to hidden states that the options allow and that fit memory and disk."""
        ways = [way for way in self._ways() if self.work.taps in ("auto", way.way)]
        return [way for way in ways if self._fits(way)]

    def _ways(self) -> list[Taps]:
        work, target, card = self.work, self.target, self.card
        states, whole = self._state_bytes(), target.bytes
        share = whole / work.gpus
        flop = work.batch * work.row * target.forward(work.row / 2)
        one = max(flop / (card.flops * card.forward), target.layers * card.layer_seconds)
        seconds = one * work.rows / work.batch
        gathered = whole * (1 - 1 / work.gpus) / self._link()
        writing = states / (c.DISK_SPEED * work.machines) / 3600
        reading = self.passes * writing
        stored = max(seconds / work.gpus / 3600, writing)
        table = HALF * 2 * target.hidden * target.vocabulary  # embedding and head
        ways = [
            Taps("online", 0.0, 0.0, one, 0.0, 0.0, whole),
            Taps("memory", seconds / 3600, 0.0, 0.0, 0.0, states, whole),
            Taps("cache", stored, reading, 0.0, states, 0.0, whole),
        ]
        if work.gpus > 1:
            ways.append(Taps("online", 0.0, 0.0, one + gathered, 0.0, 0.0, share, "target.placement=sharded"))
        if work.answers == "vllm":
            ways.append(Taps("engine", stored, reading, 0.0, states, 0.0, table, "the target only in vLLM"))
        return ways

    def _fits(self, way: Taps) -> bool:
        in_memory = sum(self._memory(way).values()) <= self.card.memory
        return in_memory and way.memory <= self.work.taps_memory and way.disk <= self.work.disk

    def _hours_of(self, way: Taps) -> float:
        parts, _ = self._training(way)
        return way.hours + sum(part.hours for part in parts)

    def _state_bytes(self) -> float:
        return HALF * self.drafter.states * self.target.hidden * self.work.rows * self.work.row

    def _predictions(self) -> float:
        """Predicted tokens of a row, all depths: places at depth 1, sampled places at deeper ones."""
        deeper = min(self.drafter.anchors or inf, self.work.supervised)
        return self.work.supervised + (self.drafter.depth - 1) * deeper

    def _training(self, taps: Taps) -> tuple[list[Part], float]:
        """Parts of training, and the bytes that one process sends in a step."""
        work, drafter = self.work, self.drafter
        hours = max(self.steps * self._step_seconds(taps) / 3600, taps.reading)
        sent = self.sharing.traffic(drafter.parameters, work.gpus)
        steps = Part("training", f"{self.steps:,} steps", f"{self.steps / hours / 3600:,.4g} steps/s", hours)
        link = self._link()
        exchange = Part(
            "gradients",
            f"{sent / 1e6:,.1f} MB a step",
            f"{link / 1e9:g} GB/s",
            self.steps * sent / link / 3600,
        )
        return [steps, *([exchange] if sent else [])], sent

    def _step_seconds(self, taps: Taps) -> float:
        """Seconds of an optimizer step, without the exchange of gradients."""
        work, drafter, card = self.work, self.drafter, self.card
        weights = 6 * drafter.own + (0 if drafter.own_head else 4 * self.target.hidden * drafter.scored)
        own = work.batch * self._predictions() * weights / (card.flops * card.training)
        teacher = work.batch * work.supervised * self.target.head / (card.flops * card.forward)
        micro = max(own + teacher, drafter.passes * card.depth_seconds) + taps.forward
        return micro * work.accumulate

    def _link(self) -> float:
        return self.work.network or (self.card.link if self.work.machines == 1 else c.NETWORK)

    def _taps(self, taps: Taps) -> list[Part]:
        if not taps.hours:
            return []
        amount = self.work.rows * self.work.row
        each = 1 if taps.way == "memory" else self.work.gpus
        rate = amount / each / taps.hours / 3600
        return [Part("hidden states", f"{amount:,} tokens", f"{rate:,.4g} tokens/s", taps.hours)]

    def _memory(self, taps: Taps) -> dict[str, float]:
        """Bytes of one training process."""
        work, target, drafter = self.work, self.target, self.drafter
        states = HALF * drafter.states * target.hidden * work.row
        unroll = c.LAYER_ACTIVATIONS * target.hidden * drafter.layers * self._predictions()
        return {
            "target": taps.resident,
            "drafter and optimizer": self.sharing.memory(drafter.parameters, work.gpus),
            "activations": work.batch * (states + unroll),
            "logits": self._logits(),
            "hidden states": taps.memory,
            "prompts": c.PROMPT_BYTES * work.prompts,
            "reserve": c.RESERVED,
        }

    def _logits(self) -> float:
        """Bytes of the blocks in which a step scores logits."""
        rows = rows_on_card(self.card.memory, self.target.vocabulary)
        predicted = self.work.batch * self._predictions()
        if self.work.on_cpu:
            return BLOCKS * CACHED_BYTES
        return BLOCKS * 4 * self.target.vocabulary * min(rows, predicted)

    # -- scores, and what is said ----------------------------------------------------------------------

    def _checkpoints(self, scored: bool) -> list[Part]:
        target, card = self.target, self.card
        saves = self.saves if self.drafter.trains else 1
        one_pass = max(
            target.layers * card.layer_seconds, target.bytes / self.group / (card.bandwidth * card.reading)
        )
        seconds = c.SCORE_PASSES * one_pass if scored else 0.0
        written = 6 * self.drafter.parameters / c.DISK_SPEED  # read in fp32, written in bf16
        scores = Part("scores", f"{saves:,} save points", f"{seconds:,.0f} s each", saves * seconds / 3600)
        return [*([scores] if seconds else []), Part("export", "best checkpoint", "", written / 3600)]

    def _setup(self) -> str:
        target, work = self.target, self.work
        size = f"{target.parameters / 1e9:,.2f} B weights"
        fit = (
            "it fits on one device"
            if self.group == 1
            else f"it needs {self.group} devices: --tensor-parallel-size={self.group} of vLLM"
        )
        idle = work.gpus % self.group
        rest = f", of which {idle} make no answers" if idle else ""
        return f"target: {target.name}, {size} ({target.source}); {fit}; {work.gpus} x {self.card.name}{rest}"

    def _taps_choice(self, taps: Taps) -> str:
        how = {
            "online": "computed in each step (taps=online)",
            "memory": "held in memory (taps=memory)",
            "cache": "stored on disk (taps=cache)",
            "engine": "stored on disk by an engine (taps=engine)",
        }[taps.way]
        states, chosen = self._state_bytes() / GIB, "cheapest" if self.work.taps == "auto" else "as given"
        why = f", {taps.why}" if taps.why else ""
        return f"hidden states: {how}, {chosen}{why}; stored, they would take {states:,.1f} GiB"

    def _depths(self, taps: Taps) -> list[str]:
        """The depths of an EAGLE-3, and what the default or the paper's would cost."""
        if self.drafter.name != "eagle3":
            return []
        depth, anchors = self.drafter.depth, self.drafter.anchors
        is_paper = (depth, anchors) == PAPER
        other, others = DEFAULT if is_paper else PAPER
        shape = replace(self.drafter, depth=other, passes=other, anchors=others)
        ratio = BeforeRun(self.target, shape, self.work)._step_seconds(taps) / self._step_seconds(taps)
        if is_paper:
            return [
                f"depths: 7 at all places of a text, as in the paper's code; a step takes {1 / ratio:.1f} "
                "times that of the default, 3 depths, the deeper ones at 64 places"
            ]
        where = f"the deeper ones at {anchors} places of a text" if anchors else "at all places of a text"
        return [
            f"depths: {depth}, {where}; the paper's 7 at all places would take {ratio:.1f} times as long a "
            "step (drafter.depth=7 drafter.anchors=0 drafter.depth_weight=1)"
        ]

    def _network(self) -> list[str]:
        """What is assumed of the network."""
        if self.work.network or self.work.gpus == 1 or not self.drafter.trains:
            return []
        where = "the link between its cards" if self.work.machines == 1 else "between machines"
        return [
            f"network: {self._link() / 1e9:g} GB/s is assumed, {where}; network=<GB/s> gives another speed"
        ]

    def _assumptions(self) -> list[str]:
        work = self.work
        makers = {"vllm": "by vLLM on all devices", "own": "by this program's own loop", "given": "given"}
        return [
            f"answers: {work.rows:,} {makers[work.answers]}, prompts of {work.prompt_tokens:,} tokens and "
            f"answers of {work.answer_tokens:,}; {self.passes:,.1f} passes over them",
            *self._network(),
            "an estimate: no phase was measured; plan again from a small run (foredraft plan RUN)",
        ]

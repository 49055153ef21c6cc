"""The scorecard of a checkpoint: its fields, its JSON form (score.json) and the reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from decode.errors import UserError
from decode.evaluation.audit import Audit
from decode.evaluation.estimates import MIN_SAMPLES, interval
from decode.evaluation.json_records import as_json, build
from decode.evaluation.rows import Row, check_lengths
from decode.evaluation.served import Headline, Served

NOT_RUN = "not run"  # shown instead of an audit's verdict
SCHEMA = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of the measurement.

    Attributes:
        seed: of all draws.
        prompts: number of decoded held-out prompts.
        max_new_tokens: longest answer, in tokens.
        repeats: timed runs.
        dtype: of the target.
        threads: CPU threads.
        hardware: processor or GPU.
        load_average: of the machine over one minute, at the end.
        kv_bytes_per_token: bytes per token in the target's cache.
        prompts_digest: hash of the decoded prompts' token ids.
        replayed_digest: hash of the token ids of the prompts whose answers are replayed; "" without any.
        elsewhere: reason why the target cannot be decoded here, so nothing was timed or audited; or "".
        control: "none", or how the drafter's inputs were corrupted on purpose.
        served_plan: name of the run's engine's plan, used to compare checkpoints; "": no engine is named.
    """

    seed: int
    prompts: int
    max_new_tokens: int
    repeats: int
    dtype: str
    threads: int
    hardware: str
    load_average: float
    kv_bytes_per_token: int = 0
    prompts_digest: str = ""
    replayed_digest: str = ""
    elsewhere: str = ""
    control: str = "none"
    served_plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDrift:
    """Distance of a tuned target from the original, on the original's own answers.

    Attributes:
        kl: KL(original || tuned), nats per token.
        reverse_kl: KL(tuned || original) at the same positions, nats per token.
        top1_agreement: share of tokens at which both have the same most likely token.
        greedy_prefix: share of an answer before the first difference, mean over prompts.
        prompts: number of answers.
        tokens: number of tokens.
    """

    kl: float
    reverse_kl: float
    top1_agreement: float
    greedy_prefix: float
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The scored checkpoint.

    Attributes:
        drafter: short name of its kind.
        step: number of optimizer steps.
        commit: of the source code that scored it.
        target: path or hub id.
        versions: of the libraries, by name.
        parameters: number of the drafter's parameters.
        drafter_kv_bytes_per_token: bytes per token in the drafter's cache.
        quantize: int8 if the drafter's weights were rounded for decoding; otherwise none.
        lossless_to: "target", or "tuned target" if the drafter comes with one.
        target_drift: distance of a tuned target from the original; None for others.
        train_seconds: s of training; None if unknown.
        train_cpu_seconds: s of CPU time of the first process; None if unknown.
        train_precision: of its steps; "" if unknown.
    """

    drafter: str = ""
    step: int = 0
    commit: str = ""
    target: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    drafter_kv_bytes_per_token: int = 0
    quantize: str = "none"
    lossless_to: str = "target"
    target_drift: TargetDrift | None = None
    train_seconds: float | None = None
    train_cpu_seconds: float | None = None
    train_precision: str = ""


class SampleToken(NamedTuple):
    """One token of a sample text; a list in JSON. See `traces.Written`."""

    text: str
    source: str  # accepted | corrected | plain
    p: float  # under the target
    p_rank: int  # 1: its most likely token
    q: float | None  # under the drafter
    q_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A held-out prompt and the decoder's answer.

    Attributes:
        id: of the prompt.
        category: of the prompt.
        prompt: end of the prompt, as text.
        temperature: of the answer.
        decode: name of the plan.
        tokens: of the answer.
    """

    id: str
    category: str
    prompt: str
    temperature: float
    decode: str
    tokens: list[SampleToken]


class Category(NamedTuple):
    """Acceptance on one kind of prompts, with tau's 95 % interval if there are enough prompts."""

    name: str
    prompts: int
    tokens: int
    tau: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The plan chosen by decode=auto or decode=calibrated for one sampler and batch size.

    Attributes:
        temperature: of the answers used for the choice.
        batch_size: requests decoded together.
        chosen: name of the plan.
        tree: its paths if it is a static tree.
        curve: basis of the choice: forecasts by plan, or accuracy by depth.
    """

    temperature: float
    batch_size: int
    chosen: str
    tree: list[list[int]]
    curve: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scorecard:
    """All measurements of one checkpoint.

    In JSON the fields of `conditions` and `checkpoint` are at the top level, with the other fields,
    `schema`, and the properties `headline`, `audit_passed` and `replay_agrees` (docs/report.md).

    Attributes:
        rows: one for each setting; the first has the plan that was asked for or chosen.
        audit: whether the decoder wrote the target's own text; None if an engine decodes.
        conditions: conditions of the measurement.
        checkpoint: scored checkpoint.
        categories: of each replayed prompt.
        samples: example texts.
        plan_choices: plans chosen by measurement.
        served: an engine's measurements of the same checkpoint.
    """

    rows: list[Row]
    audit: Audit | None
    conditions: Conditions
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    categories: list[str] = field(default_factory=list)
    samples: list[SampleText] = field(default_factory=list)
    plan_choices: list[PlanChoice] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)

    def __repr__(self) -> str:
        """The headline, the audit and the number of rows, in a line; every field is in `to_json`."""
        head, scored = self.headline, f"{self.checkpoint.drafter} step {self.checkpoint.step}".strip()
        count = f"{len(self.rows)} row{'s' * (len(self.rows) > 1)}"
        return (
            f"Scorecard({scored}: {head.tau_text}, {head.speedup_text}, {head.setting}, "
            f"audit {self.audited}, {count})"
        )

    @property
    def headline(self) -> Headline:
        """Tau and speedup of the `compared` row; every other number is named by what it is."""
        row = self.compared
        return Headline(
            tau=row.acceptance.tau,
            tau_interval=row.acceptance.tau_interval,
            source=row.source,
            prompts=row.replay.prompts if row.replay else self.conditions.prompts,
            speedup=row.speedup,
            decode=row.decode,
            temperature=row.temperature,
            batch_size=row.batch_size,
        )

    @property
    def drafts(self) -> list[Row]:
        """Lossless drafting rows with the first row's temperature and batch size; else the first row."""
        head = self.rows[0]
        same = [r for r in self.rows if (r.temperature, r.batch_size) == (head.temperature, head.batch_size)]
        return [row for row in same if row.nodes and not row.lossy] or [head]

    @property
    def compared(self) -> Row:
        """Row of the headline, by which checkpoints are compared: the plan of the run's engine; without
        an engine the first row, or the first draft if that is plain decoding.
        """
        plan = self.conditions.served_plan
        return next((row for row in self.drafts if row.decode == plan), self.drafts[0])

    @property
    def fastest(self) -> Row:
        """The draft with the highest speedup."""
        return max(self.drafts, key=lambda row: row.speed)

    @property
    def pays(self) -> bool:
        """Whether a draft is faster than plain decoding on this machine."""
        return self.fastest.nodes > 0 and self.fastest.speed > 1

    @property
    def audit_passed(self) -> bool:
        """Whether the audit passed, or no audit was possible."""
        return self.audit is None or self.audit.passed

    @property
    def audited(self) -> str:
        """The audit's verdict in one or two words."""
        return NOT_RUN if self.audit is None else "pass" if self.audit.passed else "FAIL"

    def after(self, training: Training) -> Self:
        """The same scorecard with training times and precision."""
        seconds = {"train_seconds": training.seconds, "train_cpu_seconds": training.cpu_seconds}
        checkpoint = replace(self.checkpoint, **seconds, train_precision=training.precision)
        return replace(self, checkpoint=checkpoint)

    def by_category(self, row: Row) -> list[Category]:
        """Acceptance of a row by kind of prompt, sorted descending; empty with fewer than two kinds."""
        names, counts = self.categories, row.counts
        if len(names) != len(counts.tokens) or len(set(names)) < 2:
            return []
        kinds = []
        for name in sorted(set(names)):
            places = [i for i, other in enumerate(names) if other == name]
            tokens, rounds = [counts.tokens[i] for i in places], [counts.rounds[i] for i in places]
            if sum(rounds):
                tau = sum(tokens) / sum(rounds)
                reach = interval(tokens, rounds) if len(places) >= MIN_SAMPLES else None
                kinds.append(Category(name or "(none)", len(places), sum(tokens), tau, reach))
        return sorted(kinds, key=lambda kind: -kind.tau)

    @property
    def replay_agrees(self) -> bool:
        """Decoder and replay agree in all rows."""
        return all(row.replay.agrees for row in self.rows if row.replay)

    def to_json(self) -> dict[str, Any]:
        """Contents of score.json."""
        top = {"headline": as_json(self.headline), **as_json(self.conditions), **as_json(self.checkpoint)}
        names = ("rows", "audit", "categories", "samples", "plan_choices", "served")
        top |= {name: as_json(getattr(self, name)) for name in names}
        passed = None if self.audit is None else self.audit_passed
        verdicts = {"audit_passed": passed, "replay_agrees": self.replay_agrees}
        return {"schema": SCHEMA, **top, **verdicts}

    @classmethod
    def from_json(cls, values: Any, where: str | Path) -> Self:
        """Restore a scorecard from `to_json`.

        Args:
            values: parsed JSON.
            where: file, for messages.

        Raises:
            UserError: not a scorecard, another version, or a field is missing or has the wrong type.
        """
        version = values.get("schema", "none") if isinstance(values, dict) else "none"
        if version != SCHEMA:
            raise UserError(
                f"{where}: a scorecard of version {version}, this one reads {SCHEMA}; "
                "score the checkpoint again"
            )
        parts = {"conditions": values, "checkpoint": values}
        try:
            card = build(cls, values | parts, "")
            if not card.rows:
                raise ValueError("rows: there are none")
            for number, row in enumerate(card.rows):
                check_lengths(row, f"rows[{number}]")
        except ValueError as error:
            raise UserError(
                f"{where}: its scorecard is damaged ({error}); score the checkpoint again"
            ) from None
        return card


def read_scorecard(path: Path) -> Scorecard:
    """Read a score.json, or the scorecard of a passport.

    Raises:
        UserError: see `Scorecard.from_json`.
    """
    try:
        values = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        values = values.get("scorecard", values)
    return Scorecard.from_json(values, path)


class Training(NamedTuple):
    """Training time and precision of a checkpoint; see `Checkpoint`."""

    step: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    precision: str = ""


def read_training(path: Path) -> Training:
    """Read the training fields of a score.json of any version, even a damaged one."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return Training()
    values = values if isinstance(values, dict) else {}
    step, precision = values.get("step"), values.get("train_precision")
    seconds, cpu_seconds = values.get("train_seconds"), values.get("train_cpu_seconds")
    return Training(
        step if isinstance(step, int) else None,
        seconds if isinstance(seconds, float) else None,
        cpu_seconds if isinstance(cpu_seconds, float) else None,
        precision if isinstance(precision, str) else "",
    )

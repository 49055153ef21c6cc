"""What `foredraft make` measured and decided: make.json in the run's folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.commands.making.speed import AnswerSpeed
from distill.utils.atomic_files import read_json, write_json

RECORD = "make.json"
ADVICE = "resume=never starts again"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Something that was left open.

    Attributes:
        what: an option, or a question.
        chosen: its value.
        because: what decided it.
    """

    what: str
    chosen: Any
    because: str


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """The trained drafter in an engine.

    Attributes:
        engine: name, and version if the drafter was timed there.
        ceiling: speedup if every token of a draft were accepted.
        predicted: speedup of the best length, from the scored acceptance and rounds with random weights.
        length: drafted tokens of a round; 0: no length pays.
        measured: speedup of that length when it was timed; None: it was not.
        tau: tokens of a round, counted there.
    """

    engine: str
    ceiling: float
    predicted: float
    length: int
    measured: float | None = None
    tau: float | None = None


@dataclass
class MakeRecord:
    """State of a run. It is written after every stage, so a run that was ended continues.

    Attributes:
        path: of the file.
        spent: seconds of the budget.
        took: seconds of each stage.
        decisions: in the order in which they were made.
        drafter: kind of the chosen drafter; empty: none is chosen yet.
        words: overrides that choose it.
        answers: whether the drafter needs answers of the target.
        moment: date for chat templates that write it.
        limit: prompts.limit of the run; None: all prompts.
        speed: what was measured of the answers before the limit was chosen; None: nothing.
        draft: whether a draft pays somewhere; None: not known yet.
        engines: results by format.
        commands: what serves each format that was written.
    """

    path: Path
    spent: float = 0.0
    took: dict[str, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    drafter: str = ""
    words: list[str] = field(default_factory=list)
    answers: bool = True
    moment: str = ""
    limit: int | None = None
    speed: AnswerSpeed | None = None
    draft: bool | None = None
    engines: dict[str, EngineResult] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> MakeRecord:
        """Read the record of a run, or start one.

        Raises:
            UserError: the file is damaged.
        """
        path = folder / RECORD
        values = read_json(path, ADVICE) or {}
        try:
            decisions = [Decision(**one) for one in values.pop("decisions", [])]
            engines = {to: EngineResult(**one) for to, one in values.pop("engines", {}).items()}
            speed = AnswerSpeed(**found) if (found := values.pop("speed", None)) else None
            return cls(path, decisions=decisions, engines=engines, speed=speed, **values)
        except (AttributeError, TypeError):
            raise UserError(f"{path}: damaged; {ADVICE}") from None

    def decide(self, what: str, chosen: Any, because: str) -> None:
        """Record a decision."""
        self.decisions.append(Decision(what=what, chosen=chosen, because=because))

    def write(self) -> None:
        """Write the file."""
        values = asdict(self)
        del values["path"]
        write_json(self.path, values)

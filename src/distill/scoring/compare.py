"""Compare runs in one table: acceptance length, speedup and cost of each drafter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from decode.errors import UserError
from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard, Training, read_scorecard, read_training
from decode.evaluation.served import BY_ENGINE
from decode.verification.rule import changes_greedy
from distill.scoring import served
from distill.scoring.paired import MIN_SAMPLES, speedup_ratio, speedup_text, tau_difference, why_incomparable
from distill.scoring.run_scorecards import objective_of
from distill.scoring.tables import grid, target_label, tau_cell
from distill.scoring.target_drift import describe
from distill.scoring.width import fitted
from distill.utils.redact import hidden, printable
from distill.utils.run_folder import is_step
from drafters.hub import PASSPORT, SCORECARD

# Written by training, and in a published folder.
CARDS = ("score.json", SCORECARD, PASSPORT)

LEVELS = 4
SHOWN = 4  # folders in a line


class Choice(NamedTuple):
    """Which rows of a scorecard are compared, and how runs are sorted.

    Attributes:
        temperatures: temperatures of the acceptance lengths; all other values use the first.
        batch: requests decoded together.
        decode: name of a plan, with or without its parentheses; default: the fastest lossless plan.
        against: name of the run to compare with; default: the best.
        by: speedup | tau; tau uses each card's first plan, since the fastest is partly chance.
    """

    temperatures: Sequence[float] = (0.0,)
    batch: int = 1
    decode: str = ""
    against: str = ""
    by: str = "speedup"


class Scored(NamedTuple):
    """A scorecard, its name, and what the drafter was trained with ("" if unknown or not trained)."""

    name: str
    card: Scorecard
    objective: str = ""

    def rows(self, choice: Choice) -> list[Row]:
        """One row per temperature, with one plan if possible, else with the plan chosen there.

        Raises:
            UserError: nothing lossless was scored at a temperature, or not with that plan.
        """
        rows: list[Row] = []
        for temperature in choice.temperatures:
            candidates = self.at(temperature, choice.batch, choice.decode)
            same_plan = [row for row in candidates if rows and row.decode == rows[0].decode]
            candidates = same_plan or candidates
            rows.append(candidates[0] if choice.by == "tau" else fastest(candidates))
        return rows

    def settings(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes of lossless rows, in order; at least the headline's."""
        return [(row.temperature, row.batch_size) for row in self.card.rows if not row.lossy]

    def at(self, temperature: float, batch: int, decode: str = "") -> list[Row]:
        """Lossless rows at a setting, of all drafts or of one plan; at least one.

        Raises:
            UserError: there is none.
        """
        lossless = [row for row in self.card.rows if not row.lossy]
        rows = [row for row in lossless if (row.temperature, row.batch_size) == (temperature, batch)]
        if not rows:
            settings = dict.fromkeys(f"T={t:g} batch {size}" for t, size in self.settings())
            raise UserError(
                f"{self.name}: not scored at T={temperature:g}, batch {batch}; it was at "
                f"{', '.join(settings)}: choose among these, or score it again with foredraft score out=..."
            )
        rows_of_plan = _of_plan(rows, decode)
        if not rows_of_plan:
            raise UserError(
                f"decode={decode}: {self.name} was not scored with it at T={temperature:g}, batch {batch}; "
                f"choose one of {', '.join(row.decode for row in rows)}"
            )
        return rows_of_plan

    def lossy(self, temperature: float, batch: int) -> list[Row]:
        """Rows at a setting that change the text; some lossy rules are lossless at temperature 0."""
        rows = [row for row in self.card.rows if row.lossy and (temperature or changes_greedy(row.rule))]
        return [row for row in rows if (row.temperature, row.batch_size) == (temperature, batch)]

    def by_batch(self, temperature: float, decode: str = "") -> dict[int, Row]:
        """The fastest lossless row at each scored batch size, of one plan or of any draft."""
        by_size: dict[int, list[Row]] = {}
        for row in self.card.rows:
            if not row.lossy and row.temperature == temperature:
                by_size.setdefault(row.batch_size, []).append(row)
        found = {size: _of_plan(rows, decode) for size, rows in sorted(by_size.items())}
        return {size: fastest(rows) for size, rows in found.items() if rows}


def _of_plan(rows: Sequence[Row], decode: str) -> list[Row]:
    """Rows of one plan, or of every draft (plain decoding has no speedup); all rows if nothing drafts."""
    if decode:
        return [row for row in rows if decode in (row.decode, short(row.decode))]
    return [row for row in rows if row.nodes] or list(rows)


def fastest(rows: Sequence[Row]) -> Row:
    """The row with the highest speedup."""
    return max(rows, key=lambda row: row.speed)


def short(decode: str) -> str:
    """A plan's name without its parentheses."""
    return decode.partition(" (")[0]


def read(paths: Sequence[str]) -> list[Scored]:
    """Read scorecards of run folders (their `best` checkpoint), checkpoint folders or score.json files.

    Args:
        paths: paths, each optionally named as NAME=PATH. The default name is the drafter's; runs of the
            same drafter are distinguished by their folders.

    Raises:
        UserError: no such path, a named folder without a scorecard, no readable one (others are omitted with
            a note, as are folders of `outputs/*/*` that have none), or a duplicate name.
    """
    pairs: list[tuple[str, str]] = []
    cards: list[Scorecard] = []
    objectives: list[str] = []
    damaged: list[UserError] = []
    without: list[str] = []
    for argument in paths:
        name, path = ("", argument) if Path(argument).exists() else _name_and_path(argument)
        if not name and Path(path).exists() and _card_in(Path(path)) is None:
            without.append(path)
            continue
        file = scorecard_file(Path(path))
        try:
            cards.append(read_scorecard(file))
            pairs.append((name, path))
            objectives.append(objective_of(file) if cards[-1].checkpoint.step else "")
        except UserError as error:
            damaged.append(error)
    if not cards:
        raise damaged[0] if damaged else _no_card(without[0])
    for error in damaged:
        print(printable(hidden(f"left out: {error}")), file=sys.stderr)
    if without:
        shown = ", ".join(without[:SHOWN]) + ", ..." * (len(without) > SHOWN)
        said = f"left out: {len(without)} of {len(paths)}, which are no runs or have no scores: {shown}"
        print(printable(hidden(said)), file=sys.stderr)
    kinds = [card.checkpoint.drafter for card in cards]
    folders = [Path(path).name for _, path in pairs]
    names = []
    for (name, path), kind, folder in zip(pairs, kinds, folders, strict=True):
        place = folder if folders.count(folder) == 1 else path
        names.append(name or (kind if kinds.count(kind) == 1 else f"{kind} ({place})"))
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{duplicates[0]}: two runs of that name; give them others, as in a=PATH b=PATH")
    return [Scored(*one) for one in zip(names, cards, objectives, strict=True)]


def _name_and_path(path: str) -> tuple[str, str]:
    name, sign, rest = path.partition("=")
    return (name, rest) if sign else ("", path)


def scorecard(path: Path) -> Scorecard:
    """The scorecard of a run's `best`, of a checkpoint, or of a file.

    Raises:
        UserError: no scorecard, or an unreadable one.
    """
    return read_scorecard(scorecard_file(path))


def scorecard_file(path: Path) -> Path:
    """File of the scorecard of a run's `best`, of a checkpoint, or the file itself.

    Raises:
        UserError: no scorecard.
    """
    if (file := _card_in(path)) is None:
        raise _no_card(path)
    return file


def _card_in(path: Path) -> Path | None:
    candidates = [path, *(path / name for name in (*CARDS, f"checkpoints/best/{CARDS[0]}"))]
    return next((p for p in candidates if p.is_file()), None)


def _no_card(path: str | Path) -> UserError:
    return UserError(f"{path}: no score.json there; give a run's folder, a checkpoint or a scorecard")


def in_order(scored: Sequence[Scored], choice: Choice) -> list[Scored]:
    """Runs sorted by speedup or tau, the best first.

    Raises:
        UserError: a run was not scored at this choice.
    """

    def value(one: Scored) -> float:
        row = one.rows(choice)[0]
        return row.acceptance.tau if choice.by == "tau" else row.speed

    return sorted(scored, key=value, reverse=True)


class Table(NamedTuple):
    """Cells of the comparison, shown as text or on a page."""

    head: list[str]
    lines: list[list[str]]
    notes: list[str]

    def text(self, width: int | None = None) -> str:
        """The table as plain text; with a width, of the columns that fit, and in lines of that width."""
        if width is None:
            return printable("\n".join([grid(self.head, self.lines), *self.notes]))
        head, lines, left_out = fitted(self.head, self.lines, width, short)
        notes = [f"left out here: {', '.join(left_out)} (--wide, --html)"] * bool(left_out)
        notes = [part for note in [*notes, *self.notes] for part in wrap(note, width, subsequent_indent="  ")]
        return printable("\n".join([grid(head, lines), *notes]))


def comparison(scored: Sequence[Scored], choice: Choice) -> Table:
    """Runs in order, each compared with the best or the named run.

    Raises:
        UserError: a run was not scored at this choice, or an unknown name.
    """
    ordered = in_order(scored, choice)
    base = next((s for s in ordered if s.name == (choice.against or ordered[0].name)), None)
    if base is None:
        names = ", ".join(s.name for s in scored)
        raise UserError(f"against={choice.against}: no such run; there are {names}")
    base_name = choice.against or "best"
    pairs = len(scored) > 1
    taus = [f"tau T={t:g}" for t in choice.temperatures]
    taus += [f"tau vs {base_name}, T={t:g}" for t in choice.temperatures if pairs]
    blocks = [["speedup", *[f"speedup vs {base_name}"] * pairs], taus]
    targets, objectives = target_labels(scored), _objectives(scored)
    head = [
        "drafter",
        *["target"] * bool(targets),
        *["objective"] * bool(objectives),
        "decode",
        *_first(blocks, choice),
        *(f"s_{j}" for j in range(1, LEVELS + 1)),
    ]
    there = served.head([s.card for s in ordered])
    head += [*there, "draft", "ms/round", "trained", "parameters", "KV/token", "audit"]
    lines = [_line(s, choice, base, pairs, bool(there)) for s in ordered]
    for labels in (objectives, targets):
        if labels:
            lines = [[name, labels[name], *rest] for name, *rest in lines]
    return Table(head, lines, _notes(ordered, choice, base))


def target_labels(scored: Sequence[Scored]) -> dict[str, str]:
    """The target of each run, by the run's name; empty if all have the same target."""
    paths = {s.name: _place(s.card) for s in scored}
    labels = {name: target_label(path) for name, path in paths.items()}
    different = len(set(paths.values()))
    if different == 1:
        return {}
    return labels if len(set(labels.values())) == different else paths


def _objectives(scored: Sequence[Scored]) -> dict[str, str]:
    """The objective of each run, by the run's name; empty if it is one, which a note names."""
    found = {s.name: s.objective or "-" for s in scored}
    return found if len({s.objective for s in scored if s.objective}) > 1 else {}


def _place(card: Scorecard) -> str:
    """Path or hub id of a scorecard's target, normalized."""
    target = card.checkpoint.target
    return str(Path(target).resolve()) if Path(target).is_dir() else target


def table(scored: Sequence[Scored], choice: Choice) -> str:
    """`comparison` as plain text."""
    return comparison(scored, choice).text()


def _line(scored: Scored, choice: Choice, base: Scored, pairs: bool, there: bool) -> list[str]:
    card, rows, others = scored.card, scored.rows(choice), base.rows(choice)
    row = rows[0]
    survival = [f"{s:.2f}" for s in row.acceptance.survival[:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    same = scored is base
    reason = why_incomparable(card, row, base.card, others[0])
    speeds, taus = [speedup_text(row)], [tau_cell(r) for r in rows]
    if pairs:
        speeds.append("-" if same else reason or speedup_ratio(row, others[0]).text("{:.2f}"))
        both = zip(rows, others, strict=True)
        taus += ["-" if same else _difference_cell(scored, base, mine, other) for mine, other in both]
    return [
        scored.name,
        row.decode,
        *_first([speeds, taus], choice),
        *survival,
        *(served.cells(card, row) if there else []),
        row.text("draft_share", "{:.0%}"),
        "-" if row.speedup is None else f"{draft_ms(row):.2f}",
        minutes(card.checkpoint.train_seconds),
        f"{card.checkpoint.parameters / 1e6:.2f} M",
        f"{card.checkpoint.drafter_kv_bytes_per_token} B",
        card.audited,
    ]


def _first(blocks: Sequence[list[str]], choice: Choice) -> list[str]:
    """Columns of speed and acceptance, starting with the sort key."""
    speeds, taus = blocks
    return [*taus, *speeds] if choice.by == "tau" else [*speeds, *taus]


def _notes(ordered: Sequence[Scored], choice: Choice, base: Scored) -> list[str]:
    rows = {s.name: s.rows(choice) for s in ordered}
    first = choice.temperatures[0]
    prompts = sorted({len(r[0].counts.tokens) for r in rows.values()})
    timed_prompts = sorted({s.card.conditions.prompts for s in ordered})
    notes = [
        f"T={first:g} unless noted. tau: replayed on the target's answers to "
        f"{_either(prompts)} held-out prompts (~: counted by the decoder), with its 95 % interval",
        f"speedup: over plain decoding at batch {choice.batch}, interleaved in one process, on "
        f"{_either(timed_prompts)} prompts; its interval draws batches, each with plain decoding's time of "
        f"it, where there are {MIN_SAMPLES} or more. draft: the drafter's share of a round, and in ms",
    ]
    if len(ordered) > 1:
        notes.append(
            f"against {base.name}: differences of tau are paired by prompt; ratios of speedups by batch, "
            "over plain decoding, which each process timed for itself. 95 % bootstrap"
        )
    known = {s.objective for s in ordered if s.objective}
    notes += [f"objective: {name}" for name in known if len(known) == 1]
    for scored in ordered:
        first_row, *others = rows[scored.name]
        other_plans = [
            f"T={row.temperature:g}: {row.decode}" for row in others if row.decode != first_row.decode
        ]
        control = scored.card.conditions.control
        reason = scored.card.conditions.elsewhere
        about = [
            *([f"{BY_ENGINE}, scored only by replay: {reason}"] if reason else []),
            *other_plans,
            *([f"control={control}: no real score"] if control != "none" else []),
            *(["drafted with int8 weights"] if scored.card.checkpoint.quantize == "int8" else []),
            describe(scored.card.checkpoint),
            *served.notes(scored.card),
        ]
        notes += [f"{scored.name}: {one}" for one in about if one]
    return notes + machines([s.card for s in ordered])


def machines(cards: Sequence[Scorecard]) -> list[str]:
    """Dtypes and machines of the scorecards, without repetition."""
    return sorted({f"{card.conditions.dtype}, {card.conditions.hardware}" for card in cards})


def _either(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))


def minutes(train_seconds: float | None) -> str:
    """Training time of a drafter."""
    return "-" if train_seconds is None else f"{train_seconds / 60:.1f} min"


def draft_ms(row: Row) -> float:
    """Milliseconds of drafting in a round of the whole batch; 0 if an engine decodes."""
    return 1000 * (row.draft_share or 0.0) * (row.tpot or 0.0) * row.tau


def _difference_cell(scored: Scored, base: Scored, row: Row, other: Row) -> str:
    drifted = any(s.card.checkpoint.target_drift for s in (scored, base))
    if drifted or _place(scored.card) != _place(base.card):
        return "other target"  # its answers may differ despite equal lengths
    difference = tau_difference(row, other)
    return "other prompts" if difference is None else difference.text("{:+.2f}")


def earlier(checkpoint: Path) -> Training:
    """Training time of a checkpoint, from the scorecard next to its weights.

    Args:
        checkpoint: folder with weights; without a scorecard, its name is the step.
    """
    name = checkpoint.resolve().name
    file = next((checkpoint / card for card in CARDS if (checkpoint / card).is_file()), None)
    training = read_training(file) if file else Training()
    return training if training.step is not None or not is_step(name) else training._replace(step=int(name))

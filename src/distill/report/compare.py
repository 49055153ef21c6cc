"""One table over several runs: what each drafter accepts, what it gains and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decode.errors import UserError
from distill.report.history import read_card
from distill.report.tables import grid
from distill.scoring.paired import FEWEST, accepted, comparable, counts, exact, faster, less, speedup
from distill.scoring.target_drift import describe
from distill.utils.redact import printable

# score.json is written by training, scorecard.json is in a folder that was given away.
CARDS = ("score.json", "scorecard.json")

LEVELS = 4


class Choice(NamedTuple):
    """Which rows of a scorecard are compared, and by what they are in order.

    Attributes:
        temperatures: of the acceptance lengths; everything else is at the first.
        batch: requests decoded together.
        decode: name of a plan, without its parentheses or with them; default the fastest lossless one.
        against: a run's name; default the best.
        by: speedup | tau; by tau, the plan is each card's first, since the fastest is partly chance.
    """

    temperatures: Sequence[float] = (0.0,)
    batch: int = 1
    decode: str = ""
    against: str = ""
    by: str = "speedup"


class Scored(NamedTuple):
    """A checkpoint's scorecard and what to call it."""

    name: str
    card: dict[str, Any]

    def rows(self, choice: Choice) -> list[dict[str, Any]]:
        """Of one plan at every temperature, or, where that was not scored, of the one chosen there.

        Raises:
            UserError: nothing lossless was scored at a temperature, or not with that plan.
        """
        found: list[dict[str, Any]] = []
        for temperature in choice.temperatures:
            there = self.at(temperature, choice.batch, choice.decode)
            same = [row for row in there if found and row["decode"] == found[0]["decode"]]
            found.append((same or there)[0] if choice.by == "tau" else fastest(same or there))
        return found

    def settings(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes of lossless rows, in order; at least the headline's."""
        return [(r["temperature"], r["batch_size"]) for r in self.card["rows"] if not r["lossy"]]

    def at(self, temperature: float, batch: int, decode: str = "") -> list[dict[str, Any]]:
        """Lossless rows at one setting, of all plans or of one; at least one.

        Raises:
            UserError: there is none.
        """
        lossless = [row for row in self.card["rows"] if not row["lossy"]]
        there = [r for r in lossless if (r["temperature"], r["batch_size"]) == (temperature, batch)]
        if not there:
            settings = dict.fromkeys(f"T={t:g} batch {size}" for t, size in self.settings())
            raise UserError(
                f"{self.name}: not scored at T={temperature:g}, batch {batch}; it was at "
                f"{', '.join(settings)}: choose among these, or score it again with foredraft score out=..."
            )
        named = [r for r in there if decode in ("", r["decode"], short(r["decode"]))]
        if not named:
            raise UserError(
                f"decode={decode}: {self.name} was not scored with it at T={temperature:g}, batch {batch}; "
                f"choose one of {', '.join(r['decode'] for r in there)}"
            )
        return named

    def by_batch(self, temperature: float, decode: str = "") -> dict[int, dict[str, Any]]:
        """The fastest lossless row at each batch size, of one plan or of any; sizes without are left out."""
        found: dict[int, list[dict[str, Any]]] = {}
        for row in self.card["rows"]:
            named = decode in ("", row["decode"], short(row["decode"]))
            if named and not row["lossy"] and row["temperature"] == temperature:
                found.setdefault(row["batch_size"], []).append(row)
        return {size: fastest(rows) for size, rows in sorted(found.items())}


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest speedup."""
    return max(rows, key=lambda row: row["speedup"])


def short(decode: str) -> str:
    """A plan's name without its parentheses."""
    return decode.partition(" (")[0]


def read(paths: Sequence[str]) -> list[Scored]:
    """Scorecards of run folders (their `best` checkpoint), checkpoint folders or score.json files.

    Args:
        paths: each may have a name in front, NAME=PATH. Others have their drafter's; runs of the same
            drafter are told apart by their folders.

    Raises:
        UserError: no scorecard there, or one of another version; a name that is given twice.
    """
    named = [("", path) if Path(path).exists() else _named(path) for path in paths]
    cards = [scorecard(Path(path)) for _, path in named]
    kinds = [card["drafter"] for card in cards]
    folders = [Path(path).name for _, path in named]
    names = []
    for (name, path), kind, folder in zip(named, kinds, folders, strict=True):
        told = folder if folders.count(folder) == 1 else path
        names.append(name or (kind if kinds.count(kind) == 1 else f"{kind} ({told})"))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]}: two runs of that name; give them others, as in a=PATH b=PATH")
    return [Scored(name, card) for name, card in zip(names, cards, strict=True)]


def _named(path: str) -> tuple[str, str]:
    name, sign, rest = path.partition("=")
    return (name, rest) if sign else ("", path)


def scorecard(path: Path) -> dict[str, Any]:
    """The scorecard of a run's `best`, of a checkpoint, or of a file.

    Raises:
        UserError: no scorecard there, or one of another version.
    """
    tried = [path, *(path / name for name in (*CARDS, f"checkpoints/best/{CARDS[0]}"))]
    place = next((p for p in tried if p.is_file()), None)
    if place is None:
        raise UserError(f"{path}: no score.json there; give a run's folder, a checkpoint or a scorecard")
    return read_card(place)


def in_order(scored: Sequence[Scored], choice: Choice) -> list[Scored]:
    """The best first.

    Raises:
        UserError: a run that was not scored at this choice.
    """

    def worth(one: Scored) -> float:
        row = one.rows(choice)[0]
        return accepted(row)["tau"] if choice.by == "tau" else row["speedup"]

    return sorted(scored, key=worth, reverse=True)


class Table(NamedTuple):
    """What is shown, as text or on a page."""

    head: list[str]
    lines: list[list[str]]
    notes: list[str]

    def text(self) -> str:
        """For a terminal."""
        return printable("\n".join([grid(self.head, self.lines), *self.notes]))


def compared(scored: Sequence[Scored], choice: Choice) -> Table:
    """The runs in order, each beside the best or the one that is named.

    Raises:
        UserError: a run that was not scored at this choice, a name that no run has.
    """
    ordered = in_order(scored, choice)
    base = next((s for s in ordered if s.name == (choice.against or ordered[0].name)), None)
    if base is None:
        names = ", ".join(s.name for s in scored)
        raise UserError(f"against={choice.against}: no such run; there are {names}")
    whose = f"{choice.against or 'best'}'s"
    pairs = len(scored) > 1
    taus = [f"tau T={t:g}" for t in choice.temperatures]
    taus += [f"less {whose}, T={t:g}" for t in choice.temperatures if pairs]
    blocks = [["speedup", *[f"of {whose}"] * pairs], taus]
    head = ["drafter", "decode", *_first(blocks, choice), *(f"s_{j}" for j in range(1, LEVELS + 1))]
    head += ["draft", "ms/round", "trained", "parameters", "KV/token", "audit"]
    lines = [_line(s, choice, base, pairs) for s in ordered]
    return Table(head, lines, _notes(ordered, choice, base))


def table(scored: Sequence[Scored], choice: Choice) -> str:
    """`compared` as text."""
    return compared(scored, choice).text()


def _line(scored: Scored, choice: Choice, base: Scored, pairs: bool) -> list[str]:
    card, rows, others = scored.card, scored.rows(choice), base.rows(choice)
    row = rows[0]
    survival = [f"{s:.2f}" for s in accepted(row)["survival"][:LEVELS]]
    survival += ["-"] * (LEVELS - len(survival))
    same = scored is base
    why = comparable(card, row, base.card, others[0])
    speeds, taus = [speedup(row).text("{:.2f}x")], [tau_cell(r) for r in rows]
    if pairs:
        speeds.append("-" if same else why or faster(row, others[0]).text("{:.2f}"))
        both = zip(rows, others, strict=True)
        taus += ["-" if same else _less(scored, base, mine, other) for mine, other in both]
    return [
        scored.name,
        row["decode"],
        *_first([speeds, taus], choice),
        *survival,
        f"{100 * row['draft_share']:.0f}%",
        f"{draft_ms(row):.2f}",
        minutes(card),
        f"{card['parameters'] / 1e6:.2f} M",
        f"{card['drafter_kv_bytes_per_token']} B",
        "pass" if card["audit_passed"] else "FAIL",
    ]


def _first(blocks: Sequence[list[str]], choice: Choice) -> list[str]:
    """Speed and acceptance, whatever the order is by in front."""
    speeds, taus = blocks
    return [*taus, *speeds] if choice.by == "tau" else [*speeds, *taus]


def _notes(ordered: Sequence[Scored], choice: Choice, base: Scored) -> list[str]:
    rows = {s.name: s.rows(choice) for s in ordered}
    first = choice.temperatures[0]
    prompts = sorted({len(counts(r[0]).tokens) for r in rows.values()})
    timed = sorted({s.card["prompts"] for s in ordered})
    notes = [
        f"T={first:g} where nothing else is said. tau: replayed on the target's answers to "
        f"{_either(prompts)} held-out prompts (~: counted by the decoder), with its 95 % interval",
        f"speedup: over plain decoding at batch {choice.batch}, interleaved in one process, on "
        f"{_either(timed)} prompts; its interval draws batches, each with plain decoding's time of it, where "
        f"there are {FEWEST} or more. draft: the drafter's share of a round, and in ms",
    ]
    if len(ordered) > 1:
        notes.append(
            f"beside {base.name}: differences of tau are paired by prompt; ratios of speedups by batch, with "
            "plain decoding, which each process timed for itself, as the common yardstick. 95 % bootstrap"
        )
    for scored in ordered:
        found = rows[scored.name]
        elsewhere = [
            f"T={row['temperature']:g}: {row['decode']}"
            for row in found[1:]
            if row["decode"] != found[0]["decode"]
        ]
        control = scored.card.get("control", "none")
        about = [
            *elsewhere,
            *([f"control={control}: no real score"] if control != "none" else []),
            describe(scored.card),
        ]
        notes += [f"{scored.name}: {one}" for one in about if one]
    return notes + machines([s.card for s in ordered])


def machines(cards: Sequence[dict[str, Any]]) -> list[str]:
    """What they were measured on, each once."""
    return sorted({f"{card['dtype']}, {card['hardware']}" for card in cards})


def _either(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))


def minutes(card: dict[str, Any]) -> str:
    """That a drafter trained."""
    return f"{card['train_seconds'] / 60:.1f} min" if "train_seconds" in card else "-"


def draft_ms(row: dict[str, Any]) -> float:
    """Milliseconds of a round, a batch's, in which the drafter works."""
    return 1000 * row["draft_share"] * row["tpot"] * row["tau"]


def tau_cell(row: dict[str, Any]) -> str:
    """Acceptance length and its interval."""
    found = accepted(row)
    low, high = found["tau_interval"]
    return f"{found['tau']:.2f}{'' if exact(row) else '~'} ({low:.2f}..{high:.2f})"


def _less(scored: Scored, base: Scored, row: dict[str, Any], other: dict[str, Any]) -> str:
    if any(s.card.get("target_moved") for s in (scored, base)):
        return "other target"  # whose answers may be as long, and say something else
    found = less(row, other)
    return "other prompts" if found is None else found.text("{:+.2f}")


def earlier(checkpoint: Path) -> dict[str, Any]:
    """How long and how far it was trained, as the scorecard beside its weights has it.

    Args:
        checkpoint: folder with weights.

    Returns:
        `step`, also where the folder's name alone says it, and `train_seconds`; what is unknown is
        left out.
    """
    name = checkpoint.resolve().name
    known = {"step": int(name)} if name.isdigit() else {}
    for card in (checkpoint / one for one in CARDS):
        try:
            found = json.loads(card.read_text())
        except (OSError, ValueError):
            continue  # none, or not one of ours: scored again all the same
        if isinstance(found, dict):
            kinds = {"step": int, "train_seconds": float}
            return known | {k: found[k] for k, kind in kinds.items() if isinstance(found.get(k), kind)}
    return known

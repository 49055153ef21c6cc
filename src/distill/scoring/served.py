"""Format an engine's measurements of a checkpoint as columns and lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decode.evaluation.rows import Row
from decode.evaluation.scorecard import Scorecard
from decode.evaluation.served import Served

NONE = "-"


def served_row(card: Scorecard, row: Row) -> Served | None:
    """The engine's measurement at a row's plan, temperature and batch size."""
    same = (row.decode, row.temperature, row.batch_size)
    return next((s for s in card.served if (s.decode, s.temperature, s.batch_size) == same), None)


def head(cards: Sequence[Scorecard]) -> list[str]:
    """Names of the engine's columns; empty without an engine."""
    engine = next((served.engine.split()[0] for card in cards for served in card.served), "")
    return [f"{engine} tau", f"{engine} speedup"] if engine else []


def cells(card: Scorecard, row: Row) -> list[str]:
    """Acceptance length and speedup in the engine."""
    served = served_row(card, row)
    return [f"{served.tau:.2f}{'' if served.agrees else '!'}", speed(served)] if served else [NONE, NONE]


def speed(served: Served) -> str:
    """The engine's speedup over its own plain decoding."""
    return NONE if served.speedup is None else f"{served.speedup:.2f}x"


def figures(survival: Sequence[float]) -> str:
    """Acceptance by position."""
    return "/".join(f"{s:.2f}" for s in survival)


def texts(served: Served) -> str:
    """Describe how greedy answers compare with the engine's plain answers."""
    if served.texts is None:
        return NONE
    equal, near, different = served.texts
    others = [f"{near} near ties"] * bool(near) + [f"{different} DIFFERENT"] * bool(different)
    return ", ".join([f"{equal} of {sum(served.texts)} equal", *others])


def difference(served: Served) -> str:
    """Describe how an engine's acceptance differs from the scorecard's, and the likely cause, in one line."""
    return (
        f"{served.engine}, T={served.temperature:g}, batch {served.batch_size}, accepts "
        f"{figures(served.survival)} by position where {figures(served.scored_survival)} was scored; likely "
        f"cause: {served.cause}"
    )


def notes(card: Scorecard) -> Iterator[str]:
    """Yield a line per setting at which the engine's acceptance or text differs."""
    for served in card.served:
        if not served.agrees:
            yield difference(served)
        if served.texts and served.texts[2]:
            yield (
                f"{served.engine}: {texts(served)}: greedy answers differ with and without this drafter: "
                "an error of the engine, or rounding of the target in batches"
            )

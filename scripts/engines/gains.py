"""Write the tables of what drafts can gain in engines (docs/engines.md), and gain (docs/qwen_coder.md).

    foredraft advise engine=... out=scripts/lab/results/engines/<target>_<engine>_<drafter>.json
    foredraft advise engine=... checkpoint=... out=scripts/lab/results/engines/qwen_coder/<prompts>.json
    python scripts/engines/gains.py

A file of a drafter with random weights predicts; one of a trained drafter, of the same target and engine,
measures. A trained one that has no random one predicts by its own rounds. Each line is one draft length of
a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distill.scoring.tables import with_interval

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "scripts" / "lab" / "results" / "engines"
BEGIN, END = "<!-- gains -->\n", "<!-- end of gains -->\n"
NAMES = ("target", "drafter", "engine", "drafted", "pass", "round", "ceiling", "needed", "tau")
NAMES = (*NAMES, "predicted", "tau there", "measured")
MEASURED = ("prompts", "T", "requests", "drafted", "tau", "a round, in plain rounds", "over plain")


def main() -> None:
    """Write the tables."""
    _write(DOCS / "engines.md", NAMES, lines, RESULTS)
    _write(DOCS / "qwen_coder.md", MEASURED, measured_lines, RESULTS / "qwen_coder")


def _write(
    page: Path,
    names: Sequence[str],
    lines_of: Callable[[Sequence[dict[str, Any]]], Iterator[list[str]]],
    folder: Path,
) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [f"| {' | '.join(line)} |" for line in (names, *lines_of(files))]
    rows.insert(1, "|---" * len(names) + "|")
    where = sorted({f"commit {one['commit']}, {one['hardware']}" for one in files})
    page.write_text(
        "\n".join([f"{before}{BEGIN}", f"Timed at {'; '.join(where)}.", "", *rows, f"\n{END}{after}"])
    )


def measured_lines(files: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Cells of what a trained drafter gains, by prompts, temperature and requests side by side."""
    for one in sorted(files, key=lambda one: (one["target"], one["temperature"])):
        for costs in one["measured"]["costs"]:
            for timed in costs["lengths"]:
                yield [
                    one["target"].partition(", ")[2],
                    f"{one['temperature']:g}",
                    str(costs["batch_size"]),
                    str(timed["length"]),
                    with_interval(f"{timed['tau']:.2f}", timed["tau_interval"]),
                    f"{timed['seconds'] / costs['plain']:.2f}",
                    with_interval(f"{timed['measured']:.2f}x", timed["measured_interval"]),
                ]


def lines(files: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Cells, by target and engine."""
    predicting = {_key(one) for one in files if one["weights"] != "trained"}
    for one in sorted(files, key=_key):
        if one["weights"] == "trained":
            if _key(one) not in predicting:
                yield from _lines(one, one)
            continue
        trained = next((o for o in files if o["weights"] == "trained" and _key(o) == _key(one)), None)
        yield from _lines(one, trained)


def _key(one: dict[str, Any]) -> tuple[str, ...]:
    return one["target"], one["measured"]["engine"], one["drafter"]


def _lines(one: dict[str, Any], trained: dict[str, Any] | None) -> Iterator[list[str]]:
    passes = {int(n): seconds for n, seconds in one["measured"]["passes"].items()}
    measured = {t["length"]: t for t in trained["measured"]["costs"][0]["lengths"]} if trained else {}
    for costs, found in zip(one["measured"]["costs"], one["results"], strict=True):
        known = {row["length"]: row for row in found["lengths"]}
        needed = found["needed"]["1.05"]
        for timed in costs["lengths"]:
            k = timed["length"]
            there = timed if one["weights"] == "given" else measured.get(k)
            read, row = passes.get(k + 1), known.get(k)
            # Of random weights without a trained drafter the acceptance is only stated.
            scored = row is not None and (trained is not None or one["weights"] == "given")
            yield [
                one["target"],
                one["drafter"],
                one["measured"]["engine"],
                str(k),
                f"{read / passes[1]:.2f}" if read else "",
                f"{timed['seconds'] / costs['plain']:.2f}",
                f"{(k + 1) * costs['plain'] / timed['seconds']:.2f}x",
                "never" if needed is None else f"{needed:.2f}",
                f"{row['tau']:.2f}" if row and scored else "",
                f"{row['speedup']:.2f}x" if row and scored else "",
                f"{there['tau']:.2f}" if there else "",
                with_interval(f"{there['measured']:.2f}x", there.get("measured_interval")) if there else "",
            ]


if __name__ == "__main__":
    main()

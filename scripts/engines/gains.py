"""Write the table of docs/engines.md that says what drafts can gain in engines.

    foredraft advise engine=... out=scripts/lab/results/engines/<target>_<engine>_<drafter>.json
    python scripts/engines/gains.py

A file of a drafter with random weights predicts; one of a trained drafter, of the same target and engine,
measures. A trained one that has no random one predicts by its own rounds. Each line is one draft length of
a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "engines.md", ROOT / "scripts" / "lab" / "results" / "engines"
BEGIN, END = "<!-- gains -->\n", "<!-- end of gains -->\n"
NAMES = ("target", "drafter", "engine", "drafted", "pass", "round", "ceiling", "needed", "tau")
NAMES = (*NAMES, "predicted", "tau there", "measured")


def main() -> None:
    """Write the table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    rows = [f"| {' | '.join(line)} |" for line in (NAMES, *lines(files))]
    rows.insert(1, "|---" * len(NAMES) + "|")
    where = sorted({f"commit {one['commit']}, {one['hardware']}" for one in files})
    PAGE.write_text(
        "\n".join([f"{before}{BEGIN}", f"Timed at {'; '.join(where)}.", "", *rows, f"\n{END}{after}"])
    )


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
                f"{there['measured']:.2f}x" if there else "",
            ]


if __name__ == "__main__":
    main()

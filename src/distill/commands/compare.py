"""Compare runs side by side: foredraft compare outputs/<date>/<time> name=outputs/<date>/<time> ..."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from distill.report.field import field_page
from distill.scoring.compare import Choice, comparison, read
from distill.utils.atomic_files import put


def main() -> None:
    """Print the table and write the requested files."""
    parser = argparse.ArgumentParser("foredraft compare", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="a run's folder, a checkpoint's, or a score.json, and what to call it",
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], metavar="T")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows scored at this batch size")
    parser.add_argument(
        "--decode",
        default="",
        metavar="PLAN",
        help="rows of this plan; default: the fastest of each run",
    )
    parser.add_argument(
        "--against", default="", metavar="NAME", help="a row to compare the others with; default: the best"
    )
    parser.add_argument("--wide", action="store_true", help="print all columns, also on a narrow terminal")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the table and plots")
    parser.add_argument(
        "--field",
        type=Path,
        metavar="FILE",
        help="write a Markdown page of one target: all drafters, the bound above them, which to take when",
    )
    arguments = parser.parse_args()
    choice = Choice(arguments.temperatures, arguments.batch, arguments.decode, arguments.against)
    scored = read(arguments.runs)
    table = comparison(scored, choice)
    narrow = sys.stdout.isatty() and not arguments.wide
    print(table.text(shutil.get_terminal_size().columns if narrow else None))
    if arguments.out:
        put(arguments.out, table.text() + "\n")
    if arguments.html:
        from distill.report.compare_page import page_of  # imports plotly

        put(arguments.html, page_of(scored, choice))
    if arguments.field:
        put(arguments.field, field_page(scored, choice))

"""One table over runs: python scripts/compare.py outputs/<date>/<time> outputs/<date>/<time> ..."""

import argparse
from pathlib import Path


def main() -> None:
    """Print the table and, where `--out` says so, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, a checkpoint's, or a score.json"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], metavar="T")
    parser.add_argument(
        "--against", default="", metavar="NAME", help="a row; adds what each tau has over its"
    )
    parser.add_argument("--out", type=Path, help="a file for the table")
    arguments = parser.parse_args()

    from distill.cli import one_line_errors
    from distill.compare import read, table

    with one_line_errors():
        text = table(read(arguments.runs), arguments.temperatures, arguments.against)
        print(text)
        if arguments.out:
            arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

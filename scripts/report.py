"""A run's report.html, made anew: python scripts/report.py outputs/<date>/<time> [--out file]."""

import argparse
from pathlib import Path


def main() -> None:
    """Write the page and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument("--out", type=Path, help="file to write; default: report.html in the folder")
    arguments = parser.parse_args()

    from distill.cli.main import one_line_errors
    from distill.report.html import write

    with one_line_errors():
        print(write(arguments.run, arguments.out))


if __name__ == "__main__":
    main()

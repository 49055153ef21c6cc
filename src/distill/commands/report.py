"""Write a run's report.html again: foredraft report RUN [--out FILE]."""

from __future__ import annotations

import argparse
from pathlib import Path

from distill.report.html import write


def main() -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser("foredraft report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument("--out", type=Path, help="file to write; default: report.html in the folder")
    arguments = parser.parse_args()
    print(write(arguments.run, arguments.out))

"""Write or check the pages that follow from scorecards."""

from __future__ import annotations

import argparse
import sys

from claims.pages import write_all
from decode.errors import UserError


def main() -> int:
    """Write the pages; with --check only name those that differ, and return 1."""
    parser = argparse.ArgumentParser(prog="claims.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change no file")
    check = parser.parse_args().check
    try:
        changed = write_all(check)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in changed:
        print(f"{name} differs from the scorecards: python scripts/lab/claims.py" if check else name)
    return int(check and bool(changed))

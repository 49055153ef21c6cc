"""A judge of arithmetic: 1 if the last number of the answer is that of the record's own answer, else 0.

python scripts/lab/judges/exact_number.py < records.jsonl
foredraft score ... score.judge=scripts/lab/judges/exact_number.py
"""

from __future__ import annotations

import json
import re
import sys

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number of a text; None if it has none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def main() -> None:
    """Score records from stdin."""
    for line in sys.stdin:
        record = json.loads(line)
        if not record["reference"]:
            sys.exit(f"prompt {record['id']} has no answer to compare with")
        expected = last_number(record["reference"])
        print(float(last_number(record["answer"]) == expected), flush=True)


if __name__ == "__main__":
    main()

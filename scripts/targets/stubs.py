"""Write stubs of Python functions as prompts, made from instructions of code with answers.

    python scripts/targets/stubs.py codegen-instruct.json --without HumanEval.jsonl > stubs.jsonl

A stub has the signature of the first function of an answer and the instruction as its docstring, the form
that HumanEval's prompts have. Answers without a function, instructions that name another language, and
functions with a name of the benchmark are left out; standard error counts them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

SIGNATURE = re.compile(r"^def (\w+)\(([^)]*)\)( *->[^:]*)?:", re.M)
OTHER_LANGUAGES = re.compile(r"\b(Java|C\+\+|JavaScript|Ruby|Go|Rust|PHP|C#)\b")
LONGEST = 60  # characters of an input that is shown as an example


def stub(record: dict[str, str], excluded: set[str]) -> tuple[str, str]:
    """The stub of a record, or "" and the reason why there is none.

    Args:
        record: `instruction`, `input` and `response`.
        excluded: names of functions.
    """
    task, given = record["instruction"].strip(), record.get("input", "").strip()
    found = SIGNATURE.search(record["response"])
    if not found or found[1] == "main":
        return "", "no function"
    if found[1] in excluded:
        return "", "a name of the benchmark"
    if OTHER_LANGUAGES.search(task):
        return "", "another language"
    imports = "from typing import List\n\n\n" if re.search("list|array", task.lower()) else ""
    example = (
        f"\n    >>> {found[1]}({given})" if 0 < len(given) < LONGEST and not set(given) & set("\n=:") else ""
    )
    return f'{imports}def {found[1]}({found[2]}){found[3] or ""}:\n    """ {task}{example}\n    """\n', ""


def main(argv: list[str] | None = None) -> None:
    """Write the stubs, each signature once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("instructions", type=Path, help="a JSON list of instruction, input and response")
    parser.add_argument("--without", type=Path, help="JSON lines of a benchmark, with entry_point")
    given = parser.parse_args(argv)
    lines = given.without.read_text().splitlines() if given.without else []
    excluded = {json.loads(line)["entry_point"] for line in lines}
    written, left_out = set[str](), Counter[str]()
    for record in json.loads(given.instructions.read_text()):
        prompt, reason = stub(record, excluded)
        signature = prompt.partition("def ")[2].partition("\n")[0]
        reason = reason or ("a signature that was written" if signature in written else "")
        if reason:
            left_out[reason] += 1
            continue
        written.add(signature)
        print(json.dumps({"prompt": prompt}))
    print(f"{len(written)} stubs; left out: {dict(left_out)}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A judge of steps: the share of right equations, such as `3 + 4 = 7`, in a step; 1 where it has none.

foredraft generate ... judge.script=scripts/lab/judges/right_equations.py
"""

from __future__ import annotations

import json
import re
import sys

NUMBER = r"-?\d+(?:\.\d+)?"
EQUATION = re.compile(rf"({NUMBER}) ?([-+*/x]) ?({NUMBER}) ?= ?({NUMBER})")


def is_right(left: str, sign: str, right: str, result: str) -> bool:
    """Whether an equation holds, to half a unit of a hundredth."""
    a, b = float(left), float(right)
    if sign == "/":
        return b != 0 and abs(a / b - float(result)) < 0.005
    value = {"+": a + b, "-": a - b, "*": a * b, "x": a * b}[sign]
    return abs(value - float(result)) < 0.005


def main() -> None:
    """Score records from stdin."""
    for line in sys.stdin:
        found = EQUATION.findall(json.loads(line)["step"])
        print(sum(is_right(*one) for one in found) / len(found) if found else 1.0, flush=True)


if __name__ == "__main__":
    main()

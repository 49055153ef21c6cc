"""What a reader must open to follow one call: python scripts/lab/reading_path.py FUNCTION... -- train.py ...

Runs a script of this project in this process and counts, for every FUNCTION named by its qualified name
(Objective.__call__, Loop.round, Scorer.__call__), the files of src/ and the lines of the functions of src/
that were entered while it was running.
"""

from __future__ import annotations

import runpy
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

SRC = str(Path.cwd() / "src") + "/"


class CallTrace:
    """Records the functions that are entered below chosen ones, in every thread.

    Args:
        roots: qualified names of the chosen functions.
    """

    def __init__(self, roots: list[str]) -> None:
        self.entered: dict[str, set[CodeType]] = {root: set() for root in roots}
        self.depth = dict.fromkeys(roots, 0)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """See `sys.setprofile`."""
        del argument
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SRC):
            return
        if code.co_qualname in self.depth:
            self.depth[code.co_qualname] += 1 if event == "call" else -1
        for root, depth in self.depth.items():
            if event == "call" and depth > 0:
                self.entered[root].add(code)

    def report(self) -> str:
        """A line for each of the chosen functions."""
        lines = []
        for root, codes in self.entered.items():
            files = {code.co_filename for code in codes}
            size = sum(len({line for *_, line in code.co_lines() if line}) for code in codes)
            lines.append(f"{root}: {len(files)} files, {len(codes)} functions, {size} lines with code")
        return "\n".join(lines)


def main() -> None:
    """Trace a run."""
    split = sys.argv.index("--")
    trace = CallTrace(sys.argv[1:split])
    sys.argv = [str(Path(sys.argv[split + 1]).resolve()), *sys.argv[split + 2 :]]
    sys.path.insert(0, str(Path.cwd()))
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.setprofile(None)
        print(trace.report())


if __name__ == "__main__":
    main()

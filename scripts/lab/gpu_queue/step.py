"""One measurement of the queue."""

from __future__ import annotations

from typing import NamedTuple

OUT = "{out}"  # in the words of a step: the file that its command writes
LIMIT = 8.0  # minutes that a step may take


class Step(NamedTuple):
    """A command that writes one JSON file.

    Attributes:
        name: of its result.
        group: part of the queue.
        shows: what it measures, in a line.
        minutes: that it takes on a card, by estimate; at most `LIMIT`.
        words: of the command, after the interpreter; `OUT` stands for the file that it writes.
        tiny: words that are added for a tiny size on a CPU.
    """

    name: str
    group: str
    shows: str
    minutes: float
    words: tuple[str, ...]
    tiny: tuple[str, ...] = ()

    def command(self, out: str, tiny: bool) -> list[str]:
        """Words of the command that writes `out`."""
        return [word.replace(OUT, out) for word in (*self.words, *(self.tiny if tiny else ()))]

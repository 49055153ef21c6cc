"""How long a prompt may be, and what becomes of longer ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.prompts.sources import Rejected

NO_LIMIT = 2**31
START = 200  # characters of a prompt that is set aside


class Limit(NamedTuple):
    """Tokens of the longest prompt that is used.

    Attributes:
        tokens: before the answer.
        option: that sets it; empty where the target's context does.
        room: tokens that the option counts besides, for the answer.
    """

    tokens: int = NO_LIMIT
    option: str = ""
    room: int = 0

    def __str__(self) -> str:
        what = f"{self.option}={self.tokens + self.room}" if self.option else "as many as the target reads"
        return f"{self.tokens} tokens ({what})"


def strictest(option: int | None, row: int | None, context: int | None) -> Limit:
    """What leaves room for a token of the answer in a training row and in the target's context.

    Args:
        option: prompts.max_tokens, if it is set.
        row: max_tokens, where there is training.
        context: of the target, if it has an end.
    """
    limits = [Limit()]
    if option is not None:
        limits.append(Limit(option, "prompts.max_tokens"))
    if row is not None:
        limits.append(Limit(row - 1, "max_tokens", 1))
    if context is not None:
        limits.append(Limit(context - 1))
    return min(limits, key=lambda limit: limit.tokens)


@dataclass
class Measured:
    """Prompts, and those of them that are too long.

    Attributes:
        fit: in the order that they came.
        long: the others.
        longest: tokens of the longest.
        where: it stands in its file.
    """

    fit: list[Prompt] = field(default_factory=list)
    long: list[Rejected] = field(default_factory=list)
    longest: int = 0
    where: str = ""

    def add(self, prompt: Prompt, tokens: int, limit: Limit) -> None:
        """Count one in."""
        if tokens <= limit.tokens:
            self.fit.append(prompt)
            return
        self.long.append(set_aside(prompt, f"{tokens} tokens"))
        if tokens > self.longest:
            self.longest, self.where = tokens, str(self.long[-1])

    def summary(self, what: str) -> str:
        """How many of how many are too long."""
        return f"{len(self.long)} of {len(self.fit) + len(self.long)} {what}"


def set_aside(prompt: Prompt, reason: str) -> Rejected:
    """A prompt that is not used, by file and line where it has them."""
    start = json.dumps(prompt.messages)[:START]
    return Rejected(prompt.file or f"prompt {prompt.id}", prompt.line, reason, start)


def check_share(measured: Measured, limit: Limit, share: float, what: str) -> None:
    """Stop before work begins on a part of what was meant.

    Args:
        measured: the prompts.
        limit: that they were measured against.
        share: of them that may be left out; one of a few may in any case.
        what: they are called.

    Raises:
        UserError: more of them are too long, or all.
    """
    fit, long = len(measured.fit), len(measured.long)
    if not long or (fit and (long == 1 or long / (fit + long) <= share)):
        return
    ways = [f"raise {limit.option} to {measured.longest + limit.room}"] if limit.option else []
    if fit:
        enough = math.ceil(100 * long / (fit + long)) / 100
        ways.append(f"set prompts.max_left_out={enough:g} to go on without them")
    raise UserError(
        f"prompts: {measured.summary(what)} have more than {limit}, the longest {measured.where}; "
        + (", or ".join(ways) or "give shorter ones")
    )

"""Length limit of prompts, and handling of longer ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.prompts.sources import Rejected

NO_LIMIT = 2**31
START = 200  # characters shown of a prompt that is left out


class Limit(NamedTuple):
    """Largest prompt length.

    Attributes:
        tokens: of the prompt.
        option: that sets the limit; empty if the target's context does.
        room: tokens of the answer that the option includes.
    """

    tokens: int = NO_LIMIT
    option: str = ""
    room: int = 0

    def __str__(self) -> str:
        what = f"{self.option}={self.tokens + self.room}" if self.option else "as many as the target reads"
        return f"{self.tokens} tokens ({what})"


def strictest(option: int | None, row: int | None, context: int | None) -> Limit:
    """The smallest limit that leaves room for one answer token in a training row and the context.

    Args:
        option: prompts.max_tokens, if set.
        row: max_tokens, in training.
        context: of the target, if limited.
    """
    limits = [Limit()]
    if option is not None:
        limits.append(Limit(option, "prompts.max_tokens"))
    if row is not None:
        limits.append(Limit(row - 1, "max_tokens", 1))
    if context is not None:
        limits.append(Limit(context - 1))
    # Of equal ones the context's: raising the option would not help.
    return min(limits, key=lambda limit: (limit.tokens, limit.option))


@dataclass
class Measured:
    """Prompts sorted into those that fit and those that are too long.

    Attributes:
        fit: in input order.
        long: the others.
        longest: tokens of the longest prompt.
        where: its file and line.
    """

    fit: list[Prompt] = field(default_factory=list)
    long: list[Rejected] = field(default_factory=list)
    longest: int = 0
    where: str = ""

    def add(self, prompt: Prompt, tokens: int, limit: Limit) -> None:
        """Add a prompt."""
        if tokens <= limit.tokens:
            self.fit.append(prompt)
            return
        self.long.append(set_aside(prompt, f"{tokens} tokens"))
        if tokens > self.longest:
            self.longest, self.where = tokens, str(self.long[-1])

    def summary(self, what: str) -> str:
        """Number of prompts that are too long, out of all."""
        return f"{len(self.long)} of {len(self.fit) + len(self.long)} {what}"


def set_aside(prompt: Prompt, reason: str) -> Rejected:
    """Record of a prompt that is left out."""
    start = json.dumps(prompt.messages)[:START]
    return Rejected(prompt.file or f"prompt {prompt.id}", prompt.line, reason, start)


def check_share(measured: Measured, limit: Limit, share: float, what: str) -> None:
    """Refuse to continue if too many prompts are too long.

    Args:
        measured: the prompts.
        limit: applied to them.
        share: that may be left out; a single prompt always may.
        what: name of the prompts in messages.

    Raises:
        UserError: more than `share`, or all, are too long.
    """
    fit, long = len(measured.fit), len(measured.long)
    if not long or (fit and (long == 1 or long / (fit + long) <= share)):
        return
    fixes = [f"raise {limit.option} to {measured.longest + limit.room}"] if limit.option else []
    if fit:
        enough = math.ceil(100 * long / (fit + long)) / 100
        fixes.append(f"set prompts.max_left_out={enough:g} to go on without them")
    raise UserError(
        f"prompts: {measured.summary(what)} have more than {limit}, the longest {measured.where}; "
        + (", or ".join(fixes) or "give shorter ones")
    )

"""Length limit of prompts, and handling of longer ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.prompts.sources import Rejected

NO_LIMIT = 2**31
START = 200  # characters shown of a prompt that is left out
SHOWN_REASONS = 3
VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")  # parts of a reason that differ from prompt to prompt


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


NONE = Limit()


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


@dataclass(frozen=True)
class LeftOut:
    """What is left out of the prompts of one kind, for any reason.

    Attributes:
        what: name of the prompts in messages.
        measured: those that were rendered.
        refused: by the chat template, or without the answer that is asked for.
        malformed: records.
        records: malformed ones and others.
        lost: about how many more there are that could not be read.
        limit: on the tokens.
        advice: what else helps against refusals; empty if nothing does.
    """

    what: str
    measured: Measured
    refused: Sequence[Rejected] = ()
    malformed: Sequence[Rejected] = ()
    records: int = 0
    lost: int = 0
    limit: Limit = NONE
    advice: str = ""

    @property
    def count(self) -> int:
        """Of all that are left out."""
        return len(self.measured.long) + len(self.refused) + len(self.malformed) + self.lost

    @property
    def share(self) -> float:
        """Of the records that give no prompt; a sample of the prompts stands for all of them."""
        fit, rendered = len(self.measured.fit), len(self.measured.long) + len(self.refused)
        whole = 1 - Fraction(len(self.malformed) + self.lost, max(1, self.records + self.lost))
        return float(1 - whole * Fraction(fit, max(1, fit + rendered)))

    def check(self, most: float) -> None:
        """Refuse to continue if too many prompts are left out; a single one always may be.

        Args:
            most: share that may be left out.

        Raises:
            UserError: more than that, or all, are left out.
        """
        fit = len(self.measured.fit)
        if not self.count or (fit and (self.count == 1 or self.share <= most)):
            return
        fixes: list[str] = []
        if self.measured.long and self.limit.option:
            fixes.append(f"raise {self.limit.option} to {self.measured.longest + self.limit.room}")
        fixes += [self.advice] if self.advice and self.refused else []
        if fit:
            enough = min(1.0, math.ceil(100 * self.share) / 100)
            fixes.append(f"set prompts.max_left_out={enough:g} to continue without them")
        raise UserError(f"prompts: {self._reasons()}; {', or '.join(fixes) or self._rest()}")

    def _rest(self) -> str:
        return "give shorter ones" if self.measured.long else "mend them"

    def _reasons(self) -> str:
        """How many of how many are left out and why, the commonest reasons first."""
        long, more = self.measured.long, [*self.malformed, *self.refused]
        too_long = f"have more than {self.limit}, the longest {self.measured.where}"
        if not more:
            return f"{self.measured.summary(self.what)} {too_long}"
        kinds: dict[str, list[Rejected]] = {}
        for one in more:
            kinds.setdefault(VARIABLE.sub("", one.reason), []).append(one)
        ranked = sorted(kinds.values(), key=len, reverse=True)
        reasons = [f"{len(kind)} as {kind[0]}" for kind in ranked[:SHOWN_REASONS]]
        if rest := sum(map(len, ranked[SHOWN_REASONS:])):
            reasons.append(f"{rest} for other reasons")
        reasons += [f"about {self.lost:,} stand behind these and were not read"] if self.lost else []
        reasons += [f"{len(long)} {too_long}"] if long else []
        whole = self.count + len(self.measured.fit)
        return f"{self.count} of {whole} {self.what} are left out: {'; '.join(reasons)}"

"""Length limit of prompts, and handling of longer prompts."""

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
START = 200  # characters shown of an omitted prompt
SHOWN_REASONS = 3
VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")  # varying parts of a reason


class Limit(NamedTuple):
    """Largest prompt length.

    Attributes:
        tokens: maximum tokens of the prompt.
        option: option that sets the limit; empty if the target's context does.
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
        context: maximum tokens of the target, if limited.
    """
    limits = [Limit()]
    if option is not None:
        limits.append(Limit(option, "prompts.max_tokens"))
    if row is not None:
        limits.append(Limit(row - 1, "max_tokens", 1))
    if context is not None:
        limits.append(Limit(context - 1))
    # Ties name the context, since raising the option would not help.
    return min(limits, key=lambda limit: (limit.tokens, limit.option))


@dataclass
class Measured:
    """Prompts sorted by whether they fit.

    Attributes:
        fit: prompts that fit, in input order.
        long: prompts that are too long.
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
    """Record of an omitted prompt."""
    start = json.dumps(prompt.messages)[:START]
    return Rejected(prompt.file or f"prompt {prompt.id}", prompt.line, reason, start)


@dataclass(frozen=True)
class LeftOut:
    """Omitted prompts of one kind, for any reason.

    Attributes:
        what: name of the prompts in messages.
        measured: rendered prompts.
        refused: prompts that the chat template refuses, or without a required answer.
        malformed: malformed records.
        records: number of all records.
        lost: estimated number of unreadable records.
        limit: limit on the tokens.
        advice: advice against refusals; may be empty.
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
        """Number of omitted prompts."""
        return len(self.measured.long) + len(self.refused) + len(self.malformed) + self.lost

    @property
    def share(self) -> float:
        """Share of records without a usable prompt; a sample of the prompts represents all."""
        fit, rendered = len(self.measured.fit), len(self.measured.long) + len(self.refused)
        whole = 1 - Fraction(len(self.malformed) + self.lost, max(1, self.records + self.lost))
        return float(1 - whole * Fraction(fit, max(1, fit + rendered)))

    def check(self, most: float) -> None:
        """Raise if too many prompts are omitted; a single one is always allowed.

        Args:
            most: share that may be omitted.

        Raises:
            UserError: more than that, or all, are omitted.
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
        """Describe how many prompts are omitted and why, the most common reasons first."""
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
        reasons += [f"about {self.lost:,} after these were not read"] if self.lost else []
        reasons += [f"{len(long)} {too_long}"] if long else []
        whole = self.count + len(self.measured.fit)
        return f"{self.count} of {whole} {self.what} are left out: {'; '.join(reasons)}"

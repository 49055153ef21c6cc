"""Date and time that chat templates render.

Some templates write today's date into every prompt (Llama-3.2, gpt-oss). A template gets one fixed moment, so
that all renderings of a run agree, also after it is resumed. If a template renders only the date, the moment
is the date, so that runs of the same day share their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from decode.errors import UserError
from decode.hardware import locked
from distill.utils.atomic_files import read_json, write_json

NAME = "strftime_now"  # function that templates call
FILE = "moment.json"  # in a run folder
# From coarse to fine.
PARTS = [
    {"month": 1, "day": 1, "hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"day": 1, "hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"minute": 0, "second": 0, "microsecond": 0},
    {"second": 0, "microsecond": 0},
    {"microsecond": 0},
    {},
]
_LOCK = RLock()  # transformers has one environment per template


def now() -> datetime:
    """The current local time, from the clock that transformers reads."""
    return chat_template_utils.datetime.now()


class Clock:
    """Formats a fixed moment for a template.

    Args:
        moment: the moment.

    Attributes:
        asked: the requested formats.
    """

    def __init__(self, moment: datetime) -> None:
        self.moment = moment
        self.asked: set[str] = set()

    def __call__(self, form: str) -> str:
        """Format the moment."""
        self.asked.add(form)
        return self.moment.strftime(form)


class KnownFormats(Clock):
    """Formats a fixed moment, in known formats only.

    Args:
        moment: the moment.
        forms: the known formats.
    """

    def __init__(self, moment: datetime, forms: set[str]) -> None:
        super().__init__(moment)
        self._forms = forms

    def __call__(self, form: str) -> str:
        """Format the moment.

        Raises:
            TemplateError: an unknown format, which may differ in other renderings.
        """
        if form not in self._forms:
            raise jinja2.TemplateError(
                f"it asks for the time ({form!r}) in this conversation and not in others; give it a date "
                "by prompts.template_options"
            )
        return super().__call__(form)


def coarsest(moment: datetime, forms: set[str]) -> datetime:
    """The moment without the parts that no format shows."""
    texts = [moment.strftime(form) for form in forms]
    rounded = (moment.replace(**parts) for parts in PARTS)
    return next(one for one in rounded if [one.strftime(form) for form in forms] == texts)


def parse(moment: str) -> datetime:
    """Parse a moment in an option.

    Raises:
        UserError: it is invalid.
    """
    try:
        return datetime.fromisoformat(moment)
    except ValueError:
        raise UserError(f"prompts.moment={moment}: write it as in 2026-11-28 or 2026-11-28T13:05") from None


@contextmanager
def use_clock(template: str, clock: Callable[[str], str]) -> Iterator[None]:
    """Use this clock in transformers' own rendering of a template."""
    if NAME not in template:
        yield
        return
    with _LOCK:
        # private API: there is no public way to replace this function
        functions: Any = chat_template_utils._compile_jinja_template(template).environment.globals
        real, functions[NAME] = functions[NAME], clock
        try:
            yield
        finally:
            functions[NAME] = real


def read_moment(folder: Path) -> str | None:
    """The moment at which a run began, if its template renders one."""
    advice = "remove it to render the prompts at the present time"
    found = read_json(folder / FILE, advice, moment=str)
    return str(found["moment"]) if found else None


def moment_of_checkpoint(checkpoint: Path) -> str | None:
    """The moment at which the run of a checkpoint began."""
    return read_moment(checkpoint.resolve().parent.parent)


def record_moment(folder: Path, moment: str) -> str:
    """Record the moment of a new run; the first of several processes decides it."""
    with locked(folder / f"{FILE}.lock"):
        if (known := read_moment(folder)) is None:
            write_json(folder / FILE, {"moment": moment})
        return known or moment

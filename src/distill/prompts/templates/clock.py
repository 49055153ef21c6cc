"""The moment that a chat template is told when it asks for the date or the time.

Some templates write today's date into every prompt (Llama-3.2, gpt-oss). So that all renderings of a run
agree, and one that is resumed tomorrow renders as it began, a template is told one moment. Where it asks for
no more than the date, the moment is the date, so that the runs of a day share their answers.
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

NAME = "strftime_now"  # what templates call
KEPT = "moment.json"  # in a run folder
# From the coarsest on.
PARTS = [
    {"month": 1, "day": 1, "hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"day": 1, "hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"hour": 0, "minute": 0, "second": 0, "microsecond": 0},
    {"minute": 0, "second": 0, "microsecond": 0},
    {"second": 0, "microsecond": 0},
    {"microsecond": 0},
    {},
]
_LOCK = RLock()  # transformers has one environment for each template


def now() -> datetime:
    """The moment, in local time, from the clock that transformers reads."""
    return chat_template_utils.datetime.now()


class Clock:
    """Tells a template a moment.

    Args:
        moment: that is told.

    Attributes:
        asked: the formats that were asked for.
    """

    def __init__(self, moment: datetime) -> None:
        self.moment = moment
        self.asked: set[str] = set()

    def __call__(self, form: str) -> str:
        """The moment in this format."""
        self.asked.add(form)
        return self.moment.strftime(form)


class Known(Clock):
    """Tells a moment in the formats that a template is known to ask for.

    Args:
        moment: that is told.
        forms: the formats.
    """

    def __init__(self, moment: datetime, forms: set[str]) -> None:
        super().__init__(moment)
        self._forms = forms

    def __call__(self, form: str) -> str:
        """The moment in this format.

        Raises:
            TemplateError: nothing says that it would be the same in another rendering.
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
    """A moment as an option gives it.

    Raises:
        UserError: it is none.
    """
    try:
        return datetime.fromisoformat(moment)
    except ValueError:
        raise UserError(f"prompts.moment={moment}: write it as in 2026-11-28 or 2026-11-28T13:05") from None


@contextmanager
def told(template: str, clock: Callable[[str], str]) -> Iterator[None]:
    """Let transformers' own rendering of a template be told this moment."""
    if NAME not in template:
        yield
        return
    with _LOCK:
        # private API: what templates call has no public way to be given
        functions: Any = chat_template_utils._compile_jinja_template(template).environment.globals
        real, functions[NAME] = functions[NAME], clock
        try:
            yield
        finally:
            functions[NAME] = real


def kept(folder: Path) -> str | None:
    """The moment at which a run began, if its template asks for one."""
    advice = "remove it to render the prompts at the present time"
    found = read_json(folder / KEPT, advice, moment=str)
    return str(found["moment"]) if found else None


def of_run(checkpoint: Path) -> str | None:
    """The moment at which the run of a checkpoint began."""
    return kept(checkpoint.resolve().parent.parent)


def keep(folder: Path, moment: str) -> str:
    """Write down the moment of a run that begins; of several processes the first says which it is."""
    with locked(folder / f"{KEPT}.lock"):
        if (known := kept(folder)) is None:
            write_json(folder / KEPT, {"moment": moment})
        return known or moment

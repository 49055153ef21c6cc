"""What a run shows while it works: bars on a terminal, a line at each save point, from rank 0 alone.

Bars are on stderr and go when they are done; what is said stays, on stdout. Where no terminal is, or in
CI, there are no bars, and no control characters. Nothing is drawn by a thread: a terminal is written to
where work is counted, at most a few times a second, so that bars cost neither time that is measured nor
locks that a fork would break.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text
from torch import distributed
from typing_extensions import override

from decode.errors import UserError

WIDE = 70  # columns of a terminal in which there is room for a bar and for how fast it goes
EVERY = 0.15  # seconds between two drawings
switch = {"on": True}  # trainer.enable_progress_bar, for every bar of the process


def rank_and_world() -> tuple[int, int]:
    """Of this process, whoever launched it: torchrun, SLURM, or Lightning, whose processes have no RANK."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def first_rank() -> bool:
    """Whether this process is the one that speaks and writes."""
    return not getattr(rank_zero_only, "rank", 0)


def lively() -> bool:
    """Whether stderr is a terminal that somebody watches, and this process the one that may draw on it."""
    quiet = os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM") == "dumb"
    worker = multiprocessing.parent_process() is not None  # of a sweep, say: its parent has the terminal
    return switch["on"] and first_rank() and not quiet and not worker and sys.stderr.isatty()


class Facts(ProgressColumn):
    """How much of a task is done, since when, until when, how fast, and what else is to be said of it."""

    def __init__(self, wide: bool) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self.wide = wide

    @override
    def render(self, task: Task) -> Text:
        n, total, note = int(task.completed), int(task.total or 0), task.fields["note"]
        seconds = task.elapsed or 0.0
        # Pauses count: what is to come has some, too.
        rate = (n - task.fields["begun"]) / seconds if seconds else 0.0
        left = clock((total - n) / rate) if rate else "?"
        if not task.fields["unit"]:  # nothing of it can be counted
            return Text(f"{'' if self.wide else task.description} ...".strip())
        if not self.wide:
            return Text(f"{task.description} {100 * n // max(1, total)}% <{left} {note}".rstrip())
        words = [f"{n}/{total} {task.fields['unit']}", f"{clock(seconds)}<{left}"]
        if rate:
            words.append(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")
        return Text(" ".join([*words, note]).rstrip())


class Bars(Progress):
    """All bars of this process, in as many columns as the terminal has room for."""

    def __init__(self, console: Console) -> None:
        self._on, self._drawn = console, 0.0
        super().__init__(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        wide = self._on.width >= WIDE
        self.columns = (Name(), BarColumn(10), Facts(True)) if wide else (Facts(False),)
        return super().get_renderables()

    def draw(self, now: bool = False) -> None:
        """Draw what has changed, if the last drawing is not too new."""
        if now or time.monotonic() - self._drawn > EVERY:
            self.refresh()
            self._drawn = time.monotonic()


class Name(ProgressColumn):
    """What is being done."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    @override
    def render(self, task: Task) -> Text:
        return Text(task.description)


class Bar:
    """One of them, or nothing where none are shown.

    Args:
        total: when it is done.
        what: is done.
        unit: of `total`.
        done: of it already.
        leave: say when it is done how long it took.

    Attributes:
        n: done so far.
    """

    def __init__(self, total: int, what: str, unit: str, done: int, leave: bool) -> None:
        self.n, self.what, self.unit, self.leave = done, what, unit, leave
        self._total, self._begun = total, done
        self._start = time.monotonic()
        self._task = _open(total, what, done, unit) if lively() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def total(self) -> int:
        """What `n` is out of; it may become known later."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total

    def update(self, count: int = 1, note: str | None = None) -> None:
        """So much more is done.

        Args:
            count: in units.
            note: shown behind the bar from now on.
        """
        self.n += count
        if self._task is None or not (bars := _shown.get("bars")):
            return
        fields: dict[str, Any] = {} if note is None else {"note": note}
        bars.update(self._task, completed=self.n, total=self._total, **fields)
        bars.draw()

    def close(self) -> None:
        """Take it off the terminal; the last one leaves that as it was."""
        if self._task is None or not (bars := _shown.get("bars")):
            return
        bars.remove_task(self._task)
        self._task = None
        if bars.tasks:
            bars.draw(now=True)
        else:
            _shown.clear()
            bars.stop()
        if self.leave and self.n > self._begun:
            say(f"{self.what}: {self.n}/{self._total} {self.unit} in {clock(time.monotonic() - self._start)}")


_shown: dict[str, Bars] = {}  # "bars", while there are any


def _open(total: int, what: str, done: int, unit: str) -> TaskID:
    if not (bars := _shown.get("bars")):
        bars = _shown["bars"] = Bars(Console(stderr=True, highlight=False, markup=False, emoji=False))
        bars.start()
        bars.console.show_cursor()  # rich hides it, and who is killed cannot bring it back
    task = bars.add_task(what, total=total, completed=done, unit=unit, begun=done, note="")
    bars.draw(now=True)
    return task


def _forget() -> None:
    """A child that was forked leaves the bars to its parent."""
    if _shown:
        _shown.clear()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


os.register_at_fork(after_in_child=_forget)


def bar(total: int, what: str, unit: str, done: int = 0, leave: bool = True) -> Bar:
    """A bar for `what`; nothing where no terminal shows it."""
    return Bar(total, what, unit, done, leave)


def say(text: str) -> None:
    """Print a line, above whatever bars are showing."""
    if not first_rank():
        return
    if (bars := _shown.get("bars")) and sys.stdout.isatty():
        bars.console.print(text, soft_wrap=True)
    else:
        print(text, flush=True)


def clock(seconds: float) -> str:
    """As 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def wants_color(choice: str) -> bool:
    """Whether to colour: `auto` does on a terminal, unless NO_COLOR (no-color.org) asks not to.

    Raises:
        UserError: no such choice.
    """
    if choice not in ("auto", "always", "never"):
        raise UserError(f"color={choice}: choose auto, always or never")
    able = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return choice == "always" or (choice == "auto" and able and not os.environ.get("NO_COLOR"))

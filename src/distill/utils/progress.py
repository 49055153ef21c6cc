"""Progress bars on a terminal and lines of output, from rank 0 only.

Bars go to stderr and disappear when done; lines go to stdout. Without a terminal, or in CI, there are no bars
and no control characters: `progress_lines` writes a line of progress from time to time. `update` draws bars,
at most a few times per second; no thread draws, since it would disturb timings.
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
from distill.utils.progress_lines import Lines, State, clock
from distill.utils.redact import hidden, printable

WIDE = 70  # minimum columns for a bar with its rate
EVERY = 0.15  # seconds between redraws
switch = {"on": True}  # trainer.enable_progress_bar, for every bar of the process


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 shard, 2 shards."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rank_and_world() -> tuple[int, int]:
    """Rank and world size of this process under torchrun, SLURM or Lightning (which sets no RANK)."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def first_rank() -> bool:
    """Whether this process is rank 0, which prints and writes files."""
    return not getattr(rank_zero_only, "rank", 0)


def shows_progress() -> bool:
    """Whether this process shows progress, as bars or as lines."""
    worker = multiprocessing.parent_process() is not None  # in a sweep, for example, the parent draws
    return switch["on"] and first_rank() and not worker


def bars_visible() -> bool:
    """Whether this process may draw bars: rank 0, stderr on a terminal, not in CI."""
    quiet = os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM") == "dumb"
    return shows_progress() and not quiet and sys.stderr.isatty()


class ProgressText(ProgressColumn):
    """Column with count, elapsed and remaining time, rate and note of a task."""

    def __init__(self, wide: bool) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self.wide = wide

    @override
    def render(self, task: Task) -> Text:
        n, total, note = int(task.completed), int(task.total or 0), task.fields["note"]
        seconds = task.elapsed or 0.0
        done, worked = n - task.fields["initial"], seconds - task.fields["paused"]
        rate = done / worked if worked > 0 else 0.0
        # Pauses count here, since they occur in the remaining work too.
        remaining = clock((total - n) * seconds / done) if done and seconds else "?"
        if not task.fields["unit"]:  # no countable progress
            return Text(f"{'' if self.wide else task.description} ...".strip())
        if not self.wide:
            return Text(f"{task.description} {100 * n // max(1, total)}% <{remaining} {note}".rstrip())
        words = [f"{n}/{total} {task.fields['unit']}", f"{clock(seconds)}<{remaining}"]
        if rate:
            words.append(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")
        return Text(" ".join([*words, note]).rstrip())


class Bars(Progress):
    """All bars of this process; columns depend on the width of the terminal."""

    def __init__(self, console: Console) -> None:
        self._terminal, self._last_draw = console, 0.0
        super().__init__(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        wide = self._terminal.width >= WIDE
        self.columns = (TaskName(), BarColumn(10), ProgressText(True)) if wide else (ProgressText(False),)
        return super().get_renderables()

    def draw(self, now: bool = False) -> None:
        """Redraw, at most every EVERY seconds unless `now`."""
        if now or time.monotonic() - self._last_draw > EVERY:
            self.refresh()
            self._last_draw = time.monotonic()


class TaskName(ProgressColumn):
    """Column with the name of a task."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    @override
    def render(self, task: Task) -> Text:
        return Text(task.description)


class Bar:
    """A progress bar, or lines of progress where bars are not visible.

    Args:
        total: total number of units.
        what: name of the task.
        unit: unit of `total`.
        done: units already done.
        leave: print the total time at the end, if bars are visible.

    Attributes:
        n: units done so far.
    """

    def __init__(self, total: int, what: str, unit: str, done: int, leave: bool) -> None:
        self.n, self.what, self.unit, self.leave = done, what, unit, leave
        self._total, self._initial, self._note = total, done, ""
        self._start, self._paused, self._since = time.monotonic(), 0.0, None
        if _nested:
            _nested[-1]._pause()
        _nested.append(self)
        self._task = _open(total, what, done, unit) if bars_visible() else None
        self._writes = self._task is None and shows_progress()
        if self._writes:
            _lines.add(self)

    @property
    def paused(self) -> float:
        """Seconds in which another bar was open inside this one, such as scoring inside training."""
        return self._paused + (time.monotonic() - self._since if self._since is not None else 0.0)

    def _pause(self) -> None:
        self._since = time.monotonic()

    def _resume(self) -> None:
        self._paused, self._since = self.paused, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def total(self) -> int:
        """Units in all; may be set later."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Advance the bar.

        Args:
            count: units done since the last call.
            note: text to show after the bar.
        """
        self.n += count
        self._note = self._note if note is None else note
        if self._writes:
            _lines.moved(self)
        if self._task is None or not (bars := _shown.get("bars")):
            return
        fields: dict[str, Any] = {"paused": self.paused, "note": self._note}
        bars.update(self._task, completed=self.n, total=self._total, **fields)
        bars.draw()

    def state(self) -> State:
        """What a line of progress says."""
        seconds = time.monotonic() - self._start
        worked = seconds - self.paused
        return State(self.what, self.n, self._total, self.unit, self._initial, seconds, worked, self._note)

    def close(self) -> None:
        """Remove the bar; the last one restores the terminal."""
        if self in _nested:
            innermost = _nested[-1] is self
            _nested.remove(self)
            if innermost and _nested:
                _nested[-1]._resume()
        if self._writes:
            self._writes = False
            _lines.remove(self)
        if self._task is None or not (bars := _shown.get("bars")):
            return
        bars.remove_task(self._task)
        self._task = None
        if bars.tasks:
            bars.draw(now=True)
        else:
            _shown.clear()
            bars.stop()
        if self.leave and self.n > self._initial:
            say(f"{self.what}: {self.n}/{self._total} {self.unit} in {clock(time.monotonic() - self._start)}")


_shown: dict[str, Bars] = {}  # "bars", while any are visible
_lines = Lines()
_nested: list[Bar] = []  # all open bars, the innermost last


def _open(total: int, what: str, done: int, unit: str) -> TaskID:
    if not (bars := _shown.get("bars")):
        bars = _shown["bars"] = Bars(Console(stderr=True, highlight=False, markup=False, emoji=False))
        bars.start()
        bars.console.show_cursor()  # rich hides the cursor; a killed process would leave it hidden
    task = bars.add_task(what, total=total, completed=done, unit=unit, initial=done, paused=0.0, note="")
    bars.draw(now=True)
    return task


def _forget() -> None:
    """In a forked child, leave the bars to the parent."""
    _lines.forget()
    _nested.clear()
    if _shown:
        _shown.clear()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


os.register_at_fork(after_in_child=_forget)


def bar(total: int, what: str, unit: str, done: int = 0, leave: bool = True) -> Bar:
    """Open a progress bar; see `Bar`."""
    return Bar(total, what, unit, done, leave)


def say(text: str) -> None:
    """Print a line above the bars, on rank 0, without secrets; control characters are escaped."""
    if not first_rank():
        return
    text = printable(hidden(text))
    if (bars := _shown.get("bars")) and sys.stdout.isatty():
        bars.console.print(text, soft_wrap=True)
    else:
        print(text, flush=True)


def wants_color(choice: str) -> bool:
    """Whether to print colors; `auto`: on a terminal, unless NO_COLOR is set (no-color.org).

    Raises:
        UserError: unknown choice.
    """
    if choice not in ("auto", "always", "never"):
        raise UserError(f"color={choice}: choose auto, always or never")
    supported = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return choice == "always" or (choice == "auto" and supported and not os.environ.get("NO_COLOR"))

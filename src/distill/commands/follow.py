"""Train a drafter for a target that is being trained: foredraft follow 'PATTERN' OPTION=VALUE ...

The target's trainer writes a model folder from time to time, such as checkpoints/step_100. Whenever there is
a newer one, a run of `foredraft train` goes on with the drafter of the run before: it scores that drafter on
the new model, has the new model answer the prompts, and trains.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.report.tables import grid
from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import say
from distill.utils.run_folder import best, occupy

FILE = "follow.json"  # the updates of a folder, in order
LATEST = "latest"  # link to the newest update's best checkpoint
INDEX = "model.safetensors.index.json"
ANSWERS = ("rollouts", "heldout")  # in a run's folder
# Options that are not the user's
OWN = (
    "target",
    "target.path",
    "output_dir",
    "hydra.run.dir",
    "rollout.store",
    "score.start",
    "score.enabled",
)


@dataclass(frozen=True)
class Update:
    """A run that brought the drafter to a newer model.

    Attributes:
        target: folder of the model.
        run: name of the run's folder.
        stale: tau of the drafter as it was, on this model, at the first temperature; None: there was none.
        tau: after training; None: not ended.
        seconds: of the run that ended.
    """

    target: str
    run: str
    stale: float | None = None
    tau: float | None = None
    seconds: float | None = None


class Words(NamedTuple):
    """Options of `foredraft train`: of every run, and of those that go on with a drafter."""

    always: Sequence[str]
    then: Sequence[str]


def main() -> None:
    """Follow until there have been enough updates, or no newer model for long."""
    parser = argparse.ArgumentParser("foredraft follow", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pattern", metavar="PATTERN", help="of model folders, quoted: '/ckpt/step_*'")
    parser.add_argument(
        "words", nargs="*", metavar="OPTION=VALUE", help="of every run, as for foredraft train"
    )
    parser.add_argument(
        "--then", action="append", default=[], metavar="OPTION=VALUE", help="of runs after the first, too"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/follow"), metavar="DIR", help="default: outputs/follow"
    )
    parser.add_argument("--updates", type=int, metavar="N", help="end after so many; default: never")
    parser.add_argument(
        "--patience", type=float, metavar="MINUTES", help="end without a newer model; default: never"
    )
    parser.add_argument(
        "--poll", type=float, default=10.0, metavar="SECONDS", help="between looks for one; default: 10"
    )
    given = parser.parse_intermixed_args()
    follow(
        given.pattern, Words(given.words, given.then), given.folder, given.updates, given.patience, given.poll
    )


def follow(
    pattern: str, words: Words, folder: Path, count: int | None, patience: float | None, poll: float
) -> None:
    """Train a drafter for each model that is the newest when the one before is done.

    A run that was interrupted goes on when the same command is given again.

    Args:
        pattern: of model folders, for `glob`.
        words: of the runs.
        folder: of the runs and `follow.json`.
        count: of updates, those of earlier starts included; None: no limit.
        patience: minutes without a newer model; None: no limit.
        poll: seconds between looks for one.

    Raises:
        UserError: an option that is not the user's to set, a folder of another command, or a run that
            cannot begin.
        SystemExit: a run failed, or was stopped by a signal, with its exit code.
    """
    _check(words, count, patience, poll)
    folder.mkdir(parents=True, exist_ok=True)
    lock = occupy(folder, {"pattern": pattern, "words": words}, "follow")
    updates = _read(folder)
    while count is None or _finished(updates) < count:
        if updates and updates[-1].tau is None and not whole(Path(updates[-1].target)):
            say(f"{updates[-1].target}: gone before its run had ended; going on with the newest model")
            shutil.rmtree(folder / updates.pop().run, ignore_errors=True)
        if not updates or updates[-1].tau is not None:
            model = _newer(pattern, updates, patience, poll)
            if model is None:
                break
            updates.append(Update(str(model), f"{len(updates):04}"))
        _write(folder, updates)
        updates[-1] = _update(updates, words, folder)
        _write(folder, updates)
        for name in ANSWERS if len(updates) > 1 else ():  # of a model that is the newest no more
            shutil.rmtree(folder / updates[-2].run / name, ignore_errors=True)
        say(_line(updates[-1]))
    lock.close()
    print(as_text(folder, updates))


def newest(pattern: str) -> Path | None:
    """The model folder with the highest numbers in its path, of those that are completely written."""

    def numbers(path: Path) -> tuple[list[int], str]:
        return [int(digits) for digits in re.findall(r"\d+", str(path))], str(path)

    path = Path(pattern).expanduser().absolute()
    found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    return next(filter(whole, sorted(found, key=numbers, reverse=True)), None)


def whole(folder: Path) -> bool:
    """Whether a model folder has a configuration and all of its weights, none of them half written."""
    if not (folder / "config.json").is_file():
        return False
    names = {"model.safetensors"}
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, LookupError, AttributeError):
            return False  # it is being written
    try:
        for name in names:
            with safe_open(folder / name, "pt"):  # compares the header with the file's size
                pass
    except (OSError, SafetensorError):
        return False
    return True


def _check(words: Words, count: int | None, patience: float | None, poll: float) -> None:
    for word in (*words.always, *words.then):
        key, sign, _ = word.partition("=")
        if not sign:
            raise UserError(f"foredraft follow: {word} is no OPTION=VALUE; quote the pattern of the folders")
        if key in OWN or (key == "drafter.init_from" and word in words.then):
            raise UserError(f"{key}: foredraft follow sets it; give the folders as a pattern, and --folder")
    if (count is not None and count < 1) or (patience is not None and patience < 0) or poll <= 0:
        raise UserError("foredraft follow: --updates is 1 or more, --patience 0 or more, --poll above 0")


def _read(folder: Path) -> list[Update]:
    stored = read_json(folder / FILE, "give another --folder to begin anew", updates=list)
    try:
        return [Update(**update) for update in (stored or {"updates": []})["updates"]]
    except TypeError:
        raise UserError(f"{folder / FILE}: damaged; give another --folder to begin anew") from None


def _write(folder: Path, updates: Sequence[Update]) -> None:
    write_json(folder / FILE, {"updates": [asdict(update) for update in updates]})


def _finished(updates: Sequence[Update]) -> int:
    return sum(update.tau is not None for update in updates)


def _newer(pattern: str, updates: Sequence[Update], patience: float | None, poll: float) -> Path | None:
    """Wait for a model that no update was made for; None: there was none for so many minutes."""
    known, begun, told = {update.target for update in updates}, time.monotonic(), False
    while (model := newest(pattern)) is None or str(model) in known:
        if patience is not None and time.monotonic() - begun >= 60 * patience:
            say(f"{pattern}: no newer model in {patience:g} minutes")
            return None
        if not told:
            say(f"{pattern}: waiting for a {'newer ' if known else ''}model")
            told = True
        time.sleep(poll)
    return model


def _update(updates: Sequence[Update], words: Words, folder: Path) -> Update:
    """Train the drafter for the last update's model.

    Raises:
        SystemExit: as `follow`.
    """
    update, earlier = updates[-1], updates[:-1]
    run = folder / update.run
    options = [*words.always, f"target={update.target}"]
    if earlier:  # the later of two values counts
        options += [*words.then, f"drafter.init_from={best(folder / earlier[-1].run)}"]
    warm = any(word.startswith("drafter.init_from=") for word in options)
    options += [f"score.start={str(warm).lower()}", f"output_dir={run}", f"hydra.run.dir={run}"]
    say(f"{update.run}: foredraft train {' '.join(options)}")
    begun = time.monotonic()
    if (code := _train(options)) or (made := best(run)) is None:
        raise SystemExit(code if code >= 0 else 128 - code)
    start = run / "checkpoints" / "0" / "score.json"
    stale = read_scorecard(start).compared.tau if warm and start.exists() else None
    _link(folder / LATEST, made)
    tau = read_scorecard(made / "score.json").compared.tau
    return replace(update, stale=stale, tau=tau, seconds=time.monotonic() - begun)


def _train(options: Sequence[str]) -> int:
    """Exit code of `foredraft train`, in a process of its own."""
    with _passing_signals_to(
        subprocess.Popen([sys.executable, "-m", "foredraft", "train", *options])
    ) as process:
        return process.wait()


@contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told of the signals that end this one, and saves then."""

    def tell(number: int, frame: FrameType | None) -> None:
        del frame
        with suppress(ProcessLookupError):
            process.send_signal(number)

    # A terminal sends SIGINT to both; the child decides how the run ends.
    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _link(link: Path, checkpoint: Path) -> None:
    temporary = link.with_name(f"{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.absolute())
    temporary.replace(link)  # whoever opens it finds one or the other


def _line(update: Update) -> str:
    return f"{update.run}: {update.target}: tau {_number(update.stale)} -> {_number(update.tau)}"


def as_text(folder: Path, updates: Sequence[Update]) -> str:
    """A table of all updates."""
    lines = [
        [u.run, Path(u.target).name, _number(u.stale), _number(u.tau), _number(u.seconds and u.seconds / 60)]
        for u in updates
        if u.tau is not None
    ]
    table = grid(["run", "model", "tau before", "after", "minutes"], lines)
    return f"{table}\n{folder / LATEST}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

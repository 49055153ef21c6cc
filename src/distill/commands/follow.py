"""Train a drafter for a target that is being trained: foredraft follow 'PATTERN' OPTION=VALUE ...

The target's trainer writes model folders such as checkpoints/step_100. For each newer folder, a run of
`foredraft train` continues with the previous run's drafter: the new model answers the prompts, the drafter
is scored on it unchanged, and then trained.
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
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.distributed.graceful_shutdown import SIGNALS
from distill.scoring.tables import grid
from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import say
from distill.utils.provenance import digest
from distill.utils.run_folder import Run, best, checkpoints, occupy

FILE = "follow.json"  # the updates of a folder, in order
LATEST = "latest"  # link to the newest update's best checkpoint
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")  # one of them is in a model's folder
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What reading a model raises while it is being written or removed
UNREADABLE = (OSError, SafetensorError, ValueError, LookupError, AttributeError)
ANSWERS = ("rollouts", "heldout")  # in a run's folder
# Options that this command sets itself
OWN = (
    *("target", "target.path", "output_dir", "hydra.run.dir", "resume", "rollout.store"),
    *("score.start", "score.enabled"),
)


@dataclass(frozen=True)
class Update:
    """A run that adapts the drafter to a newer model.

    Attributes:
        target: folder of the model.
        stamp: `stamp` of the weights at the start of the run.
        run: name of the run's folder.
        stale: tau before training, on this model, at the first temperature; None without a drafter.
        tau: tau after training; None if the run has not ended.
        seconds: duration of the last start of the run.
    """

    target: str
    stamp: str
    run: str
    stale: float | None = None
    tau: float | None = None
    seconds: float | None = None

    @property
    def valid(self) -> bool:
        """Whether the model is still there, with the same weights."""
        return whole(Path(self.target)) and stamp(Path(self.target)) == self.stamp


class Words(NamedTuple):
    """Options of `foredraft train`: `always` for every run, `then` for runs after the first, too."""

    always: Sequence[str]
    then: Sequence[str]


def main() -> None:
    """Follow until `--updates` updates are done or no newer model appears for `--patience` minutes."""
    parser = argparse.ArgumentParser("foredraft follow", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pattern", metavar="PATTERN", help="pattern of model folders, quoted: '/ckpt/step_*'")
    parser.add_argument(
        "words", nargs="*", metavar="OPTION=VALUE", help="options of every run, as for foredraft train"
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
    """Train a drafter for the newest model; repeat when a run is done and a newer model exists.

    The same command continues an interrupted run.

    Args:
        pattern: glob pattern of model folders.
        words: options of the runs.
        folder: folder of the runs and `follow.json`.
        count: number of updates, including earlier starts; None: no limit.
        patience: minutes without a newer model; None: no limit.
        poll: seconds between checks for a newer model.

    Raises:
        UserError: an option that this command sets itself, or a folder of another command.
        SystemExit: a run failed or was stopped by a signal; has the run's exit code.
    """
    _check(words, count, patience, poll)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    another = f"--folder another folder, and drafter.init_from={folder / LATEST} to continue with its drafter"
    lock = occupy(folder, {"pattern": pattern, "words": words}, "follow", instead=another)
    with closing(lock):
        updates = _followed(words, folder, lock, pattern, count, patience, poll)
    print(as_text(folder, updates))


def _followed(
    words: Words,
    folder: Path,
    lock: Run,
    pattern: str,
    count: int | None,
    patience: float | None,
    poll: float,
) -> list[Update]:
    """Train on one model after another; arguments as in `follow`, with the folder's `lock`."""
    updates = _read(folder)
    _link(folder, updates)
    while count is None or len(_finished(updates)) < count:
        if updates and updates[-1].tau is None and not updates[-1].valid:
            say(f"{updates[-1].target}: gone or changed before its run had ended; taking the newest model")
            _discard(folder, updates)
        if not updates or updates[-1].tau is not None:
            model = _newer(pattern, updates, patience, poll)
            if model is None:
                break
            updates.append(Update(str(model), stamp(model), f"{len(updates):04}"))
            _write(folder, updates)
        if (code := _update(updates, words, folder, lock)) and code < 128 and not updates[-1].valid:
            continue  # its model was removed while being read
        if code:
            if not _finished(updates) and not checkpoints(folder / updates[-1].run):
                _discard(folder, updates)  # so that a wrong option can be corrected
                (folder / "run.json").unlink()
            raise SystemExit(code)
    return updates


def newest(pattern: str) -> Path | None:
    """Find the completely written model folder with the highest numbers in its path."""
    path = Path(pattern).expanduser().absolute()
    found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    named = [folder for folder in found if folder.suffix != ".tmp" and folder.name[:1] != "."]
    return next(filter(whole, sorted(named, key=_order, reverse=True)), None)


def _order(folder: Path) -> tuple[list[int], str]:
    """Sort key of models by age: the numbers in their paths."""
    return [int(digits) for digits in re.findall(r"\d+", str(folder))], str(folder)


def whole(folder: Path) -> bool:
    """Whether a model folder has a configuration, a tokenizer and all of its weights, completely written."""
    tokenizer = any(any(folder.glob(name)) for name in TOKENIZERS)
    if not tokenizer or not (folder / "config.json").is_file():
        return False
    try:
        for path in _weights(folder):
            with safe_open(path, "pt"):  # compares the header with the file's size
                pass
    except UNREADABLE:
        return False
    return True


def _weights(folder: Path) -> list[Path]:
    """Weight files of a model; raises one of UNREADABLE if the index file is incomplete."""
    names = {WEIGHTS}
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def stamp(folder: Path) -> str:
    """Hash the sizes and times of a model's weight files, to detect changes; "" if files are missing."""
    try:
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _weights(folder)]
    except UNREADABLE:
        return ""
    return digest(json.dumps(facts))


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
    advice = "give another --folder to begin again"
    stored = read_json(folder / FILE, advice, updates=list)
    try:
        return [Update(**update) for update in (stored or {"updates": []})["updates"]]
    except TypeError:
        raise UserError(f"{folder / FILE}: damaged; {advice}") from None


def _write(folder: Path, updates: Sequence[Update]) -> None:
    write_json(folder / FILE, {"updates": [asdict(update) for update in updates]})


def _finished(updates: Sequence[Update]) -> list[Update]:
    return [update for update in updates if update.tau is not None]


def _discard(folder: Path, updates: list[Update]) -> None:
    """Remove the last update and its run."""
    shutil.rmtree(folder / updates.pop().run, ignore_errors=True)
    _write(folder, updates)


def _newer(pattern: str, updates: Sequence[Update], patience: float | None, poll: float) -> Path | None:
    """Wait for a model newer than the last update's; returns None after `patience` minutes.

    A model rewritten under the same name is newer. A model with lower numbers is not, even if a trainer went
    back to it.
    """
    begun, announced = time.monotonic(), False
    while True:
        model = newest(pattern)
        if model and (not updates or _is_newer(model, updates[-1])):
            return model
        if patience is not None and time.monotonic() - begun >= 60 * patience:
            say(f"{pattern}: no newer model in {patience:g} minutes")
            return None
        if not announced:
            newer = "newer " if updates else ""
            say(f"{pattern}: waiting for a {newer}model, with config.json, weights and tokenizer")
            announced = True
        time.sleep(poll)


def _is_newer(model: Path, last: Update) -> bool:
    if str(model) == last.target:
        return stamp(model) != last.stamp
    return _order(model) > _order(Path(last.target))


def _update(updates: list[Update], words: Words, folder: Path, lock: Run) -> int:
    """Train the drafter for the last update's model; returns the exit code."""
    update, earlier = updates[-1], updates[:-1]
    run = folder / update.run
    options = [*words.always, f"target={update.target}"]
    if earlier:  # the later of two values counts
        options += [*words.then, *_init_from(folder / earlier[-1].run)]
    warm = any(word.startswith("drafter.init_from=") for word in options)
    options += [f"score.start={str(warm).lower()}", f"output_dir={run}", f"hydra.run.dir={run}"]
    say(f"{update.run}: foredraft train {' '.join(options)}")
    begun = time.monotonic()
    if (code := _train(options, lock)) or (made := best(run)) is None:
        return code or 1
    start = run / "checkpoints" / "0" / "score.json"
    stale = read_scorecard(start).headline.tau if warm and start.exists() else None
    tau = read_scorecard(made / "score.json").headline.tau
    updates[-1] = replace(update, stale=stale, tau=tau, seconds=time.monotonic() - begun)
    _write(folder, updates)
    _link(folder, updates)
    for name in ANSWERS if earlier else ():  # answers of an outdated model
        shutil.rmtree(folder / earlier[-1].run / name, ignore_errors=True)
    say(f"{update.run}: {update.target}: tau {_number(stale)} -> {_number(tau)}")
    return 0


def _init_from(run: Path) -> list[str]:
    """Option that continues with a run's drafter; empty if the drafter needs no training (text lookup)."""
    trained = any(path.name != "0" for path in checkpoints(run))
    return [f"drafter.init_from={best(run)}"] if trained else []


def _train(options: Sequence[str], lock: Run) -> int:
    """Run `foredraft train` in a subprocess that also holds the lock; returns the exit code."""
    with _forward_signals() as pass_to:
        process = subprocess.Popen(
            [sys.executable, "-m", "foredraft", "train", *options],
            pass_fds=lock.descriptors,  # keeps the folder locked if this process dies
            process_group=0,  # so that the child receives Ctrl-C only from this process
        )
        pass_to(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forward_signals() -> Iterator[_SignalForwarder]:
    """Forward ending signals to the child process so that it saves; Ctrl-C is sent as SIGTERM."""
    receiver = _SignalForwarder()
    before = {number: signal.signal(number, receiver.tell) for number in (*SIGNALS, signal.SIGINT)}
    try:
        yield receiver
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SignalForwarder:
    """Forwards signals to a process; signals that arrive before it starts are sent later."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []

    def __call__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        for number in self.early:
            process.send_signal(number)

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        del frame
        number = signal.SIGTERM if number == signal.SIGINT else number
        if self.process is None:
            self.early.append(number)
        else:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def _link(folder: Path, updates: Sequence[Update]) -> None:
    """Point the `latest` link to the drafter of the last finished update."""
    if not (done := _finished(updates)):
        return
    temporary = folder / f"{LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best(folder / done[-1].run) or "")
    temporary.replace(folder / LATEST)  # atomic: the link always exists


def as_text(folder: Path, updates: Sequence[Update]) -> str:
    """Format a table of all finished updates."""
    lines = [
        [u.run, Path(u.target).name, _number(u.stale), _number(u.tau), _number(u.seconds and u.seconds / 60)]
        for u in _finished(updates)
    ]
    table = grid(["run", "model", "tau before", "after", "minutes"], lines)
    return f"{table}\n{folder / LATEST}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

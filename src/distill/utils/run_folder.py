"""Run folders: one per configuration, resumed after a kill, never shared by two processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from decode.errors import UserError
from distill.utils.atomic_files import read_json, write_json
from distill.utils.launcher import launch, process_age
from distill.utils.thread_spinning import described

REPORT = "report.html"
RECORD = "run.json"  # what identifies a run, and its options (utils/run_record.py)

DONE = "done"
FAILED = "failed"  # folder of batches with a non-finite loss or gradient
Recorded = Callable[[Path], dict[str, Any] | None]  # folder of a run -> its configuration, if readable


_unnamed: dict[Path, Path] = {}  # new folders of this process that no line has named yet, as they were given

# Settings that a continued run may change: they do not affect its steps, or only their number.
AFTERWARDS = ("resume", "export", "timeout_minutes", "budget")


def config_hash(config: dict[str, Any]) -> str:
    """Hash of the resolved configuration, without settings that do not affect the run's steps."""
    settings = {k: v for k, v in config.items() if k not in AFTERWARDS}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


class _Lock:
    """A run folder's lock: one file that a process owns, and one that shows other ranks that it is owned.

    Ranks that check (`in_use`) briefly take a shared lock on the second file. On the first file, rank 0 of a
    restarted launch would mistake this for another running process.
    """

    def __init__(self, owned: IO[str], shown: IO[str]) -> None:
        self._files = (owned, shown)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(file.fileno() for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()

    @classmethod
    def take(cls, folder: Path) -> _Lock | None:
        """Lock a folder; None if another process has locked it, or if it was removed."""
        owned = _flock(folder / "run.lock", fcntl.LOCK_EX)
        while owned:
            if shown := _flock(folder / "run.alive", fcntl.LOCK_EX):
                return cls(owned, shown)
            time.sleep(0.01)  # another rank is checking
        return None

    @staticmethod
    def in_use(folder: Path) -> bool:
        """Whether a process has locked the folder; does not disturb a process that locks it."""
        look = _flock(folder / "run.alive", fcntl.LOCK_SH)
        if look:
            look.close()
        return look is None


def _flock(path: Path, operation: int) -> IO[str] | None:
    """Open and lock a file; None if another process has locked it, or its folder was removed."""
    try:
        handle = path.open("a+")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    os.set_inheritable(handle.fileno(), False)
    return handle


@dataclass(slots=True)
class Run:
    """A run folder locked by this process; the lock ends with the process.

    Attributes:
        path: the folder.
        resumed: whether it contained a run of the same configuration.
    """

    path: Path
    resumed: bool
    _lock: _Lock
    _made: bool = True  # whether the folder is new; an existing one may contain other files

    def finish(self) -> None:
        """Mark the run as complete, so that the same command starts a new one."""
        (self.path / DONE).touch()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors of the lock, which lasts while a process has them open."""
        return self._lock.descriptors

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def discard_if_empty(self) -> None:
        """Remove a folder without results."""
        families = self.path.glob("families/*/checkpoints/*")  # of drafter=auto
        has_results = checkpoints(self.path) or (self.path / FAILED).exists() or any(families)
        if self.resumed or has_results:
            return
        if not self._made:
            for name in (RECORD, "run.lock", "run.alive"):
                (self.path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # contains other runs of the day
                self.path.parent.rmdir()


def _unknown(folder: Path) -> dict[str, Any] | None:
    del folder


def claim(root: Path, config: dict[str, Any], resume: str, recorded: Recorded = _unknown) -> Run:
    """Continue the newest unfinished run of this configuration, or start one.

    Args:
        root: folder of all runs.
        config: resolved configuration.
        resume: `auto`, `never`, or a run's folder.
        recorded: reads the configuration in a run's folder, if run.json is damaged.

    Raises:
        UserError: a named folder that is no run, belongs to another configuration, is finished or in use; a
            damaged run.json; an unwritable root.
    """
    key = config_hash(config)
    try:
        if resume not in ("auto", "never"):
            run = _claim_named(Path(resume), key, recorded)
        else:
            run = (_unfinished(root, key, recorded) if resume == "auto" else None) or _new(root, key)
        _announce(root, run)
    except OSError as error:
        raise UserError(f"output_dir={root}: {error.strerror}") from None
    except UserError:
        with suppress(OSError):
            _announce(root, None)
        raise
    return run


def claim_at(
    folder: Path, root: Path, config: dict[str, Any], resume: str, recorded: Recorded = _unknown
) -> Run:
    """Continue the run in the folder `hydra.run.dir`, or start one there.

    A finished run of the same configuration is continued too; it has nothing left to do.

    Args:
        folder: folder of the run.
        root: folder of all runs.
        config: resolved configuration.
        resume: see `claim`.
        recorded: see `claim`.

    Raises:
        UserError: the folder has a run of another configuration, or any run with `resume=never`; it has
            checkpoints without run.json; it is in use or unusable.
    """
    instead = "give hydra.run.dir another folder"
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            run = _claim_at(folder, config_hash(config), resume, recorded, instead)
        except UserError:
            _announce(root, None)
            raise
        _announce(root, run)
    except OSError as error:
        raise UserError(f"hydra.run.dir={folder}: {error.strerror}; {instead}") from None
    return run


def _claim_at(folder: Path, key: str, resume: str, recorded: Recorded, instead: str) -> Run:
    record, named = folder / RECORD, f"hydra.run.dir={folder}"
    if resume not in ("auto", "never") and Path(resume).resolve() != folder.resolve():
        raise UserError(f"{named}: differs from resume={resume}; give only one of them")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = _Lock.take(folder)
    if not lock:
        raise UserError(f"{named}: another process is working there")
    try:
        there = record.exists()
        if there and resume == "never":
            raise UserError(f"{named}: has a run, and resume=never starts another; {instead}")
        run = _read(record, recorded)
        if there and run.get("config") != key:
            raise UserError(f"{named}: has a run of another configuration; {instead}")
        if not there and checkpoints(folder):
            raise UserError(f"{named}: has checkpoints of an unknown run (no run.json); {instead}")
    except UserError:
        lock.close()
        raise
    _rewrite(record, run)
    if not there:
        write_json(record, _begun(key))
    return Run(folder, there, lock, made)


def name_later(folder: Path) -> None:
    """Have `name_new` print the folder of a new run, which a command with a mistake removes."""
    _unnamed[folder.resolve()] = folder


def name_new(folder: Path) -> None:
    """Print the folder of a new run, once nothing can be refused any more; of others nothing."""
    if given := _unnamed.pop(folder.resolve(), None):
        print(f"run folder: {given}", flush=True)


def _announce(root: Path, run: Run | None) -> None:
    """Publish the claimed folder to other processes of this launch; None: claiming failed."""
    if path := _launch_file(root):
        write_json(path, run and str(run.path))


def occupy(
    folder: Path,
    config: dict[str, Any],
    job: str,
    recorded: Recorded = _unknown,
    instead: str = "hydra.sweep.dir another folder",
) -> Run:
    """Start or resume a job of a sweep in its folder.

    Args:
        folder: folder of the job.
        config: resolved configuration.
        job: recorded name of the job.
        recorded: see `claim`.
        instead: advice if the folder has another job.

    Raises:
        UserError: the folder has a job of another configuration, or is in use.
    """
    key, record = config_hash(config), folder / RECORD
    resumed = record.exists()
    run = _read(record, recorded)
    if resumed and run.get("config") != key:
        raise UserError(f"{folder}: has a job of another configuration; give {instead}")
    lock = _Lock.take(folder)
    if not lock:
        raise UserError(f"{folder}: another process is working there")
    _rewrite(record, run | {"job": job})
    if not resumed:
        write_json(record, _begun(key) | {"job": job})
    return Run(folder, resumed, lock)


def join(root: Path, wait: float = 600.0) -> Path:
    """Wait for the folder that rank 0 of this launch (torchrun, SLURM) claims.

    Args:
        root: folder of all runs.
        wait: seconds.

    Raises:
        UserError: no folder in that time, or rank 0 has exited.
    """
    path, started = _launch_file(root), time.time() - process_age()
    end = time.monotonic() + wait
    while path and time.monotonic() < end:
        try:
            written = path.stat().st_mtime
            claimed = json.loads(path.read_text())
        except (OSError, ValueError):
            written, claimed = 0.0, None
        if claimed and (Path(claimed) / RECORD).exists() and _Lock.in_use(Path(claimed)):
            return Path(claimed)
        # A file older than this process is from an earlier launch with the same identifier.
        if written > started:
            raise UserError(f"output_dir={root}: rank 0 of this launch has ended; see its error message")
        time.sleep(0.1)
    raise UserError(f"output_dir={root}: rank 0 of this launch has claimed no run there; do ranks share it?")


def _launch_file(root: Path) -> Path | None:
    """File in which rank 0 publishes its folder to other ranks of the launch; None without a launcher."""
    info = launch()
    return root / f".launch-{hashlib.sha256(info[1].encode()).hexdigest()[:12]}.json" if info else None


def _unfinished(root: Path, key: str, recorded: Recorded) -> Run | None:
    records = [record for record in root.glob(f"*/*/{RECORD}") if not (record.parent / DONE).exists()]
    same = [(run, record) for record in records if (run := _read(record, recorded)).get("config") == key]
    for run, record in sorted(same, key=lambda one: one[0]["started"], reverse=True):
        folder = record.parent
        lock = _Lock.take(folder)
        # Another process may have finished or discarded it meanwhile.
        if lock and record.exists() and not (folder / DONE).exists():
            _rewrite(record, run)
            return Run(folder, True, lock)
        if lock:
            lock.close()
    return None


def unfinished_before(root: Path, run: Run) -> Path | None:
    """The run begun before this one, if it was ended between its first checkpoint and its end; else None."""
    begun = {record.parent: record.stat().st_mtime for record in root.glob("*/*/run.json")}
    begun.pop(run.path, None)
    last = max(begun, key=lambda folder: begun[folder], default=None)
    if last is None or (last / DONE).exists() or not checkpoints(last) or _Lock.in_use(last):
        return None
    return last


def _claim_named(folder: Path, key: str, recorded: Recorded) -> Run:
    record = folder / RECORD
    if not record.is_file():
        raise UserError(f"resume={folder}: no run there; give a run's folder, auto or never")
    if (run := _read(record, recorded)).get("config") != key:
        raise UserError(f"resume={folder}: that run has another configuration; repeat its overrides")
    if (folder / DONE).exists():
        raise UserError(f"resume={folder}: that run is finished")
    lock = _Lock.take(folder)
    if not lock:
        raise UserError(f"resume={folder}: another process is working there")
    _rewrite(record, run)
    return Run(folder, True, lock)


def _new(root: Path, key: str) -> Run:
    while True:
        folder = root / time.strftime("%Y-%m-%d") / time.strftime("%H-%M-%S")
        for suffix in ("", *(f"-{i}" for i in range(1, 100))):
            named = folder.with_name(folder.name + suffix)
            try:
                named.mkdir(parents=True)
            except FileExistsError:
                if not named.is_dir():  # a file has this name
                    raise
                continue
            lock = _Lock.take(named)
            assert lock, "a folder made a moment ago is locked"
            write_json(named / RECORD, _begun(key))
            return Run(named, False, lock)


def _begun(key: str) -> dict[str, Any]:
    """Content of run.json for a new run."""
    return {"config": key, "started": time.time(), "threads": described()}


def _read(record: Path, recorded: Recorded) -> dict[str, Any]:
    """Read a run.json; if damaged, derive it from the configuration in its folder.

    Raises:
        UserError: the configuration is missing or unreadable too.
    """
    try:
        return read_json(record, "", started=(int, float)) or {}
    except UserError:
        config = recorded(record.parent)
    if config is None:
        raise UserError(
            f"{record}: damaged, so whether this command continues there is unknown; "
            f"remove {record.parent}, or start another run with resume=never"
        )
    return {"config": config_hash(config), "started": record.stat().st_mtime, "damaged": True}


def _rewrite(record: Path, run: dict[str, Any]) -> None:
    """Rewrite a damaged run.json."""
    if run.pop("damaged", False):
        print(f"{record}: damaged; written again from the configuration next to it", flush=True)
        write_json(record, run)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, by step."""
    paths = [p for p in (folder / "checkpoints").glob("*") if is_step(p.name) and p.is_dir()]
    return sorted(paths, key=lambda p: int(p.name))


def is_step(name: str) -> bool:
    """Whether a name is a step number, in ASCII digits."""
    return name.isascii() and name.isdigit()


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points to."""
    link = folder / "checkpoints" / "best"
    return link.resolve() if link.exists() else None

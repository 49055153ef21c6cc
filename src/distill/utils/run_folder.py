"""Run folders: one per configuration, resumed after a kill, never shared by two processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from decode.errors import UserError
from distill.utils.atomic_files import write_json
from distill.utils.launcher import launch, lived

REPORT = "report.html"

DONE = "done"
FAILED = "failed"  # folder of batches that no number came of


def config_hash(config: dict[str, Any]) -> str:
    """Of the resolved configuration, how to resume and what becomes of the result aside."""
    kept = {k: v for k, v in config.items() if k not in ("resume", "export")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Run:
    """A claimed folder; the claim ends with the process, however it ends.

    Attributes:
        path: the folder.
        resumed: it held an unfinished run of the same configuration.
    """

    path: Path
    resumed: bool
    _lock: IO[str]

    def finish(self) -> None:
        """Mark the run as complete, so that the same command starts a new one."""
        (self.path / DONE).touch()

    def close(self) -> None:
        """Let another process work there."""
        self._lock.close()

    def discard_if_empty(self) -> None:
        """Remove a folder that no work was written to."""
        families = self.path.glob("families/*/checkpoints/*")  # of drafter=auto
        worked = checkpoints(self.path) or (self.path / FAILED).exists() or any(families)
        if not (self.resumed or worked):
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # other runs of this day are in there
                self.path.parent.rmdir()


def claim(root: Path, config: dict[str, Any], resume: str) -> Run:
    """Continue the newest unfinished run of this configuration, or start one.

    Args:
        root: folder of all runs.
        config: resolved.
        resume: `auto`, `never`, or a run's folder.

    Raises:
        UserError: a named folder that is no run, belongs to another configuration, is finished
            or is in use; a root that cannot be written to.
    """
    key = config_hash(config)
    try:
        if resume not in ("auto", "never"):
            run = _claim_named(Path(resume), key)
        else:
            run = (_unfinished(root, key) if resume == "auto" else None) or _new(root, key)
        _tell(root, run)
    except OSError as error:
        raise UserError(f"output_dir={root}: {error.strerror}") from None
    except UserError:
        with suppress(OSError):
            _tell(root, None)
        raise
    return run


def _tell(root: Path, run: Run | None) -> None:
    """Let the other processes of this launch know what was claimed; None: nothing can be."""
    if there := _launch(root):
        write_json(there, run and str(run.path))


def occupy(folder: Path, config: dict[str, Any], job: str) -> Run:
    """Begin a sweep's job in its folder, or go on there.

    Args:
        folder: of the job.
        config: resolved.
        job: its name among the others, recorded.

    Raises:
        UserError: a job of another configuration was there, or a process is.
    """
    key, record = config_hash(config), folder / "run.json"
    resumed = record.exists()
    if resumed and _read(record).get("config") != key:
        raise UserError(f"{folder}: has a job of another configuration; give hydra.sweep.dir another folder")
    lock = _lock(folder)
    if not lock:
        raise UserError(f"{folder}: another process is working there")
    if not resumed:
        write_json(record, {"config": key, "started": time.time(), "job": job})
    return Run(folder, resumed, lock)


def join(root: Path, wait: float = 600.0) -> Path:
    """The folder that the first process of this launch (torchrun's, SLURM's) has claimed.

    Args:
        root: folder of all runs.
        wait: seconds.

    Raises:
        UserError: none in that time, or that process has ended.
    """
    there, born = _launch(root), time.time() - lived()
    end = time.monotonic() + wait
    while there and time.monotonic() < end:
        try:
            written = there.stat().st_mtime
            claimed = json.loads(there.read_text())
        except (OSError, ValueError):
            written, claimed = 0.0, None
        if claimed and (Path(claimed) / "run.json").exists():
            lock = _lock(Path(claimed))
            if not lock:
                return Path(claimed)
            lock.close()
        # An earlier launch may have had the same name; its processes hold no lock any more either.
        if written > born:
            raise UserError(f"output_dir={root}: rank 0 of this launch has ended; see what it says")
        time.sleep(0.1)
    raise UserError(f"output_dir={root}: rank 0 of this launch has claimed no run there; do ranks share it?")


def _launch(root: Path) -> Path | None:
    """Where ranks that somebody else starts learn which folder rank 0 has."""
    known = launch()
    return root / f".launch-{hashlib.sha256(known[1].encode()).hexdigest()[:12]}.json" if known else None


def _unfinished(root: Path, key: str) -> Run | None:
    found = [(_read(record), record.parent) for record in root.glob("*/*/run.json")]
    same = [(run["started"], folder) for run, folder in found if run.get("config") == key]
    for _, folder in sorted(same, reverse=True):
        lock = None if (folder / DONE).exists() else _lock(folder)
        # Its owner may have finished or discarded it meanwhile.
        if lock and (folder / "run.json").exists() and not (folder / DONE).exists():
            return Run(folder, True, lock)
        if lock:
            lock.close()
    return None


def _claim_named(folder: Path, key: str) -> Run:
    record = folder / "run.json"
    if not record.is_file():
        raise UserError(f"resume={folder}: no run there; give a run's folder, auto or never")
    if _read(record).get("config") != key:
        raise UserError(f"resume={folder}: that run has another configuration; repeat its overrides")
    if (folder / DONE).exists():
        raise UserError(f"resume={folder}: that run is finished")
    lock = _lock(folder)
    if not lock:
        raise UserError(f"resume={folder}: another process is working there")
    return Run(folder, True, lock)


def _new(root: Path, key: str) -> Run:
    while True:
        folder = root / time.strftime("%Y-%m-%d") / time.strftime("%H-%M-%S")
        for suffix in ("", *(f"-{i}" for i in range(1, 100))):
            named = folder.with_name(folder.name + suffix)
            try:
                named.mkdir(parents=True)
            except FileExistsError:
                if not named.is_dir():  # a file stands where a folder has to be
                    raise
                continue
            lock = _lock(named)
            assert lock, "a folder made a moment ago is locked"
            write_json(named / "run.json", {"config": key, "started": time.time()})
            return Run(named, False, lock)


def _lock(folder: Path) -> IO[str] | None:
    try:
        handle = (folder / "run.lock").open("a")
    except FileNotFoundError:  # its owner has discarded it
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    os.set_inheritable(handle.fileno(), False)
    return handle


def _read(record: Path) -> dict[str, Any]:
    try:
        run = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) and "started" in run else {}


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run, by step."""
    found = [p for p in (folder / "checkpoints").glob("*") if p.name.isdigit() and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name))


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points to."""
    link = folder / "checkpoints" / "best"
    return link.resolve() if link.exists() else None

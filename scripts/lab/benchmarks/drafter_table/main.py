"""Train what has no result yet, and print the table of all results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from benchmarks.drafter_table.arms import Run, keep, planned, train, uncommitted
from claims.cards import read_folder
from claims.tables import table
from decode.errors import UserError
from distill.config.validate import check_ranges
from distill.utils.progress import say


def drafters(cfg: DictConfig, folder: Path) -> float:
    """Train every run that has no result, one after the other; print the table of the folder of results.

    Each result is written when its run has ended, so that the command can be stopped and given again, on
    other days and machines. `scripts/lab/claims.py` writes the pages.

    Args:
        cfg: composed from the file of conf/lab/ that is named; all of them begin with conf/lab/arms.yaml.
        folder: unused; runs go below `runs`, results below `results`.

    Returns:
        The number of results of these runs.

    Raises:
        UserError: bad input, results of uncommitted changes, or runs that failed, after all others.
    """
    del folder
    check_ranges(cfg)
    runs, results = planned(cfg), Path(cfg.results)
    missing = [run for run in runs if not _result(run, results).exists()]
    if missing and (changed := uncommitted()):
        raise UserError(f"{changed}: commit it first; a result names the commit that it came from")
    common = [f"trainer={cfg.device}", *map(str, [*cfg.also, *cfg.common])]
    failed = _train(missing, runs, Path(cfg.runs), results, common, cfg.hours)
    finished = [run for run in runs if _result(run, results).exists()]
    if finished:
        print(table(read_folder(results)))
    if failed:
        raise UserError(f"benchmark drafters: {len(failed)} runs have failed: {', '.join(failed)}")
    return float(len(finished))


def _result(run: Run, results: Path) -> Path:
    return results / f"{run.name}.json"


def _train(
    missing: Sequence[Run],
    runs: Sequence[Run],
    folder: Path,
    results: Path,
    common: list[str],
    hours: float | None,
) -> list[str]:
    """Train runs until the time is over; the names of those that failed."""
    failed, by_name, begun = [], {run.name: run for run in runs}, time.monotonic()
    for number, run in enumerate(missing):
        if hours is not None and time.monotonic() - begun > 3600 * hours:
            say(f"{len(missing) - number} runs are left; the same command continues with them")
            break
        try:
            needed = [run]
            if run.after and not (folder / run.after / "checkpoints" / "best").exists():
                if run.after not in by_name:
                    raise UserError(f"arms.{run.arm}.after: no run {run.after}; add its arm to `only`")
                needed.insert(0, by_name[run.after])
            for one in needed:
                if one is not run or not _result(one, results).exists():  # made already, for another
                    train(one, folder, common)
                    keep(one, folder, results)
        except UserError as error:
            say(str(error))
            failed.append(run.name)
    return failed

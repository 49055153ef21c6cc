"""Train what has no result yet, and write the table of all results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from benchmarks.drafter_table.arms import Run, keep, planned, train
from benchmarks.drafter_table.identical import Commits, uncommitted
from benchmarks.drafter_table.page import page
from benchmarks.drafter_table.plot import plot
from benchmarks.drafter_table.table import TEMPERATURES, Result, grouped, table
from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.config.validate import check_ranges
from distill.utils.progress import say
from distill.utils.provenance import commit


def drafters(cfg: DictConfig, folder: Path) -> float:
    """Train every run that has no result, one after the other; print and write the table of all.

    Each result is written when its run has ended, so that the command can be stopped and given again, on
    other days and machines. The table has rows of the present commit and of those that train and decode
    alike, bit by bit.

    Args:
        cfg: composed from conf/lab/{distillspec,drafters,objectives,smollm2,sweep}.yaml.
        folder: unused; runs go below `runs`, results below `results`.

    Returns:
        The number of results in the table.

    Raises:
        UserError: bad input, or runs that failed, after all others.
    """
    del folder
    check_ranges(cfg)
    runs = planned(cfg)
    results, common = Path(cfg.results), list(map(str, [*cfg.also, *cfg.common]))
    trainer = f"trainer={cfg.device}"
    missing = [run for run in runs if not _result(run, results).exists()]
    if missing and (changed := uncommitted()):
        raise UserError(f"{changed}: commit it first; a result names the commit that it came from")
    failed = _train(missing, runs, Path(cfg.runs), results, [trainer, *common], cfg.hours)
    found, left_out = _comparable(runs, results, Commits(results, Path(cfg.runs), common))
    if found:
        lines = grouped(found)
        print(table(lines))
        if cfg.table:
            file = Path(cfg.table)
            file.write_text(
                page(cfg.title, lines, left_out, f"{file.stem}.svg", cfg.against), encoding="utf-8"
            )
            plot(lines, TEMPERATURES, file.with_suffix(".svg"))
    for line in left_out:
        say(line)
    if failed:
        raise UserError(f"benchmark drafters: {len(failed)} runs have failed: {', '.join(failed)}")
    return float(len(found))


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


def _comparable(runs: Sequence[Run], results: Path, commits: Commits) -> tuple[list[Result], list[str]]:
    """Results of the present commit and of those that are alike, and a line on each of the others."""
    found, left_out, present = [], [], commit().removesuffix("-dirty")
    for run in runs:
        if not _result(run, results).exists():
            continue
        card = read_scorecard(_result(run, results))
        of = card.checkpoint.commit.removesuffix("-dirty")
        if commits.alike(run, of, present):
            found.append(Result(run, card))
        else:
            left_out.append(f"{run.name} is left out: commit {of} trains or decodes otherwise; run it again.")
    return found, left_out

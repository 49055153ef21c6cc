"""Run a command under Hydra: paths as group values, one-line errors with exit codes, resuming."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from decode.errors import FollowUpError, RemoteError, TooLargeError, UserError
from distill.cli import sweep
from distill.cli.checkpoint_defaults import with_run_settings
from distill.cli.closing_line import closing_line
from distill.config.choices import options, register_choices
from distill.config.compose import compose, configurations, without_dashes
from distill.config.engine import check_engine, check_started
from distill.config.help import show_help
from distill.config.own_runs import remember
from distill.config.recorded import settings
from distill.config.run_prompts import quoted
from distill.config.validate import check_flags, check_paths, check_ranges
from distill.utils.launcher import (
    LostRankError,
    launch,
    reported_by_rank_0,
    started_by_rank_0,
    watch_parent,
)
from distill.utils.redact import hidden, printable
from distill.utils.run_folder import (
    AFTERWARDS,
    Recorded,
    Run,
    claim,
    claim_at,
    join,
    name_later,
    unfinished_before,
)

# group -> (yaml that takes a path, key of the path)
PATH_GROUPS = {"target": ("hf", "path"), "prompts": ("jsonl", "path")}
DATASET = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?<!\.txt)")  # of the Hub
NESTED = ("drafter.first", "drafter.second")  # settings that are a choice of conf/drafter themselves
TERMS = "objective.terms"  # a mapping that an override may extend
RUN_PATHS = ("output_dir", "answers", "resume", "checkpoint", "out", "store", "stores")
TARGET_PATHS = ("data", "tokenizer", "init_from")  # of scripts/lab/train_target.py
PROMPT_PATHS = ("prompts.path", "prompts.dataset", "prompts.heldout")
DRAFTER_PATHS = ("drafter.path", *NESTED, "drafter.init_from", "rollout.drafter")
PATHS = ("target.path", "rollout.store", *DRAFTER_PATHS, *PROMPT_PATHS, *RUN_PATHS, *TARGET_PATHS)
TEXTS = ("prompt", "row")  # free text; never split by a sweep
SHOWN = 4  # names of changed options in a line
FULL = {errno.ENOSPC, errno.EDQUOT}
# Disk errors that are not bugs: reported in one line, exit code 1.
DISK = {*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
Task = Callable[[DictConfig, Path], float]


def main(task: Task, config_dir: Path, config_name: str = "config") -> None:
    """Run `task(config, folder)` under Hydra; user errors print one line and exit with code 2.

    A configuration with `output_dir` gets a run folder there; others run in the current folder.

    Args:
        task: does the work and returns the metric that sweeps optimize.
        config_dir: folder of configurations.
        config_name: the primary configuration.
    """
    run: Run | None = None

    def job(cfg: DictConfig) -> float:
        folder = Path(HydraConfig.get().runtime.output_dir)
        if "output_dir" in cfg:
            remember(list(HydraConfig.get().overrides.task))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return sweep.run_job(task, cfg, folder, one_line_errors)
        with one_line_errors(run), _finishing(run):
            result = task(cfg, folder)
        return result

    def run_sweep() -> None:
        with one_line_errors():
            parts = partial(compose, config_dir=config_dir, config_name=config_name)
            plan = sweep.prepare(argv, config_dir, config_name, parts)
        overrides = [a for a in argv if not a.startswith("hydra.sweep.dir=") and a not in sweep.FLAGS]
        names = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(plan.fixed)}]"
        place = f"hydra.sweep.dir={quoted(str(plan.folder))}"
        sys.argv = [sys.argv[0], "--multirun", *overrides, names, place]
        with sweep.summed_up(plan.folder), one_line_errors():
            hydra.main(version_base="1.3", config_path=str(config_dir), config_name=config_name)(job)()

    with one_line_errors():
        show_help(config_dir, config_name)
        check_flags(sys.argv[1:], partial(without_dashes, config_dir=config_dir, config_name=config_name))
    watch_parent()
    register_choices(config_dir)  # before Hydra's own flags, such as --cfg
    with one_line_errors():
        argv = rewrite(with_run_settings(sys.argv[1:], config_dir, config_name), config_dir)
        sweeps = sweep.wanted(argv, config_dir, config_name)
    if sweeps:
        run_sweep()
        return
    # Flags are handled by Hydra.
    flags = any(a.startswith("-") for a in argv)
    with one_line_errors():
        if not flags:
            argv, run = _with_folder(argv, config_dir, config_name)
    sys.argv = [sys.argv[0], *argv]
    if flags:
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name=config_name)(job)()
    else:  # skips hydra.main's extra composition, which detects sweeps
        said, held = (closing_line(run.path), closing(run)) if run else (nullcontext(), nullcontext())
        with held, said, configurations(config_dir) as reader:
            reader.run(config_name, job, argv)
    if run:
        print(run.path, flush=True)


def run_here(
    task: Task, overrides: Sequence[str], program: str, config_dir: Path, config_name: str = "config"
) -> Path:
    """Run a command with a run folder from Python, as `main` does; errors are raised.

    Args:
        task: see `main`.
        overrides: options of the command.
        program: file that starts the command; Lightning starts other ranks with it.
        config_dir: folder of configurations.
        config_name: the primary configuration.

    Returns:
        Folder of the run.

    Raises:
        UserError: an invalid option, a sweep, or a launcher's process.
    """
    failed: list[Exception] = []

    def job(cfg: DictConfig) -> None:
        try:
            remember(list(HydraConfig.get().overrides.task))
            with _finishing(run):
                task(cfg, Path(HydraConfig.get().runtime.output_dir))
        except Exception as error:  # Hydra would print a text of its own
            failed.append(error)

    if launch():
        raise UserError("several processes are started with the command: torchrun -m foredraft train ...")
    check_flags(overrides, partial(without_dashes, config_dir=config_dir, config_name=config_name))
    argv = rewrite(with_run_settings(overrides, config_dir, config_name), config_dir)
    if sweep.wanted(argv, config_dir, config_name):
        raise UserError("a sweep runs as a command: foredraft train -m ...")
    argv, run = _with_folder(argv, config_dir, config_name)
    assert run, "the configuration has a folder of runs"
    before, sys.argv = sys.argv, [program, *argv]
    try:
        with configurations(config_dir) as reader:
            reader.run(config_name, job, argv)
        for error in failed:
            if isinstance(error, UserError):
                run.discard_if_empty()
            raise error
    finally:
        sys.argv = before
        run.close()
    return run.path


@contextmanager
def _finishing(run: Run | None) -> Iterator[None]:
    """Mark the run as complete at the end, even if a follow-up step fails."""
    try:
        yield
    except FollowUpError:
        if run:
            run.finish()
        raise
    if run:
        run.finish()


def _with_folder(argv: list[str], config_dir: Path, config_name: str) -> tuple[list[str], Run | None]:
    """Return the options plus the run's folder, and the run if this process has claimed it."""
    if any(a.startswith("hydra.run.dir=") for a in argv) and started_by_rank_0():
        return argv, None
    cfg, run = compose(argv, config_dir, config_name), None
    check_ranges(cfg)  # before the slow imports of the command
    check_paths(cfg)
    if OmegaConf.select(cfg, "rollout.engine"):
        check_started(cfg.rollout)
    if "taps" in cfg:
        check_engine(cfg)
    if "output_dir" not in cfg:
        return argv, None
    if (info := launch()) and not info[0]:
        folder = join(Path(cfg.output_dir))
    else:
        resolved: Any = OmegaConf.to_container(cfg, resolve=True)
        root, resume, recorded = Path(cfg.output_dir), str(cfg.resume), partial(settings, current=cfg)
        if named := sweep.run_folder(argv, config_dir, config_name):
            run = claim_at(named, root, resolved, resume, recorded)
        else:
            run = claim(root, resolved, resume, recorded)
            _name_unfinished(root, run, resolved, recorded)
        folder = run.path
        if run.resumed:
            print(f"resuming: {folder}", flush=True)
        else:
            name_later(folder)
    argv = [argument for argument in argv if not argument.startswith("hydra.run.dir=")]
    return [*argv, f"hydra.run.dir={quoted(str(folder))}"], run


def _name_unfinished(root: Path, run: Run, config: dict[str, Any], recorded: Recorded) -> None:
    """Print one line about a run that was killed before, and has other options than this new one."""
    old = None if run.resumed else unfinished_before(root, run)
    if old and (before := recorded(old)) and (changed := sorted(_changed(before, config))):
        shown = ", ".join(changed[:SHOWN]) + f" and {len(changed) - SHOWN} more" * (len(changed) > SHOWN)
        print(
            f"a new run: the one before, {old}, is not finished and has other values of {shown}; "
            "its own options continue it",
            flush=True,
        )


def _changed(old: Any, new: Any, name: str = "") -> list[str]:
    """Dotted names of the settings that differ; values may be secret, and are not given."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [name] if old != new else []
    keys = [key for key in {**old, **new} if name or key not in AFTERWARDS]
    return [
        one
        for key in keys
        for one in _changed(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    ]


@contextmanager
def one_line_errors(
    run: Run | None = None, leave: Callable[[int, str], None] | None = None
) -> Iterator[None]:
    """Print user errors as one line with exit code 2, disk and memory errors with exit code 1.

    Args:
        run: removed if it has no results.
        leave: called with exit code and text, instead of exiting.
    """
    lost = False
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        if run:
            run.discard_if_empty()
        code, text = 2, f"error: {error}"
    except (TooLargeError, LostRankError, RemoteError, FollowUpError) as error:
        lost = isinstance(error, LostRankError)
        code, text = 1, f"error: {error}"
    except KeyboardInterrupt:
        hint = f"; the same command continues in {run.path}" if run else ""
        code, text = 130, f"interrupted{hint}"
    except BrokenPipeError:  # as in `| head`
        with suppress(OSError, ValueError):  # buffered output is flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        cause = _disk_error(error)
        if cause is None:
            raise
        code, text = 1, f"error: {_disk_line(cause)}"
    else:
        return
    if leave:
        return leave(code, text)
    _report(text, lost)
    raise SystemExit(code)


def _report(text: str, lost: bool) -> None:
    if lost or not reported_by_rank_0():  # a rank 0 that was killed has reported nothing
        print(printable(hidden(text)), file=sys.stderr, flush=True)


def _disk_error(error: BaseException | None) -> OSError | None:
    """The disk error that caused an exception, if any."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return error
        error = error.__cause__ or error.__context__
    return None


def _disk_line(error: OSError) -> str:
    """Describe a disk error with its path; for a full disk, also its mount point and free space."""
    text, name = " ".join(str(error.strerror).split()), error.filename2 or error.filename
    if not name:
        return text
    path = Path(re.sub(r"(\.\d+)?\.tmp(?=/|$)", "", str(name)))  # name of the final file
    text = f"{text} ({path})"
    if error.errno == errno.EFBIG:
        return f"{text}: the file exceeds a size limit; remove it (ulimit -f), and run the same command again"
    if error.errno not in FULL:
        return text
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    disk = next(parent for parent in (folder, *folder.parents) if parent.is_mount())
    free = shutil.disk_usage(folder).free / 2**20
    return f"{text}: the disk at {disk} has {free:.0f} MiB left; make room, and run the same command again"


def rewrite(argv: Sequence[str], config_dir: Path) -> list[str]:
    """Rewrite `target=/a/folder` as `target=hf target.path='/a/folder'`; quote other paths and texts."""
    # Hydra accepts flags only before or after all overrides.
    argv = sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))
    sweeping = argv[:1] in (["-m"], ["--multirun"])
    result: list[str] = []
    for argument in argv:
        key, sign, value = argument.partition("=")
        if not sign or argument.startswith("-"):
            result.append(argument)
        elif key == "hydra.run.dir" and any(other.startswith("hydra.run.dir=") for other in result):
            continue  # Lightning repeats it, unquoted, for its ranks
        elif key == "prompts" and DATASET.fullmatch(value) and not Path(value).exists():
            result += ["prompts=jsonl", "prompts.path=null", f"prompts.dataset={value}"]
        elif key in PATH_GROUPS and not _is_choice(value, options(config_dir, key), sweeping):
            name, where = PATH_GROUPS[key]
            result += [f"{key}={name}", f"{key}.{where}={_quote_path(value, sweeping)}"]
        elif key in NESTED and _is_choice(value, options(config_dir, "drafter"), sweeping):
            result.append(f"drafter@{argument}")
        elif key.startswith(f"{TERMS}.") or (key == TERMS and value.startswith("{")):
            result.append(f"++{argument}")
        elif key in TEXTS:
            result.append(f"{key}={_quote_text(value)}")
        elif value != "null" and (key in PATHS or value.startswith(("/", "~/", "./", "../"))):
            result.append(f"{key}={_quote_path(value, sweeping)}")
        else:
            result.append(argument)
    return result


def _is_choice(value: str, names: Sequence[str], sweeping: bool) -> bool:
    parts = value.split(",") if sweeping and not Path(value).exists() else [value]
    are_names = [part in names for part in parts]
    if any(are_names) and not all(are_names):
        raise UserError(f"{value}: names and paths in one sweep; write all of them as paths")
    return all(are_names)


def _quote_path(value: str, sweeping: bool) -> str:
    exists = Path(value).exists()
    if not exists and value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1:
        return value  # already quoted for Hydra
    parts = value.split(",") if sweeping and not exists else [value]
    return ",".join(quoted(str(Path(part).expanduser()) if part[:1] == "~" else part) for part in parts)


def _quote_text(value: str) -> str:
    # OmegaConf: ${ starts an interpolation, and backslashes before it escape.
    return quoted(re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value))

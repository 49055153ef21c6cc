"""Weights & Biases: curves, scorecards, histograms, the report and checkpoints of a run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.served import BY_ENGINE
from distill.loggers.base import COLUMNS, FailSafe, accepted_lengths, rows, setting
from distill.loggers.naming import run_name, tags
from distill.scoring.run_scorecards import scorecards
from distill.utils import redact
from distill.utils.progress import bar, say
from distill.utils.provenance import commit, digest
from distill.utils.run_folder import REPORT, best, checkpoints
from distill.utils.run_record import RunRecord, identity
from drafters.checkpoint import io as checkpoint_io

STEP = "trainer/global_step"
JOURNAL = "history.jsonl"  # next to W&B's own files: [step, numbers] per line
UPLOAD = 600.0  # seconds to wait for weights after a run that succeeded
FINISH = 60.0  # seconds to wait for everything else
_turn = threading.Lock()
_busy: list[threading.Thread] = []  # threads that wait for a server
WEIGHTS_NOTE = {
    "end": "; best and last weights too, when the run ends",
    "always": "; all weights too",
    "never": "",
}


class Wandb(FailSafe, Logger):
    """Logs to W&B: in WANDB_MODE if set, else online if an API key is set, else offline.

    A run's folder is one W&B run: a resumed run continues it, and repeated steps are not logged twice.
    Offline, W&B writes 32 KB at a time and a kill loses the rest, so a resumed run rewrites the record from a
    journal.

    Args:
        record: folder and options of the run; choices that are made later are added at save points.
        project: W&B project.
        weights: which checkpoints become artifacts: `end`, `always` or `never`.
    """

    label = "W&B"

    def __init__(self, record: RunRecord, project: str, weights: str) -> None:
        super().__init__()
        self.record, self.project, self.weights, self.folder = record, project, weights, record.folder
        self._identity = identity(self.folder)
        self._id = digest(json.dumps(self._identity, sort_keys=True))[:8] if self._identity else None
        self._run: Any = None
        self._logged: dict[str, int] = {}

    @property
    @override
    def name(self) -> str:
        return self.project

    @property
    @override
    def version(self) -> str | None:
        return self._id

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """No-op: W&B gets the configuration at its start."""

    @property
    def config(self) -> dict[str, Any]:
        """The options of the run, what chose those that were open, and the commit."""
        options = self.record.options
        return {**options.values, "chosen": options.chosen, "commit": commit()}

    @rank_zero_only
    def begin(self) -> None:
        """Start or continue the W&B run, and print its location."""
        if os.environ.get("WANDB_MODE") == "disabled":
            self._off |= {"curves", "scorecards", "reports and weights"}
        self._try("curves", self._begin)

    def _begin(self) -> Any:
        if self._run is not None:
            return self._run
        mode = os.environ.get("WANDB_MODE")
        try:
            self._run = self._init(mode or ("online" if _key_known() else "offline"))
        except Exception as error:  # wandb, the key, the network or the server: the run continues
            if mode == "offline":
                raise
            say(f"W&B: {redact.reason(error)}; this run is recorded offline")
            wandb.teardown()  # otherwise the failed run blocks the next `init`
            self._run = self._init("offline")
        self._continue(self._run)
        place = self._run.url or f"offline, `wandb sync {self._run.settings.sync_dir}` uploads it"
        say(f"W&B: {place}{WEIGHTS_NOTE[self.weights]}")
        return self._run

    def _continue(self, run: Any) -> None:
        """Read the entries of earlier processes of this run; offline, log them again."""
        place = Path(run.settings.wandb_dir)
        self._journal = place / JOURNAL
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("]")]  # the last line may be truncated
        self._logged = {_kind(metrics): step for step, metrics in entries}
        older = [p for p in place.glob(f"*run-*-{run.id}") if p != Path(run.settings.sync_dir)]
        if not older or any(p.name.startswith("run-") or list(p.glob("*.synced")) for p in older):
            return
        for step, metrics in entries:
            run.log({**metrics, STEP: step})
        for checkpoint in checkpoints(self.folder):
            self._saved(self.folder, checkpoint)
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)  # the killed run's writer may still write there

    def _init(self, mode: Any) -> Any:
        settings = wandb.Settings(finish_timeout=FINISH, finish_timeout_raises=True)
        options = self.record.options.values
        with _arguments_without_secrets():
            run = wandb.init(
                project=self.project,
                name=run_name(options, str((self._identity or {}).get("job", ""))),
                tags=tags(options),
                dir=self.folder,
                id=self._id,
                resume="allow",
                mode=mode,
                config=self.config,
                settings=settings,
            )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of one step, unless this or a later one was logged before."""
        if step is not None:
            self._try("curves", lambda: self._log(dict(metrics), step))

    def _log(self, metrics: dict[str, float], step: int) -> None:
        run, kind = self._begin(), _kind(metrics)
        if step <= self._logged.get(kind, -1):
            return
        run.log({**metrics, STEP: step})
        self._logged[kind] = step
        with self._journal.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")

    def _later(self, what: str, work: Callable[[], object]) -> None:
        """Do `work` in a thread, so that training does not wait for a server."""

        def turn() -> None:
            with _turn:
                try:
                    if thread in _busy and what not in self._off:
                        work()
                except Exception as error:  # as in `_try`; the thread's result is not read
                    if thread in _busy:  # the W&B run has not been finished yet
                        self._turn_off(what, error)

        thread = threading.Thread(target=turn, daemon=True)
        _busy.append(thread)
        thread.start()

    @rank_zero_only
    def saved(self, folder: Path, checkpoint: Path) -> None:
        """Log a checkpoint's scorecard, and its weights with logger.weights=always."""
        self._try("scorecards", lambda: self._saved(folder, checkpoint))

    def _saved(self, folder: Path, checkpoint: Path) -> None:
        run, best_checkpoint = self._begin(), best(folder)
        run.config.update(self.config, allow_val_change=True)
        cards = scorecards(folder)
        if card := cards.get(int(checkpoint.name)):
            lines: list[Any] = [line for one in cards.values() for line in rows(one)]
            histograms = {
                f"accepted_length/{setting(row)}": _histogram(accepted_lengths(row)) for row in card.rows
            }
            values = {**histograms, "scorecard": wandb.Table(columns=["step", *COLUMNS], data=lines)}
            self._later("scorecards", lambda: run.log({**values, STEP: card.checkpoint.step}))
        if top := cards.get(int(best_checkpoint.name)) if best_checkpoint else None:
            head = top.headline
            speedup = BY_ENGINE if head.speedup is None else head.speedup
            summary = {"step": top.checkpoint.step, "tau": head.tau, "tau_source": head.source}
            summary |= {"speedup": speedup, "decode": head.decode}
            run.summary.update({f"best/{name}": value for name, value in summary.items()})
        if self.weights == "always":
            self._upload(checkpoint, ["last"] + ["best"] * (checkpoint == best_checkpoint))

    @rank_zero_only
    def ended(self, folder: Path) -> None:
        """Log the report, and weights with logger.weights=end."""
        self._try("reports and weights", lambda: self._ended(folder))

    def _ended(self, folder: Path) -> None:
        run, last = self._begin(), (folder / "checkpoints" / "last").resolve()
        if (report := folder / REPORT).exists():
            artifact = wandb.Artifact(f"report-{run.id}", type="report")
            artifact.add_file(str(report), policy="immutable", skip_cache=True)
            self._later("reports", lambda: run.log({"report": wandb.Html(report, inject=False)}))
            self._later("reports", lambda: run.log_artifact(artifact))
        if self.weights == "end" and last.is_dir():
            top = best(folder) or last
            for checkpoint in dict.fromkeys([top, last]):
                self._upload(checkpoint, ["best"] * (checkpoint == top) + ["last"] * (checkpoint == last))

    def _upload(self, checkpoint: Path, aliases: list[str]) -> None:
        """Upload a checkpoint's files in place, without a copy and without the trainer's state."""
        run, card = self._begin(), checkpoint / "score.json"
        values = read_scorecard(card).to_json() if card.exists() else {}
        values |= values.pop("headline", {})
        metadata = {k: v for k, v in values.items() if isinstance(v, str | int | float)}
        artifact = wandb.Artifact(f"drafter-{run.id}", type="model", metadata=metadata)
        files = {p for name in checkpoint_io.FILES for p in checkpoint.glob(name)} | (
            {card} if card.exists() else set()
        )
        for path in sorted(files):
            artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)

        def upload() -> None:
            logged = run.log_artifact(artifact, aliases=[f"step-{checkpoint.name}", *aliases])
            if run.url:
                with suppress(Exception):  # `finish` reports missing uploads
                    logged.wait()

        self._later("weights", upload)


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Hide secrets in sys.argv, which W&B records."""
    argv = sys.argv
    sys.argv = [argv[0], *map(redact.override, argv[1:])]
    try:
        yield
    finally:
        sys.argv = argv


def _kind(metrics: Mapping[str, float]) -> str:
    """Prefixes of the names, such as `train`."""
    return " ".join(sorted({name.partition("/")[0] for name in metrics if "/" in name}))


def _histogram(counts: list[int]) -> wandb.Histogram:
    return wandb.Histogram(np_histogram=(np.array(counts), np.arange(len(counts) + 1) - 0.5))


def _key_known() -> bool:
    """Whether W&B has an API key, in the environment or from `wandb login`."""
    return bool(wandb.login(prompt=False, verify=False))


def finish(failed: bool) -> None:
    """Finish the W&B run; `wandb sync` can upload the rest."""
    assert wandb.run
    folder, end = wandb.run.settings.sync_dir, time.monotonic() + (FINISH if failed else UPLOAD)
    with bar(1, "W&B: finishing", "", leave=False):
        try:
            for thread in _busy:
                thread.join(max(0.0, end - time.monotonic()))
            wandb.finish(exit_code=int(failed))
        except Exception as error:  # everything is on disk as well
            say(f"W&B: {redact.reason(error)}; `wandb sync {folder}` uploads the rest")
        finally:
            _busy.clear()

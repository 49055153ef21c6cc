"""Whether two commits train and decode alike, so that a table may have rows of both."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.drafter_table.arms import TRAIN, Run
from decode.errors import UserError
from decode.hardware import hardware
from distill.utils.atomic_files import write_json
from distill.utils.progress import say

ROOT = TRAIN.parent
# What training and decoding depend on; what is benchmarked is none of it
SOURCE = ("src", "conf", "data", "constraints.txt")
BENCHMARKS = ("conf/lab/", "conf/benchmark_")  # the second until they moved
# What a short run replaces, so that it cannot tell a change there
ANSWERS = tuple(
    f"conf/{name}.yaml"
    for name in (
        *("prompts/bundled", "prompts/jsonl", "prompts/mix", "rollout/hf", "experiment/smollm2"),
        *("target/pocket", "target/smollm2", "target/smollm2_gguf"),
    )
)
RECORD = "identical.json"
SHORT = [  # a run of some seconds, by which commits are compared
    *("prompts.limit=12", "prompts.self=0", "rollout.max_new_tokens=32", "batch_size=4", "try_largest=false"),
    *("score.replay_prompts=4", "score.prompts=1", "score.audit_prompts=1", "score.max_new_tokens=24"),
]
STEPS = 3


class Commits:
    """Knows which commits give bit-identical runs of an arm; what short runs gave is kept in a file.

    Args:
        results: folder of that file.
        runs: folder of the runs, of which some read others.
        common: words of every run.
    """

    def __init__(self, results: Path, runs: Path, common: Sequence[str]) -> None:
        self.file, self.runs, self.common = results / RECORD, runs, list(common)
        self.machine = f"{hardware(torch.device('cpu'))}, torch {torch.__version__}"
        self.digests: dict[str, dict[str, str]] = {}  # machine -> arm and what decides its run -> digest
        with suppress(FileNotFoundError):
            self.digests = json.loads(self.file.read_text())

    def alike(self, run: Run, commit: str, other: str) -> bool:
        """Whether both commits train the same weights and accept the same drafts.

        Raises:
            UserError: a commit is not in this repository.
        """
        if commit == other:
            return True
        files, others = _source(commit), _source(other)
        changed = {path for path in files.keys() | others.keys() if files.get(path) != others.get(path)}
        if not changed:
            return True
        if not changed.isdisjoint(ANSWERS):
            return False
        digest = self._digest(run, commit)
        return bool(digest) and digest == self._digest(run, other)

    def _digest(self, run: Run, commit: str) -> str:
        """Hash of the weights and the replayed counts of a short run of a commit, once on each machine.

        "" if it fails, which is not kept.
        """
        decides = [_source(commit), run.words, self.common]
        name = f"{run.arm} {hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]}"
        known = self.digests.setdefault(self.machine, {})
        if name not in known:
            say(f"{run.name}: a short run of commit {commit}, to compare it")
            if not (digest := self._run_commit(run, commit)):
                return ""
            known[name] = digest
            write_json(self.file, self.digests)
        return known[name]

    def _run_commit(self, run: Run, commit: str) -> str:
        with TemporaryDirectory(prefix="commit-") as folder:
            tree = Path(folder) / "tree"
            _git("worktree", "add", "--detach", str(tree), commit)
            try:
                return self._short_run(run, commit, tree, Path(folder) / "runs")
            finally:
                _git("worktree", "remove", "--force", str(tree))

    def _short_run(self, run: Run, commit: str, tree: Path, runs: Path) -> str:
        words = [*self.common, *run.words_in(self.runs), *SHORT, "logger=csv", f"output_dir={runs}"]
        words += [f"trainer.max_steps={STEPS}", f"score.every={STEPS}"] if run.steps else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, "train.py", *words, f"hydra.run.dir={runs / 'run'}"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:  # an older commit may not know the drafter or an option
            say(f"{run.name}: its short run has failed at {commit}: {done.stderr.strip()[-300:]}")
            return ""
        best = runs / "run" / "checkpoints" / "best"
        hashed = hashlib.sha256()
        for file in sorted(best.glob("*.safetensors")):  # one whose drafter has weights
            hashed.update(file.read_bytes())
        rows = json.loads((best / "score.json").read_text())["rows"]
        hashed.update(json.dumps([row["replay"] and row["replay"]["counts"] for row in rows]).encode())
        return hashed.hexdigest()[:16]


@cache
def _source(commit: str) -> dict[str, str]:
    """Files of a commit that training and decoding depend on, and their blobs."""
    files: dict[str, str] = {}
    for line in _git("ls-tree", "-r", commit, "--", *SOURCE).splitlines():
        blob, path = line.split("\t")
        if not path.startswith(BENCHMARKS):
            files[path] = blob
    return files


def uncommitted() -> str:
    """The first changed file that results depend on; "" if all are committed."""
    lines = _git("status", "--porcelain", "--", *SOURCE, f":!{BENCHMARKS[0]}*").splitlines()
    return next(iter(lines), "")[3:]


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {words[0]}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout

"""What is trained: the runs that a configuration asks for, and how one is made."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.scoring.compare import scorecard
from distill.utils.atomic_files import write_json
from distill.utils.progress import say

ROOT = Path(__file__).resolve().parents[4]
TRAIN = ROOT / "train.py"
SOURCE = ("src", "conf", "data", "constraints.txt", ":!conf/lab")  # what a run depends on
KEYS = {"words", "steps", "after"}


class Run(NamedTuple):
    """One training run.

    Attributes:
        arm: what it is called in the table.
        steps: of training; 0: nothing is trained.
        seed: of weights, order of the rows and sampled anchors.
        words: of train.py.
        after: name of another run, whose folder is read by `words`; "": none.
    """

    arm: str
    steps: int
    seed: int
    words: tuple[str, ...]
    after: str = ""

    def words_in(self, folder: Path) -> list[str]:
        """`words` with the folder of the runs filled in."""
        return [word.replace("{runs}", str(folder.resolve())) for word in self.words]

    @property
    def name(self) -> str:
        """Of its folder and its result."""
        return f"{self.arm}-{self.steps}-{self.seed}"


def planned(cfg: DictConfig) -> list[Run]:
    """All runs of a configuration: of its arms, in their order, or of the sweep of a drafter.

    Raises:
        UserError: an unknown arm or key; see also `_swept`.
    """
    if "of" in cfg:
        return _swept(cfg)
    arms: Any = OmegaConf.to_container(cfg.arms, resolve=True)
    names = list(cfg.only) or list(arms)
    if unknown := [name for name in names if name not in arms]:
        raise UserError(f"only: no arm {unknown[0]}; there are {', '.join(arms)}")
    runs: list[Run] = []
    for name in names:
        arm = arms[name]
        if wrong := set(arm) - KEYS:
            raise UserError(f"arms.{name}.{min(wrong)}: no such key; there are {', '.join(sorted(KEYS))}")
        words = tuple(arm["words"]), arm.get("after", "")
        runs += [Run(name, steps, seed, *words) for steps, n in arm["steps"].items() for seed in range(n)]
    return runs


def _swept(cfg: DictConfig) -> list[Run]:
    """Runs of a drafter by its recipe, then with each value of each option; see conf/lab/sweep.yaml.

    Raises:
        UserError: a drafter without options to sweep, or without such an option.
    """
    options: Any = OmegaConf.to_container(cfg.options)
    if cfg.of not in options:
        raise UserError(f"of={cfg.of}: no options to sweep; there are some of {', '.join(options)}")
    values = options[cfg.of]
    if unknown := [name for name in cfg.only if name not in values]:
        raise UserError(f"only: no option {unknown[0]}; there are {', '.join(values)}")
    changed = [(name, value) for name in cfg.only or values for value in values[name]]
    arms = {"recipe": []} | {
        f"{name.rpartition('.')[2]}={value}": [f"{name}={value}"] for name, value in changed
    }
    return [
        Run(arm, steps, seed, (f"drafter={cfg.of}", *words))
        for arm, words in arms.items()
        for steps in cfg.steps
        for seed in range(cfg.seeds)
    ]


def train(run: Run, folder: Path, common: list[str]) -> None:
    """Train in `folder`/<name>; an interrupted run continues.

    Raises:
        UserError: it has failed.
    """
    words = run.words_in(folder)
    steps = [f"trainer.max_steps={run.steps}", f"score.every={run.steps}"] if run.steps else []
    place = folder.resolve() / run.name
    options = [f"seed={run.seed}", f"output_dir={folder.resolve()}", f"hydra.run.dir={place}", "logger=csv"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    say(f"{run.name}: train.py {' '.join([*words, *steps])}")
    command = [sys.executable, str(TRAIN), *common, *words, *steps, *options]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise UserError(f"benchmark drafters: {run.name} has failed; see what it says above")


def uncommitted() -> str:
    """The first changed file that runs depend on; "" if all are committed."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git status: {done.stderr.strip().splitlines()[-1]}")
    return next(iter(done.stdout.splitlines()), "")[3:]


def keep(run: Run, folder: Path, results: Path) -> None:
    """Write the scorecard of a finished run, without its texts, to `results`."""
    results.mkdir(parents=True, exist_ok=True)
    card = scorecard(folder / run.name)
    write_json(results / f"{run.name}.json", replace(card, samples=[]).to_json())

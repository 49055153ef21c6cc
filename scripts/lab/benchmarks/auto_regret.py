"""scripts/lab/benchmark.py auto: what `drafter=auto` loses against the best family given the whole budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from benchmarks.common import conditions, encode, load_drafter, load_inputs, span
from benchmarks.regret import spread
from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from distill.config.validate import check_ranges
from distill.scoring.tables import grid
from distill.search.state import RECORD
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar, say
from drafters.base import Drafter

TRAIN = Path(__file__).resolve().parents[3] / "train.py"


class Runner(NamedTuple):
    """A run's drafter, with the plan that the run chose for it.

    Attributes:
        name: `auto`, or the family that had all of the budget.
        drafter: trained.
        plan: of its scorecard.
        minutes: that the run took.
        family: of the drafter.
    """

    name: str
    drafter: Drafter
    plan: Plan
    minutes: float
    family: str


def auto_regret(cfg: DictConfig, folder: Path) -> float:
    """Run `drafter=auto`, then each family alone with the same budget; race what came of them.

    Every run makes its own rollouts, so all pay for them alike. Drafters decode the same held-out prompts
    in turns, each by the plan that its run settled on; none was chosen by these prompts.

    Args:
        cfg: composed from conf/lab/auto.yaml.
        folder: unused; runs go below `runs`, the result to `out`.

    Returns:
        The regret: how much faster the best family by itself is, in the median.

    Raises:
        UserError: bad input, or a run that failed.
    """
    del folder
    check_ranges(cfg)
    names = [str(name) for name in cfg.families]
    runs = {name: _train(cfg, name, [name] if name != "auto" else names) for name in ["auto", *names]}
    target, chat, _, held = load_inputs(cfg)
    runners = [_runner(name, run, target) for name, run in runs.items()]
    ids = encode(chat, held[: cfg.score.prompts])
    with open_dict(cfg):
        cfg.checkpoint = str(runs["auto"] / "checkpoints" / "best")
    with conditions(cfg, target) as found:
        speeds = _race(cfg, target, runners, ids)
    card = summary(runners, speeds) | {"what": "auto", "budget_minutes": cfg.minutes}
    card |= {"prompts": len(ids), "batch_size": cfg.batch_size, **found}
    write_json(Path(cfg.out), card)
    print(described(card))
    return card["regret"]


def _train(cfg: DictConfig, name: str, families: Sequence[str]) -> Path:
    """The folder of a finished run; one that was done before is taken as it is."""
    place = (Path(cfg.runs) / name).absolute()
    done = [p.parent for p in place.glob("*/*/done")]
    if not done:
        say(f"{name}: drafter=auto with {', '.join(families)}, {cfg.minutes:g} min")
        command = [sys.executable, str(TRAIN), "drafter=auto", f"drafter.families=[{','.join(families)}]"]
        command += [f"drafter.minutes={float(cfg.minutes)}", f"score.batch_sizes=[{cfg.batch_size}]"]
        ours = [o for o in HydraConfig.get().overrides.task if re.match(r"(target|prompts)[.=]", o)]
        command += [f"output_dir={place}", "logger=csv", *ours, *cfg.overrides]
        if subprocess.run(command, check=False).returncode:
            raise UserError(f"benchmark auto: the run of {name} has failed; see what it says above")
        done = [p.parent for p in place.glob("*/*/done")]
    return done[0]


def _runner(name: str, run: Path, target: Target) -> Runner:
    record = json.loads((run / RECORD).read_text())
    drafter = load_drafter(str(run / "checkpoints" / "best"), target)
    plan = plan_of(record["result"]["shape"])
    return Runner(name, drafter, plan, record["spent"] / 60, record["result"]["winner"])


def _race(
    cfg: DictConfig, target: Target, runners: Sequence[Runner], ids: Sequence[list[int]]
) -> list[list[float]]:
    """Tokens a CPU second of every runner in every repeat, prefill included; they take turns at batches."""
    size, new = cfg.batch_size, cfg.score.max_new_tokens
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    options: dict[str, Any] = {"sampler": Sampler(cfg.temperature), "seed": cfg.seed}
    options |= {"stop": stop_tokens(target), "max_new_tokens": new}

    def decode(runner: Runner, part: Sequence[list[int]]) -> tuple[int, float]:
        verifier = runner.drafter.verifier(target)
        verifier.tap(runner.drafter.taps)
        begun = time.process_time()
        outputs = generate(verifier, runner.drafter, part, plan=runner.plan, **options).outputs
        return sum(len(o.tokens) for o in outputs), time.process_time() - begun

    for runner in runners:
        decode(runner, parts[0])  # warm up
    speeds: list[list[float]] = [[] for _ in runners]
    with bar(cfg.score.repeats, "race", "repeats", leave=False) as shown:
        for repeat in range(cfg.score.repeats):
            sums = np.zeros((len(runners), 2))
            for number, part in enumerate(parts):
                turn = (repeat + number) % len(runners)  # nobody always goes first
                for i in [*range(turn, len(runners)), *range(turn)]:
                    sums[i] += decode(runners[i], part)
            for own, (tokens, seconds) in zip(speeds, sums, strict=True):
                own.append(float(tokens / seconds))
            shown.update()
    return speeds


def summary(runners: Sequence[Runner], speeds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Every single family's speed over auto's, the first; the fastest of them is what auto regrets."""
    rows = []
    for runner, own in zip(runners, speeds, strict=True):
        ratios = [a / b for a, b in zip(own, speeds[0], strict=True)]
        rows.append(
            {
                "run": runner.name,
                "family": runner.family,
                "decode": runner.plan.name,
                "minutes": runner.minutes,
                "tokens_per_cpu_second": float(np.median(own)),
                "over_auto": float(np.median(ratios)),
                "over_auto_interval": spread(ratios),
            }
        )
    best = max(rows[1:], key=lambda row: row["over_auto"])
    interval = [end - 1 for end in best["over_auto_interval"]]
    return {"rows": rows, "best": best["run"], "regret": best["over_auto"] - 1, "regret_interval": interval}


def described(card: dict[str, Any]) -> str:
    """For a terminal."""
    head = ["run", "family", "decode", "minutes", "tokens/CPU s", "over auto"]
    lines = [
        [
            row["run"],
            row["family"],
            row["decode"],
            f"{row['minutes']:.2f}",
            f"{row['tokens_per_cpu_second']:.0f}",
            "{:.3f} ({:.3f}..{:.3f})".format(row["over_auto"], *row["over_auto_interval"]),
        ]
        for row in card["rows"]
    ]
    low, high = card["regret_interval"]
    return (
        f"{grid(head, lines)}\nregret against {card['best']} with all {card['budget_minutes']:g} min: "
        f"{card['regret']:.1%} ({low:.1%}..{high:.1%}); batch {card['batch_size']}, {card['prompts']} "
        f"prompts, {card['repeats']} repeats, {card['hardware']}, "
        f"load {span(card['load_average'], 2)}"
    )

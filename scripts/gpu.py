"""What is to be measured on a GPU, in one go: tests, a training run, decoding and batches, with its name.

Writes outputs/gpu/<name of the GPU>.md. On a machine without one it prints what it would run.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import torch

from decode.hardware import hardware
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
BEST = "<best>"  # stands for the trained checkpoint


class Step(NamedTuple):
    """A command, and what it shows."""

    shows: str
    command: list[str]


def steps(accelerator: str, overrides: list[str]) -> list[Step]:
    """Everything, in order: later commands read the checkpoint of the training run."""
    device, out = f"trainer.accelerator={accelerator}", "outputs/gpu"
    benchmark = [sys.executable, "scripts/lab/benchmark.py"]
    short = ["experiment=quick"] if accelerator == "cpu" else []
    checkpoint = [f"checkpoint={BEST}", device, *overrides]
    tests = [Step("tests marked gpu", [sys.executable, "-m", "pytest", "-q", "-m", "gpu"])]
    return [
        *(tests if accelerator == "gpu" else []),
        Step(
            "rollouts, training steps and the scores of every save point",
            [sys.executable, "train.py", "drafter=eagle", device, f"output_dir={out}", *short, *overrides],
        ),
        Step(
            "tokens a second against Hugging Face's decoders, batch 1",
            [*benchmark, "decode", *checkpoint, f"out={out}/decode.json"],
        ),
        Step(
            "where a batch stops paying: batches of 1 to 32",
            [*benchmark, "batch", *checkpoint, f"out={out}/batch.json"],
        ),
        Step(
            "the fastest draft at batch 1 and 8",
            [sys.executable, "-m", "foredraft", "advise", *checkpoint, "batch_sizes=[1,8]"],
        ),
    ]


def newest_best() -> str:
    """The best checkpoint of the newest run."""
    runs = sorted((ROOT / "outputs" / "gpu").glob("*/*/checkpoints/best"))
    if not runs:
        raise SystemExit("error: the training run has left no checkpoint in outputs/gpu")
    return str(runs[-1])


def main(accelerator: str, overrides: list[str]) -> int:
    """Run all steps and write the page; 1 if one of them failed."""
    listed = steps(accelerator, overrides)
    if accelerator == "gpu" and not torch.cuda.is_available():
        print("no GPU here; on a machine with one this would run:")
        for step in listed:
            print(f"  {step.shows}:\n    {shlex.join(['python', *step.command[1:]])}")
        return 0
    name = hardware(torch.device("cuda" if accelerator == "gpu" else "cpu"))
    parts, failed = [f"# Measured on {name}\n\nAt commit {commit()}.\n"], 0
    for step in listed:
        command = [newest_best().join(word.split(BEST)) if BEST in word else word for word in step.command]
        print(f"-- {step.shows}", flush=True)
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        print(done.stdout, end="", flush=True)
        failed += done.returncode != 0
        parts.append(f"## {step.shows}\n\n```\n{done.stdout.strip()}\n```\n")
    page = ROOT / "outputs" / "gpu" / f"{name.replace('/', '-').replace(' ', '_')}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts))
    print(f"written: {page.relative_to(ROOT)}")
    return int(failed > 0)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of every command, as score.prompts=4")
    parser.add_argument("--accelerator", default="gpu", choices=("gpu", "cpu"), help="cpu: a shorter run")
    given = parser.parse_args()
    raise SystemExit(main(given.accelerator, given.overrides))

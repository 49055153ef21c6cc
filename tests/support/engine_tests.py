"""For tests of engines: scripts in their environments, and a drafter that knows a few texts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from decode.model.target import Target
from drafters.base import Batch, Drafter


def ask_script(python: Path, script: Path, *words: Any, variables: Mapping[str, str] | None = None) -> Any:
    """What a script prints last, as JSON, in an environment without foredraft.

    Args:
        python: interpreter of the environment.
        script: to run.
        words: arguments; those that are neither text nor paths are given as JSON.
        variables: environment variables beyond those of this process.
    """
    given = [word if isinstance(word, str | Path) else json.dumps(word) for word in words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, script, *given],
        capture_output=True,
        text=True,
        check=False,
        env=environment | dict(variables or {}),
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def fit(drafter: Drafter, target: Target, batch: Batch, rate: float, steps: int) -> Drafter:
    """Train on the tokens of a batch by Adam; returns the drafter, frozen."""
    optimizer = torch.optim.Adam(drafter.parameters(), rate)
    for _ in range(steps):
        losses = []
        for step in drafter.unroll(batch, target):
            wanted = batch.tokens.flatten()[step.anchor + 1 + step.depth]
            losses.append(F.cross_entropy(step.head(step.hidden), wanted))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)

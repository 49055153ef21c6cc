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
from transformers import AutoModelForCausalLM

from decode.model.load import load_target
from decode.model.target import Target
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.export.layout import Layout

# An argument of this process's engines: other tests' engines run on the machine at the same time.
MARK = f"--seed={os.getpid()}"
ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


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


def own_engines() -> set[int]:
    """Processes that serve with `MARK` among their arguments."""
    words = ["pgrep", "-f", f"vllm.entrypoints.*{MARK}"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in found.split()}


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


def random_target(config: Any, folder: Path, **options: Any) -> Target:
    """A random target with heads of 32, as vLLM's attention on a CPU wants them, in fp32.

    Args:
        config: class of its configuration.
        folder: to write it into.
        options: of the configuration, beyond its sizes.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    heads |= {"max_position_embeddings": 256, "pad_token_id": None, "tie_word_embeddings": False}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(**sizes, **heads, **ENDS, **options))
    for weight in made.parameters():
        weight.data = weight.data * 6 if weight.dim() > 1 else weight + 0.3 * torch.rand_like(weight)
    made.save_pretrained(folder)
    return load_target(str(folder), "float32")


@torch.no_grad()
def greedy_texts(target: Target, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """(B, n) prompts -> (B, n + tokens), by plain passes."""
    found = prompts
    for _ in range(tokens):
        found = torch.cat([found, target.head(target.read(found).last[:, -1:]).argmax(-1)], 1)
    return found


def exported(drafter: Drafter, target: Target, to: str, folder: Path) -> Layout:
    """Write a drafter in a program's format into a new folder."""
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, to)
    folder.mkdir()
    layout.write(folder)
    return layout

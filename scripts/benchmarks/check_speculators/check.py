"""scripts/check_speculators.py: whether speculators itself makes of an export what we do."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target
from distill.config.build import build_target, quiet
from distill.config.read import read_options
from distill.options import TargetOptions
from distill.utils.progress import say
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as hub
from drafters.checkpoint.folder import target_name
from drafters.export import formats as table

OPENER = Path(__file__).with_name("peer.py")
CLOSE = 1e-4  # largest difference of logits, relative to the largest logit; fp32
ABSENT = 3  # exit code of `peer`: no such package
LENGTH = 24  # tokens of a text


class Opened(NamedTuple):
    """What speculators made of an export.

    Attributes:
        version: of the package.
        places: (text, root, depth) whose logits were compared.
        most: the largest difference of a logit.
        scale: the largest logit.
    """

    version: str
    places: int
    most: float
    scale: float


def check(cfg: DictConfig) -> float:
    """Export a checkpoint, open it with speculators in its own environment, and compare logits.

    Args:
        cfg: composed from conf/check_speculators.yaml.

    Returns:
        The largest difference; 0 where there is no speculators.

    Raises:
        UserError: the two differ, and whatever an export may raise.
    """
    quiet()
    checkpoint = hub.fetch(cfg.checkpoint)
    options = read_options(TargetOptions, cfg.target)
    target = build_target(replace(options, path=options.path or target_name(checkpoint)))
    opened = compare(hub.load(checkpoint, target), target, cfg.python, cfg.texts)
    if isinstance(opened, str):
        say(f"skipped: {opened}")
        return 0.0
    say(
        f"speculators {opened.version}: logits of {opened.places} (text, root, depth) differ by "
        f"{opened.most:.2g} at most, of {opened.scale:.3g}"
    )
    if opened.most > CLOSE * opened.scale:
        raise UserError(f"{cfg.checkpoint}: speculators makes something else of it; see above")
    return opened.most


def compare(drafter: Drafter, target: Target, python: str, texts: int) -> Opened | str:
    """Both sides' logits on random texts, in fp32.

    Args:
        drafter: what can be exported to speculators.
        target: loaded from files, which speculators reads again.
        python: interpreter of its environment.
        texts: how many.

    Returns:
        What was found, or why nothing could be.

    Raises:
        UserError: it did not open the export.
    """
    if not Path(python).exists():
        return f"python={python}: no such file; docs/training_speed.md says how to make the environment"
    layout = table.write_layout(hub.as_saved(drafter), target, "speculators")
    mask = layout.config.get("mask_token_id", -1)
    tokens = torch.randint(target.vocab_size, (texts, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[tokens == mask] = (mask + 1) % target.vocab_size  # no text holds it
    target.tap(drafter.taps)
    read = target.read(tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        layout.write(folder)
        save_file({"tokens": tokens, "taps": read.taps.flatten(-2).contiguous()}, folder / "inputs")
        command = [python, OPENER, folder, folder / "inputs", folder / "outputs"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == ABSENT:
            return f"python={python} has no speculators ({done.stderr.strip()})"
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"speculators did not open the export: {said[:300]}")
        with safe_open(folder / "outputs", "pt") as file:
            version, theirs = file.metadata()["version"], file.get_tensor("logits")
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), read.taps, read.last)
    return _apart(drafter, target, batch, theirs, version)


@torch.no_grad()
def _apart(drafter: Drafter, target: Target, batch: Batch, theirs: Tensor, version: str) -> Opened:
    """`theirs` (N, K, T, V')."""
    places, most, scale = 0, 0.0, 0.0
    for step in drafter.eval().unroll(batch, target):
        row, t = step.anchor // LENGTH, step.anchor % LENGTH
        got, want = theirs[row, step.depth - 1, t], step.head(step.hidden)
        places += len(t)
        most = max(most, float((got - want).abs().nan_to_num(torch.inf).max()))
        scale = max(scale, float(want.abs().max()))
    return Opened(version, places, most, scale)

"""Open an export with speculators and compare its logits with ours."""

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
from decode.model.target import LAST, Target
from distill.config.build import TargetSource, quiet
from distill.config.read import read_options
from distill.options.answers import TargetOptions
from distill.utils.progress import say
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.folder import target_name
from drafters.export import formats
from drafters.export.layout import Layout

PEER = Path(__file__).with_name("peer.py")
TOLERANCE = 1e-4  # largest difference of logits, relative to the largest logit; fp32
ABSENT = 3  # exit code of peer.py: speculators is not installed
LENGTH = 24  # tokens of a text


class Comparison(NamedTuple):
    """Comparison of logits.

    Attributes:
        version: of speculators.
        places: number of (text, root, depth) compared.
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
        cfg: composed from conf/lab/check_speculators.yaml.

    Returns:
        The largest difference; 0 where there is no speculators.

    Raises:
        UserError: the logits differ, or the drafter cannot be exported.
    """
    quiet()
    checkpoint = checkpoint_io.fetch(cfg.checkpoint)
    options = read_options(TargetOptions, cfg.target)
    target = TargetSource(replace(options, path=options.path or target_name(checkpoint))).load()
    comparison = compare(checkpoint_io.load(checkpoint, target), target, cfg.python, cfg.texts)
    if isinstance(comparison, str):
        say(f"skipped: {comparison}")
        return 0.0
    say(
        f"speculators {comparison.version}: logits of {comparison.places} (text, root, depth) differ by "
        f"{comparison.most:.2g} at most, of {comparison.scale:.3g}"
    )
    if comparison.most > TOLERANCE * comparison.scale:
        raise UserError(f"{cfg.checkpoint}: speculators makes something else of it; see above")
    return comparison.most


def compare(
    drafter: Drafter, target: Target, python: str, texts: int, layout: Layout | None = None
) -> Comparison | str:
    """Compare logits of both sides on random texts, in fp32.

    Args:
        drafter: exportable to speculators.
        target: loaded from files, which speculators reads too.
        python: interpreter of an environment with speculators.
        texts: number of texts.
        layout: the drafter in speculators' layout; None: its export.

    Returns:
        The comparison, or the reason why there is none.

    Raises:
        UserError: speculators failed to open the export.
    """
    if not Path(python).exists():
        return f"python={python}: no such file; docs/training_speed.md says how to make the environment"
    layout = layout or formats.write_layout(checkpoint_io.as_saved(drafter), target, "speculators")
    mask = layout.config.get("mask_token_id", -1)
    tokens = torch.randint(target.vocab_size, (texts, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[tokens == mask] = (mask + 1) % target.vocab_size  # no text contains the mask token
    target.tap(drafter.taps)
    states: list[Tensor] = []  # what enters the final norm, which an MTP head reads
    hook = target.layers[-1].register_forward_hook(lambda *call: states.append(call[-1]))
    read = target.read(tokens)
    hook.remove()
    taps = states[0] if drafter.taps == (LAST,) else read.taps.flatten(-2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        layout.write(folder)
        save_file({"tokens": tokens, "taps": taps.contiguous()}, folder / "inputs")
        command = [python, PEER, folder, folder / "inputs", folder / "outputs"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode == ABSENT:
            return f"python={python} has no speculators ({process.stderr.strip()})"
        if process.returncode:
            message = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"speculators did not open the export: {message[:300]}")
        with safe_open(folder / "outputs", "pt") as file:
            version, theirs = file.metadata()["version"], file.get_tensor("logits")
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), read.taps, read.last)
    return _compare_logits(drafter, target, batch, theirs, version)


@torch.no_grad()
def _compare_logits(
    drafter: Drafter, target: Target, batch: Batch, theirs: Tensor, version: str
) -> Comparison:
    """Compare with logits `theirs` (N, K', T, V'), of texts, depths and positions; K' depths are known."""
    places, most, scale = 0, 0.0, 0.0
    for step in drafter.eval().unroll(batch, target):
        if step.depth > theirs.shape[1]:
            break
        row, t = step.anchor // LENGTH, step.anchor % LENGTH
        actual, expected = theirs[row, step.depth - 1, t], step.head(step.hidden)
        places += len(t)
        most = max(most, float((actual - expected).abs().nan_to_num(torch.inf).max()))
        scale = max(scale, float(expected.abs().max()))
    return Comparison(version, places, most, scale)

"""Open a checkpoint in speculators' layout and run it, in an environment with that package.

    python peer.py FOLDER INPUTS OUTPUTS

INPUTS holds `tokens` (N, T) and `taps` (N, T, L * D); OUTPUTS gets `logits` (N, K, T, V') of the token
drafted at depth k, from 1, with token t + 1 as the root; NaN where nothing is drafted. Must not import
foredraft.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its file names must not shadow modules

import contextlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

ABSENT = 3  # exit code: the package is not in this environment

try:  # before torch, which is slow to import
    import speculators.models.dflash.core as dflash_core  # pyright: ignore[reportMissingImports]
    import speculators.models.dspark.core as dspark_core  # pyright: ignore[reportMissingImports]
    import speculators.models.peagle.core as peagle_core  # pyright: ignore[reportMissingImports]
    import torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore[reportMissingImports]
    from torch import Tensor
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(ABSENT)

Rows = Callable[[Any, Tensor, Tensor, int], Tensor]


class StopForward(Exception):  # noqa: N818 no error: skips the loss
    """Raised in a hook once all logits are computed."""


def main(folder: str, inputs: str, outputs: str) -> None:
    """Write the logits of an export; see the module docstring."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    # private API: speculators takes no attention kernel; flex, its default, has to be compiled.
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    depth = config.speculators_config.proposal_methods[0].speculative_tokens
    tensors, run = load_file(inputs), RUNS[config.speculators_model_type]
    with torch.no_grad():
        rows = [
            run(model, tokens, taps, depth)
            for tokens, taps in zip(tensors["tokens"], tensors["taps"], strict=True)
        ]
    save_file({"logits": torch.stack(rows)}, outputs, {"version": version("speculators")})


def logits_of(model: Any, calls: int, **inputs: Any) -> list[Tensor]:
    """Outputs of the first `calls` calls of the head; the rest of the forward pass is skipped."""
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        del module, args
        outputs.append(output[0])
        if len(outputs) == calls:
            raise StopForward

    hook = model.lm_head.register_forward_hook(keep)
    try:
        model(document_ids=torch.zeros_like(inputs["input_ids"]), **inputs)
    except StopForward:
        pass
    finally:
        hook.remove()
    return outputs


def shifted(tokens: Tensor, taps: Tensor) -> dict[str, Tensor]:
    """Inputs of their training: each token with the features of the previous one."""
    return {"input_ids": tokens[None, 1:], "hidden_states": taps[None, :-1]}


def eagle3(model: Any, tokens: Tensor, taps: Tensor, depth: int) -> Tensor:
    """Step k of the training-time test is depth k + 1, teacher-forced."""
    steps = logits_of(model, depth, ttt_steps=depth, **shifted(tokens, taps))
    logits = steps[0].new_full((depth, len(tokens), steps[0].shape[-1]), torch.nan)
    for k, step in enumerate(steps):
        logits[k, : len(tokens) - 1 - k] = step[: len(tokens) - 1 - k]
    return logits


def p_eagle(model: Any, tokens: Tensor, taps: Tensor, depth: int) -> Tensor:
    """All anchors at all depths, in place of the sample used in training."""
    size = len(tokens) - 1
    pairs = [(t, k) for k in range(depth) for t in range(size - k)]
    anchor, deep = torch.tensor(pairs).T
    peagle_core.generate_cod_sample_indices = lambda **_: (anchor, deep)
    last = torch.zeros(1, size, model.hidden_size)
    inputs = shifted(tokens, taps)
    (logits,) = logits_of(model, 1, verifier_last_hidden_states=last, num_depths=depth, **inputs)
    result = logits.new_full((depth, len(tokens), logits.shape[-1]), torch.nan)
    result[deep, anchor] = logits
    return result


def mtp(model: Any, tokens: Tensor, taps: Tensor, depth: int) -> Tensor:
    """The first depth, from states before the final norm; at later ones keys of the first are not read."""
    tokens, taps = (torch.cat([x, x.new_zeros(depth, *x.shape[1:])])[None] for x in (tokens, taps))
    (logits,) = logits_of(model, 1, input_ids=tokens, hidden_states=taps)
    return logits[None]


def biased_logits(model: Any, **inputs: Any) -> list[Tensor]:
    """Logits of a DSpark with the bias of the previous token, as its loss is given them."""
    outputs: list[Tensor] = []

    def keep(logits: Tensor, *args: Any, **more: Any) -> None:
        del args, more
        outputs.append(logits[0])
        raise StopForward

    dspark_core.compute_metrics = keep
    with contextlib.suppress(StopForward):
        model(document_ids=torch.zeros_like(inputs["input_ids"]), **inputs)
    return outputs


def dflash(model: Any, tokens: Tensor, taps: Tensor, depth: int) -> Tensor:
    """A block at every root; the last blocks reach past the end of the text, so it is padded."""
    return _blocks(model, tokens, taps, depth, partial(logits_of, calls=1))


def dspark(model: Any, tokens: Tensor, taps: Tensor, depth: int) -> Tensor:
    """The same, teacher-forced."""
    return _blocks(model, tokens, taps, depth, biased_logits)


def _blocks(model: Any, tokens: Tensor, taps: Tensor, depth: int, run: Callable[..., list[Tensor]]) -> Tensor:
    """Logits of the last `depth` places of each block."""
    size, roots = len(tokens), torch.arange(1, len(tokens))
    dflash_core.select_anchors = lambda *_: (roots, torch.ones_like(roots, dtype=torch.bool))
    tokens, taps = (torch.cat([x, x.new_zeros(depth, *x.shape[1:])])[None] for x in (tokens, taps))
    mask, last = torch.ones_like(tokens), taps[..., : model.hidden_size]
    inputs = {
        "input_ids": tokens,
        "hidden_states": taps,
        "loss_mask": mask,
        "verifier_last_hidden_states": last,
    }
    (logits,) = run(model, max_anchors=len(roots), **inputs)
    result = logits.new_full((depth, size, logits.shape[-1]), torch.nan)
    result[:, roots - 1] = logits.unflatten(0, (len(roots), -1))[:, -depth:].transpose(0, 1)
    return result


RUNS: dict[str, Rows] = {
    "eagle3": eagle3,
    "peagle": p_eagle,
    "dflash": dflash,
    "dspark": dspark,
    "mtp": mtp,
}

if __name__ == "__main__":
    main(*sys.argv[1:])

"""The frozen target: rows, taps, and a cache in which every row has its own length."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.model.causal_lm import CausalLM, recorded
from decode.model.packing import places, row_by_row

LAST = "last"  # the name of the head's input, after the final norm; never a number
Tap = int | str


class Read(NamedTuple):
    """What one forward pass of the target yields."""

    last: Tensor  # (B, n, D) the head's input
    taps: Tensor  # (B, n, L, D) the values entering the tapped layers (or `last`)


class Target(CausalLM):
    """A Hugging Face causal LM, frozen, with the operations that speculative decoding needs.

    Not an nn.Module on purpose: as an attribute of what is trained it would enter checkpoints
    and be wrapped, cast and partitioned.

    Args:
        model: any causal LM whose attention is full or sliding-window.
        taps: layer ids whose inputs drafters read (0 .. n_layers - 1), or "last".

    Raises:
        UserError: a tap that does not exist, and see `CausalLM`.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[Tap] = ()) -> None:
        super().__init__(model.eval().requires_grad_(False))
        self.embed = model.get_input_embeddings()
        self.disguise: Callable[[Tensor], Tensor] | None = None  # of (B, n, L, D) taps: for controls
        self.tap(taps)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Choose which values `Read.taps` holds."""
        n = len(self.layers)
        for tap in taps:
            if tap != LAST and not (isinstance(tap, int) and 0 <= tap < n):
                raise UserError(f"drafter.taps: {tap!r} is no layer; use 0..{n - 1} or '{LAST}'")
        self.taps = tuple(taps)

    def check_taps(self, drafter: object) -> None:
        """Compare what a drafter reads (its attribute `taps`) with what this target records.

        Raises:
            UserError: they differ.
        """
        taps = tuple(getattr(drafter, "taps", ()))
        if taps and taps != self.taps:
            raise UserError(
                f"the drafter reads hidden states {list(taps)} and the target records {list(self.taps)}; "
                "call target.tap(drafter.taps) before decoding"
            )

    def fingerprint(self) -> str:
        """Tells this target's weights and vocabulary from another's, whatever dtype they are in."""
        digest = hashlib.sha256(f"{self.head.weight.shape} {len(self.layers)}".encode())
        weights = self.weights(self.layers[len(self.layers) // 2])
        middle = next(w for w in weights.values() if w.dim() > 1)
        for weight in (self.head.weight, middle):
            sample = weight[:: max(1, weight.shape[0] // 64)].to("cpu", torch.bfloat16)
            digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    # -- among several processes -----------------------------------------------------------------

    def rest(self) -> None:
        """To be called by every process when it has nothing to read for now; returns when all have.

        At once, but for a target that they hold together (`Sharded`).
        """

    def wait(self, seconds: float) -> None:
        """For other processes, which may need this one's part of the target."""
        time.sleep(seconds)

    # -- without a cache: training and rescoring ---------------------------------------------

    @torch.no_grad()
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Read:
        """One causal pass over (B, T) right-padded tokens.

        Args:
            tokens: of all rows.
            lengths: of the rows; where they are given, rows are read behind one another, without
                padding, and what is behind a row's end is 0. See `probe.check_packing`.
        """
        found = self._wanted()
        if lengths is None:
            with recorded(self.layers, found):
                out = self.base(input_ids=tokens, use_cache=False)
            return self._pack(out.last_hidden_state, found)
        index, positions = (part.to(tokens.device) for part in places(lengths, tokens.shape[1]))  # (N,)
        with recorded(self.layers, found), row_by_row(self.config, lengths):
            pack, at = tokens.flatten()[index][None], positions[None]  # (1, N)
            out = self.base(input_ids=pack, position_ids=at, use_cache=False)

        def spread(values: Tensor) -> Tensor:
            """(1, N, D) -> (B, T, D)."""
            rows = values.new_zeros(tokens.numel(), values.shape[-1])
            return rows.index_copy(0, index, values[0]).view(*tokens.shape, -1)

        found = {layer: spread(values) for layer, values in found.items()}
        return self._pack(spread(out.last_hidden_state), found)

    # -- with the row cache: decoding --------------------------------------------------------

    def extend(self, tokens: Tensor, draft: Draft | None = None) -> Read:
        """Read new tokens behind each row's settled ones; `keep` decides what stays.

        Args:
            tokens: (B, n) right-padded; with a draft (B, 1), the roots.
            draft: nodes that hang from the root, read in the same pass.

        Returns:
            (B, n) rows, or (B, S) in slot order with a draft. Padding entries mean nothing.
        """
        block = None
        if draft is not None and draft.depth:
            tokens = torch.cat([tokens, draft.tokens.clamp_min(0)], 1)  # (B, S)
            block = draft.ancestors()  # (B, S, S)
        found = self._wanted()
        last = self.forward(tokens, block, inputs=found)
        return self._pack(last, found)

    # -- internals ---------------------------------------------------------------------------

    def _wanted(self) -> dict[int, Tensor]:
        """Layers to record; what entered them is filled in."""
        return dict.fromkeys((t for t in self.taps if isinstance(t, int)), torch.empty(0))

    def _pack(self, last: Tensor, found: dict[int, Tensor]) -> Read:
        parts = [found[t] if isinstance(t, int) else last for t in self.taps]
        taps = (
            torch.stack([part.to(last.device) for part in parts], 2) if parts else last[:, :, None][:, :, :0]
        )
        return Read(last, taps if self.disguise is None else self.disguise(taps))

"""The frozen target model: hidden states of tapped layers, and decoding with a ragged KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.kernels.packed_linear import fast_linears
from decode.model.causal_lm import CausalLM, record_inputs
from decode.model.identity.fingerprint import config_hash, fingerprint
from decode.model.identity.weight_files import local_files
from decode.model.packing import attention_per_row, pack_indices

LAST = "last"  # tap of the head's input, after the final norm
Tap = int | str


class TargetOutput(NamedTuple):
    """Hidden states of one forward pass of the target."""

    last: Tensor  # (B, n, D) input of the head
    taps: Tensor  # (B, n, L, D) inputs of the tapped layers (or `last`)


class Target(CausalLM):
    """A frozen Hugging Face causal LM with the operations of speculative decoding.

    Deliberately not an nn.Module: as a submodule of the trained module it would be saved in checkpoints,
    wrapped, cast and sharded.

    Args:
        model: any causal LM with full or sliding-window attention.
        taps: ids of layers whose inputs drafters read (0 .. n_layers - 1), or "last".

    Raises:
        UserError: a tap that does not exist; also see `CausalLM`.
    """

    capture = False  # whether rounds are captured, see `decode.generation.capture`
    compiles = False  # whether captured rounds are compiled
    captures: Any = None  # its captured rounds
    source = ""  # name of the engine that runs the layers, if any
    read_ahead = 0  # preferred tokens per `read`, if each call waits for a server
    starting_seconds = 0.0  # in which this process waited for engines that the run starts

    def __init__(self, model: PreTrainedModel, taps: Sequence[Tap] = ()) -> None:
        super().__init__(model.eval().requires_grad_(False))
        self.embed = model.get_input_embeddings()
        self.tap_transform: Callable[[Tensor], Tensor] | None = None  # of (B, n, L, D) taps, for ablations
        self.tap(taps)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Select the layer inputs that `TargetOutput.taps` returns."""
        n = len(self.layers)
        for tap in taps:
            if tap != LAST and not (isinstance(tap, int) and 0 <= tap < n):
                raise UserError(f"drafter.taps: {tap!r} is no layer; use 0..{n - 1} or '{LAST}'")
        self.taps = tuple(taps)

    def check_taps(self, taps: Sequence[Tap]) -> None:
        """Check that this target records the taps that a drafter reads.

        Raises:
            UserError: it records other taps.
        """
        if taps and tuple(taps) != self.taps:
            raise UserError(
                f"the drafter reads hidden states {list(taps)} and the target records {list(self.taps)}; "
                "call target.tap(drafter.taps) before decoding"
            )

    def fingerprint(self) -> str:
        """Fingerprint of all current weights, the same in every dtype."""
        half = self.dtype == torch.float16
        return fingerprint(self.tensors(), local_files(self.model) if half else None)

    def config_hash(self) -> str:
        """Hash of the configuration's computational settings, which the fingerprint does not cover."""
        return config_hash(self.config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of all parameters and persistent buffers, on their devices."""
        yield from self.model.state_dict().items()

    # -- several processes -----------------------------------------------------------------------

    def join(self) -> None:
        """Take part in other processes' forward passes until all processes have called this.

        Each process calls it when it has no forward pass to run. Returns at once unless `Sharded`.
        """

    def idle(self, seconds: float) -> None:
        """Sleep; a `Sharded` target takes part in other processes' forward passes meanwhile."""
        time.sleep(seconds)

    def rest(self) -> None:
        """Call before a pause in reading; a target stops its engine if this run started it."""

    # -- without a KV cache: training and rescoring ------------------------------------------

    @torch.no_grad()
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> TargetOutput:
        """One causal forward pass over (B, T) right-padded tokens.

        Args:
            tokens: (B, T).
            lengths: row lengths; if given, rows are packed without padding, and outputs after the end of a
                row are 0. See `probe.check_packing`.
        """
        layer_inputs = self._tap_inputs()
        if lengths is None:
            with record_inputs(self.layers, layer_inputs), fast_linears(self.head.weight, begins=True):
                out = self.base(input_ids=tokens, use_cache=False)
            return self._output(out.last_hidden_state, layer_inputs)
        index, positions = (part.to(tokens.device) for part in pack_indices(lengths, tokens.shape[1]))  # (N,)
        per_row = attention_per_row(self.config, lengths)
        fast = fast_linears(self.head.weight, begins=True)
        with record_inputs(self.layers, layer_inputs), per_row, fast:
            packed = tokens.flatten()[index][None]  # (1, N)
            out = self.base(input_ids=packed, position_ids=positions[None], use_cache=False)

        def unpack(values: Tensor) -> Tensor:
            """(1, N, D) -> (B, T, D), 0 at padding."""
            rows = values.new_zeros(tokens.numel(), values.shape[-1])
            return rows.index_copy(0, index, values[0]).view(*tokens.shape, -1)

        layer_inputs = {layer: unpack(values) for layer, values in layer_inputs.items()}
        return self._output(unpack(out.last_hidden_state), layer_inputs)

    # -- with the KV cache: decoding ---------------------------------------------------------

    def slots(self, draft: int) -> int:
        """Slots that `extend` runs; `draft` counts the draft's nodes and the root."""
        return draft

    def extend(self, tokens: Tensor, draft: Draft | None = None) -> TargetOutput:
        """Run new tokens after each row's settled ones; call `keep` to settle them.

        Args:
            tokens: (B, n) right-padded; with a draft the (B, 1) roots.
            draft: nodes below the root, run in the same pass with a tree attention mask.

        Returns:
            Hidden states of (B, n) tokens, or of (B, S) slots with a draft; undefined at padding.
        """
        block = None
        if draft is not None and draft.depth:
            tokens = torch.cat([tokens, draft.tokens.clamp_min(0)], 1)  # (B, S)
            block = draft.ancestors()  # (B, S, S)
        layer_inputs = self._tap_inputs()
        if block is None:
            last = self.read_text(tokens, layer_inputs)
        else:
            last = self.forward(tokens, block, inputs=layer_inputs)
        return self._output(last, layer_inputs)

    # -- internals ---------------------------------------------------------------------------

    def _tap_inputs(self) -> dict[int, Tensor]:
        """Empty entries that `record_inputs` fills."""
        return dict.fromkeys((t for t in self.taps if isinstance(t, int)), torch.empty(0))

    def _output(self, last: Tensor, layer_inputs: dict[int, Tensor]) -> TargetOutput:
        """Add the stacked taps, (B, n, L, D)."""
        parts = [layer_inputs[t] if isinstance(t, int) else last for t in self.taps]
        taps = (
            torch.stack([part.to(last.device) for part in parts], 2) if parts else last[:, :, None][:, :, :0]
        )
        return TargetOutput(last, taps if self.tap_transform is None else self.tap_transform(taps))

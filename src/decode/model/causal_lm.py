"""A Hugging Face causal LM read through a cache in which every row has its own length.

What a target and an independent draft model have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import config as compiler
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.cache import KVCache, attention_mask
from decode.model.fused_forward import Fused
from decode.model.head import Head


class CausalLM:
    """A model, its head and one cache.

    Args:
        model: any causal LM whose attention is full or sliding-window.

    Attributes:
        max_positions: longest sequence, in tokens, that the model was built for.
        compiled: see `compile`.
        movable: whether all weights lie on one device, and can be moved, copied and altered.

    Raises:
        UserError: no decoder layers to be found, or no output head.
    """

    movable = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.base: Any = model.base_model
        self.config = model.config.get_text_config()
        self.layers = decoder_layers(model)
        self.head = _head(model, self.config)
        self.vocab_size, self.hidden_size = self.head.weight.shape
        # Read once: transformers' configurations are slow to ask.
        self.max_positions = max_positions(self.config)
        self._kinds = set(getattr(self.config, "layer_types", None) or ())
        self._window: int | None = getattr(self.config, "sliding_window", None)
        # private API: transformers has no public way to ask for the attention kernel.
        self._sdpa = self.config._attn_implementation == "sdpa"
        self._places = [0] * len(self.layers)  # of keys and values; see `SplitStore`
        self._fused: Fused | None = None
        self._cache: KVCache | None = None
        self.compiled = False
        self._behind: Tensor | None = None  # (B, scratch + n) positions of the unsettled slots, for a window

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.head.weight.device

    @property
    def bytes(self) -> int:
        """Of the weights that this process holds."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters())

    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        """State dict of a part of the model, of whole weights to be copied; called on every process."""
        return part.state_dict()

    def start(self, rows: int, capacity: int) -> None:
        """Forget everything and make room for `capacity` tokens in each of `rows` rows."""
        self._cache = KVCache(self._places, rows, capacity, self.compiled)
        self._fused = None if self.compiled else Fused.of(self.base, self.layers, self.config)

    def compile(self) -> None:
        """Compile the decoder layers (torch.compile), for all batch sizes and lengths.

        The first passes take a minute or more. Rows change in their last bits, for plain decoding and
        for verification alike. No CUDA graphs: every round attends to another number of slots.
        """
        # A layer's number is a constant to the compiler: one graph for each, and one for each mask.
        limit = 4 * len(self.layers)
        compiler.recompile_limit = max(compiler.recompile_limit, limit)
        for layer in self.layers:
            layer.compile(dynamic=True)
        self.compiled = True

    @property
    def lengths(self) -> list[int]:
        """Tokens each row has settled in the cache."""
        return self.cache.store.lengths

    @property
    def cache(self) -> KVCache:
        """The current cache."""
        assert self._cache is not None, "call start() first"
        return self._cache

    def forward(
        self,
        tokens: Tensor,
        block: Tensor | None = None,
        scratch: int = 0,
        inputs: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Read tokens behind each row's settled and scratch ones; `keep` decides what stays.

        Args:
            tokens: (B, n) right-padded.
            block: (B, n, scratch + n) bool, which of the slots behind the settled ones each token
                sees, itself included; None: all up to itself.
            scratch: slots that earlier calls have written behind the settled ones.
            inputs: its keys are layer ids; filled with the values that enter them, (B, n, D).

        Returns:
            (B, n, D) the head's input. Padding entries mean nothing.
        """
        store, new, device = self.cache.store, tokens.shape[1], tokens.device
        store.begin(new, scratch)
        settled = torch.tensor(store.lengths).to(device)[:, None]
        # A node's place on its path is its position, whatever its slot.
        place = torch.arange(scratch, scratch + new, device=device) if block is None else block.sum(-1) - 1
        positions = settled + place  # (B, n)
        if self.max_positions is not None and store.width > self.max_positions:
            # A target's nodes past the end only predict tokens that will be cut.
            positions = positions.clamp_max(self.max_positions - 1)
        if self._window is not None:
            before = [self._behind[:, :scratch]] if scratch and self._behind is not None else []
            self._behind = torch.cat([*before, positions], 1)
        return self._body(tokens, positions, self._mask(block, tokens), {} if inputs is None else inputs)

    def _body(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        inputs: dict[int, Tensor],
    ) -> Tensor:
        if self._fused is not None:
            assert not isinstance(mask, dict)
            return self._fused(tokens, positions, mask, self.cache.store, inputs)
        with recorded(self.layers, inputs):
            return self.base(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state

    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        """Settle `counts[b]` of the slots behind the settled ones: the first, or (B, M) `slots`."""
        self.cache.store.keep(counts, slots)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.store.select(rows)

    def _mask(self, block: Tensor | None, tokens: Tensor) -> Tensor | dict[str, Tensor] | None:
        store, window = self.cache.store, self._window
        rows, new = tokens.shape
        if block is None:
            # One token that sees all there is, or a prompt: the kernel's own causality will do.
            simple = len(set(store.lengths)) == 1 and (new == 1 or new == store.width)
            if self._sdpa and simple and (window is None or store.width < window):
                return None
            behind = store.width - max(store.lengths)
            block = torch.ones(new, behind, dtype=torch.bool, device=tokens.device).tril(behind - new)
            block = block.expand(rows, -1, -1)

        def build(window: int | None) -> Tensor:
            allow = attention_mask(store.lengths, block, store.width, self._behind, window)[:, None]
            # Additive: every layer would make that of a boolean one.
            bias = torch.zeros(allow.shape, dtype=self.dtype, device=allow.device)
            return bias.masked_fill_(~allow, torch.finfo(self.dtype).min)

        if "sliding_attention" in self._kinds:
            named = {"full_attention": None, "sliding_attention": window}
            return {kind: build(named[kind]) for kind in self._kinds}
        # Without layer types, a window (Mistral's) holds for every layer.
        return build(None if self._kinds else window)


@contextmanager
def recorded(layers: nn.ModuleList, inputs: dict[int, Tensor]) -> Iterator[None]:
    """Fill in what enters these layers in one forward pass; hooks on them only, and only for it."""

    def hook(index: int):
        def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
            del module
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return keep_input

    handles = [layers[i].register_forward_pre_hook(hook(i), with_kwargs=True) for i in inputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def max_positions(config: Any) -> int | None:
    """The longest sequence, in tokens, that a model of this configuration was built for; None: any."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if kind.get("rope_type") == "longrope":
            # Past this, the longest row of a batch changes the angles of all the others.
            short = kind["original_max_position_embeddings"]
            limit = min(limit or short, short)
    return limit


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """A model's stack of layers.

    Raises:
        UserError: there is none.
    """
    base, count = model.base_model, model.config.get_text_config().num_hidden_layers
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(base).__name__}: no stack of {count} decoder layers found in it")


def _head(model: PreTrainedModel, config: Any) -> Head:
    out = model.get_output_embeddings()
    if out is None:
        raise UserError(f"{type(model).__name__}: it has no language-model head")
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        weight=out.weight,
        bias=getattr(out, "bias", None),
        scale=float(scale),
        softcap=getattr(config, "final_logit_softcapping", None),
    )

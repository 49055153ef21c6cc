"""A Hugging Face causal LM with a KV cache of separate row lengths; base of targets and draft models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from threading import Lock, RLock
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.kernels.packed_linear import described, fast_linears
from decode.kernels.weight_state import notice_changes
from decode.model.abilities import Abilities
from decode.model.cache import KVCache, RowStore, attention_mask
from decode.model.compiled_forward import compiled_pass, compiled_weights
from decode.model.fused_forward import Fused, Parts
from decode.model.head import Head
from decode.model.own_cache import cache_name

_GUARD = Lock()
_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()  # not in the models, which may be copied


class CausalLM:
    """A causal LM with its head and a KV cache.

    Args:
        model: any causal LM with full or sliding-window attention.

    Attributes:
        max_positions: maximum sequence length of the model, in tokens; None: unlimited.
        chunk: tokens per pass of `read_text`.
        abilities: results of the probe.
        movable: whether all weights are on one device, so they can be moved, copied and changed.

    Raises:
        UserError: the model has no list of decoder layers, or no output head.
    """

    abilities = Abilities()
    movable = True
    chunk = 2048  # the mask of a pass has (chunk, width) entries

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.base: Any = model.base_model
        if self.base is model:  # a class with a wrong `base_model_prefix` (Llama-4)
            self.base = getattr(model, "model", model)
        self.config = model.config.get_text_config()
        self.layers = decoder_layers(model)
        self.head = _head(model, self.config)
        self.vocab_size, self.hidden_size = self.head.weight.shape
        # Cached: attribute access of transformers' configurations is slow.
        self.max_positions = max_positions(self.config)
        self._kinds = set(getattr(self.config, "layer_types", None) or ())
        self._window: int | None = getattr(self.config, "sliding_window", None)
        # private API: transformers has no public way to ask for the attention kernel.
        self._sdpa = self.config._attn_implementation == "sdpa"
        self._places = [0] * len(self.layers)  # device index per layer, see `MultiDeviceStore`
        self._fused: Fused | None = None
        self._cache: KVCache | None = None
        self._unsettled: Tensor | None = (
            None  # (B, scratch + n) positions of the unsettled slots, for a window
        )

    @property
    def lock(self) -> RLock:
        """Lock of the thread that runs the model, because all callers share one cache and one set of hooks.

        All objects made of one model share it. It is reentrant.
        """
        with _GUARD:
            return _LOCKS.setdefault(self.model, RLock())

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding; the head may have fewer or more."""
        weight: Any = self.model.get_input_embeddings().weight
        return weight.shape[0]

    @property
    def head(self) -> Head:
        """The output head, rebuilt when the model's head parameters are replaced."""
        if any(old is not new for old, new in zip(self._head_source, self._head_parameters(), strict=True)):
            self.head = _head(self.model, self.config)
        return self._head

    @head.setter
    def head(self, head: Head) -> None:
        self._head, self._head_source = head, self._head_parameters()

    def _head_parameters(self) -> tuple[Tensor, Tensor | None]:
        out: Any = self.model.get_output_embeddings()
        return out.weight, getattr(out, "bias", None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the head, of inputs and of outputs."""
        return self.head.weight.device

    @property
    def products(self) -> str:
        """How this machine multiplies with the weights, if not plainly; known after the first pass."""
        return described(self.head.weight)

    @property
    def bytes(self) -> int:
        """Bytes of the weights in this process."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters())

    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        """State dict of a submodule, with full (unsharded) weights; must be called on every process."""
        return part.state_dict()

    def start(self, rows: int, capacity: int) -> None:
        """Start new texts: an empty cache for `rows` rows of `capacity` tokens.

        Also rebuilds copies of weights, the drafter's included, if the weights changed.
        """
        notice_changes()
        self._cache = KVCache.empty(self._places, rows, capacity)
        self._fused = self.fused

    @property
    def fused(self) -> Fused | None:
        """The fused forward pass; None if the model needs transformers' code."""
        return Fused.of(self.base, self.layers, self.config)

    def compile(self) -> str:
        """Compile passes over a few tokens, or load compiled code from the cache; see `compiled_forward`.

        Outputs change by rounding, equally in plain decoding and verification. Changing weights later
        disables it.

        Returns:
            Reason why passes are not compiled; "" if they are.
        """
        fused = self.fused
        if fused is None:
            return f"{type(self.model).__name__} has no forward pass that can be compiled"
        fused.compiled, reason = compiled_pass(fused)
        if fused.compiled:
            fused.watch(self.base, compiled_weights(fused))
        return reason

    @property
    def lengths(self) -> list[int]:
        """Settled tokens per row."""
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
        offsets: Tensor | None = None,
        parts: Sequence[Parts] | None = None,
        store: RowStore | None = None,
    ) -> Tensor:
        """Run the model on tokens after each row's settled and scratch slots. Call `keep` to settle them.

        Args:
            tokens: (B, n) right-padded.
            block: (B, n, scratch + n) bool, which unsettled slots each token sees, including itself;
                None: all up to itself.
            scratch: number of unsettled slots written by earlier calls.
            inputs: dict with layer ids as keys; filled with the (B, n, D) inputs of these layers.
            offsets: positions between the settled tokens and each new one: (n,), (B, n), or
                (B, scratch + n) for all unsettled slots; None: derived from the slots that each one sees.
            parts: sublayers to run, `fused` models only; None: all. Such slots cannot be settled.
            store: keys and values of another text, `fused` models only; None: the cache's.

        Returns:
            (B, n, D) input of the head. Entries at padding are undefined.
        """
        store, new, device = store or self.cache.store, tokens.shape[1], tokens.device
        store.begin(new, scratch)
        settled = store.read.on(device)[:, None]  # (B, 1)
        if offsets is None:
            # The position of a tree node is its depth on its path, not its slot: count what it sees.
            offsets = torch.arange(scratch + new, device=device) if block is None else block.sum(-1) - 1
        positions = settled + offsets  # (B, n); of a chain (B, scratch + n)
        if self.max_positions is not None and store.longest > self.max_positions:
            # Nodes past the end of the context only predict tokens that will be cut.
            positions = positions.clamp_max(self.max_positions - 1)
        if self._window is not None:
            missing = scratch + new - positions.shape[1]
            earlier = [self._unsettled[:, :missing]] if missing and self._unsettled is not None else []
            self._unsettled = torch.cat([*earlier, positions], 1)
        positions = positions[:, -new:]
        read = {} if inputs is None else inputs
        return self._body(tokens, positions, self._mask(block, tokens, store), store, read, parts)

    def read_text(self, tokens: Tensor, inputs: dict[int, Tensor] | None = None) -> Tensor:
        """`forward` for (B, n) tokens of a text, in chunks, so that masks do not grow as n * n."""
        inputs, length = {} if inputs is None else inputs, tokens.shape[1]
        if length <= self.chunk:
            return self.forward(tokens, inputs=inputs)
        last, parts = [], {layer: [] for layer in inputs}
        for start in range(0, length, self.chunk):
            read = dict.fromkeys(inputs, tokens[:, :0])
            last.append(self.forward(tokens[:, start : start + self.chunk], None, start, read))
            for layer, part in read.items():
                parts[layer].append(part)
        inputs |= {layer: torch.cat(part, 1) for layer, part in parts.items()}
        return torch.cat(last, 1)

    def read_once(self, tokens: Tensor, positions: Tensor, block: Tensor) -> Tensor:
        """Run the model without its cache, as training does.

        Args:
            tokens: (B, n).
            positions: (B, n).
            block: (B, n, n) bool, which tokens each one sees, including itself.

        Returns:
            (B, n, D) input of the head.
        """
        mask = self.additive_mask([0] * len(tokens), block, tokens.shape[1], positions)
        return self.base(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state

    def layer_input(self, tokens: Tensor) -> dict[str, Tensor]:
        """Decoder inputs for (B, n) tokens: `input_ids`, or `inputs_embeds` (B, n, D)."""
        return {"input_ids": tokens}

    def _body(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        store: RowStore,
        inputs: dict[int, Tensor],
        parts: Sequence[Parts] | None,
    ) -> Tensor:
        """Decoder layers and final norm, fused or by transformers."""
        if self._fused is not None:
            assert not isinstance(mask, dict)
            read = self.layer_input(tokens)
            return self._fused(positions, mask, store, inputs, parts, **read)
        assert parts is None, "only a fused pass can omit sublayers"
        assert store is self.cache.store, "only a fused pass can read another store"
        read = self.layer_input(tokens) | {cache_name(type(self.base)): self.cache}
        with record_inputs(self.layers, inputs), fast_linears(self.head.weight):
            return self.base(
                **read, attention_mask=mask, position_ids=positions, use_cache=True
            ).last_hidden_state

    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        """Settle `counts[b]` unsettled slots: the first ones, or (B, M) `slots`; see `RowStore.keep`."""
        self.cache.store.keep(counts, slots)

    def cut(self, lengths: Sequence[int]) -> None:
        """Drop each row's settled tokens from index `lengths[b]` on."""
        self.cache.store.cut(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.store.select(rows)

    def append(self, other: CausalLM) -> None:
        """Append the rows of another cache of this model."""
        self.cache.store.append(other.cache.store)

    def resume(self, cache: KVCache) -> None:
        """Continue with the texts of an earlier cache."""
        self._cache = cache

    def over(self, store: RowStore) -> Self:
        """The same model with another cache, which shares everything else."""
        twin = copy(self)
        twin._cache = KVCache(store)
        return twin

    def _mask(
        self, block: Tensor | None, tokens: Tensor, store: RowStore
    ) -> Tensor | dict[str, Tensor] | None:
        """(B, 1, n, width) additive mask, per layer type if there are several; None: plain causal."""
        window, new = self._window, tokens.shape[1]
        if block is None:
            # A single token that sees everything, or a whole prompt: the kernel needs no mask.
            simple = store.even and (new == 1 or new == store.width)
            if self._sdpa and simple and (window is None or store.width < window):
                return None
            unsettled = store.unsettled
            block = torch.ones(1, new, unsettled, dtype=torch.bool, device=tokens.device)
            block = block.tril(unsettled - new)
        see = partial(store.visible, block, self._unsettled)
        return self._additive(see, len(tokens))

    def additive_mask(
        self, lengths: Sequence[int], block: Tensor, width: int, positions: Tensor | None
    ) -> Tensor | dict[str, Tensor]:
        """`attention_mask` in additive form, with each layer type's window; a dict if there are several."""
        return self._additive(partial(attention_mask, lengths, block, width, positions), len(lengths))

    def _additive(self, see: Callable[[int | None], Tensor], rows: int) -> Tensor | dict[str, Tensor]:
        """(B, 1, n, width) additive form of the slots that `see` returns for a window; or a dict of these."""

        def build(window: int | None) -> Tensor:
            allow = see(window)[:, None]
            # Additive, since every layer would convert a boolean mask again.
            bias = torch.zeros(allow.shape, dtype=self.dtype, device=allow.device)
            bias = bias.masked_fill_(~allow, torch.finfo(self.dtype).min)
            return bias.expand(rows, -1, -1, -1)

        if "sliding_attention" in self._kinds:
            named = {"full_attention": None, "sliding_attention": self._window}
            return {kind: build(named[kind]) for kind in self._kinds}
        # Without layer types a window applies to every layer (Mistral).
        return build(None if self._kinds else self._window)


@contextmanager
def record_inputs(layers: nn.ModuleList, inputs: dict[int, Tensor]) -> Iterator[None]:
    """Record the inputs of the layers in `inputs` during a forward pass, by temporary hooks."""

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
    """Maximum sequence length of a configuration, in tokens; None: unlimited."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if kind.get("rope_type") == "longrope":
            # Beyond this length the longest row would change the rotary angles of all rows.
            short = kind["original_max_position_embeddings"]
            limit = min(limit or short, short)
    return limit


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a model.

    Raises:
        UserError: no list of `num_hidden_layers` modules.
    """
    base, count = model.base_model, model.config.get_text_config().num_hidden_layers
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(base).__name__}: no stack of {count} decoder layers found in it")


def _head(model: PreTrainedModel, config: Any) -> Head:
    """The output head, with scale and soft cap from the configuration."""
    out = model.get_output_embeddings()
    if out is None:
        raise UserError(f"{type(model).__name__}: it has no language-model head")
    if not getattr(getattr(out, "weight", None), "is_floating_point", bool)():
        raise UserError(f"{type(model).__name__}: its head is quantised and cannot be read")
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        weight=out.weight,
        bias=getattr(out, "bias", None),
        scale=float(scale),
        softcap=getattr(config, "final_logit_softcapping", None),
    )

"""The frozen target: rows, taps, and a cache in which every row has its own length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cache import KVCache, attention_mask
from decode.draft import Draft
from decode.errors import UserError

LAST = "last"  # the name of the head's input, after the final norm; never a number
Tap = int | str


class Read(NamedTuple):
    """What one forward pass of the target yields."""

    last: Tensor  # (B, n, D) the head's input
    taps: Tensor  # (B, n, L, D) the values entering the tapped layers (or `last`)


@dataclass(frozen=True, slots=True)
class Head:
    """A linear map to logits with what families put behind it.

    Target and drafter heads are one class, so Gemma's soft cap or Cohere's scale are right in
    both. `softcap`: z -> c tanh(z / c), after `scale`.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V) logits."""
        z = nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap


class Target:
    """A Hugging Face causal LM, frozen, with the operations that speculative decoding needs.

    Not an nn.Module on purpose: as an attribute of what is trained it would enter checkpoints
    and be wrapped, cast and partitioned.

    Args:
        model: any causal LM whose attention is full or sliding-window.
        taps: layer ids whose inputs drafters read (0 .. n_layers - 1), or "last".

    Raises:
        UserError: a tap that does not exist, or a model that has no output head.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[Tap] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.base: Any = model.base_model
        self.config = model.config.get_text_config()
        self.layers = _decoder_layers(self.base, self.config.num_hidden_layers)
        self.embed = model.get_input_embeddings()
        self.head = _head(model, self.config)
        self.vocab_size, self.hidden_size = self.head.weight.shape
        self.tap(taps)
        self._cache: KVCache | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.head.weight.device

    @property
    def max_positions(self) -> int | None:
        """Longest sequence, in tokens, that the model was built for."""
        limit = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        for kind in (rope, *(v for v in rope.values() if isinstance(v, dict))):
            if kind.get("rope_type") == "longrope":
                # Past this, the longest row of a batch changes the angles of all the others.
                short = kind["original_max_position_embeddings"]
                limit = min(limit or short, short)
        return limit

    def tap(self, taps: Sequence[Tap]) -> None:
        """Choose which values `Read.taps` holds."""
        n = len(self.layers)
        for tap in taps:
            if tap != LAST and not (isinstance(tap, int) and 0 <= tap < n):
                raise UserError(f"drafter.taps: {tap!r} is no layer; use 0..{n - 1} or '{LAST}'")
        self.taps = tuple(taps)

    def fingerprint(self) -> str:
        """Tells this target's weights and vocabulary from another's, whatever dtype they are in."""
        digest = hashlib.sha256(f"{self.head.weight.shape} {len(self.layers)}".encode())
        middle = next(p for p in self.layers[len(self.layers) // 2].parameters() if p.dim() > 1)
        for weight in (self.head.weight, middle):
            sample = weight[:: max(1, weight.shape[0] // 64)].to("cpu", torch.bfloat16)
            digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    # -- without a cache: training and rescoring ---------------------------------------------

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Read:
        """One causal pass over (B, T) right-padded tokens."""
        with self._record() as taps:
            out = self.base(input_ids=tokens, use_cache=False)
        return self._pack(out.last_hidden_state, taps)

    # -- with the row cache: decoding --------------------------------------------------------

    def start(self, rows: int, capacity: int) -> None:
        """Forget everything and make room for `capacity` tokens in each of `rows` rows."""
        self._cache = KVCache(len(self.layers), rows, capacity)

    @property
    def lengths(self) -> list[int]:
        """Tokens each row has settled in the cache."""
        return self.cache.store.lengths

    @property
    def cache(self) -> KVCache:
        """The current cache."""
        assert self._cache is not None, "call start() first"
        return self._cache

    def extend(self, tokens: Tensor, draft: Draft | None = None) -> Read:
        """Read new tokens behind each row's settled ones; `keep` decides what stays.

        Args:
            tokens: (B, n) right-padded; with a draft (B, 1), the roots.
            draft: nodes that hang from the root, read in the same pass.

        Returns:
            (B, n) rows, or (B, S) in slot order with a draft. Padding entries mean nothing.
        """
        store = self.cache.store
        rows, device = tokens.shape[0], tokens.device
        draft = draft or Draft.chain(tokens[:, 1:])
        tokens = torch.cat([tokens[:, :1], draft.tokens.clamp_min(0)], 1)  # (B, S)
        block = draft.ancestors()  # (B, S, S)
        store.begin(tokens.shape[1])
        settled = torch.tensor(store.lengths).to(device)
        # A node's place on its path is its position, whatever its slot.
        positions = settled[:, None] + block.sum(-1) - 1  # (B, S)
        if self.max_positions is not None:
            # Nodes past the end only predict tokens that will be cut.
            positions = positions.clamp_max(self.max_positions - 1)
        mask = self._mask(block.expand(rows, -1, -1), positions)
        with self._record() as taps:
            out = self.base(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        return self._pack(out.last_hidden_state, taps)

    def keep(self, counts: Sequence[int], slots: Tensor | None = None) -> None:
        """Settle `counts[b]` of the slots read last: the first ones, or (B, M) `slots`."""
        self.cache.store.keep(counts, slots)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.store.select(rows)

    # -- internals ---------------------------------------------------------------------------

    def _mask(self, block: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        store, config = self.cache.store, self.config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)

        def build(window: int | None) -> Tensor:
            allow = attention_mask(store.lengths, block, store.width, positions, window)[:, None]
            if config._attn_implementation == "sdpa":
                return allow
            bias = torch.zeros(allow.shape, dtype=self.dtype, device=allow.device)
            return bias.masked_fill(~allow, torch.finfo(self.dtype).min)

        if "sliding_attention" in kinds:
            named = {"full_attention": None, "sliding_attention": window}
            return {kind: build(named[kind]) for kind in kinds}
        # Without layer types, a window (Mistral's) holds for every layer.
        return build(None if kinds else window)

    @contextmanager
    def _record(self) -> Iterator[dict[int, Tensor]]:
        """Hooks on the tapped layers only, for one forward pass."""
        found: dict[int, Tensor] = {}

        def hook(index: int):
            def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
                del module
                found[index] = args[0] if args else kwargs["hidden_states"]

            return keep_input

        handles = [
            self.layers[i].register_forward_pre_hook(hook(i), with_kwargs=True)
            for i in {t for t in self.taps if isinstance(t, int)}
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, last: Tensor, found: dict[int, Tensor]) -> Read:
        taps = [last if t == LAST else found[t] for t in self.taps]  # type: ignore[index]
        return Read(last, torch.stack(taps, 2) if taps else last[:, :, None][:, :, :0])


def _decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"target: no stack of {count} decoder layers found in {type(base).__name__}")


def _head(model: PreTrainedModel, config: Any) -> Head:
    out = model.get_output_embeddings()
    if out is None:
        raise UserError(f"target: {type(model).__name__} has no language-model head")
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        weight=out.weight,
        bias=getattr(out, "bias", None),
        scale=float(scale),
        softcap=getattr(config, "final_logit_softcapping", None),
    )

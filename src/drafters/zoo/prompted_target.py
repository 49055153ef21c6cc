"""A target that also reads learned prompts; their outputs predict later tokens.

After a token at position t there are E prompts of each depth j from 1 to K, at position t + j. Prompt e of a
depth sees the tokens up to t, the prompts e of earlier depths and itself. The mean output of depth j predicts
the token at t + 1 + j (ensemble prompt tokens: PPD, Chen et al., arXiv:2405.18628). No token sees a prompt,
and the cache contains none, so prompts do not change the target's predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.kernels.packed_linear import fast_linears
from decode.model.causal_lm import CausalLM
from decode.model.own_cache import cache_name
from decode.model.target import Target, TargetOutput

READ_TOGETHER = 512  # prompts in one training pass; bounds its mask, (512, T + 512)


class PromptedTarget(Target):
    """A target with mean outputs by depth of the prompts after each slot as taps, (B, n, K, D).

    It shares all weights and compiled code with `source`. A pass over a draft of S slots reads S (1 + K E)
    slots. A pass without a draft (prefill, plain decoding) reads only tokens and has no taps, (B, n, 0, D);
    `look_ahead` may follow it.

    Args:
        source: target with all weights in this process, on one device.
        prompts: (K, E, D) input of the first layer instead of embeddings.
    """

    def __init__(self, source: Target, prompts: Tensor) -> None:
        super().__init__(source.model)
        self.source, self.abilities = source.source, source.abilities
        self.prompts = prompts.detach().to(self.head.weight)  # (K, E, D)

    @override
    def slots(self, draft: int) -> int:
        depth, ensemble, _ = self.prompts.shape
        return draft * (1 + depth * ensemble)

    @override
    def layer_input(self, tokens: Tensor) -> dict[str, Tensor]:
        """Ids from V on are prompts."""
        number = tokens - self.vocab_size
        words = self.embed(tokens.clamp_max(self.vocab_size - 1))
        prompts = self.prompts.flatten(0, 1)[number.clamp_min(0)]
        return {"inputs_embeds": torch.where((number >= 0)[..., None], prompts, words)}

    @override
    def extend(self, tokens: Tensor, draft: Draft | None = None) -> TargetOutput:
        if draft is None or not draft.depth:
            return super().extend(tokens)
        tokens = torch.cat([tokens, draft.tokens.clamp_min(0)], 1)  # (B, S)
        (rows, slots), (depth, ensemble, _) = tokens.shape, self.prompts.shape
        path = draft.ancestors().expand(rows, -1, -1)  # (B, S, S)
        own = _prompt_mask(slots, depth, ensemble, tokens.device).expand(rows, -1, -1)  # (B, P, P), P = S K E
        prompts_see = torch.cat([path.repeat_interleave(depth * ensemble, 1), own], 2)  # (B, P, S + P)
        block = torch.cat([F.pad(path, (0, own.shape[2])), prompts_see], 1)
        last = self.forward(torch.cat([tokens, self._ids(slots).expand(rows, -1)], 1), block)
        return TargetOutput(last[:, :slots], _depth_means(last[:, slots:], slots, self.prompts))

    def look_ahead(self) -> Tensor:
        """(B, K, D) mean outputs of the prompts after each row's newest settled token; nothing is cached."""
        rows, (depth, ensemble, _) = len(self.lengths), self.prompts.shape
        block = _prompt_mask(1, depth, ensemble, self.prompts.device).expand(rows, -1, -1)  # (B, K E, K E)
        return _depth_means(self.forward(self._ids(1).expand(rows, -1), block), 1, self.prompts)[:, 0]

    @override
    @torch.no_grad()
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> TargetOutput:
        """As `Target.read`, with padding, and with prompts after every token."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with fast_linears(self.head.weight, begins=True):
            return TargetOutput(*read_with_prompts(self, self.prompts, tokens, places))

    def _ids(self, slots: int) -> Tensor:
        """(1, slots K E) ids of the prompts after this number of slots."""
        count = self.slots(1) - 1
        ids = torch.arange(self.vocab_size, self.vocab_size + count, device=self.prompts.device)
        return ids.repeat(slots)[None]


def read_with_prompts(lm: CausalLM, prompts: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Read texts, and prompts after some of their tokens, with gradients.

    A text is read once by itself, then its prompts. If no weights train, only prompts get gradients.

    Args:
        lm: model without prompts.
        prompts: (K, E, D) input of its first layer.
        tokens: (B, T) right-padded.
        places: (B, A) places of tokens.

    Returns:
        Head inputs (B, T, D) of the tokens, and (B, A, K, D) means of the prompts after the places.
    """
    text = [_TextLayer() for _ in lm.layers]
    cache = {cache_name(type(lm.base)): Cache(layers=[*text])}
    read = lm.base(input_ids=tokens, use_cache=True, **cache)
    together = max(1, READ_TOGETHER // len(prompts.flatten(0, 1)))
    ahead = [_read_prompts(lm, prompts, text, part) for part in places.split(together, 1)]
    return read.last_hidden_state, torch.cat(ahead, 1)


def _read_prompts(lm: CausalLM, prompts: Tensor, text: Sequence[_TextLayer], places: Tensor) -> Tensor:
    """(B, A, K, D) mean outputs of the prompts after (B, A) places of cached texts."""
    (rows, anchors), (depth, ensemble, _), device = places.shape, prompts.shape, places.device
    place = torch.arange(text[0].length, device=device)  # (T,)
    number = torch.arange(depth, device=device).repeat_interleave(ensemble)  # (K E,)
    own = _prompt_mask(anchors, depth, ensemble, device).expand(rows, -1, -1)  # (B, P, P), P = A K E
    seen = (place <= places[..., None]).repeat_interleave(len(number), 1)  # (B, P, T)
    block = torch.cat([seen, own], 2)  # (B, P, T + P)
    positions = (places[..., None] + 1 + number).flatten(1)  # (B, P)
    if lm.max_positions is not None:
        positions = positions.clamp_max(lm.max_positions - 1)
    every = torch.cat([place.expand(rows, -1), positions], 1)  # (B, T + P)
    read = lm.base(
        inputs_embeds=prompts.to(lm.dtype).expand(rows, anchors, -1, -1, -1).flatten(1, 3),
        attention_mask=lm.additive_mask([0] * rows, block, block.shape[2], every),
        position_ids=positions,
        use_cache=True,
        **{cache_name(type(lm.base)): Cache(layers=[_PromptLayer(layer) for layer in text])},
    )
    return _depth_means(read.last_hidden_state, anchors, prompts)


def _depth_means(last: Tensor, slots: int, prompts: Tensor) -> Tensor:
    """(B, S K E, D) head inputs after S slots -> their means by depth, (B, S, K, D).

    PPD averages logits. A head is linear, apart from a soft cap, so this gives the same logits with one head
    product instead of E.
    """
    return last.unflatten(1, (slots, *prompts.shape[:2])).mean(3)


@lru_cache(maxsize=16)
def _prompt_mask(slots: int, depth: int, ensemble: int, device: torch.device) -> Tensor:
    """(1, S K E, S K E) bool: the prompts of the same slot that each prompt sees, itself included."""
    with torch.inference_mode(False):  # cached, so it must be usable outside inference mode
        earlier = torch.ones(depth, depth, device=device).tril()
        own = earlier.kron(torch.eye(ensemble, device=device))  # (K E, K E)
        return torch.eye(slots, device=device).kron(own).bool()[None]


def check_embedded(target: Target) -> None:
    """Check that a target gives the same output for embeddings as for their tokens.

    Raises:
        UserError: its layers read more of a token than the embedding.
    """
    tokens = torch.arange(min(8, target.vocab_size), device=target.device)[None]
    with torch.no_grad():
        expected = target.base(input_ids=tokens, use_cache=False).last_hidden_state
        try:
            found = target.base(inputs_embeds=target.embed(tokens), use_cache=False).last_hidden_state
        except (TypeError, ValueError, RuntimeError):
            found = None
    if found is None or not torch.allclose(found, expected):
        raise UserError(
            f"drafter: layers of a {type(target.model).__name__} read more than embeddings of its tokens, "
            "so prompts cannot replace tokens; choose another drafter"
        )


class _SingleUseLayer(CacheLayerMixin):
    """A cache layer that is used once, so that gradient checkpointing can repeat a pass."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def get_max_length(self) -> int:
        """Unlimited."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask built by transformers."""
        return self.get_seq_length() + query_length, 0


class _TextLayer(_SingleUseLayer):
    """Stores the keys and values of a text."""

    length = 0

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.keys, self.values, self.length = key_states, value_states, key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """0: nothing precedes a text."""
        return 0


class _PromptLayer(_SingleUseLayer):
    """Prepends the keys and values of a text to those of prompts."""

    def __init__(self, text: _TextLayer) -> None:
        super().__init__()
        self._text, self.is_initialized = text, True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        text = self._text
        assert text.keys is not None
        assert text.values is not None
        return torch.cat([text.keys, key_states], 2), torch.cat([text.values, value_states], 2)

    def get_seq_length(self) -> int:
        """Number of tokens of the text."""
        return self._text.length

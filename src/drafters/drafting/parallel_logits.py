"""Logits of all depths, computed in parallel, as the levels of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.model.head import Head
from drafters.layers.token_bias import TokenBias
from drafters.vocabulary import Vocabulary, target_ids


class ParallelLogits:
    """Logits of all depths, computed in parallel, with the token bias along the paths of a tree.

    `first` and `step` are arguments of `expand`. Without a bias all tokens of a level have the same
    children.

    Args:
        raw: K of (B, V): logits of each depth without bias, scale and soft cap, `Head.product`.
        states: (B, K, D) hidden states they were computed from.
        head: applies its scale and soft cap; None: already applied.
        info: the bias, or None.
        root: (B,) root tokens, for the bias.
        vocabulary: reduced vocabulary of the logits; None: the target's.
        biased_from: the first depth with the bias.
    """

    def __init__(
        self,
        raw: Sequence[Tensor],
        states: Tensor,
        head: Head | None = None,
        info: TokenBias | None = None,
        root: Tensor | None = None,
        vocabulary: Vocabulary | None = None,
        biased_from: int = 1,
    ) -> None:
        self._raw, self._states, self._info, self._biased_from = raw, states, info, biased_from
        self._shape = head.shape if head else (lambda logits: logits)
        self.vocabulary = vocabulary
        self._memory: Tensor | None = None
        self._depth = 0
        self._last: tuple[Tensor, Tensor | None]  # tokens above the last level, memory before them
        root = torch.zeros_like(states[:, :1, 0], dtype=torch.long) if root is None else root[:, None]
        self.first = self.step(root, torch.zeros_like(root))[:, 0]  # (B, V)

    @property
    def newest(self) -> Tensor:
        """Input of a head with the bias at the last level: (B, W, D + r); (B, 1, D) without a bias."""
        state = self._states[:, self._depth - 1, None]
        if self._info is None:
            return state
        token, memory = self._last
        state = state.expand(-1, token.shape[1], -1)
        return torch.cat([state, self._info.low_rank_input(token, state, memory)[0]], -1)

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """(B, K) tokens of the greedy chain, and the probability of each; to be called before `step`."""
        logits, found = self.first, list[tuple[Tensor, Tensor]]()
        for depth in range(len(self._raw)):
            if depth:
                logits = self.step(found[-1][0][:, None], torch.zeros_like(found[-1][0])[:, None])[:, 0]
            chance, token = logits.softmax(-1).max(-1)  # (B,)
            found.append((target_ids(token, self.vocabulary), chance))
        tokens, chances = zip(*found, strict=True)
        return torch.stack(tokens, 1), torch.stack(chances, 1)

    def step(self, token: Tensor, parent: Tensor) -> Tensor:
        """Logits below the tokens of a level; see `expand`."""
        k, self._depth = self._depth, self._depth + 1
        logits = self._raw[k][:, None]
        if self._info is None:
            return self._shape(logits)
        memory = self._memory
        if memory is not None:
            memory = memory.gather(1, parent[..., None].expand(-1, -1, memory.shape[-1]))
        self._last = token, memory
        state = self._states[:, k, None]
        if self._depth < self._biased_from:
            state = state.expand(-1, token.shape[1], -1)
            self._memory = self._info.low_rank_input(token, state, memory)[1]
        else:
            logits, self._memory = self._info.add(logits, token, state, memory)
        return self._shape(logits)

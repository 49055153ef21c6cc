"""Masks after a causal text, with a KV cache of the text.

The attention mask of SpecDiff-2's `--approx_kv_cache` (Sandler et al., arXiv:2511.00606).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decode.model.causal_lm import CausalLM
from decode.row_state import append_rows, select_rows
from decode.transfer import RowInts, upload_together
from drafters.hf.vocabulary import known_tokens, unread_text


class MaskedPrefix:
    """A causal LM with a KV cache of its text, and masks after the text.

    Text is causal and does not see the masks; masks see the text up to the root, and one another. Sliding
    windows apply. Beyond its context length it drafts at its last position.

    Args:
        model: causal LM.
        mask_token: id of the mask.
        masks: number of masks after the root, K.
        shift: distance from a mask back to the place that predicts its token; 1: the root predicts the
            first one, as in a causal LM.

    Attributes:
        states: (B, K, D') input of the head for every mask after the newest roots; None before `read`.
    """

    states: Tensor | None = None

    def __init__(self, model: PreTrainedModel, mask_token: int, masks: int, shift: int) -> None:
        self.lm = CausalLM(model)
        self.mask_token, self.masks, self.shift = mask_token, masks, shift

    def _predicting(self, root: Tensor, mask: Tensor | int) -> Tensor:
        """(..., K) places that predict, from (..., 1) places of the root and of the first mask."""
        ahead = torch.arange(self.masks, device=root.device) - self.shift
        return torch.where(ahead < 0, root, mask + ahead)

    # -- training ----------------------------------------------------------------------------

    def reach(self, length: int) -> int:
        """Number of the `length` tokens that fit in front of the masks."""
        limit = self.lm.max_positions
        return length if limit is None else min(length, limit - self.masks)

    def read_packed(self, tokens: Tensor, row: Tensor, root: Tensor) -> Tensor:
        """Read texts, each followed by one block of masks per root, in one pass.

        A block sees its text up to its root, and itself.

        Args:
            tokens: (B, T) texts.
            row: (M,) the text of each root, ascending, on the host.
            root: (M,) its place, below `reach`, on the host.

        Returns:
            (M, K, D') input of the head for every mask.
        """
        rows, size = len(tokens), self.masks
        text = known_tokens(self.lm, tokens[:, : self.reach(tokens.shape[1])])  # (B, n)
        length, device = text.shape[1], text.device
        counts = torch.bincount(row, minlength=rows)  # (B,) blocks of each text
        earlier = counts.cumsum(0) - counts  # (B,) blocks of earlier texts
        number = torch.arange(len(row)) - earlier[row]  # (M,) index of a block in its text
        blocks = int(counts.max())
        # Texts with fewer blocks get padding blocks after their first token.
        roots = root.new_zeros(rows, blocks).index_put((row, number), root)
        hosts = {"row": row, "root": root, "number": number, "roots": roots}
        row, root, number, roots = upload_together(hosts, device).values()
        roots = roots.repeat_interleave(size, 1)  # (B, S) of every mask
        place = torch.arange(length, device=device)
        block = torch.arange(blocks, device=device).repeat_interleave(size)  # (S,)
        after = torch.arange(1, size + 1, device=device).repeat(blocks)  # (S,) places from root to mask
        behind = F.pad(place[:, None] >= place, (0, len(block))).expand(rows, -1, -1)  # (B, n, n + S)
        own = (block[:, None] == block).expand(rows, -1, -1)  # (B, S, S)
        masks_see = torch.cat([place <= roots[..., None], own], 2)  # (B, S, n + S)
        last = self.lm.read_once(
            F.pad(text, (0, len(block)), value=self.mask_token),
            torch.cat([place.expand(rows, -1), roots + after], 1),
            torch.cat([behind, masks_see], 1),
        )  # (B, n + S, D')
        first = length + number[:, None] * size  # (M, 1) place of a block's first mask
        return last[row[:, None], self._predicting(root[:, None], first)]

    # -- decoding ----------------------------------------------------------------------------

    def start(self, rows: int) -> Self:
        """Begin empty texts."""
        self.lm.start(rows, capacity=256)
        return self

    def read(self, tokens: Tensor, counts: Sequence[int], root: Tensor) -> None:
        """Read the new tokens of the texts and the masks in one pass; cache only the text.

        Args:
            tokens: as in `Drafter.advance`.
            counts: as in `Drafter.advance`.
            root: as in `Drafter.advance`.
        """
        lm = self.lm
        text, at = unread_text(lm, tokens, counts, root)
        rows, length = text.shape
        end = at.on(text.device)[:, None]  # (B, 1) place of the root
        # A long text is read in chunks, the last together with the masks, placed after the padding.
        start = (length - 1) // lm.chunk * lm.chunk
        parts = [lm.read_text(text[:, :start])] if start else []
        slot = torch.arange(length + self.masks, device=text.device)
        is_mask, new = slot >= length, slot[start:]
        masks_see = is_mask | (slot <= end)  # (B, n + K)
        sees = torch.where(is_mask[start:, None], masks_see[:, None], new[:, None] >= slot)
        offsets = torch.where(is_mask, slot - length + end + 1, slot)[:, start:]
        last_part = F.pad(text[:, start:], (0, self.masks), value=self.mask_token)
        parts.append(lm.forward(last_part, sees, start, offsets=offsets))
        lm.keep(at.plus(1))
        last = torch.cat(parts, 1)  # (B, n + K, D')
        row = torch.arange(rows, device=text.device)[:, None]
        self.states = last[row, self._predicting(end, length)]

    def read_block(self, tokens: Tensor) -> Tensor:
        """One pass over (B, K) tokens instead of the masks -> (B, K, D') states; nothing is cached."""
        assert self.states is not None
        sees = torch.ones(1, self.masks, self.masks, dtype=torch.bool, device=tokens.device)
        last = self.lm.forward(tokens, sees, offsets=torch.arange(self.masks, device=tokens.device))
        # The root's output depends only on the text.
        return torch.cat([self.states[:, : self.shift], last[:, : self.masks - self.shift]], 1)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.lm.select(rows)
        self.states = select_rows(self.states, RowInts.of(rows))

    def append(self, other: MaskedPrefix) -> None:
        """Append the other's rows."""
        self.lm.append(other.lm)
        self.states = append_rows(self.states, other.states)

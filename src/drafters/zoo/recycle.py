"""Token recycling (Luo et al., arXiv:2408.08696): reuses the target's distributions after a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.model.target import LAST, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.row_state import append_rows, select_rows
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Progress, Text
from drafters.drafting.tree import expand
from drafters.families.pair_table import PairTable

RECENT = 8  # newest occurrences of a token that are averaged
LOGITS = 1 << 24  # computed by the target's head at once


@dataclass(slots=True)
class RecycledRows:
    """The most probable tokens of the target's distribution after every token of every text.

    Columns are in the order of the text; rows that settle fewer tokens in a round are filled with `PAD`.
    """

    root: Tensor  # (B,) newest token, not read by the target yet
    text: Tensor  # (B, T) tokens that it has read
    tokens: Tensor  # (B, T, k) the most probable after each
    probs: Tensor  # (B, T, k)

    @classmethod
    def empty(cls, rows: int, count: int, like: Tensor) -> RecycledRows:
        """The empty state; `like` has the device and the dtype of probabilities."""
        root = torch.full((rows,), PAD, device=like.device)
        none = root.new_empty(rows, 0)
        return cls(root, none, root.new_empty(rows, 0, count), like.new_empty(rows, 0, count))

    def select(self, rows: RowInts) -> None:
        """Keep these rows, in this order."""
        self._set([select_rows(part, rows) for part in self._parts])

    def append(self, other: RecycledRows) -> None:
        """Append another state's rows; the shorter texts are padded on the left."""
        width = max(self.text.shape[1], other.text.shape[1])
        pairs = zip(self._padded(width), other._padded(width), strict=True)
        self._set([append_rows(mine, theirs) for mine, theirs in pairs])

    def extend(self, root: Tensor, text: Tensor, tokens: Tensor, probs: Tensor) -> None:
        """Add columns, and set the newest token."""
        new = zip(self._parts[1:], (text, tokens, probs), strict=True)
        self._set([root, *(torch.cat(pair, 1) for pair in new)])

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.root, self.text, self.tokens, self.probs

    def _padded(self, width: int) -> list[Tensor]:
        missing = width - self.text.shape[1]
        text = F.pad(self.text, (missing, 0), value=PAD)
        return [self.root, text, *(F.pad(part, (0, 0, missing, 0)) for part in self._parts[2:])]

    def _set(self, parts: Sequence[Tensor]) -> None:
        self.root, self.text, self.tokens, self.probs = parts


class Recycle(PairTable):
    """Drafts from the target's distributions at earlier places of the same token, as seen in verification.

    After a token v, the target's distributions at the `RECENT` newest places of v in the row's text, prompt
    included, are averaged with weights 1, `decay`, `decay`^2, ... from the newest. This average r is mixed
    with the bigram table of the rollouts:

        q(w | v) = own_weight r(w | v) + (1 - own_weight) bigram(w | v)

    If v is new in the text, q is the table's. (The paper keeps the newest ranking of each token for all
    requests, rejected nodes included, without probabilities. Here a draft depends only on the row's text, not
    on other requests, so replay is exact.)

    Args:
        vocab_size: V of the target.
        candidates: k, most probable tokens kept at each place.
        own_weight: weight of the row's own text.
        decay: weight of a place relative to the next newer one of the same token.
        pairs: whether to count pairs of tokens in the rollouts; otherwise q has no other tokens than r's.
        successors, prior: of the table, see `PairTable`.

    Raises:
        UserError: an option out of range.
    """

    taps = (LAST,)

    def __init__(
        self,
        vocab_size: int,
        candidates: int,
        own_weight: float,
        decay: float,
        pairs: bool,
        successors: int,
        prior: float,
    ) -> None:
        super().__init__(vocab_size, successors, prior)
        if candidates < 1 or not 0 < own_weight < 1 or not 0 <= decay <= 1:
            raise UserError(
                f"drafter: candidates={candidates} must be at least 1, own_weight={own_weight} between 0 and "
                f"1, and decay={decay} from 0 to 1"
            )
        self.candidates, self.own_weight, self.decay = min(candidates, vocab_size), own_weight, decay
        self.settings |= {"candidates": candidates, "own_weight": own_weight, "decay": decay, "pairs": pairs}

    @property
    @override
    def needs_fit(self) -> bool:
        return self.settings["pairs"]

    @override
    def fit(
        self, texts: Iterable[Text], target: Target | None = None, progress: Progress | None = None
    ) -> str:
        if not self.settings["pairs"]:
            return "nothing is counted or trained"
        return super().fit(texts, target, progress)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> RecycledRows:
        return RecycledRows.empty(rows, self.candidates, self.seen.new_empty(0, dtype=torch.float32))

    @override
    def advance(
        self,
        state: RecycledRows,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        ends = RowInts.of(counts).on(tokens.device)[:, None]
        settled = torch.arange(tokens.shape[1], device=tokens.device) < ends  # (B, M)
        width = max(1, LOGITS // (len(tokens) * target.vocab_size))
        probs, best = [], []
        for last in taps[:, :, 0].split(width, 1):
            logits = target.head(last)  # (B, w, V)
            value, token = logits.to(state.probs.dtype).softmax(-1).topk(self.candidates)
            probs.append(value)
            best.append(token)
        text = tokens.where(settled, PAD)
        state.extend(root, text, torch.cat(best, 1), torch.cat(probs, 1))

    @override
    def propose(
        self, state: RecycledRows, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        def step(token: Tensor, parent: Tensor) -> Tensor:
            del parent  # children depend only on token and settled text
            return self._mixed(state, token, target.dtype)

        return expand(step(state.root[:, None], state.root)[:, 0], step, sampler, coin, plan)

    def _mixed(self, state: RecycledRows, token: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, W) tokens -> (B, W, V) log-probabilities of the next token."""
        table = super().logits(token, dtype).softmax(-1)
        places = torch.arange(1, state.text.shape[1] + 1, device=token.device)
        found = (state.text[:, None] == token[..., None]) * places  # (B, W, T) 0: another token
        newest = found.topk(min(RECENT, len(places))).values  # (B, W, R) from 1, the newest first
        weight = (newest > 0) * self.decay ** torch.arange(newest.shape[-1], device=token.device)  # (B, W, R)
        share = self.own_weight * weight / weight.sum(-1, keepdim=True).clamp_min(1)
        row = torch.arange(len(token), device=token.device)[:, None, None]
        at = (newest - 1).clamp_min(0)
        own = (state.probs[row, at] * share[..., None]).to(table.dtype)  # (B, W, R, k)
        left = 1 - share.sum(-1, keepdim=True).to(table.dtype)  # 1 where the token is new
        return (left * table).scatter_add(-1, state.tokens[row, at].flatten(-2), own.flatten(-2)).log()

"""The target's distributions at the slots of one round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.sampling import Sampler

# Changes logits: (the request of each row, its text, (R, V) fp32 logits after it) -> (R, V). Must be a
# function of these alone, because a slot may be asked for or not, and in any order.
EditLogits = Callable[[Sequence[int], Sequence[Sequence[int]], Tensor], Tensor]


class TextState(Protocol):
    """A rule's state of the texts of a batch; `row_state` selects and appends its rows."""

    def after(self, tokens: Tensor) -> Self:
        """State after (B, M) more tokens, `PAD` included."""
        ...


class TargetProbs:
    """The target's distributions at the slots of one round, warped on demand.

    Args:
        logits: (B, S, V) of the target.
        sampler: warpers.
        seen: (B, V) bool tokens of each sequence, root included; None if no warper needs them.
        state: the rule's state of each sequence, root included; see `Rule.follow`.

    Attributes:
        state: the rule's state of the current paths.
    """

    def __init__(
        self, logits: Tensor, sampler: Sampler, seen: Tensor | None = None, state: TextState | None = None
    ) -> None:
        self._logits, self._sampler, self.state = logits, sampler, state
        self._soft = replace(sampler, temperature=sampler.temperature or 1.0)
        self._seen = None if seen is None else seen.clone()
        self._row = torch.arange(logits.shape[0], device=logits.device)

    def at(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V) distributions, given the tokens passed to `append`."""
        return self._sampler.probs(self._logits_at(slot), self._seen)

    def soft_at(self, slot: Tensor) -> Tensor:
        """Like `at`, but with temperature 1 instead of 0, to compare other tokens."""
        return self._soft.probs(self._logits_at(slot), self._seen)

    def append(self, token: Tensor, active: Tensor) -> None:
        """Add (B,) tokens to the paths of the active rows; penalties and rules may depend on them."""
        if self._seen is not None:
            self._seen[self._row, token.clamp_min(0)] |= active
        if self.state is not None:
            self.state = self.state.after(token.where(active, PAD)[:, None])

    def all(self, draft: Draft) -> Tensor:
        """(B, S, V) distributions at every slot, each given its path from the root."""
        probs = self._sampler.probs(self._all_logits(draft).flatten(0, 1), self._seen_at(draft))
        return probs.unflatten(0, self._logits.shape[:2])

    def argmax(self, draft: Draft) -> Tensor | None:
        """(B, S) greedy token at every slot; None unless the temperature is 0."""
        if self._sampler.temperature:
            return None
        tokens = self._sampler.argmax(self._logits.flatten(0, 1), self._seen_at(draft))
        return tokens.unflatten(0, self._logits.shape[:2])

    def _logits_at(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V)."""
        return self._logits[self._row, slot]

    def _all_logits(self, draft: Draft) -> Tensor:
        """(B, S, V)."""
        del draft
        return self._logits

    def _seen_at(self, draft: Draft) -> Tensor | None:
        """(B * S, V) bool: tokens of the sequence and of each slot's path."""
        if self._seen is None:
            return None
        # One-hot token of each node, times the ancestor matrix: counts of each token on each path.
        node = torch.zeros_like(self._logits[:, 1:]).scatter_(2, draft.tokens.clamp_min(0)[..., None], 1)
        on_path = draft.ancestors()[:, :, 1:].to(node.dtype) @ node > 0  # (B, S, V)
        return (self._seen[:, None] | on_path).flatten(0, 1)


class EditedProbs(TargetProbs):
    """`TargetProbs` of logits that a function of the text changes, such as a processor of transformers.

    Args:
        logits: (B, S, V) of the target.
        sampler: warpers, applied after the edit.
        seen: see `TargetProbs`.
        state: see `TargetProbs`.
        edit: changes logits.
        requests: of each row.
        texts: tokens of each row, root included.
    """

    def __init__(
        self,
        logits: Tensor,
        sampler: Sampler,
        seen: Tensor | None,
        state: TextState | None,
        edit: EditLogits,
        requests: Sequence[int],
        texts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(logits, sampler, seen, state)
        self._edit, self._requests, self._texts = edit, requests, list(texts)

    def append(self, token: Tensor, active: Tensor) -> None:
        """See `TargetProbs`; waits for the device, because texts are on the host."""
        super().append(token, active)
        chosen = zip(token.tolist(), active.tolist(), strict=True)
        for row, (one, grows) in enumerate(chosen):
            if grows:
                self._texts[row] = [*self._texts[row], one]

    def argmax(self, draft: Draft) -> Tensor | None:
        """None: the walk reads fewer slots than there are."""
        del draft

    def _logits_at(self, slot: Tensor) -> Tensor:
        return self._edit(self._requests, self._texts, super()._logits_at(slot).float())

    def _all_logits(self, draft: Draft) -> Tensor:
        requests, texts, on_path = [], [], draft.ancestors()[:, :, 1:].tolist()  # (B, S, N)
        for row, nodes in enumerate(draft.tokens.tolist()):
            requests += [self._requests[row]] * len(on_path[row])
            for path in on_path[row]:
                texts.append([*self._texts[row], *(n for n, on in zip(nodes, path, strict=True) if on)])
        edited = self._edit(requests, texts, self._logits.flatten(0, 1).float())
        return edited.unflatten(0, self._logits.shape[:2])

"""Teacher forcing: drafts at every position of stored answers, given the preceding text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD
from decode.generation.finite import check_logits, check_states
from decode.generation.types import Proposer
from decode.hardware import memory_bytes
from decode.model.target import Target, TargetOutput
from decode.rng import Key


class Rollout(NamedTuple):
    """A prompt and the target's answer, including its end token."""

    prompt: list[int]
    answer: list[int]


class Start(NamedTuple):
    """A possible start of a round: token `place` - 1 of the answers is the root, token `place` is drafted."""

    place: int
    rows: int  # number of answers that are long enough: the first rows of the batch
    state: Any  # drafter state of these rows


Read = Callable[[Tensor], TargetOutput]  # as `Target.read`
MEMORY_SHARE = 0.02  # maximum share of the device's memory for hidden states of `TargetResults`
STORED = "a prompt with its stored answer"  # name of the texts in errors
ROOM = 64  # initial slots for a draft; the cache grows if needed


class TargetResults:
    """Results of a target alone, kept from the score of one checkpoint to that of the next.

    The target's weights must not change.

    Args:
        target: the target.

    Attributes:
        tie_widths: widths of near ties that `audit` has measured.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._room = MEMORY_SHARE * memory_bytes(target.device)
        self._outputs: dict[Hashable, TargetOutput] = {}
        self.tie_widths: dict[Hashable, float] = {}

    def read(self, tokens: Tensor) -> TargetOutput:
        """`Target.read` of (B, T) tokens; kept if there is room."""
        if self.target.tap_transform is not None:
            return self.target.read(tokens)
        key = self.target.taps, tokens.shape, tokens.cpu().numpy().tobytes()
        if key in self._outputs:
            return self._outputs[key]
        output = self.target.read(tokens)
        size = sum(part.numel() * part.element_size() for part in output)
        if size <= self._room:
            self._room -= size
            self._outputs[key] = output
        return output


class SettledCache:
    """The target's cache, filled step by step for a drafter that reads it.

    For other drafters it does nothing, because `TeacherForcedTexts` has the target's outputs.

    Args:
        target: its cache is replaced.
        drafter: drafter that may read the cache.
        rows: number of texts.
        longest: tokens of the longest text.
    """

    def __init__(self, target: Target, drafter: Proposer, rows: int, longest: int) -> None:
        self._target = target if drafter.traits.reads_cache else None
        if self._target:
            self._target.start(rows, longest + ROOM)

    def settle(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Run (B, n) right-padded tokens and settle `counts[b]` of them."""
        if self._target:
            self._target.extend(tokens)
            self._target.keep(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if self._target:
            self._target.select(rows)


class TeacherForcedTexts:
    """A batch of rollouts after one target pass; see `SettledCache` for drafters that read its cache.

    Args:
        target: model that generated the rollouts.
        rollouts: sorted by answer length, longest first.
        ahead: number of tokens to read after a start.
        read: reads the texts; default `target.read`.

    Raises:
        UserError: the target's hidden states, or its logits after a prompt, are not finite.

    Attributes:
        answers: (B, longest + ahead) tokens, padded with `PAD`.
        output: the target's hidden states and taps of the full texts.
    """

    def __init__(
        self, target: Target, rollouts: Sequence[Rollout], ahead: int, read: Read | None = None
    ) -> None:
        texts = [r.prompt + r.answer for r in rollouts]
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        answers = torch.full((len(texts), len(rollouts[0].answer) + ahead), PAD)
        for row, (text, rollout) in enumerate(zip(texts, rollouts, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            answers[row, : len(rollout.answer)] = torch.tensor(rollout.answer)
        self.target, self.rollouts = target, rollouts
        self.tokens, self.answers = tokens.to(target.device), answers.to(target.device)
        self.output: TargetOutput = (read or target.read)(self.tokens)
        check_states(target, self.output.last, texts, STORED)
        prompts = torch.tensor([len(r.prompt) for r in rollouts], device=target.device)
        rows = torch.arange(len(rollouts), device=target.device)
        # Fixed drafts are replayed without logits; a broken head shows in any row of them.
        logits = target.head(self.output.last[rows, prompts - 1])  # (B, V)
        for row, (text, rollout) in enumerate(zip(texts, rollouts, strict=True)):
            check_logits(target, logits[row : row + 1], text, len(rollout.prompt), STORED)

    def starts(self, drafter: Proposer) -> Iterator[Start]:
        """Iterate over all starts in order; the drafter may call `propose` several times at each."""
        row = torch.arange(len(self.rollouts), device=self.tokens.device)
        state: Any = drafter.new_state(len(row))
        counts = [len(r.prompt) for r in self.rollouts]
        begin = torch.tensor(counts, device=self.tokens.device)
        settled, taps = self.tokens[:, : max(counts)], self.output.taps[:, : max(counts)]
        cache = SettledCache(self.target, drafter, *self.tokens.shape)
        for place in range(1, len(self.rollouts[0].answer)):
            rows = sum(len(r.answer) > place for r in self.rollouts)
            if rows < len(row):
                drafter.select(state, list(range(rows)))
                cache.select(list(range(rows)))
                settled, taps, counts, row = settled[:rows], taps[:rows], counts[:rows], row[:rows]
            cache.settle(settled, counts)
            drafter.advance(state, self.target, settled, taps, counts, self.answers[row, place - 1])
            yield Start(place, rows, state)
            at = (begin[row] + place - 1)[:, None]  # (B, 1) position of the root, settled next
            settled, taps, counts = (
                self.tokens[row[:, None], at],
                self.output.taps[row[:, None], at],
                [1] * rows,
            )


class ForcedTokens:
    """A coin that returns the rollout's tokens, one per level of the draft.

    Args:
        ahead: (B, K) tokens.
    """

    def __init__(self, ahead: Tensor) -> None:
        self.ahead, self.level = ahead, 0

    def draw(self, weights: Tensor, key: Key, active: Tensor) -> Tensor:
        """(B,) or (B, n) tokens; call it once per level."""
        del weights, key
        token = self.ahead[:, self.level].clamp_min(0)
        self.level += 1
        return token if active.ndim == 1 else token[:, None].expand(active.shape)

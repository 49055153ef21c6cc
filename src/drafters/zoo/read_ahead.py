"""A draft model's chain or tree in fewer passes: guesses of another drafter are read early.

The vertical cascade of Cascade Speculative Drafting (Chen et al., arXiv:2312.11462) and TriForce (Sun et al.,
arXiv:2404.11912), and the drafted drafter of staged speculative decoding (Spector and Re, arXiv:2308.04623).
There the draft model accepts or rejects each guess at random. Here it chooses or draws every token itself,
with the same random key and distribution as without guesses; a guess helps if it is an expanded node. The
draft is the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from decode.model.target import Target
from decode.plan import Path
from decode.transfer import upload
from drafters.hf.vocabulary import known_tokens
from drafters.models.lm import DraftLM, LMState


class Reading(NamedTuple):
    """Outputs of a draft model for n tokens of each row."""

    last: Tensor  # (B, n, D') input of the head after each token
    logits: Tensor  # (B, n, V) of the token that follows each


def read_settled(
    drafter: DraftLM,
    state: LMState,
    target: Target,
    tokens: Tensor,
    counts: Sequence[int],
    root: Tensor,
    guesses: Tensor,
    reach: Tensor | None = None,
) -> Reading:
    """`DraftLM.advance`, with (B, G) guesses of the draft read after the root.

    Guesses use the first scratch slots. `reach` (B, G, G) bool: the guesses that each sees, itself included;
    None: all up to itself.
    """
    lm, count = state.lm, guesses.shape[1]
    text, end = drafter.unread(state, tokens, counts, root)
    at = end.on(root.device)[:, None] + torch.arange(count + 1, device=root.device)  # (B, 1 + G)
    if count:
        text = F.pad(text, (0, count)).scatter(1, at[:, 1:], known_tokens(lm, guesses))
    last = lm.read_text(text) if reach is None else lm.forward(text, _visibility(text, at[:, 1:], reach))
    lm.keep(end.plus(1))
    last = last.gather(1, at[..., None].expand(-1, -1, last.shape[-1]))  # (B, 1 + G, D')
    logits = drafter.logits(lm, last, target)
    state.last, state.logits = last[:, 0], logits[:, 0]
    return Reading(last[:, 1:], logits[:, 1:])


def _visibility(text: Tensor, at: Tensor, reach: Tensor) -> Tensor:
    """(B, n, n) bool: the (B, n) tokens that each sees; those at (B, G) see one another by `reach`."""
    rows, width = text.shape
    block = torch.ones(width, width, dtype=torch.bool, device=text.device).tril().repeat(rows, 1, 1)
    row = torch.arange(rows, device=text.device)[:, None, None]
    block[row, at[:, :, None], at[:, None]] = reach
    return block


def read_drafted(
    drafter: DraftLM,
    state: LMState,
    target: Target,
    tokens: Tensor,
    scratch: int,
    reach: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Reading:
    """Read (B, n) tokens below the root, after `scratch` tokens that were read there.

    `reach` and `offsets` are `block` and `offsets` of `CausalLM.forward`.
    """
    last = state.lm.forward(known_tokens(state.lm, tokens), reach, scratch, offsets=offsets)
    return Reading(last, drafter.logits(state.lm, last, target))


class ReadNodes:
    """Nodes below the root that a draft model has read, by their paths of tokens.

    All rows use the same number of scratch slots; a row with fewer nodes is padded with token 0.

    Args:
        rows: B.

    Attributes:
        count: number of scratch slots in use.
    """

    def __init__(self, rows: int) -> None:
        self.count = 0
        self._slots: list[dict[Path, int]] = [{} for _ in range(rows)]
        self._parents: list[list[int]] = [[] for _ in range(rows)]  # slot of each slot's parent; -1: the root
        self._readings: list[tuple[int, Reading]] = []  # first slot of each pass; it ends at the next one's

    def have(self, paths: Sequence[Sequence[Path]]) -> bool:
        """Whether all these nodes were read in each row."""
        return all(path in slots for slots, row in zip(self._slots, paths, strict=True) for path in row)

    def forget_others(self, paths: Sequence[Sequence[Path]]) -> None:
        """Forget nodes neither above nor below these, and free the slots after the last remaining node."""
        for row, kept in enumerate(paths):
            self._slots[row] = {
                path: slot
                for path, slot in self._slots[row].items()
                if any(path[: len(other)] == other[: len(path)] for other in kept)
            }
        self.count = 1 + max((slot for slots in self._slots for slot in slots.values()), default=-1)
        self._parents = [parents[: self.count] for parents in self._parents]
        self._readings = [(begin, reading) for begin, reading in self._readings if begin < self.count]

    def add(self, paths: Sequence[Sequence[Path]], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Assign slots to new nodes of each row.

        Args:
            paths: of each row, parents before children.
            device: of the draft model.

        Returns:
            (B, n) tokens to read in the next n slots, and (B, m, m) bool: of all m slots those that each
            sees, itself included; None: all up to itself. Pass the tokens' `Reading` to `extend`.
        """
        new = [
            [p for p in dict.fromkeys(row) if p not in slots]
            for slots, row in zip(self._slots, paths, strict=True)
        ]
        begin, self.count = self.count, self.count + max(map(len, new))
        for slots, parents, row in zip(self._slots, self._parents, new, strict=True):
            for path in row:
                slots[path] = len(parents)
                parents.append(slots[path[:-1]] if path[:-1] else -1)
            parents += range(len(parents) - 1, self.count - 1)  # padding continues a chain
        table = np.zeros((len(new), self.count, 1 + self.count), np.int64)  # tokens, then the mask
        for row, added in enumerate(new):
            table[row, begin : begin + len(added), 0] = [path[-1] for path in added]
        chain = list(range(-1, self.count - 1))
        if all(parents == chain for parents in self._parents):
            return upload(table[:, begin:, 0].copy(), device), None
        for row, parents in enumerate(self._parents):
            for slot, parent in enumerate(parents):
                if parent >= 0:
                    table[row, slot, 1:] = table[row, parent, 1:]
                table[row, slot, 1 + slot] = 1
        on_device = upload(table, device)
        return on_device[:, begin:, 0], on_device[..., 1:].bool()

    def extend(self, reading: Reading) -> None:
        """Store the outputs of the tokens in the newest slots."""
        self._readings.append((self.count - reading.last.shape[1], reading))

    def of(self, paths: Sequence[Sequence[Path]]) -> Reading:
        """Outputs of W nodes of each row; all must have been read."""
        slots = [[s[path] for path in row] for s, row in zip(self._slots, paths, strict=True)]
        lowest, highest = min(map(min, slots)), max(map(max, slots))
        begin, *parts = self._between(lowest, highest)
        width = len(slots[0])
        if all(row == list(range(lowest, lowest + width)) for row in slots):  # a view, not a copy
            return Reading(*(part[:, lowest - begin : lowest - begin + width] for part in parts))
        slot = upload(np.array(slots, np.int64) - begin, parts[0].device)  # (B, W)
        row = torch.arange(len(slots), device=slot.device)[:, None]
        return Reading(*(part[row, slot] for part in parts))

    def _between(self, lowest: int, highest: int) -> tuple[int, Tensor, Tensor]:
        """Outputs of the fewest passes that contain these slots: first slot, last, logits."""
        ends = [*(begin for begin, _ in self._readings[1:]), self.count]
        used = [
            (begin, end, reading)
            for (begin, reading), end in zip(self._readings, ends, strict=True)
            if begin <= highest and lowest < end
        ]
        if len(used) == 1:
            begin, _, reading = used[0]
            return begin, reading.last, reading.logits
        last, logits = (
            torch.cat([reading[i][:, : end - begin] for begin, end, reading in used], 1) for i in (0, 1)
        )
        return used[0][0], last, logits


Guess = Callable[[int, Path, int], Sequence[Path]]  # row, path, n -> at most n paths below it, parents first


class ReadAhead:
    """The `Step` of a draft (see `expand`) that reads nodes together with guesses of those below them.

    If every row has read all expanded nodes, there is no pass. Otherwise one pass reads the missing nodes of
    all rows, with guesses below all expanded nodes.

    Args:
        read: (B, n) tokens, number of slots before them, `reach` and `offsets` of `read_drafted` -> outputs.
        guess: nodes that a row may expand next.
        length: maximum guesses of a row in one pass.
        nodes: nodes read below the root; changed in place.
        last: (B, D') input of the head at the root.

    Attributes:
        last: (B, W, D') input of the head after the newest nodes.
    """

    def __init__(
        self,
        read: Callable[[Tensor, int, Tensor | None, Tensor | None], Reading],
        guess: Guess,
        length: int,
        nodes: ReadNodes,
        last: Tensor,
    ) -> None:
        self._read, self._guess, self._length, self._nodes = read, guess, length, nodes
        self.last = last[:, None]
        self._paths: list[list[Path]] = [[()]] * len(last)  # of the newest nodes

    def __call__(self, token: Tensor, parent: Tensor) -> Tensor:
        """(B, W) tokens, and (B, W) their parents in the previous level -> (B, W, V) logits below them."""
        rows = torch.stack([token, parent], -1).tolist()  # one transfer to the host
        self._paths = [[(*above[p], t) for t, p in row] for above, row in zip(self._paths, rows, strict=True)]
        if not self._nodes.have(self._paths):
            self._read_missing(token.device)
        found = self._nodes.of(self._paths)
        self.last = found.last
        return found.logits

    def _read_missing(self, device: torch.device) -> None:
        """Read the newest unread nodes, and guesses."""
        nodes, paths = self._nodes, self._paths
        nodes.forget_others(paths)
        scratch = nodes.count
        wanted = [[*row, *guessed(self._guess, i, row, self._length)] for i, row in enumerate(paths)]
        tokens, reach = nodes.add(wanted, device)
        if reach is None:
            nodes.extend(self._read(tokens, scratch, None, None))
        else:  # positions of all slots, since sliding windows need them
            nodes.extend(self._read(tokens, scratch, reach[:, scratch:], reach.sum(-1) - 1))


def guessed(guess: Guess, row: int, paths: Sequence[Path], count: int) -> list[Path]:
    """At most `count` guesses below a row's nodes, equally many for each; the first get the remainder."""
    paths = list(dict.fromkeys(paths))
    shares = [count // len(paths) + (i < count % len(paths)) for i in range(len(paths))]
    return [below for path, n in zip(paths, shares, strict=True) for below in guess(row, path, n)]

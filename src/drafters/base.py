"""Base class of drafters: a module that unrolls for training and proposes drafts for decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model.head import Head
from decode.model.target import Tap, Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.row_state import append_rows, select_rows
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.vocabulary import DraftVocabulary, TokenCounts


class Batch(NamedTuple):
    """Target rollouts, right-padded.

    Positions: anchor t sees tokens up to x_{t+1} and taps up to t; depth j (from 1) predicts
    x_{t+1+j}, and its teacher is the target's row at t + j.
    """

    tokens: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool, on the host: True where the target wrote token i
    taps: Tensor  # (B, T, L, D)
    last: Tensor  # (B, T, D) input of the target's head: teacher logits are head(last)
    seed: int = 0  # of the drafter's noise, a function of the optimizer step
    progress: float = 1.0  # completed share of the training steps, for schedules


class DraftStep(NamedTuple):
    """Predictions at one depth.

    Attributes:
        hidden: (M, D') of the supervised anchors; (M, D' + r) where the head has a `side`.
        anchor: (M,) flat index b * T + t, ascending, on the host, where the objective plans.
        depth: j >= 1; 0 for the target's own prediction of x_{t+1}, from a drafter that tunes the target.
        head: maps hidden to logits.
        aux: named auxiliary losses, (M,) each, unweighted.
        weight: loss weight of the rows, one number or (M,). It multiplies the objective's weights; in a
            sum over depths, the part of this depth.
        training_only: an extra loss term with the weights of the step of the same depth and anchors. It
            is not drafted from, so alpha ignores it.
        copied: `anchor` on the device of `hidden`; None: copied by `place`.
    """

    hidden: Tensor
    anchor: Tensor
    depth: int
    head: Head
    aux: Mapping[str, Tensor]
    weight: float | Tensor = 1.0
    training_only: bool = False
    copied: Tensor | None = None

    @property
    def place(self) -> Tensor:
        """(M,) `anchor` on the device of `hidden`."""
        return self.anchor.to(self.hidden.device) if self.copied is None else self.copied


def constant_rate(progress: float) -> float:
    """Factor 1 on the learning rate at every step."""
    del progress
    return 1.0


class ParamGroup(NamedTuple):
    """Parameters that share a learning rate."""

    weights: list[nn.Parameter]
    rate: Callable[[float], float] = (
        constant_rate  # completed share of the steps -> factor on optimizer.optimizer.lr
    )


Progress = Callable[[int, int], None]  # called with (steps done, all steps)


class Text(NamedTuple):
    """One stored rollout."""

    tokens: Sequence[int] | np.ndarray
    loss_mask: Sequence[int] | np.ndarray  # 1 where the target wrote token i


def constructor_arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, from its `locals()`; the entries of `**sizes` are merged into them."""
    named = {k: v for k, v in scope.items() if k not in ("self", "__class__", "sizes")}
    return named | scope.get("sizes", {})


def supervised_anchors(loss_mask: Tensor, depth: int) -> Tensor:
    """(B, T) bool: anchors whose labels x_{t+2} .. x_{t+1+depth} are all supervised.

    An anchor leaves the unroll at its first unsupervised depth.
    """
    alive = torch.ones_like(loss_mask)
    for j in range(1, depth + 1):
        label_mask = torch.zeros_like(loss_mask)
        label_mask[:, : -(1 + j)] = loss_mask[:, 1 + j :]  # of x_{t+1+j}, at t
        alive = alive & label_mask
    return alive


def sample_anchors(anchors: Tensor, count: int, seed: int) -> Tensor:
    """A uniform sample of `count` of (N,) anchors, ascending; all if there are no more than that."""
    if count >= len(anchors):
        return anchors
    chosen = torch.randperm(len(anchors), generator=torch.Generator().manual_seed(seed))[:count]
    return anchors[chosen.sort().values.to(anchors.device)]


class Origin(NamedTuple):
    """The target that a drafter was trained for, and the folder it was loaded from.

    Attributes:
        name: path or hub id of the target; "" if unknown.
        revision: commit of a hub id; None if unknown.
        fingerprint: of the target's weights, `Target.fingerprint`.
        tokenizer: hash of the target's vocabulary; "" without a readable tokenizer.
        folder: the checkpoint folder; None for a drafter built in this process.
        content: fingerprint of the drafter's weights as loaded, to detect later changes.
        exports: programs that can serve the drafter, see `export.formats.accepting`.
        published: name under which the target is published; "" if unknown.
        licence: of the target, as in apache-2.0; "" if unknown.
    """

    name: str
    revision: str | None
    fingerprint: str
    tokenizer: str
    folder: Path | None = None
    content: str = ""
    exports: tuple[str, ...] = ()
    published: str = ""
    licence: str = ""


class Drafter(DraftVocabulary, ABC):
    """Base of drafters. A new one needs a file in drafters/models, a conf/drafter yaml, a registry line.

    Constructors take plain values, kept in `settings` and written to config.json;
    `for_target` fills in sizes that follow from the target.

    Args:
        draft_vocab_size: see `DraftVocabulary`.

    Attributes:
        taps: hidden states that the drafter reads: layer ids (inputs of decoder layers) or "last".
        aux_weights: weight of each auxiliary loss; see `aux_weights_at` for schedules.
        traits: what it can do, see `Traits`; a constructor may replace the class's own.
        confidence: head that predicts from a state whether its token will be accepted; None: no head.
        origin: set when the drafter is saved or loaded.
    """

    taps: tuple[Tap, ...] = ()
    aux_weights: Mapping[str, float] = {}
    traits = Traits()
    confidence: Confidence | None
    origin: Origin | None = None
    settings: dict[str, Any]

    def __init__(self, draft_vocab_size: int | None = None) -> None:
        super().__init__(draft_vocab_size)
        self.register_module("confidence", None)

    @classmethod
    @abstractmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Build a new drafter with the sizes of `target`."""

    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        """Build from the `settings` of a config.json; `load_state_dict` fills in the weights."""
        del target
        return cls(**settings)

    # -- training ----------------------------------------------------------------------------

    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Yield predictions for depth 1, 2, ...; the objective computes losses from them."""
        raise NotImplementedError(f"{type(self).__name__} has no training")

    @property
    def trains(self) -> bool:
        """Whether it has trainable weights; a drafter without `unroll` is scored untrained."""
        return type(self).unroll is not Drafter.unroll

    def aux_weights_at(self, progress: float) -> Mapping[str, float]:
        """Weights of the auxiliary losses after a share `progress` of the training steps."""
        del progress
        return self.aux_weights

    def param_groups(self) -> list[ParamGroup]:
        """All trainable parameters, by learning rate."""
        return [ParamGroup([weight for weight in self.parameters() if weight.requires_grad])]

    @property
    def state_size(self) -> int | None:
        """Size of the hidden states that its distributions are computed from; None: no such states."""
        return self.settings.get("hidden_size")

    def add_confidence(self) -> None:
        """Add a confidence head.

        Raises:
            UserError: the drafter has no hidden state for each of its distributions.
        """
        if self.state_size is None:
            raise UserError(
                "drafter.confidence=true: this drafter has no hidden state for each of its distributions; "
                "leave it false"
            )
        self.confidence = Confidence(self.state_size)

    # -- counting, before training -------------------------------------------------------------

    def fit(self, texts: Iterable[Text], target: Target, progress: Progress | None = None) -> str:
        """Fit counts and vocabularies, without gradients, before the first training step.

        The result depends only on the rollouts: a resumed run fits again. Sizes go into `settings`,
        everything else into buffers.

        Args:
            texts: the training rollouts, without held-out prompts; read once.
            target: of the drafter.
            progress: called after each step of a fit that may take more than a few seconds.

        Returns:
            One line that describes the result.
        """
        del progress
        return self.choose_tokens(TokenCounts.of(texts, target), target)

    @property
    def needs_fit(self) -> bool:
        """Whether `fit` has to run before the first save point."""
        return type(self).fit is not Drafter.fit or self.d2t is not None

    # -- decoding: implements decode.generation.types.Proposer -----------------------------------

    def verifier(self, target: Target) -> Target:
        """The model that verifies drafts: the target or a tuned copy. Decoding is lossless to this model."""
        return target

    @property
    def max_depth(self) -> int | None:
        """Maximum draft length; None: unlimited."""
        return None

    def check(self, plan: Plan) -> None:
        """Validate a plan for this drafter.

        Raises:
            UserError: a proposal or a depth that its traits exclude.
        """
        deepest, proposals = self.max_depth, self.traits.proposals
        if deepest is not None and plan.depth > deepest:
            raise UserError(
                f"decode: a draft of depth {plan.depth}, but this drafter predicts {deepest} tokens; "
                f"set decode.depth={deepest} or less, or train with drafter.depth={plan.depth}"
            )
        if plan.depth and plan.proposal not in ("auto", *proposals):
            raise UserError(
                f"decode.proposal={plan.proposal}: this drafter has no distribution to draw from; "
                f"set decode.proposal={' or '.join(proposals)}"
            )

    def confidence_of(self, newest: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """The confidence head applied to `newest()`, (B, W, D) states of the last level, for `expand`."""
        head = self.confidence
        return None if head is None else lambda: head(newest())

    @abstractmethod
    def new_state(self, rows: int) -> Any:
        """Empty state for `rows` sequences."""

    @abstractmethod
    def advance(
        self,
        state: Any,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        """Update the state with settled tokens; see `decode.generation.types.Proposer.advance`."""

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order; see `select_rows`."""
        select_rows(state, RowInts.of(rows))

    def append(self, state: Any, target: Target, other: Any) -> None:
        """Append another state's rows, see `append_rows`. Both have advanced since their last draft."""
        del target
        append_rows(state, other)

    @abstractmethod
    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root, without changing what `advance` stored.

        Sampled nodes must be drawn with `coin` from the q of the draft (`DraftProbs`), and may not be
        dropped because of the token that was drawn. Every round checks ids and q (`draft_check`), and the
        audit tests that tokens are draws from q.
        """


class Confidence(nn.Module):
    """Probability that the token sampled from a drafter's state s is accepted: sigmoid(w . s + b).

    As in DSpark (arXiv:2607.05147) and SpecDec++ (arXiv:2405.19715). The label is the exact acceptance
    probability, alpha = sum min(p, q). States are detached, so the head does not change how the drafter
    trains. The initial prediction is 1/2.

    Args:
        hidden_size: D of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        # Vectors: Muon treats every matrix as a hidden weight.
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D + r) -> (...) logits; columns after the first D are ignored."""
        states = hidden[..., : len(self.weight)].detach()
        return states.to(self.weight.dtype) @ self.weight + self.bias

"""What every drafter is: a module that unrolls for training and proposes for decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.model.head import Head
from decode.model.target import Tap, Target
from decode.plan import RULES_OF, Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


class Batch(NamedTuple):
    """Target rollouts, right-padded.

    Positions: anchor t knows tokens up to x_{t+1} and taps up to t; depth j (from 1) predicts
    x_{t+1+j}, and its teacher is the target's row at t + j.
    """

    tokens: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool: True where the target wrote token i
    taps: Tensor  # (B, T, L, D)
    last: Tensor  # (B, T, D) the target head's input: teacher rows are head(last)
    seed: int = 0  # of whatever noise the drafter adds: a function of the optimizer step
    progress: float = 1.0  # share of the training steps that are done, for what changes over a run


class DraftStep(NamedTuple):
    """Predictions at one depth.

    Attributes:
        hidden: (M, D') of the supervised anchors; (M, D' + r) where the head has a `side`.
        anchor: (M,) flat index b * T + t.
        depth: j >= 1; 0 for the target's own law of x_{t+1}, from a drafter that tunes the target.
        head: turns hidden into logits.
        aux: named (M,) losses beside the divergence, unweighted.
        weight: of all its rows, or (M,) of each, times what the objective gives.
        training_only: taught beside the draft of the same depth and anchors, with that one's weights, but
            never drafted from: no alpha of it counts.
    """

    hidden: Tensor
    anchor: Tensor
    depth: int
    head: Head
    aux: Mapping[str, Tensor]
    weight: float | Tensor = 1.0
    training_only: bool = False


def constant_rate(progress: float) -> float:
    """The run's own learning rate, at every step."""
    del progress
    return 1.0


class ParamGroup(NamedTuple):
    """Weights that share a learning rate."""

    weights: list[nn.Parameter]
    rate: Callable[[float], float] = (
        constant_rate  # share of the steps that are done -> factor of optimizer.lr
    )


class Text(NamedTuple):
    """One stored rollout."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]  # 1 where the target wrote token i


def constructor_arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, from its `locals()`; those in `**sizes` flat, beside the others."""
    named = {k: v for k, v in scope.items() if k not in ("self", "__class__", "sizes")}
    return named | scope.get("sizes", {})


def supervised_anchors(loss_mask: Tensor, depth: int) -> Tensor:
    """(B, T) bool: anchors that are still in the unroll at `depth`.

    An anchor leaves at its first unsupervised depth: x_{t+2} .. x_{t+1+depth} all count.
    """
    alive = torch.ones_like(loss_mask)
    for j in range(1, depth + 1):
        shifted = torch.zeros_like(loss_mask)
        shifted[:, : -(1 + j)] = loss_mask[:, 1 + j :]
        alive = alive & shifted
    return alive


def sample_anchors(anchors: Tensor, count: int, seed: int) -> Tensor:
    """`count` of (N,) anchors, ascending, each as likely as any other; all, if there are no more."""
    if count >= len(anchors):
        return anchors
    chosen = torch.randperm(len(anchors), generator=torch.Generator().manual_seed(seed))[:count]
    return anchors[chosen.sort().values.to(anchors.device)]


class Origin(NamedTuple):
    """Whom a drafter was made for, and where it was read.

    Attributes:
        name: path or hub id of the target; "": nobody said.
        revision: commit of a hub id, where it is known.
        fingerprint: of the target's weights, `Target.fingerprint`.
        tokenizer: hash of what the target's tokenizer calls each id; "": it has none to be read.
        folder: that the drafter was read from; None: it was made here.
        sample: of the weights that were read, to tell whether they are still these.
    """

    name: str
    revision: str | None
    fingerprint: str
    tokenizer: str
    folder: Path | None = None
    sample: str = ""


class Drafter(nn.Module, ABC):
    """Base class. A new drafter is one file here, one yaml in conf/drafter, one contract row.

    Constructors take plain values, kept in `settings` and written to config.json; `for_target`
    fills in what follows from the target.

    Attributes:
        taps: layer ids (inputs of decoder layers) or "last" that the drafter reads.
        aux_weights: weight of each named auxiliary loss, unless `aux_weights_at` says otherwise.
        proposals: where its tokens may come from, as `Plan.proposal` has it.
        depth_invariant: its row for depth j at anchor t is its row for depth 1 at anchor t + j - 1, as in
            any model that reads the text alone; `unroll` then yields depth 1 and nothing else.
        max_depth: levels that it can draft; None: any number.
        confidence: says from a state how likely its token is to be accepted; None: nothing does.
        warm_starts_from: another drafter's short name whose weights it may begin with, or "".
        origin: known once it was saved or loaded.
    """

    taps: tuple[Tap, ...] = ()
    aux_weights: Mapping[str, float] = {}
    proposals: tuple[str, ...] = tuple(RULES_OF)
    depth_invariant: bool = False
    max_depth: int | None = None
    confidence: Confidence | None
    warm_starts_from: str = ""
    origin: Origin | None = None
    settings: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.register_module("confidence", None)

    @classmethod
    @abstractmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Build a fresh drafter whose sizes fit `target`."""

    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        """As `settings` have it, for `load_state_dict` to fill with what was saved."""
        del target
        return cls(**settings)

    @property
    def unsaved_names(self) -> frozenset[str]:
        """Names in `state_dict` of what is another model's and frozen: in no checkpoint."""
        return frozenset()

    def save_separately(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """Write those that have a file of their own into a checkpoint's folder, and give the others."""
        del folder
        return tensors

    # -- training face -----------------------------------------------------------------------

    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Yield predictions for depth 1, 2, ...; the objective decides how to score them."""
        raise NotImplementedError(f"{type(self).__name__} is used as it is")

    @property
    def trains(self) -> bool:
        """Whether there is anything to fit; one without an `unroll` is scored as it is."""
        return type(self).unroll is not Drafter.unroll

    def aux_weights_at(self, progress: float) -> Mapping[str, float]:
        """Weights of the named auxiliary losses, when a share `progress` of the steps is done."""
        del progress
        return self.aux_weights

    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a drafter of this class saved, with its settings, as it fits here.

        Raises:
            UserError: it cannot.
        """
        del settings
        return weights

    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the drafter that it `warm_starts_from`, by the names they have here."""
        return weights

    def param_groups(self) -> list[ParamGroup]:
        """What trains, by learning rate; none is left out."""
        return [ParamGroup([weight for weight in self.parameters() if weight.requires_grad])]

    def shardable_modules(self) -> Iterable[nn.Module]:
        """Parts whose weights only their own forward pass reads, and that every unroll runs.

        Engines that cut weights up (FSDP2, ZeRO-3) gather these one by one, and all else at once.
        """
        return ()

    def checkpoint_gradients(self) -> None:
        """Make activations again in the backward pass instead of keeping them (arXiv:1604.06174).

        Raises:
            UserError: a drafter of heads alone, which keeps too little for it to help.
        """
        raise UserError("gradient_checkpointing: this drafter keeps next to nothing; leave it false")

    def as_target(self, target: Target) -> Target:
        """A frozen copy that writes texts by itself, in the target's dtype: for on-policy training.

        Raises:
            UserError: a drafter that has nothing to say without the target.
        """
        del target
        raise UserError("on_policy: this drafter writes no text without the target; set on_policy.share=0")

    @property
    def state_size(self) -> int | None:
        """Of the hidden states that its laws are read off; None: there is not one for each law."""
        return self.settings.get("hidden_size")

    def add_confidence(self) -> None:
        """Give it a confidence head.

        Raises:
            UserError: a drafter without a state for each of its laws.
        """
        if self.state_size is None:
            raise UserError(
                "drafter.confidence=true: this drafter reads its laws off no hidden states, one for each; "
                "leave it false"
            )
        self.confidence = Confidence(self.state_size)

    # -- what is counted rather than trained ---------------------------------------------------

    def fit(self, texts: Iterable[Text]) -> str:
        """Learn what takes no gradient from the rollouts, before the first step and save point.

        A function of the rollouts alone: a resumed run fits again. Sizes that follow from it belong
        into `settings`, everything else into buffers.

        Args:
            texts: the training rollouts, read once; never a held-out prompt.

        Returns:
            One line on what was learned.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing without a gradient")

    @property
    def needs_fit(self) -> bool:
        """Whether there is something to count before the first save point."""
        return type(self).fit is not Drafter.fit

    # -- decoding face: satisfies decode.generation.types.Proposer -------------------------------------

    def verifier(self, target: Target) -> Target:
        """Whose law the output keeps: the target, or what a drafter that tunes it has made of it."""
        return target

    def check(self, plan: Plan) -> None:
        """Refuse a plan whose nodes this drafter cannot make.

        Raises:
            UserError: its proposal is none of `proposals`, or it is deeper than `max_depth`.
        """
        if self.max_depth is not None and plan.depth > self.max_depth:
            raise UserError(
                f"decode: a draft of depth {plan.depth}, but this drafter predicts {self.max_depth} tokens; "
                f"set decode.depth={self.max_depth} or less, or train with drafter.depth={plan.depth}"
            )
        if plan.depth and plan.proposal not in self.proposals:
            raise UserError(
                f"decode.proposal={plan.proposal}: this drafter has no law to draw from; "
                f"set decode.proposal={' or '.join(self.proposals)}"
            )

    def confidence_of(self, newest: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """For `expand`: the confidence head on (B, W, D) states of the newest level, if there is one."""
        head = self.confidence
        return None if head is None else lambda: head(newest())

    @abstractmethod
    def new_state(self, rows: int) -> Any:
        """State for `rows` fresh sequences."""

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
        """Absorb settled tokens; see `decode.generation.types.Proposer.advance`."""

    @abstractmethod
    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows of the state, in this order."""

    @abstractmethod
    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        """Draft below the root without changing what `advance` built."""

    def kv_bytes_per_token(self, state: Any) -> int:
        """Bytes of keys and values that a settled token holds in `state`; none unless said."""
        del state
        return 0


class Confidence(nn.Module):
    """sigmoid(w . s + b): the chance that the token drawn from the law that is read off state s is
    accepted (DSpark, arXiv:2607.05147; SpecDec++, arXiv:2405.19715).

    It is taught alpha = sum min(p, q), the exact chance, beside the drafter and not with it: states
    are detached, so that what is drafted is the same with and without it. It begins at 1/2.

    Args:
        hidden_size: D of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        # Vectors, so that no optimizer takes them for a hidden matrix.
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D + r) -> (...) logits; columns behind the first D are not read."""
        states = hidden[..., : len(self.weight)].detach()
        return states.to(self.weight.dtype) @ self.weight + self.bias

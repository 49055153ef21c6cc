"""Drafts with some of the target's sublayers (Draft & Verify, SWIFT, LayerSkip)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.target import Target
from decode.transfer import upload
from drafters.base import Batch, DraftStep, Progress, Text, supervised_anchors
from drafters.drafting.sublayer_search import LETTERS, parts_of, search
from drafters.families.self_drafting import Read, SelfDrafter

EXITS = ("none", "linear")


class Skip(SelfDrafter):
    """The target without some of its attention and MLP sublayers.

    Kept attention sublayers use the target's keys and values of settled text; those of drafted tokens come
    from the drafting pass.

    With only the first k layers (early exit) and a trained `exit`, the target's head reads n + W n, where n
    is the final norm of the k-th layer's output. These layers give the same output as in the target, so the
    exit is trained on stored hidden states, at one depth for all.

    Args:
        hidden_size: D of the target.
        cost: maximum multiply-adds of a pass relative to the target's, head included, for the search.
        sublayers: one letter a layer: b both, a attention, m MLP, - neither; None: not searched yet.
        exit: `none`, or `linear`: W is trained.

    Raises:
        UserError: an option out of range, or an exit that is not after the first layers.
    """

    traits = replace(SelfDrafter.traits, depth_invariant=True)  # of the exit

    def __init__(
        self, hidden_size: int, cost: float, sublayers: str | None = None, exit: str = "none"
    ) -> None:
        super().__init__()
        self.settings = {"hidden_size": hidden_size, "cost": cost, "sublayers": sublayers, "exit": exit}
        if not 0 < cost <= 1:
            raise UserError(f"drafter.cost={cost}: must be above 0 and at most 1")
        if exit not in EXITS:
            raise UserError(f"drafter.exit={exit}: choose {' or '.join(EXITS)}")
        if sublayers is not None and (set(sublayers) - set(LETTERS) or not sublayers.strip("-")):
            raise UserError(
                f"drafter.sublayers={sublayers}: give one letter a layer, b (both), a (attention), m (MLP) "
                "or -, not all of them -"
            )
        self.exit: Linear | None = None
        if exit == "linear":
            first = (sublayers or "").rstrip("-")
            if not first or set(first) != {"b"} or first == sublayers:
                raise UserError("drafter.exit=linear: set drafter.layers to the number of layers before it")
            self.taps = (len(first),)
            self.exit = Linear(hidden_size, hidden_size, bias=False)
            nn.init.zeros_(self.exit.weight)

    @override
    @classmethod
    def for_target(
        cls, target: Target, sublayers: str | None = None, layers: int | None = None, **options: Any
    ) -> Self:
        """Build one that fits a target.

        Args:
            target: target and source of the sublayers.
            sublayers: see the class.
            layers: early exit after this many layers, instead of `sublayers`.
            **options: `cost` and `exit`, see the class.

        Raises:
            UserError: see the class; a target with layers that cannot run one by one, or too few layers.
        """
        if layers is not None:
            if sublayers is not None or not 0 < layers < len(target.layers):
                raise UserError(
                    f"drafter.layers={layers}: give 1 to {len(target.layers) - 1}, and no drafter.sublayers"
                )
            sublayers = "b" * layers + "-" * (len(target.layers) - layers)
        drafter = cls(target.hidden_size, sublayers=sublayers, **options)
        drafter.check_target(target)
        return drafter

    @override
    def check_target(self, target: Target) -> None:
        super().check_target(target)
        word, layers = self.settings["sublayers"], len(target.layers)
        if word is not None and len(word) != layers:
            raise UserError(
                f"drafter.sublayers={word}: {len(word)} letters, and the target has {layers} layers"
            )

    # -- before and in training ----------------------------------------------------------------

    @property
    @override
    def needs_fit(self) -> bool:
        return self.settings["sublayers"] is None

    @override
    def fit(self, texts: Iterable[Text], target: Target, progress: Progress | None = None) -> str:
        """Search the sublayers on the first rollouts; see `sublayer_search`."""
        found = search(target, texts, self.settings["cost"], progress)
        self.settings["sublayers"] = found.word
        return f"{found.text}; nothing is trained"

    @property
    @override
    def trains(self) -> bool:
        return self.exit is not None

    @property
    @override
    def state_size(self) -> int | None:
        return self.settings["hidden_size"] if self.trains else None

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        assert self.exit is not None
        anchor = supervised_anchors(batch.loss_mask, 1).flatten().nonzero()[:, 0]  # (M,) on the host
        place = upload(anchor.numpy(), batch.tokens.device)
        # The tap at the root: the drafter computes this state itself.
        last = target.base.norm(batch.taps[:, :, 0].flatten(0, 1)[place + 1])  # (M, D)
        yield DraftStep(self._apply_exit(last), anchor, 1, target.head, {}, copied=place)

    def _apply_exit(self, last: Tensor) -> Tensor:
        """(..., D) final norm's output -> (..., D) input of the head."""
        if self.exit is None:
            return last
        last = last.to(self.exit.weight.dtype)
        return last + self.exit(last)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def reader(self, state: Any, target: Target) -> Read:
        parts = parts_of(self.settings["sublayers"])

        def read(tokens: Tensor, reach: Tensor | None, scratch: int) -> Tensor:
            return self._apply_exit(target.forward(tokens, reach, scratch, parts=parts))

        return read

"""Optional methods of drafters: a protocol for each, and a function that works for any drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from drafters.layers.unroll_attention import Attend


@runtime_checkable
class Remarks(Protocol):
    """A drafter with settings that have no effect under some plans."""

    def remark(self, plan: Plan) -> str:
        """One line on settings without effect under a resolved plan; "" if there are none."""
        ...


@runtime_checkable
class HasKeyCache(Protocol):
    """A drafter with keys and values in its state."""

    def kv_bytes_per_token(self, state: Any) -> int:
        """Bytes of keys and values per settled token; fewer where a window has dropped some."""
        ...


@runtime_checkable
class WritesText(Protocol):
    """A drafter that is a language model by itself."""

    def as_target(self, target: Target) -> Target:
        """A frozen copy that generates text, in the target's dtype, for on-policy training.

        Raises:
            UserError: it needs the target's hidden states.
        """
        ...


@runtime_checkable
class CheckpointsGradients(Protocol):
    """A drafter that supports gradient checkpointing."""

    def checkpoint_gradients(self) -> None:
        """Recompute activations in the backward pass instead of storing them (arXiv:1604.06174)."""
        ...


@runtime_checkable
class Attends(Protocol):
    """A drafter whose training attends as `attend_unrolled` does."""

    def attend_with(self, attend: Attend) -> None:
        """Compute attention in training by another implementation."""
        ...


@runtime_checkable
class Shardable(Protocol):
    """A drafter with modules that FSDP2 and ZeRO-3 gather one by one; other weights are gathered at once."""

    def shardable_modules(self) -> Iterable[nn.Module]:
        """Modules that every unroll runs, with weights that only their own forward pass reads."""
        ...


@runtime_checkable
class ConvertsWeights(Protocol):
    """A drafter with saved weights that depend on its settings."""

    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Convert saved weights of this class with other `settings` for a warm start.

        Raises:
            UserError: they cannot be converted.
        """
        ...


@runtime_checkable
class AdoptsWeights(Protocol):
    """A drafter that checkpoints of another kind of drafter may initialise."""

    @property
    def warm_starts_from(self) -> str:
        """Short name of the other drafter."""
        ...

    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the other drafter's weights."""
        ...


@runtime_checkable
class SavesSeparately(Protocol):
    """A drafter that saves some weights outside its own file."""

    @property
    def unsaved_names(self) -> frozenset[str]:
        """Names in `state_dict` of another model's frozen weights; checkpoints omit them."""
        ...

    def save_separately(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """Write tensors that have their own file format into the checkpoint folder; return the others."""
        ...


def remark(drafter: object, plan: Plan) -> str:
    """See `Remarks`; "" for any other drafter."""
    return drafter.remark(plan) if isinstance(drafter, Remarks) else ""


def kv_bytes_per_token(drafter: object, state: Any) -> int:
    """See `HasKeyCache`; 0 for any other drafter."""
    return drafter.kv_bytes_per_token(state) if isinstance(drafter, HasKeyCache) else 0


def as_target(drafter: object, target: Target) -> Target:
    """See `WritesText`.

    Raises:
        UserError: the drafter needs the target's hidden states.
    """
    if not isinstance(drafter, WritesText):
        raise UserError("on_policy: this drafter writes no text without the target; set on_policy.share=0")
    return drafter.as_target(target)


def checkpoint_gradients(drafter: object) -> None:
    """See `CheckpointsGradients`.

    Raises:
        UserError: the drafter has no layers to recompute.
    """
    if not isinstance(drafter, CheckpointsGradients):
        raise UserError("gradient_checkpointing: this drafter has no layers to recompute; leave it false")
    drafter.checkpoint_gradients()


def attend_with(drafter: object, attend: Attend) -> None:
    """See `Attends`; any other drafter stays as it is."""
    if isinstance(drafter, Attends):
        drafter.attend_with(attend)


def shardable_modules(drafter: object) -> Iterable[nn.Module]:
    """See `Shardable`; none of any other drafter."""
    return drafter.shardable_modules() if isinstance(drafter, Shardable) else ()


def unsaved_names(drafter: object) -> frozenset[str]:
    """See `SavesSeparately`; none of any other drafter."""
    return drafter.unsaved_names if isinstance(drafter, SavesSeparately) else frozenset()

"""A drafter made of two: the first is trained, saved and served, the second looks tokens up beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from drafters.base import Batch, Drafter, DraftStep, ParamGroup, Progress, Text
from drafters.registry import drafter_class, short_name

STEM = "first."  # prefix of the first drafter's weights
Second = TypeVar("Second", bound=Drafter)


class TwoDrafters(Drafter, Generic[Second]):
    """Base class. Everything but decoding is the first drafter's own; both are fitted to the answers' counts.

    Args:
        first: a drafter.
        second: another, which has no weights that train.
        options: of the combination; kept in `settings`.

    Raises:
        UserError: a first drafter that is made of two itself.
    """

    tunes_target = True  # of the class, since its first drafter may
    first: Any
    second: Second

    def __init__(self, first: Drafter, second: Second, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first, self.second = first, second
        if isinstance(first, TwoDrafters):
            raise UserError(
                f"drafter.first={short_name(first)}: it is made of two drafters; choose one that is no union "
                "and no cascade"
            )
        if first.drafts_in_verification:
            raise UserError(
                f"drafter.first={short_name(first)}: it drafts in the pass that verifies its own draft, and "
                "not one that is made of two; choose another"
            )
        self.settings = {  # the same objects: counting changes sizes
            "first": {"drafter": short_name(first), "settings": first.settings},
            "second": {"drafter": short_name(second), "settings": second.settings},
            **options,
        }
        self.taps, self.proposals = first.taps, first.proposals
        self.depth_invariant, self.max_depth = first.depth_invariant, first.max_depth
        self.tunes_target = first.tunes_target
        self.aux_weights, self.warm_starts_from = first.aux_weights, short_name(first)
        self.confidence, self.reads_cache = first.confidence, first.reads_cache
        self._counted = first.origin is not None  # counts of a trained drafter belong to its weights

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Both from functions of the target, `first` and `second`."""
        return cls(options.pop("first")(target), options.pop("second")(target), **options)

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        parts: dict[str, Any] = {
            name: drafter_class(settings[name]["drafter"]).restore(dict(settings[name]["settings"]), target)
            for name in ("first", "second")
        }
        return cls(**settings | parts)

    # -- training: the first drafter's ---------------------------------------------------------

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        return self.first.unroll(batch, target)

    @property
    @override
    def trains(self) -> bool:
        return self.first.trains and any(weight.requires_grad for weight in self.first.parameters())

    @override
    def aux_weights_at(self, progress: float) -> Mapping[str, float]:
        return self.first.aux_weights_at(progress)

    @override
    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        if settings["first"]["drafter"] != (kind := short_name(self.first)):
            raise UserError(f"its first drafter is {settings['first']['drafter']!r}, not {kind!r}")
        theirs = {name.removeprefix(STEM): w for name, w in weights.items() if name.startswith(STEM)}
        converted = self.first.convert_weights(theirs, settings["first"]["settings"])
        return weights | self.adopt_weights(converted)

    @override
    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of a checkpoint of the first drafter alone."""
        shapes = {name: weight.shape for name, weight in weights.items()}
        self._counted = all(shapes.get(name) == value.shape for name, value in self.first.named_buffers())
        confidence = {name: weight for name, weight in weights.items() if name.startswith("confidence.")}
        return confidence | {STEM + name: weight for name, weight in weights.items()}

    @override
    def param_groups(self) -> list[ParamGroup]:
        return self.first.param_groups()

    @override
    def shardable_modules(self) -> Iterable[nn.Module]:
        return self.first.shardable_modules()

    @override
    def checkpoint_gradients(self) -> None:
        self.first.checkpoint_gradients()

    @override
    def as_target(self, target: Target) -> Target:
        return self.first.as_target(target)

    @property
    @override
    def state_size(self) -> int | None:
        return self.first.state_size

    @override
    def add_confidence(self) -> None:
        self.first.add_confidence()
        self.confidence = self.first.confidence

    # -- counting: both ------------------------------------------------------------------------

    @property
    def _uncounted(self) -> list[Drafter]:
        """Drafters that are to be fitted."""
        parts: list[Drafter] = [self.second] if self._counted else [self.first, self.second]
        return [part for part in parts if part.needs_fit]

    @property
    @override
    def needs_fit(self) -> bool:
        return bool(self._uncounted)

    @override
    def fit(self, texts: Iterable[Text], target: Target, progress: Progress | None = None) -> str:
        parts = self._uncounted
        texts = list(texts) if len(parts) > 1 else texts
        return "; ".join(f"{short_name(part)}: {part.fit(texts, target, progress)}" for part in parts)

    # -- decoding ------------------------------------------------------------------------------

    @override
    def verifier(self, target: Target) -> Target:
        return self.first.verifier(target)

    @override
    def kv_bytes_per_token(self, state: Any) -> int:
        """The first's; `state` is an object whose `first` is that drafter's state."""
        return self.first.kv_bytes_per_token(state.first)


def built(part: Mapping[str, Any] | Drafter) -> Drafter:
    """A drafter, from its short name and settings if it is not built yet."""
    if isinstance(part, Drafter):
        return part
    return drafter_class(part["drafter"])(**part["settings"])

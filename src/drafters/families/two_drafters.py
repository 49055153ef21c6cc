"""Base class of drafters made of two; one of them is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.generation.types import Traits, depends_on_rounds
from decode.model.target import Target
from decode.plan import Plan
from drafters import optional
from drafters.base import Batch, Drafter, DraftStep, ParamGroup, Progress, Text
from drafters.layers.unroll_attention import Attend
from drafters.registry import drafter_class, short_name

PARTS = ("first", "second")
Second = TypeVar("Second", bound=Drafter)


class TwoDrafters(Drafter, Generic[Second]):
    """A drafter made of two. Only `trained` is trained; both are fitted to counts of the answers.

    Args:
        first: a drafter, which drafts plans that do not combine both.
        second: another drafter.
        options: of the combination; stored in `settings`.

    Attributes:
        trained_part: name of the trained part; the other has no trainable weights, or frozen ones.
        needs: condition on plans that combine both, as the end of a sentence.

    Raises:
        UserError: a part that is made of two drafters, or that drafts in verification.
    """

    traits = Traits(tunes_target=True)  # of the class, since the first drafter may
    trained_part: ClassVar[str] = "first"
    needs: ClassVar[str] = ""
    first: Any
    second: Second

    def __init__(self, first: Drafter, second: Second, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first, self.second = first, second
        for name, part in zip(PARTS, (first, second), strict=True):
            if isinstance(part, TwoDrafters):
                raise UserError(
                    f"drafter.{name}={short_name(part)}: it is made of two drafters; choose one that is not"
                )
            if part.traits.drafts_in_verification:
                raise UserError(
                    f"drafter.{name}={short_name(part)}: it drafts in the pass that verifies its own draft, "
                    "so it cannot be part of two; choose another"
                )
        self.settings = {  # not copied: counting changes sizes
            "first": {"drafter": short_name(first), "settings": first.settings},
            "second": {"drafter": short_name(second), "settings": second.settings},
            **options,
        }
        self.taps, self.confidence = first.taps, first.confidence
        trained = self.trained
        self.traits = replace(first.traits, depth_invariant=trained.traits.depth_invariant)
        self.aux_weights = trained.aux_weights
        self.warm_starts_from = short_name(trained)
        self._counted = set(self._loaded)  # counts of a checkpoint belong to its weights

    @property
    @override
    def max_depth(self) -> int | None:
        return self.first.max_depth

    @property
    def trained(self) -> Drafter:
        """The trained part."""
        return getattr(self, self.trained_part)

    @property
    def _loaded(self) -> list[str]:
        """Names of the parts that come from a checkpoint."""
        return [name for name in PARTS if getattr(self, name).origin is not None]

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Build both parts by the functions `first` and `second` of the target."""
        return cls(options.pop("first")(target), options.pop("second")(target), **options)

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        parts: dict[str, Any] = {
            name: drafter_class(settings[name]["drafter"]).restore(dict(settings[name]["settings"]), target)
            for name in PARTS
        }
        return cls(**settings | parts)

    # -- training: of one ----------------------------------------------------------------------

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        return self.trained.unroll(batch, target)

    @property
    @override
    def trains(self) -> bool:
        return self.trained.trains and any(weight.requires_grad for weight in self.trained.parameters())

    @override
    def aux_weights_at(self, progress: float) -> Mapping[str, float]:
        return self.trained.aux_weights_at(progress)

    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `optional.ConvertsWeights`."""
        part, kind, stem = settings[self.trained_part], short_name(self.trained), f"{self.trained_part}."
        if part["drafter"] != kind:
            raise UserError(f"its {self.trained_part} drafter is {part['drafter']!r}, not {kind!r}")
        theirs = {name.removeprefix(stem): w for name, w in weights.items() if name.startswith(stem)}
        if isinstance(self.trained, optional.ConvertsWeights):
            theirs = self.trained.convert_weights(theirs, part["settings"])
        return weights | self.adopt_weights(theirs)

    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename weights of a checkpoint of only the trained part; parts that were loaded keep theirs."""
        shapes = {name: weight.shape for name, weight in weights.items()}
        self._counted = set(self._loaded)
        if all(shapes.get(name) == value.shape for name, value in self.trained.named_buffers()):
            self._counted.add(self.trained_part)
        confidence = {name: weight for name, weight in weights.items() if name.startswith("confidence.")}
        kept = {
            f"{part}.{name}": weight
            for part in self._loaded
            for name, weight in getattr(self, part).state_dict().items()
        }
        return confidence | {f"{self.trained_part}.{name}": weight for name, weight in weights.items()} | kept

    @override
    def param_groups(self) -> list[ParamGroup]:
        return self.trained.param_groups()

    def shardable_modules(self) -> Iterable[nn.Module]:
        """See `optional.Shardable`."""
        return optional.shardable_modules(self.trained)

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        optional.checkpoint_gradients(self.trained)

    def attend_with(self, attend: Attend) -> None:
        """See `optional.Attends`."""
        optional.attend_with(self.trained, attend)

    def as_target(self, target: Target) -> Target:
        """See `optional.WritesText`."""
        return optional.as_target(self.trained, target)

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
        """Parts that are not fitted yet."""
        parts: list[Drafter] = [getattr(self, name) for name in PARTS if name not in self._counted]
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

    def combines(self, plan: Plan) -> bool:
        """Whether both parts draft for this resolved plan."""
        del plan
        return False

    def check_part(self, name: str, plan: Plan) -> None:
        """Check that a part can draft a plan.

        Raises:
            UserError: it cannot; the message names this drafter's options.
        """
        try:
            getattr(self, name).check(plan)
        except UserError as error:
            raise UserError(str(error).replace("drafter.", f"drafter.{name}.")) from None

    def remark(self, plan: Plan) -> str:
        """See `optional.Remarks`."""
        remarks = [optional.remark(self.first, plan)]
        if plan.depth and not self.combines(plan):
            second = short_name(self.second)
            remarks.append(f"drafter.second={second}: adds nothing to {plan.name}, which {self.needs}")
        return "; ".join(filter(None, remarks))

    @override
    def verifier(self, target: Target) -> Target:
        return self.first.verifier(target)

    def kv_bytes_per_token(self, state: Any) -> int:
        """Of the first part; `state.first` is its state."""
        return optional.kv_bytes_per_token(self.first, state.first)


def built(part: Mapping[str, Any] | Drafter) -> Drafter:
    """Build a drafter from its short name and settings; a built one is returned."""
    if isinstance(part, Drafter):
        return part
    return drafter_class(part["drafter"])(**part["settings"])


def check_rounds(name: str, part: Drafter) -> None:
    """Check that the probabilities of a part can be mixed with another's.

    Raises:
        UserError: its drafts depend on earlier rounds.
    """
    if depends_on_rounds(part, Plan(2, 2, 4)):
        raise UserError(
            f"drafter.{name}={short_name(part)}: its drafts depend on earlier rounds and have no "
            f"probabilities to mix; set drafter.{name}.reuse.mode=none"
        )

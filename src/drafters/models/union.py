"""Two drafters in one tree: a trained one, and one that looks up what followed the same tokens before.

As FastDeploy drafts with an n-gram beside MTP (pull request 3610) and TensorRT-LLM with a suffix automaton
beside EAGLE-3 (`sa_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import depends_on_rounds
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from drafters.base import Batch, Drafter, DraftStep, ParamGroup, Text
from drafters.drafting.merge import merge_trees
from drafters.families.hf_model import HFModelDrafter
from drafters.registry import drafter_class, short_name

STEM = "first."  # prefix of the first drafter's weights


@dataclass(slots=True)
class UnionState:
    """The states of both."""

    first: Any
    second: Any


class Union(Drafter):
    """Both draft a tree below the same root, and the best nodes of both are verified in one pass: the first
    drafter's best, then up to `second_nodes` that only the second has, then more of the first's.

    Every node is fixed, so `match` is lossless for any of them. A row in which the second finds
    nothing is drafted by the first alone, with all nodes. So is every plan but a dynamic tree of fixed
    nodes: a chain has no room for two, and a drawn node's q is the first's.

    It is trained, and exported, as its first drafter is.

    Args:
        first: built, or its short name and the settings of its constructor, {drafter: ..., settings: ...}.
        second: the same of a drafter that reads the text alone and is not trained.
        second_nodes: of the plan's nodes.

    Raises:
        UserError: drafters that cannot be combined, or no nodes.
    """

    def __init__(
        self, first: Mapping[str, Any] | Drafter, second: Mapping[str, Any] | Drafter, second_nodes: int
    ) -> None:
        super().__init__()
        self.first, self.second = _built(first), _built(second)
        self.second_nodes = second_nodes
        _check(self.first, self.second, second_nodes)
        self.settings = {  # the same objects: counting changes sizes
            "first": {"drafter": short_name(self.first), "settings": self.first.settings},
            "second": {"drafter": short_name(self.second), "settings": self.second.settings},
            "second_nodes": second_nodes,
        }
        self.taps, self.proposals = self.first.taps, self.first.proposals
        self.depth_invariant, self.max_depth = self.first.depth_invariant, self.first.max_depth
        self.aux_weights, self.warm_starts_from = self.first.aux_weights, short_name(self.first)
        self.confidence = self.first.confidence
        self._counted = self.first.origin is not None  # counts of a trained drafter belong to its weights

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Both from functions of the target, `first` and `second`."""
        return cls(options.pop("first")(target), options.pop("second")(target), **options)

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        first, second = (
            drafter_class(settings[name]["drafter"]).restore(dict(settings[name]["settings"]), target)
            for name in ("first", "second")
        )
        return cls(first, second, settings["second_nodes"])

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
        parts = [self.second] if self._counted else [self.first, self.second]
        return [part for part in parts if part.needs_fit]

    @property
    @override
    def needs_fit(self) -> bool:
        return bool(self._uncounted)

    @override
    def fit(self, texts: Iterable[Text], target: Target) -> str:
        parts = self._uncounted
        texts = list(texts) if len(parts) > 1 else texts
        return "; ".join(f"{short_name(part)}: {part.fit(texts, target)}" for part in parts)

    # -- decoding ------------------------------------------------------------------------------

    def depends_on_rounds(self, plan: Plan) -> bool:
        """Whether the first drafter's drafts do."""
        return depends_on_rounds(self.first, plan)

    @property
    def depends_on_batch(self) -> bool:
        """Whether the first drafter does."""
        return getattr(self.first, "depends_on_batch", False)

    @override
    def verifier(self, target: Target) -> Target:
        return self.first.verifier(target)

    @override
    def check(self, plan: Plan) -> None:
        try:
            self.first.check(plan)
        except UserError as error:
            raise UserError(str(error).replace("drafter.", "drafter.first.")) from None
        if _merges(plan):
            self.second.check(plan)

    @override
    def remark(self, plan: Plan) -> str:
        remark = self.first.remark(plan)
        if plan.depth and not _merges(plan):
            remark += "; " * bool(remark) + (
                f"drafter.second={short_name(self.second)}: adds nothing to {plan.name}, which needs fixed "
                "nodes in a dynamic tree (decode=dynamic decode.proposal=fixed)"
            )
        return remark

    @override
    def new_state(self, rows: int) -> UnionState:
        return UnionState(self.first.new_state(rows), self.second.new_state(rows))

    @override
    def advance(
        self,
        state: UnionState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        self.first.advance(state.first, target, tokens, taps, counts, root)
        self.second.advance(state.second, target, tokens, taps[:, :, :0], counts, root)

    @override
    def select(self, state: UnionState, rows: Sequence[int]) -> None:
        self.first.select(state.first, rows)
        self.second.select(state.second, rows)

    @override
    def propose(
        self, state: UnionState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        draft = self.first.propose(state.first, target, sampler, coin, plan)
        if not _merges(plan):
            return draft
        other = self.second.propose(state.second, target, sampler, coin, plan)
        kept = max(plan.nodes - self.second_nodes, 0)
        return merge_trees(draft, other, kept, plan.nodes) if other.depth else draft

    @override
    def kv_bytes_per_token(self, state: UnionState) -> int:
        return self.first.kv_bytes_per_token(state.first)


def _merges(plan: Plan) -> bool:
    """Whether a plan's tree has room for both."""
    return plan.depth > 0 and plan.proposal == "fixed" and plan.width > 1 and not plan.tree


def _built(part: Mapping[str, Any] | Drafter) -> Drafter:
    if isinstance(part, Drafter):
        return part
    return drafter_class(part["drafter"])(**part["settings"])


def _check(first: Drafter, second: Drafter, second_nodes: int) -> None:
    if second_nodes < 1:
        raise UserError(f"drafter.second_nodes={second_nodes}: must be at least 1")
    name = short_name(first)
    if isinstance(first, Union):
        raise UserError(f"drafter.first={name}: a union has two drafters; choose one that is no union")
    if isinstance(first, HFModelDrafter) and first.settings.get("lora"):
        raise UserError(
            f"drafter.first={name}: a union keeps no adapters; set drafter.first.lora=null, or give "
            "a model that they are merged into"
        )
    if second.taps or type(second).unroll is not Drafter.unroll:
        raise UserError(
            f"drafter.second={short_name(second)}: choose one that reads the text alone and is not trained: "
            "suffix, ngram or bigram"
        )

"""Two drafters in one draft: a trained one, and one that looks up what followed the same tokens before.

As FastDeploy drafts with an n-gram beside MTP (pull request 3610) and TensorRT-LLM with a suffix automaton
beside EAGLE-3 (`sa_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.generation.types import depends_on_rounds
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin, to_device
from decode.sampling import Sampler
from drafters.base import Batch, Drafter, DraftStep, ParamGroup, Text
from drafters.drafting.deferred import Deferred
from drafters.drafting.merge import choose_rows, merge_trees
from drafters.families.hf_model import HFModelDrafter
from drafters.families.lookup import LookupDrafter, Node, fork, pack_drafts
from drafters.registry import drafter_class, short_name

STEM = "first."  # prefix of the first drafter's weights
DEFERRED = 64  # tokens of a row that may wait for the first drafter


@dataclass(slots=True)
class UnionState:
    """The states of both; the first's is behind by the rounds that wait."""

    first: Any
    second: Any
    waiting: Deferred = field(default_factory=Deferred)
    begun: bool = False  # whether the first has read anything


class Union(Drafter):
    """In every round the second drafts. Where it expects `second_alone` tokens or more to be accepted, a
    row's draft is its own. If that is so in all rows, the first does not run, and reads what was settled
    later, in one pass. Otherwise a row has

    - in a chain, `first_depth` tokens of the first, and behind them what the second finds after them; half
      of the plan's nodes go to the second's own chain where that parts from it;
    - in a dynamic tree, the best nodes of both below the same root: the first's best, then up to
      `second_nodes` that only the second has, then more of the first's. Where the second finds nothing,
      it is the first's tree with all nodes.

    What is expected is the sum of the probabilities that the second estimates for its nodes, a function
    of the settled text. Every node is fixed, so `match` is lossless for any of them. All other plans are
    the first drafter's: a drawn node's q is its own.

    It is trained, and exported, as its first drafter is.

    Args:
        first: built, or its short name and the settings of its constructor, {drafter: ..., settings: ...}.
        second: the same of a drafter that reads the text alone and is not trained.
        second_nodes: of a tree's nodes.
        second_alone: in tokens; None: the first drafts in every round. A second that is no lookup
            (bigram) never drafts alone.
        first_depth: in tokens; None: a whole chain.

    Raises:
        UserError: drafters that cannot be combined, or no nodes.
    """

    def __init__(
        self,
        first: Mapping[str, Any] | Drafter,
        second: Mapping[str, Any] | Drafter,
        second_nodes: int,
        second_alone: float | None = None,  # defaults of older checkpoints
        first_depth: int | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = _built(first), _built(second)
        self.second_nodes, self.second_alone, self.first_depth = second_nodes, second_alone, first_depth
        _check(self.first, self.second, second_nodes, second_alone, first_depth)
        self.settings = {  # the same objects: counting changes sizes
            "first": {"drafter": short_name(self.first), "settings": self.first.settings},
            "second": {"drafter": short_name(self.second), "settings": self.second.settings},
            "second_nodes": second_nodes,
            "second_alone": second_alone,
            "first_depth": first_depth,
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
        if self._combines(plan):
            self.second.check(plan)

    @override
    def remark(self, plan: Plan) -> str:
        remark = self.first.remark(plan)
        if plan.depth and not self._combines(plan):
            remark += "; " * bool(remark) + (
                f"drafter.second={short_name(self.second)}: adds nothing to {plan.name}, which needs fixed "
                "nodes in a dynamic tree or, beside a lookup, in a chain (decode.proposal=fixed)"
            )
        return remark

    def _combines(self, plan: Plan) -> bool:
        """Whether drafts of a plan have nodes of both."""
        if not plan.depth or plan.proposal != "fixed" or plan.tree or plan.min_confidence:
            return False
        return plan.width > 1 or self._looks_up(plan)

    def _looks_up(self, plan: Plan) -> bool:
        """Whether the second drafts before the first, with an estimate of what will be accepted."""
        # A first that builds on its draft of the round before needs every round.
        free = isinstance(self.second, LookupDrafter) and not depends_on_rounds(self.first, plan)
        return free and not (self.second_alone is None and self.first_depth is None)

    @property
    def _defers(self) -> bool:
        """Whether the first may read what was settled rounds later."""
        lookup = isinstance(self.second, LookupDrafter)
        return lookup and self.second_alone is not None and not hasattr(self.first, "depends_on_rounds")

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
        self.second.advance(state.second, target, tokens, taps[:, :, :0], counts, root)
        if not (self._defers and state.begun):  # a prompt is read at once: its taps are large
            state.begun = True
            self.first.advance(state.first, target, tokens, taps, counts, root)
            return
        state.waiting.add(tokens, taps, counts, root)
        if state.waiting.width > DEFERRED:
            self._catch_up(state, target)

    def _catch_up(self, state: UnionState, target: Target) -> None:
        """Have the first read what waits."""
        if (waiting := state.waiting.take()) is not None:
            self.first.advance(state.first, target, *waiting)

    @override
    def select(self, state: UnionState, rows: Sequence[int]) -> None:
        self.first.select(state.first, rows)
        self.second.select(state.second, rows)
        state.waiting.select(rows)

    @override
    def propose(
        self, state: UnionState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan
    ) -> Draft:
        found, alone = None, []
        if self._combines(plan) and self._looks_up(plan):
            assert isinstance(self.second, LookupDrafter)
            self.second.check(plan)
            found = [self.second.nodes(history, plan) for history in state.second]
            alone = [self._suffices(nodes) for nodes in found]
            if all(alone):
                return pack_drafts(found, target.device, coin)
        self._catch_up(state, target)
        if found is not None and plan.width == 1:
            return self._chain(state, found, alone, target, sampler, coin, plan)
        draft = self.first.propose(state.first, target, sampler, coin, plan)
        if not self._combines(plan):
            return draft
        if found is None:
            other = self.second.propose(state.second, target, sampler, coin, plan)
        else:
            other = pack_drafts(found, target.device, coin)
        if not other.depth:
            return draft
        kept = max(plan.nodes - self.second_nodes, 0)
        merged = merge_trees(draft, other, kept, plan.nodes)
        if not any(alone):
            return merged
        return choose_rows(to_device(alone, target.device).bool(), other, merged)

    def _suffices(self, nodes: Sequence[Node]) -> bool:
        """Whether the second drafts a row alone."""
        if self.second_alone is None or not nodes:
            return False
        return sum(node.chance for node in nodes) >= self.second_alone

    def _chain(
        self,
        state: UnionState,
        found: Sequence[list[Node]],
        alone: Sequence[bool],
        target: Target,
        sampler: Sampler,
        coin: KeyedCoin,
        plan: Plan,
    ) -> Draft:
        """The draft of a plan of chains; `found` are the second's own."""
        assert isinstance(self.second, LookupDrafter)
        depth = min(self.first_depth or plan.depth, plan.depth)
        draft = self.first.propose(state.first, target, sampler, coin, _shorter(plan, depth))
        if depth == plan.depth and not any(found):
            return draft
        rows = []
        for row, line in enumerate(draft.tokens.tolist()):
            if alone[row]:
                rows.append(found[row])
                continue
            drafted = [token for token in line if token != PAD]
            chain = self.second.chain_after(state.second[row], drafted, plan)
            rows.append(fork(chain, found[row], plan.nodes))
        return pack_drafts(rows, target.device, coin)

    @override
    def kv_bytes_per_token(self, state: UnionState) -> int:
        return self.first.kv_bytes_per_token(state.first)


@lru_cache(maxsize=64)
def _shorter(plan: Plan, depth: int) -> Plan:
    """A chain of this depth; made once, since plans are checked."""
    return replace(plan, depth=depth, nodes=0, adapt=None)


def _built(part: Mapping[str, Any] | Drafter) -> Drafter:
    if isinstance(part, Drafter):
        return part
    return drafter_class(part["drafter"])(**part["settings"])


def _check(
    first: Drafter, second: Drafter, second_nodes: int, second_alone: float | None, first_depth: int | None
) -> None:
    if second_nodes < 1:
        raise UserError(f"drafter.second_nodes={second_nodes}: must be at least 1")
    if second_alone is not None and second_alone < 0:
        raise UserError(f"drafter.second_alone={second_alone}: must be at least 0, or null")
    if first_depth is not None and first_depth < 1:
        raise UserError(f"drafter.first_depth={first_depth}: must be at least 1, or null")
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

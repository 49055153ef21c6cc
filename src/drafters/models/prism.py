"""PRISM (arXiv:2602.01762): EAGLE with separate weights per draft step, at the cost of one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target
from drafters.models.eagle import Eagle


class Prism(Eagle):
    """EAGLE with several modules, each a fusion and a layer; step k runs module m(k).

    Module 0 reads the settled pairs. All modules share one KV cache and read the previous step's feature.

    Args:
        modules: module of steps 1, 2, ...; the last one repeats. `[0]` is EAGLE.
        depth: depths unrolled in training.
        **options: of `Eagle`.

    Raises:
        UserError: modules that do not begin with 0, or a module that training does not use.
    """

    warm_starts_from = "eagle"

    def __init__(self, modules: Sequence[int], depth: int, **options: Any) -> None:
        super().__init__(depth=depth, **options)
        self.settings["modules"] = self.order = list(modules)
        used = {*self.order[:depth]}
        if self.order[:1] != [0] or not {*self.order} == used == {*range(len(used))}:
            raise UserError(
                f"drafter.modules={self.order}: give a number for each step, from 0 and without gaps "
                f"in the {depth} of drafter.depth"
            )
        options["draft_vocab_size"] = None  # only of the whole drafter
        self.later = nn.ModuleList(Eagle(depth=depth, **options) for _ in range(len(used) - 1))

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Build modules with the same initial weights."""
        drafter = super().for_target(target, **options)
        drafter.load_state_dict(drafter.adopt_weights(drafter.state_dict()))
        return drafter

    def adopt_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy EAGLE's weights into every module."""
        copies = {
            f"later.{i}.{name}": weights[name]
            for i, module in enumerate(self.later)
            for name in module.state_dict()
            if name in weights
        }
        return weights | copies

    @override
    def module_at(self, depth: int) -> Eagle:
        module = self.order[min(depth, len(self.order)) - 1]
        return cast("Eagle", self.later[module - 1]) if module else self

"""LoRA of the target, trained with a drafter: stored in the drafter and applied to copies of the target.

LoRA (arXiv:2106.09685) adds alpha / r B A to a weight W (out, in), with A (r, in) and B (out, r). While
training, `Lora.read` runs a copy that shares the target's weights and has the factors as adapters; for
decoding, `Lora.merge` adds them to copies of the decoder layers, as a `TunedTarget` with a fingerprint of
its own. The given target never changes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.half_products import STEP_ROWS, product_dtype
from decode.model.causal_lm import CausalLM
from decode.model.identity.fingerprint import hashed
from decode.model.target import Target
from drafters.base import ParamGroup
from drafters.hf.build import BASE, DOWN, UP, add_lora, check_lora, checkpoint_layers, merge_lora
from drafters.hf.lora_files import locate_base, split_adapters, write_adapters


class LoraPair(nn.Module):
    """LoRA factors of one linear module; `up` is initialised to 0."""

    def __init__(self, wide_in: int, wide_out: int, r: int) -> None:
        super().__init__()
        self.down = nn.Linear(wide_in, r, bias=False)  # torch's default initialisation is LoRA's
        self.up = nn.Linear(r, wide_out, bias=False)
        nn.init.zeros_(self.up.weight)


class Lora(nn.Module):
    """LoRA factors for linear modules of a target (arXiv:2106.09685); does not contain the target.

    Args:
        r: rank.
        alpha: factors are scaled by alpha / r.
        targets: name of each module in the model -> [input size, output size].

    Attributes:
        checkpointing: gradient checkpointing; to be set before the first `read`.
    """

    checkpointing = False

    def __init__(self, r: int, alpha: int, targets: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.r, self.alpha = r, alpha
        # Module names must not contain dots.
        self.pairs = nn.ModuleDict(
            {name.replace(".", "/"): LoraPair(shape[0], shape[1], r) for name, shape in targets.items()}
        )

    @classmethod
    def for_target(cls, target: Target, r: int, alpha: int, targets: str | list[str] = "all-linear") -> Self:
        """New factors for a target.

        Args:
            target: unchanged.
            r: rank.
            alpha: see the class.
            targets: suffixes of module names, or `all-linear`: all but the head.

        Raises:
            UserError: a target does not exist, or is not a linear module before the head.
        """
        check_copied(target)
        model = _copy(target.model)
        shapes = add_lora(model, r, alpha, targets)
        head = target.model.get_output_embeddings()
        if any(target.model.get_submodule(name) is head for name in shapes):
            raise UserError("drafter.lora: only linear maps before the head can be tuned; change its targets")
        return cls(r, alpha, shapes)

    @classmethod
    def settings_for(cls, target: Target, lora: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor, from the `lora` of a yaml and the sizes of the tuned modules.

        Raises:
            UserError: see `for_target` and `check_lora`.
        """
        fresh = cls.for_target(target, **check_lora(lora))
        return {"r": fresh.r, "alpha": fresh.alpha, "targets": fresh.shapes}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """`targets` of the constructor."""
        return {name: [pair.down.in_features, pair.up.out_features] for name, pair in self._named_pairs()}

    def _named_pairs(self) -> Iterator[tuple[str, Any]]:
        return ((name.replace("/", "."), pair) for name, pair in self.pairs.items())

    def read(self, target: Target, tokens: Tensor) -> Tensor:
        """The tuned target's head input (B, T, D) for (B, T) right-padded tokens, with gradients.

        In the target's dtype, or in fp32 on a CPU that is slow in this dtype.
        """
        return self.adapted(target).base(input_ids=tokens, use_cache=False).last_hidden_state

    def adapted(self, target: Target) -> CausalLM:
        """A model with the target's weights, shared if the dtype is the same, and the factors as adapters."""
        return twin_of(target, self, self.checkpointing, self._adapt)

    def _adapt(self, twin: PreTrainedModel) -> None:
        add_lora(twin, self.r, self.alpha, list(self.shapes))
        for name, pair in self._named_pairs():
            layer: Any = twin.get_submodule(name)
            # Assign modules, not weights, so that FSDP wrapping of the drafter applies here too.
            layer.lora_A["default"], layer.lora_B["default"] = pair.down, pair.up

    @torch.no_grad()
    def merge(self, target: Target) -> Target:
        """A target with merged weights W + alpha / r B A in its dtype; copies the decoder layers.

        Raises:
            ValueError: the target is already merged.
        """
        if isinstance(target, TunedTarget):
            raise ValueError("a target would be tuned twice")
        check_copied(target)
        model = _copy(target.model, {id(weight) for weight in target.layers.parameters()})
        for name, pair in self._named_pairs():
            layer: Any = model.get_submodule(name)
            parts = {BASE + ".weight": layer.weight, DOWN: pair.down.weight, UP: pair.up.weight}
            whole = merge_lora({name + end: w for end, w in parts.items()}, model, self.alpha / self.r)
            weight = whole[name + ".weight"].to(layer.weight.dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        return TunedTarget(model, target, self._digest())

    def split_group(self, group: ParamGroup, rate: Callable[[float], float]) -> list[ParamGroup]:
        """Split a group of parameters into the others and the factors, with their own rate."""
        tuned = [weight for weight in self.parameters() if weight.requires_grad]
        ids = {id(weight) for weight in tuned}
        rest = [weight for weight in group.weights if id(weight) not in ids]
        return [group._replace(weights=rest), ParamGroup(tuned, rate)]

    def export(self, target: Target, folder: Path) -> None:
        """Write the tuned target as a Hugging Face folder, without a tokenizer."""
        self.merge(target).model.save_pretrained(folder)

    def export_adapter(self, target: Target, folder: Path) -> None:
        """Write the factors into a folder for `peft.PeftModel.from_pretrained(target, folder)`."""
        parts = [(f"model.{name}", pair) for name, pair in self._named_pairs()]
        pairs = {stem + DOWN: pair.down.weight for stem, pair in parts}
        pairs |= {stem + UP: pair.up.weight for stem, pair in parts}
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in pairs.items()}
        lora = {"r": self.r, "alpha": self.alpha, "targets": list(self.shapes)}
        base = locate_base(target.model, target.model.name_or_path or "")
        write_adapters(folder, split_adapters(tensors)[0], lora, target.model, base)

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self.alpha / self.r}".encode())
        for name, weight in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(weight.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class TunedTarget(Target):
    """A target with merged LoRA weights.

    Args:
        model: with merged weights.
        source: the original target.
        weight_hash: of the factors, for the fingerprint; rounding may hide a change in merged weights.
    """

    def __init__(self, model: PreTrainedModel, source: Target, weight_hash: str) -> None:
        super().__init__(model, source.taps)
        self._weight_hash = weight_hash

    @override
    def fingerprint(self) -> str:
        return hashed(f"{super().fingerprint()} {self._weight_hash}")


# A cache outside the module: attributes would be copied, moved and saved with it.
_TWINS: WeakKeyDictionary[nn.Module, tuple[PreTrainedModel, CausalLM]] = WeakKeyDictionary()


def twin_of(
    target: Target,
    owner: nn.Module,
    checkpointing: bool,
    change: Callable[[PreTrainedModel], None] | None = None,
) -> CausalLM:
    """A differentiable copy of a target's modules, cached for its owner.

    Args:
        target: unchanged; its tensors are shared if the dtype is the same.
        owner: key of the cache; the copy is freed with it.
        checkpointing: recompute activations of its layers.
        change: adds adapters to a new copy.
    """
    model, twin = _TWINS.get(owner, (None, None))
    if model is not target.model or twin is None:
        copied = _differentiable(target.model)
        if change:
            change(copied)
        twin = CausalLM(copied)
        if checkpointing:
            checkpoint_layers(twin)
        _TWINS[owner] = target.model, twin
    return twin


def check_copied(target: Target) -> None:
    """Check that copies of a target's modules can run.

    Raises:
        UserError: they cannot.
    """
    target.abilities.check_decode("drafter: the target (this one reads copies of it)")
    if not target.movable:
        raise UserError("drafter: this one reads copies of the target; use target.placement=replicated")


def _differentiable(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all tensors, or has fp32 copies if a CPU is slow in their dtype."""
    dtype = product_dtype(model.dtype, model.device, STEP_ROWS)
    if dtype == model.dtype:
        return _copy(model)
    own: Any = copy.deepcopy(model)
    return own.to(dtype)


def _copy(model: PreTrainedModel, copied: set[int] | None = None) -> PreTrainedModel:
    """A copy of the modules that shares all tensors except parameters whose ids are in `copied`."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors if id(t) not in (copied or ())})

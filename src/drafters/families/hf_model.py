"""Base of drafters that consist of a Hugging Face model: weights, adapters, dtype, vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from decode.errors import UserError
from decode.model.causal_lm import CausalLM, decoder_layers
from decode.model.identity.fingerprint import module_fingerprint
from decode.model.target import Target
from drafters.base import Drafter
from drafters.hf.build import (
    DOWN,
    UP,
    add_lora,
    build,
    check_lora,
    checkpoint_layers,
    merge_lora,
    training_dtype,
)
from drafters.hf.lora_files import (
    LoraBase,
    missing_adapters,
    split_adapters,
    write_adapters,
)
from drafters.registry import short_name

STEM = "model."  # prefix of the model's weights in a drafter


class HFModelDrafter(Drafter):
    """Trains, loads and casts a Hugging Face model.

    If `settings` has a `lora`, adapters of the model in `base` are trained. Checkpoints then contain only
    adapters and other trained weights, and loading merges them into a plain model. Older checkpoints have
    no `base` and contain the base model.

    Attributes:
        model: a transformers model; with adapters while these train.
        masked_lm: whether a masked language model is allowed.
    """

    model: Any
    masked_lm = False

    def prepare(self, base: LoraBase, train: bool, lora: dict[str, Any] | None, dtype: torch.dtype) -> Self:
        """Freeze or cast weights, or add adapters, for training; frozen weights keep their dtype.

        Args:
            base: where the model came from.
            train: False: freeze all weights.
            lora: keyword arguments of `add_lora`; None: train all weights.
            dtype: of the loaded model.

        Raises:
            UserError: see `add_lora`.
        """
        if not train:
            return self.requires_grad_(False)
        if not lora:
            return self.to(training_dtype(dtype))
        # Gradients underflow in fp16 layers.
        self.to(torch.float32 if dtype is torch.float16 else dtype)
        base = base._replace(fingerprint=module_fingerprint(self.model))
        targets = list(add_lora(self.model, **lora))
        self.settings |= {"lora": lora | {"targets": targets}, "base": base._asdict()}
        for weight in self.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(training_dtype(weight.dtype))
        return self

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        if not settings.get("base"):
            return cls(**settings)
        check_lora(settings["lora"])
        model = LoraBase(**settings["base"]).load(target, cls.masked_lm)
        make: Any = cls
        drafter = make(**settings, model=model)
        return drafter.to(torch.promote_types(model.dtype, target.dtype))

    @property
    def adapted(self) -> bool:
        """Whether the model has adapters that are not merged."""
        return any(DOWN in name for name, _ in self.named_parameters())

    @property
    def unsaved_names(self) -> frozenset[str]:
        """See `optional.SavesSeparately`."""
        if not (self.settings["base"] and self.adapted):
            return frozenset()
        return frozenset(n for n in self.state_dict() if n.startswith(STEM) and not n.endswith((DOWN, UP)))

    @property
    @override
    def trains(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    def shardable_modules(self) -> Iterable[nn.Module]:
        """See `optional.Shardable`."""
        return decoder_layers(self.model)

    def checkpoint_gradients(self) -> None:
        """See `optional.CheckpointsGradients`."""
        checkpoint_layers(CausalLM(self.model))

    def save_separately(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """See `optional.SavesSeparately`."""
        if not self.unsaved_names:
            return tensors
        pairs, rest = split_adapters(tensors)
        write_adapters(folder, pairs, self.settings["lora"], self.model, LoraBase(**self.settings["base"]))
        return rest

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """See `nn.Module`; merges saved adapters into a model without adapters."""
        lora, base = self.settings["lora"], self.settings["base"]
        if not lora or self.adapted:
            return super().load_state_dict(state_dict, *args, **options)
        if base:
            if missing := missing_adapters(state_dict, lora["targets"], STEM):
                raise RuntimeError(f"{len(missing)} adapters are missing, {missing[0]} first")
            state_dict = self._model_state() | dict(state_dict)
        result = super().load_state_dict(merge_lora(state_dict, self, _scale(lora)), *args, **options)
        self.settings |= {"lora": None, "base": None}  # it is a plain model now
        return result

    def _model_state(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.state_dict().items() if name.startswith(STEM)}

    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Continue adapters on the same base model, or merge them if all weights train."""
        lora, base, settings_here = settings.get("lora"), settings.get("base"), self.settings
        if settings_here["base"] and not base:
            raise UserError(
                "it contains a whole model, but drafter.lora trains adapters of the one in drafter.path; "
                "set drafter.lora=null"
            )
        if not (lora and base):
            return merge_lora(weights, self, _scale(lora)) if lora else weights
        if base["fingerprint"] != (
            settings_here["base"]["fingerprint"] if settings_here["base"] else module_fingerprint(self.model)
        ):
            where = f"drafter.path={base['path']}" if base["path"] else f"drafter.layers={base['layers']}"
            raise UserError(f"its adapters were trained on another model; set {where}")
        if not settings_here["base"]:
            return merge_lora(self._model_state() | weights, self, _scale(lora))
        ratio = _scale(lora) / _scale(settings_here["lora"])  # keeps scale B A the same
        return weights if ratio == 1 else {n: w * ratio if n.endswith(UP) else w for n, w in weights.items()}

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with merged adapters, without confidence head or tokenizer."""
        model: Any = self.model
        if self.adapted:
            model = build(self.settings["config"], self.masked_lm)
            plain = merge_lora(self._model_state(), self, _scale(self.settings["lora"]))
            model.to(max(plain.values(), key=lambda w: w.dtype.itemsize).dtype)
            model.load_state_dict({name.removeprefix(STEM): value for name, value in plain.items()})
        model.save_pretrained(folder)

    @override  # private API: torch has no public hook around casts
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Cast weights but not buffers: rotary frequencies must not be rounded to bf16."""
        buffers = [(m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)  # private API: as above
        for module, name, exact in buffers:
            setattr(module, name, exact.to(getattr(module, name).device))
        return self


def checked_lora(lora: dict[str, Any] | None, train: bool) -> dict[str, Any] | None:
    """Validate `drafter.lora` together with `drafter.train`.

    Raises:
        UserError: adapters without training; see also `check_lora`.
    """
    if lora and not train:
        raise UserError("drafter.lora: adapters are trained; leave drafter.train=true")
    return check_lora(lora) if lora is not None else None


def check_no_adapters(part: Drafter, name: str = "first") -> None:
    """Check that one of two drafters has no adapters: these are saved only for a drafter by itself.

    Raises:
        UserError: it has adapters.
    """
    if isinstance(part, HFModelDrafter) and part.settings.get("lora"):
        raise UserError(
            f"drafter.{name}={short_name(part)}: adapters cannot be saved together with another drafter; set "
            f"drafter.{name}.lora=null, or give a model with merged adapters"
        )


def _scale(lora: Mapping[str, Any]) -> float:
    return lora["alpha"] / lora["r"]

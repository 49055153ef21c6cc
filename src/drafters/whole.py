"""What drafters share that are a whole Hugging Face model: weights, adapters, dtype, vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.lm import CausalLM, Head
from decode.load import load_tokenizer
from decode.target import Target
from drafters.base import Drafter
from drafters.models import checkpoint_layers, merged

OPTION = "drafter.path"
# Ids by which two heads, padded to round sizes, may differ where no tokenizers say more; llama.cpp's bound.
PADDING = 128
RENAMED = 0.01  # share of ids with other names that still is one vocabulary: siblings rename special tokens


class WholeModel(Drafter):
    """Trains, loads and casts a model; see `check_vocabulary` for the vocabulary.

    Attributes:
        model: a transformers model; with adapters, if `settings` has a `lora`, where it trains.
    """

    model: Any

    @property
    @override
    def trains(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    @override
    def self_contained(self) -> Iterable[nn.Module]:
        return CausalLM(self.model).layers

    @override
    def checkpoint_gradients(self) -> None:
        checkpoint_layers(CausalLM(self.model))

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """See `nn.Module`; adapters that were saved are merged into a model that has none."""
        if (lora := self.settings["lora"]) and not any(".lora_" in name for name in self.state_dict()):
            state_dict = merged(state_dict, self, lora["alpha"] / lora["r"])
        return super().load_state_dict(state_dict, *args, **options)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Casts weights alone: rotary wavelengths rounded to bf16 would be other positions."""
        buffers = [(m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for module, name, exact in buffers:
            setattr(module, name, exact.to(getattr(module, name).device))
        return self


def fitted(logits: Tensor, target: Target) -> Tensor:
    """(..., V') -> (..., V) of the target: cut, or nothing where the draft model has no token."""
    missing = target.vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def shared(head: Head, target: Target) -> Head:
    """The head over the ids that the target has too: those past the target's are padding."""
    theirs, known = target.vocab_size, len(head.weight)
    if known < theirs:
        return replace(head, d2t=torch.arange(known, device=head.weight.device))
    bias = None if head.bias is None else head.bias[:theirs]
    return head if known == theirs else replace(head, weight=head.weight[:theirs], bias=bias)


def check_vocabulary(model: PreTrainedModel, target: Target, path: str, revision: str | None) -> None:
    """Refuse a draft model whose ids are not the target's.

    Raises:
        UserError: tokenizers that name the ids otherwise or, where either has none, heads whose
            sizes differ by more than padding.
    """
    wrong = ""
    names = _names(path, revision)
    theirs = _names(target.model.name_or_path or "", getattr(target.model.config, "_commit_hash", None))
    size = model.config.get_text_config().vocab_size
    if names and theirs:
        other = sum(theirs.get(i) != name for i, name in names.items())
        if other > RENAMED * len(names):
            wrong = f"{other} of its tokenizer's {len(names)} ids are other tokens to the target's"
    elif abs(size - target.vocab_size) > PADDING:
        wrong = f"its vocabulary has {size} ids, the target's {target.vocab_size}"
    if wrong:
        raise UserError(f"{OPTION}={path}: {wrong}; a draft model must share the target's vocabulary")


def _names(path: str, revision: str | None) -> dict[int, str]:
    """What a model's tokenizer calls each id; empty where there is none."""
    try:
        vocabulary = load_tokenizer(path, revision).get_vocab() if path else {}
    except UserError:
        vocabulary = {}
    return {i: token for token, i in vocabulary.items()}

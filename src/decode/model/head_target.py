"""Embedding, final norm and head of a target with layers that run in an engine, read from its files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.hardware import memory_bytes
from decode.model.files.account import report
from decode.model.files.folder import GENERATION, ModelFiles
from decode.model.files.stored import account_of_files
from decode.model.files.weights import add_outer_names
from decode.model.identity.fingerprint import fingerprint, hashed
from decode.model.identity.weight_files import WeightFiles, remembered
from decode.model.load import DTYPES, auto_class, load_config, load_target, source_of
from decode.model.target import Target, TargetOutput

MEMORY_SHARE = 0.5  # of this machine's memory, for loading a whole target to compute its fingerprint


class HeadTarget(Target):
    """Embedding, final norm, head and configuration of a target, without the weights of its layers.

    Drafters are built, trained and saved with it as with a whole target. It cannot read texts.

    Args:
        model: with only the weights of these three.
        norm: last module before the head.
        files: weight files of the whole target.
        whole: loads the whole target; None: it cannot be identified from its files.

    Attributes:
        norm: (..., D) output of the last layer -> (..., D) input of the head.
    """

    movable = False

    def __init__(
        self, model: PreTrainedModel, norm: nn.Module, files: WeightFiles, whole: Callable[[], Target] | None
    ) -> None:
        super().__init__(model)
        self.norm, self._files, self._whole = norm, files, whole

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Read the needed tensors; arguments as in `load_target`.

        Raises:
            UserError: see `load_config`; a tensor is missing or quantised.
        """
        config = copy.deepcopy(load_config(name, revision, trust_remote_code))
        if dtype != "auto" and dtype not in DTYPES:
            raise UserError(f"target.dtype={dtype}: choose auto, {', '.join(DTYPES)}")
        quantised = hasattr(config, "quantization_config")
        if quantised:
            del config.quantization_config  # applies only to the layers, which are not created
        # Create buffers: some embeddings scale their output by one.
        with init_empty_weights(include_buffers=False):
            kind = DTYPES.get(dtype) or config.dtype or torch.float32
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code, dtype=kind)
        model.tie_weights()  # outside the context, so that tied weights stay one object
        source = ModelFiles(*source_of(name, revision), f"target={name}")
        account, files = account_of_files(source), WeightFiles(name, source.path)
        norm = final_norm(Target(model))
        for part in (model.get_input_embeddings(), norm, model.get_output_embeddings()):
            _fill(part, model, files, kind, torch.device(device))
        add_outer_names(account, model, files.files, source.path)
        report(account, source.name)
        if (path := source.path(GENERATION)) is not None:
            model.generation_config = GenerationConfig.from_pretrained(path.parent)  # for the end tokens
        whole = partial(load_target, name, "auto", "cpu", revision, trust_remote_code, decodes=False)
        return cls(model, norm, files, None if quantised else whole)

    @override
    def fingerprint(self) -> str:
        """Fingerprint of the whole target; checksums of its files are computed once and cached.

        If the files store weights in another form than the model (for example stacked experts), the whole
        target is loaded once, memory permitting. Otherwise, and for a quantised target, the fingerprint is
        of these files only and matches no target that is loaded whole.
        """
        try:
            return fingerprint(self.tensors(), self._files)
        except UserError:
            paths, versions = self._files.paths(), [transformers.__version__, torch.__version__]
        return remembered(paths, ["whole", *versions], self._other_fingerprint)

    def _other_fingerprint(self) -> str:
        size = sum(path.stat().st_size for path in self._files.paths())
        if self._whole is not None and size <= MEMORY_SHARE * memory_bytes(torch.device("cpu")):
            with suppress(UserError):  # the class cannot be loaded here
                return self._whole().fingerprint()
        headers = self._files.headers
        parts = [(key, *headers[key][1:], self._files.checksum(key)) for key in sorted(headers)]
        return hashed(f"files {parts}")

    @property
    @override
    def bytes(self) -> int:
        """Bytes of the weights in this process."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters() if not p.is_meta)

    @override
    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        """State dict of a submodule.

        Raises:
            UserError: one of its weights was not loaded.
        """
        if any(weight.is_meta for weight in part.parameters()):
            self._refuse("copied")
        return super().weights(part)

    @override
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> TargetOutput:
        """Not supported; see the class."""
        self._refuse("run")

    @override
    def start(self, rows: int, capacity: int) -> None:
        """Not supported; see the class."""
        self._refuse("run")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            "taps=engine: the target's layers are only in the engine and cannot be "
            f"{what} in this process; this needs taps=auto, online, memory or cache"
        )


def final_norm(target: Target) -> nn.Module:
    """The norm between the last layer and the head: the last sibling of the layers with only (D,) weights.

    Raises:
        UserError: there is no such module.
    """
    parent = next(module for module in target.base.modules() if target.layers in module.children())
    found = [module for module in parent.children() if _is_vector(module.parameters(), target.hidden_size)]
    if not found:
        raise UserError(
            f"taps=engine: {type(target.model).__name__} has no final norm next to its layers; use taps=cache"
        )
    return found[-1]


def _is_vector(weights: Iterable[Tensor], size: int) -> bool:
    shapes = [tuple(weight.shape) for weight in weights]
    return bool(shapes) and set(shapes) == {(size,)}


def _fill(part: Any, model: Any, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
    """Load the weights of a module; tied weights may be loaded already."""
    prefix = next(name for name, module in model.named_modules() if module is part)
    for name, weight in list(part.named_parameters(recurse=False)):
        if not weight.is_meta:
            continue
        stored = files.tensor(f"{prefix}.{name}", weight.shape)
        if stored is None or not stored.is_floating_point() or stored.itemsize < 2:
            what = "not in its files" if stored is None else f"quantised ({stored.dtype})"
            raise UserError(
                f"target={files.name}: {prefix}.{name} is {what}, and taps=engine computes the teacher's "
                "rows from it; use weights with an unquantised embedding, final norm and head"
            )
        value = nn.Parameter(stored.to(device, dtype), requires_grad=False)
        for module in model.modules():  # this module and those tied to it
            for key, other in list(module.named_parameters(recurse=False)):
                if other is weight:
                    setattr(module, key, value)
    for name, buffer in list(part.named_buffers(recurse=False)):
        setattr(part, name, buffer.to(device))

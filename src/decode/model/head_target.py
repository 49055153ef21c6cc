"""A target whose layers run elsewhere: its embedding, final norm and head, read from its files alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from accelerate import init_empty_weights
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.model.fingerprint import FILE, INDEX, hash_samples, weight_sample
from decode.model.load import DTYPES, auto_class, load_config, source_of
from decode.model.target import Target, TargetOutput

TAIL = 2  # last components of a weight's name that files of all programs share: `embed_tokens.weight`


class HeadTarget(Target):
    """Embedding, final norm, head and configuration of a target; its layers have no weights.

    A drafter is built, trained and saved with it as with a whole target. It reads no text.

    Args:
        model: with the weights of these three alone.
        norm: the last module before the head.
        samples: rows of weights that the fingerprint is made of.

    Attributes:
        norm: (..., D) output of the last layer -> (..., D) input of the head.
    """

    movable = False

    def __init__(self, model: PreTrainedModel, norm: nn.Module, samples: Sequence[Tensor]) -> None:
        super().__init__(model)
        self.norm, self._samples = norm, samples

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Read the few tensors that are needed; arguments as in `load_target`.

        Raises:
            UserError: see `load_config`; a tensor is missing or quantised.
        """
        config = copy.deepcopy(load_config(name, revision, trust_remote_code))
        if dtype != "auto" and dtype not in DTYPES:
            raise UserError(f"target.dtype={dtype}: choose auto, {', '.join(DTYPES)}")
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # of the layers, which are not made
        # Buffers are made: some embeddings scale their output by one.
        with init_empty_weights(include_buffers=False):
            kind = DTYPES.get(dtype) or config.dtype or torch.float32
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code, dtype=kind)
        model.tie_weights()  # outside, where weights that were made without values stay the same object
        files = WeightFiles(name, revision)
        whole = Target(model)  # finds layers and head
        norm = final_norm(whole)
        for part in (model.get_input_embeddings(), norm, model.get_output_embeddings()):
            _fill(part, model, files, kind, torch.device(device))
        model.generation_config = files.generation_config() or model.generation_config
        middle = whole.layers[len(whole.layers) // 2]
        samples = [weight_sample(model.get_output_embeddings().weight), *_sample(model, middle, files)]
        return cls(model, norm, samples)

    @override
    def fingerprints(self) -> list[str]:
        """That of the whole target, where its weights are in its files as they are in the model."""
        return [hash_samples(f"{self.head.weight.shape} {len(self.layers)}", self._samples)]

    @property
    @override
    def bytes(self) -> int:
        """Bytes of the weights in this process."""
        return sum(p.numel() * p.itemsize for p in self.model.parameters() if not p.is_meta)

    @override
    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        """State dict of a submodule.

        Raises:
            UserError: it has a weight that is not here.
        """
        if any(weight.is_meta for weight in part.parameters()):
            self._refuse("copied")
        return super().weights(part)

    @override
    def read(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> TargetOutput:
        """Refused: see the class."""
        self._refuse("run")

    @override
    def start(self, rows: int, capacity: int) -> None:
        """Refused: see the class."""
        self._refuse("run")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            "taps=engine: the target's layers are in the engine alone and cannot be "
            f"{what} in this process; this needs taps=auto, online, memory or cache"
        )


class WeightFiles:
    """Names and tensors in a model's safetensors files, of which only those that are asked for are fetched.

    Args:
        name: folder, hub id or GGUF file; see `source_of`.
        revision: of a hub id.

    Raises:
        UserError: it has no such files.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        self.source, self.revision = source_of(name, revision)
        self.files: Mapping[str, str] = {}  # weight -> file; as in transformers, a single file comes first
        try:
            if (single := self._path(FILE)) is not None:
                with safe_open(single, "pt") as file:
                    self.files = dict.fromkeys(file.keys(), FILE)
            elif (index := self._path(INDEX)) is not None:
                self.files = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"target={name}: damaged weights ({error})") from None
        if not self.files:
            raise UserError(f"target={name}: no {FILE}, nor {INDEX}; taps=engine reads safetensors alone")

    def tensor(self, name: str, shape: Sequence[int], inner: bool = False) -> Tensor | None:
        """A weight by its name in the model, with any prefix in the files; None if there is none.

        Args:
            name: in the model.
            shape: that it has there.
            inner: it is a layer's, of which there are several with the same last names.
        """
        tail = name.split(".")[-TAIL:]
        alike = [] if inner else [key for key in self.files if key.split(".")[-TAIL:] == tail]
        alike = [key for key in alike if not any(part.isdigit() for part in key.split("."))]  # of no stack
        exact = [
            key for key in self.files if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")
        ]
        for key in dict.fromkeys([*exact, *alike]):
            try:
                path = self._path(self.files[key])
                if path is None:
                    continue
                with safe_open(path, "pt") as file:
                    if file.get_slice(key).get_shape() == list(shape):
                        return file.get_tensor(key)
            except (OSError, ValueError, SafetensorError) as error:
                raise UserError(f"target={self.name}: damaged weights ({error})") from None
        return None

    def generation_config(self) -> GenerationConfig | None:
        """The model's, which has its end tokens; None if it has none."""
        path = self._path("generation_config.json")
        return None if path is None else GenerationConfig.from_pretrained(path.parent)

    def _path(self, name: str) -> Path | None:
        if isinstance(self.source, Path):
            path = self.source / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.source, name, revision=self.revision))
        except LocalEntryNotFoundError as error:
            if name in (FILE, INDEX, "generation_config.json"):  # offline, and not in the cache
                return None
            raise UserError(f"target={self.name}: {name} is not in the cache ({error})") from None
        except EntryNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"target={self.name}: {str(error).splitlines()[0]}") from None


def final_norm(target: Target) -> nn.Module:
    """The module between the last layer and the head: the last one beside the layers with (D,) weights alone.

    Raises:
        UserError: there is none.
    """
    parent = next(module for module in target.base.modules() if target.layers in module.children())
    found = [module for module in parent.children() if _is_vector(module.parameters(), target.hidden_size)]
    if not found:
        raise UserError(
            f"taps=engine: {type(target.model).__name__} has no final norm beside its layers; use taps=cache"
        )
    return found[-1]


def _is_vector(weights: Iterable[Tensor], size: int) -> bool:
    shapes = [tuple(weight.shape) for weight in weights]
    return bool(shapes) and set(shapes) == {(size,)}


def _fill(part: Any, model: Any, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
    """Give the weights of a module their values; those that are tied to others are filled already."""
    prefix = next(name for name, module in model.named_modules() if module is part)
    for name, weight in list(part.named_parameters(recurse=False)):
        if not weight.is_meta:
            continue
        stored = files.tensor(f"{prefix}.{name}", weight.shape)
        if stored is None or not stored.is_floating_point() or stored.itemsize < 2:
            what = "not in its files" if stored is None else f"quantised ({stored.dtype})"
            raise UserError(
                f"target={files.name}: {prefix}.{name} is {what}, and taps=engine computes the teacher's "
                "rows from it; use weights whose embedding, final norm and head are whole"
            )
        value = nn.Parameter(stored.to(device, dtype), requires_grad=False)
        for module in model.modules():  # itself and those that are tied to it
            for key, other in list(module.named_parameters(recurse=False)):
                if other is weight:
                    setattr(module, key, value)
    for name, buffer in list(part.named_buffers(recurse=False)):
        setattr(part, name, buffer.to(device))


def _sample(model: Any, layer: nn.Module, files: WeightFiles) -> list[Tensor]:
    """Rows of a layer's first matrix; none where the files have it in another form."""
    prefix = next(name for name, module in model.named_modules() if module is layer)
    name, matrix = next((n, w) for n, w in layer.named_parameters() if w.dim() > 1)
    stored = files.tensor(f"{prefix}.{name}", matrix.shape, inner=True)
    whole = stored is not None and stored.is_floating_point() and stored.itemsize > 1
    return [weight_sample(stored)] if whole and stored is not None else []

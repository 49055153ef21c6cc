"""A model's safetensors files: names, tensors, and checksums that are cached per file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.hardware import cache_folder, locked
from decode.kernels.checksum import value_checksum
from decode.model.files.stored import INDEX, SINGLE

SCHEMA = 2  # of cached values
VALUES = {"BF16", "F16", "F32", "F64"}  # dtypes compared by value, in safetensors' notation
TAIL = 2  # trailing components of a weight's name that all programs share: `embed_tokens.weight`


class Stored(NamedTuple):
    """A tensor's entry in a file's header."""

    file: str
    shape: list[int]
    dtype: str  # safetensors' name


class WeightFiles:
    """Names and tensors in a model's safetensors files; files are fetched when needed.

    Args:
        name: model's name, for errors.
        locate: path of a file by name; None if it does not exist.

    Raises:
        UserError: the model has no such files.
    """

    def __init__(self, name: str, locate: Callable[[str], Path | None]) -> None:
        self.name, self._locate = name, locate
        self.files: Mapping[str, str] = {}  # weight -> file; like transformers, prefer a single file
        try:
            if (single := locate(SINGLE)) is not None:
                with safe_open(single, "pt") as file:
                    self.files = dict.fromkeys(file.keys(), SINGLE)
            elif (index := locate(INDEX)) is not None:
                self.files = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise self._damaged(error) from None
        if not self.files:
            raise UserError(f"target={name}: no {SINGLE}, nor {INDEX}; taps=engine reads only safetensors")

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """A weight outside the layers by its name in the model, with any prefix; None if there is none.

        Args:
            name: in the model.
            shape: in the model.
        """
        tail = name.split(".")[-TAIL:]
        alike = [key for key in self.files if key.split(".")[-TAIL:] == tail]
        alike = [key for key in alike if not any(part.isdigit() for part in key.split("."))]  # no layers
        for key in dict.fromkeys([*self._named(name), *alike]):
            try:
                path = self._locate(self.files[key])
                if path is None:
                    continue
                with safe_open(path, "pt") as file:
                    if file.get_slice(key).get_shape() == list(shape):
                        return file.get_tensor(key)
            except (OSError, ValueError, SafetensorError) as error:
                raise self._damaged(error) from None
        return None

    @cached_property
    def headers(self) -> dict[str, Stored]:
        """Header entries of all tensors; fetches all files.

        Raises:
            UserError: a file is missing or damaged.
        """
        found = {}
        for name in dict.fromkeys(self.files.values()):
            try:
                with safe_open(self.path(name), "pt") as file:
                    for key in file.keys():  # noqa: SIM118, it is no mapping
                        part = file.get_slice(key)
                        found[key] = Stored(name, part.get_shape(), part.get_dtype())
            except (OSError, ValueError, SafetensorError) as error:
                raise self._damaged(error) from None
        return found

    def key(self, name: str, shape: Sequence[int]) -> str | None:
        """Key of a weight by its name in the model, with any prefix; None if there is none or several."""
        keys = [key for key in self._named(name) if key in self.headers]
        keys = [key for key in keys if self.headers[key].shape == list(shape)]
        return keys[0] if len(keys) == 1 or keys[:1] == [name] else None

    def checksum(self, key: str, dtype: torch.dtype = torch.bfloat16) -> int:
        """`value_checksum` of a stored tensor; computes and caches all checksums of its file.

        Raises:
            UserError: the file is missing or damaged.
        """
        name = self.headers[key].file
        if (name, dtype) not in self._checksums:
            self._checksums[name, dtype] = self._of_file(self.path(name), dtype)
        return self._checksums[name, dtype][key]

    def paths(self) -> list[Path]:
        """All weight files."""
        return [self.path(name) for name in dict.fromkeys(self.files.values())]

    def path(self, name: str) -> Path:
        """Path of one of the files.

        Raises:
            UserError: it is missing.
        """
        path = self._locate(name)
        if path is None:
            raise UserError(f"target={self.name}: {name} is named in {INDEX} and not there; fetch it again")
        return path

    @cached_property
    def _checksums(self) -> dict[tuple[str, torch.dtype], dict[str, int]]:
        return {}

    def _of_file(self, path: Path, dtype: torch.dtype) -> dict[str, int]:
        try:
            return remembered([path], [str(dtype)], partial(_read_checksums, path, dtype))
        except (OSError, ValueError, SafetensorError) as error:
            raise self._damaged(error) from None

    @cached_property
    def _by_tail(self) -> dict[str, list[str]]:
        """Keys by each of their suffixes that begins at a component."""
        tails = defaultdict(list)
        for key in self.files:
            for start in _starts(key):
                tails[key[start:]].append(key)
        return tails

    def _named(self, name: str) -> list[str]:
        """Keys that equal a weight's name up to a prefix on one side."""
        shorter = [name[start:] for start in _starts(name)]
        shorter = [key for key in shorter if key in self.files and "." in key]
        return list(dict.fromkeys([*([name] if name in self.files else []), *self._by_tail[name], *shorter]))

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"target={self.name}: damaged weights ({error})")


def _starts(name: str) -> list[int]:
    """Indices in a name where a component begins."""
    return [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]


def _read_checksums(path: Path, dtype: torch.dtype) -> dict[str, int]:
    """Checksum of every tensor in a file, with one tensor in memory at a time."""
    with safe_open(path, "pt") as file:
        return {key: int(value_checksum(file.get_tensor(key), dtype)) for key in file.keys()}  # noqa: SIM118


def remembered(paths: Sequence[Path], facts: Sequence[str], make: Callable[[], Any]) -> Any:
    """Value computed from files, cached on this machine until one of them changes.

    Processes that call this at the same time wait for the one that computes it.

    Args:
        paths: files; identified by path, size and time of the last change.
        facts: other inputs of the computation.
        make: computes a JSON value.
    """
    before = _stamps(paths)
    key = hashlib.sha256(json.dumps([SCHEMA, before, *facts]).encode()).hexdigest()[:24]
    memory = cache_folder() / "checksums" / f"{key}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the cache is not writable: compute in every process
            memory.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(memory.with_suffix(".lock")))
        with contextlib.suppress(OSError, ValueError):
            return json.loads(memory.read_text())
        made = make()
        with contextlib.suppress(OSError):
            if _stamps(paths) == before:  # otherwise the files changed meanwhile
                whole = memory.with_suffix(f".{os.getpid()}")
                whole.write_text(json.dumps(made))
                whole.replace(memory)
    return made


def _stamps(paths: Sequence[Path]) -> list[list[Any]]:
    facts = [(path.resolve(), path.stat()) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in facts]


def local_files(model: PreTrainedModel) -> WeightFiles | None:
    """Files of the folder or cached hub repository that a model was loaded from; None if missing."""
    try:
        files = WeightFiles(model.name_or_path, partial(_local, model)) if model.name_or_path else None
        return files if files and files.headers else None
    except UserError:
        return None  # another format, or damaged


def _local(model: PreTrainedModel, name: str) -> Path | None:
    source = model.name_or_path or ""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    commit = getattr(model.config, "_commit_hash", None)  # the revision that transformers resolved
    cached = try_to_load_from_cache(source, name, revision=commit) if source.count("/") == 1 else None
    return Path(cached) if isinstance(cached, str) else None

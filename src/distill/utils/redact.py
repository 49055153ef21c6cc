"""What must not be shown: secrets in a configuration, control characters in what others wrote."""

from __future__ import annotations

import os
import re
from typing import Any

KEYS = ("WANDB_API_KEY",)  # environment variables whose values no message may repeat
HIDDEN = "(hidden)"
WORDS = r"(?:key|token|secret|password|passwd|passphrase|credentials?|authorization|cookie)"
SECRET = re.compile(rf"(?:^|[^a-z]|api|access|auth|client|hf|wandb){WORDS}$", re.IGNORECASE)
IN_ADDRESS = re.compile(
    r"(?<=://)[^/@\s]+@|(?<=[?&])(?:[\w-]*(?:key|token|secret|password|sig)[\w-]*)=[^&\s]+", re.IGNORECASE
)
IN_MAPPING = re.compile(rf"{WORDS}['\"]?\s*:", re.IGNORECASE)


def without_secrets(value: Any) -> Any:
    """A configuration, unresolved, without keys and passwords; the environment's values are not looked up."""
    if isinstance(value, dict):
        return {
            k: HIDDEN if v is not None and SECRET.search(str(k)) else without_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(v) for v in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if re.search(r"\$\{\s*oc\.", value) else IN_ADDRESS.sub(f"{HIDDEN}@", value)


def override(text: str) -> str:
    """An option of the command line, `name=value`, likewise."""
    name, sign, value = text.partition("=")
    if sign and (SECRET.search(name) or IN_MAPPING.search(value)):
        return f"{name}={HIDDEN}"
    return str(without_secrets(text))


def printable(text: str) -> str:
    """Text of others for a terminal, which would obey control characters; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def reason(error: BaseException) -> str:
    """What went wrong, in one line that repeats no key."""
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in filter(None, map(os.environ.get, KEYS)):
        text = text.replace(secret, "***")
    return text

"""What must not be shown: secrets in a configuration, control characters in what others wrote."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Any

# Environment variables whose values no message may repeat.
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
HIDDEN = "(hidden)"
WORDS = (
    r"(?:key|token|secrets?|passwords?|passwd|pwd|passphrase|bearer|credentials?|authorization|cookies?"
    # Not every plural: max_tokens is no secret.
    r"|(?:api|access|auth|client|hf|private|secret|wandb)[^a-z]?(?:key|token)s)"
)
SECRET = re.compile(rf"(?:^|[^a-z]|api|access|auth|client|hf|wandb){WORDS}$", re.IGNORECASE)
# A password may have a slash in it; a port has none before it: hdfs://host:9000/folder@1.
PASSWORD = re.compile(r"(?<=://)[^/@\s]*:(?!\d+/)[^@\s]+@")
IN_ADDRESS = re.compile(
    rf"{PASSWORD.pattern}|(?<=://)[^/@\s]+@"
    r"|(?<=[?&])(?:[\w-]*(?:key|token|secret|password|sig)[\w-]*)=[^&\s]+",
    re.IGNORECASE,
)
IN_MAPPING = re.compile(rf"{WORDS}['\"]?\s*:", re.IGNORECASE)
# Keys by their form: of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS; and an HTTP header's.
TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[\w-]{12,}|(?:gh[pousr]|github_pat)_\w{16,}|glpat-[\w-]{12,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{12,})|(?i:\bbearer\s+)[^\s,;'\"}\]]+"
)
SHOWN_AS_IS = "\n\t\u200c\u200d"  # and the joiners of Persian, Indic scripts and emoji
CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories: C0, C1, bidirectional, surrogates, separators


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
    if re.search(r"\$\{\s*oc\.", value):
        return HIDDEN
    return TOKEN.sub(HIDDEN, IN_ADDRESS.sub(f"{HIDDEN}@", value))


def override(text: str) -> str:
    """An option of the command line, `name=value`, likewise."""
    name, sign, value = text.partition("=")
    if sign and (SECRET.search(name) or IN_MAPPING.search(value)):
        return f"{name}={HIDDEN}"
    return str(without_secrets(text))


def printable(text: str) -> str:
    """Text of others for a terminal, which would obey control characters; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if c not in SHOWN_AS_IS and unicodedata.category(c) in CONTROL else c
        for c in text
    )


def reason(error: BaseException) -> str:
    """What went wrong, in one line that repeats no key."""
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in filter(None, map(os.environ.get, KEYS)):
        text = text.replace(secret, "***")
    return TOKEN.sub("***", text)

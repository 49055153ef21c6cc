"""Remove secrets and control characters from text before it is shown."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

HIDDEN = "(hidden)"
# Names of special tokens, which are no secrets.
SPECIAL = "".join(f"(?<!{name}.)" for name in ("root", "mask", "pad", "bos", "eos", "unk", "end", "stop"))
WORDS = (
    rf"(?:key|{SPECIAL}token|secrets?|passwords?|passwd|pass|pwd|passphrase|bearer|credentials?|auth|authorization"
    r"|signature|cookies?"
    # Not every plural: max_tokens is no secret.
    r"|(?:api|access|auth|client|hf|private|secret|wandb)[^a-z]?(?:key|token)s"
    r"|access[^a-z]?key[^a-z]?id|private[^a-z]?key[^a-z]?pem|connection[^a-z]?string)"
)
SECRET = re.compile(rf"(?:^|[^a-z]|api|access|auth|client|hf|wandb){WORDS}$", re.IGNORECASE)
# A password may contain a slash; hdfs://host:9000/folder@1 has a port, no password.
PASSWORD = re.compile(r"(?<=://)[^/@\s]*:(?!\d+/)[^@\s]+@")
IN_ADDRESS = re.compile(
    rf"{PASSWORD.pattern}|(?<=://)[^/@\s]+@"
    r"|(?<=[?&;])(?:[\w%-]*(?:key|token|secret|pass|pwd|sig|auth|credential|sas|session)[\w%-]*)=[^&;\s]+",
    re.IGNORECASE,
)
IN_MAPPING = re.compile(rf"{WORDS}['\"]?\s*:", re.IGNORECASE)
# An option of a program in a text: --api-key X, [--hf-token,X], ['--api_key=X'], {"api_key": "X"}.
NAME = rf"--?(?:[\w.-]*[^a-z\s])?(?:api|access|auth|client|hf|wandb)?{WORDS}"
QUOTED = r"\"[^\"]*\"|'[^']*'|[^\s,;'\"\[\]{}()]+"
OPTION = re.compile(rf"((?<![\w-]){NAME}['\"]?\s*(?:[=,\s])\s*)(?:{QUOTED})", re.IGNORECASE)
# An entry of a mapping or an assignment: 'api_key': X, HF_TOKEN=X, openai_api_key: X; not a plain "token: 5".
PLAIN = rf"(?:(?:api|access|account|auth|aws|client|hf|session|wandb|secret|private)[_-]?{WORDS}|passphrase)"
# A name at the end of a path is none: /etc/passwd: no such file.
ENTRY = re.compile(
    rf"((?i:(['\"])(?:[\w .-]*[^a-z])?(?:api|access|auth|client|hf|wandb)?{WORDS}\2|(?<![/\w])\w*?{PLAIN}"
    rf"|(?<![/\w])(?:\w+_)?passw(?:or)?d)\s*[:=]\s*|\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|AUTH|CREDENTIALS)=)"
    rf"(?:{QUOTED})"
)
# Keys by their form: prefixes of known issuers, JSON Web Tokens, HTTP headers.
TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:hf|api_org|hf_oauth|gsk|r8|npm|xai|pplx|nvapi|tgp_v1|fw|csk|dop_v1|shpat|lsv2_[a-z]{2})"
    r"[_-][\w-]{8,}"
    r"|sk-[\w-]{12,}|[srp]k_(?:live|test)_\w{8,}|(?:gh[pousr]|github_pat)_\w{16,}|gl[a-z]{2,5}-[\w.-]{12,}"
    r"|xox[a-z]{1,2}-[\w-]{10,}|xapp-[\w-]{10,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{12,}"
    r"|pypi-[\w-]{16,}|SG\.[\w-]{12,}\.[\w-]{12,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)"
    r"|(?i:\bbearer\s+)[^\s,;'\"}\]]+|(?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?)[^\s,;'\"}\]]+"
    r"|(?i:\bcookie['\"]?\s*:\s*)[^\r\n]+|\b(?:dckr_pat_[\w-]{8,}|dapi[0-9a-f]{32}\b)"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
)
LEAST = 8  # minimum length of a secret in the environment; shorter values may be any word
# Resolvers of conf/ without access to secrets; others can read the environment.
RESOLVERS = frozenset({"device_of", "now"})
# Variables of foredraft's own, which name folders and programs; a variable with a secret name stays hidden.
OWN = re.compile(r"\$\{oc\.env:(FOREDRAFT_[A-Z_]+)(?:,[^${}]*)?\}")
INTERPOLATION = re.compile(r"\$\{|\}|:")
SHOWN_AS_IS = "\n\t\u200c\u200d"  # and the joiners of Persian, Indic scripts and emoji
CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories: C0, C1, bidirectional, surrogates, separators


def without_secrets(value: Any) -> Any:
    """An unresolved configuration without keys, passwords and values that would read the environment."""
    if isinstance(value, dict):
        return {
            k: HIDDEN if v is not None and SECRET.search(str(k)) else without_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        # In a list of arguments, an option's value is the next item.
        named = [False, *(isinstance(v, str) and v[:1] == "-" and SECRET.search(v) for v in value)]
        return [
            HIDDEN if name and v is not None else without_secrets(v)
            for name, v in zip(named, value, strict=False)
        ]
    if not isinstance(value, str):
        return value
    others = OWN.sub(lambda found: found[0] if SECRET.search(found[1]) else "", value)
    return hidden(value) if RESOLVERS.issuperset(_resolvers(others)) else HIDDEN


def _resolvers(text: str) -> Iterator[str]:
    """Names of the resolvers in a text's interpolations, as in ${name:argument}."""
    begun: list[int | None] = []  # start of the name of each open interpolation; None after it
    for mark in INTERPOLATION.finditer(text):
        if mark[0] == "${":
            begun.append(mark.end())
        elif begun and mark[0] == "}":
            begun.pop()
        elif begun and begun[-1] is not None:
            yield text[begun[-1] : mark.start()].strip()
            begun[-1] = None


def hidden(text: str) -> str:
    """Remove keys and passwords from a text: by option name, by form, and values in the environment."""
    for secret in _of_environment():
        text = text.replace(secret, HIDDEN)
    text = IN_ADDRESS.sub(f"{HIDDEN}@", text)
    text = ENTRY.sub(rf"\1{HIDDEN}", OPTION.sub(rf"\1{HIDDEN}", text))
    return TOKEN.sub(HIDDEN, text)


def _of_environment() -> list[str]:
    """Values of environment variables with secret names, the longest first.

    Existing files and folders are excluded: PWD, or a file of credentials.
    """
    named = {v for name, v in os.environ.items() if len(v) >= LEAST and SECRET.search(name)}
    found = {value for value in named if not os.path.exists(value)}  # noqa: PTH110, which raises for long texts
    return sorted(found, key=len, reverse=True)


def override(text: str) -> str:
    """Remove secrets from an option of the command line, `name=value`."""
    name, sign, value = text.partition("=")
    if sign and (SECRET.search(name) or IN_MAPPING.search(value)):
        return f"{name}={HIDDEN}"
    return str(without_secrets(text))


def printable(text: str) -> str:
    """Escape control characters of untrusted text for a terminal; keeps line breaks."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if c not in SHOWN_AS_IS and unicodedata.category(c) in CONTROL else c
        for c in text
    )


def one_line(text: str) -> str:
    """Untrusted text for a line of a document: no control characters, and blanks for line breaks."""
    return " ".join(printable(text).split())


def reason(error: BaseException) -> str:
    """Describe an error in one line without keys."""
    return hidden(" ".join(str(error).split()) or type(error).__name__)

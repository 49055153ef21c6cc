"""Account of a tokenizer: the entries of each file, compared with the loaded tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.folder import ModelFiles

WHOLE, SETTINGS, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
SPECIAL, WORDS, MERGES = "special_tokens_map.json", "vocab.json", "merges.txt"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
# Texts that tokenizers split differently: digits, blanks, newlines, contractions, other scripts.
PROBES = (
    "It's 12345.67 apples",
    "  two  blanks\n\n\tand a tab ",
    "naïve CAFÉ, 東京 и мир 🙂",
    "f(x) = {'a': [1]};//",
)
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Claim(NamedTuple):
    """A token's entry in a file; `special` is None if the file does not define it."""

    token: str
    id: int
    special: bool | None


def account_of_tokenizer(tokenizer: Any, files: ModelFiles) -> Account:
    """Compare the files of a tokenizer with the tokenizer that transformers built.

    Raises:
        UserError: a file is damaged.
    """
    account = Account("tokenizer")
    words = tokenizer.get_vocab()
    account.count("tokens", len(words))
    added = tokenizer.added_tokens_decoder
    whole, settings = files.read(WHOLE), files.read(SETTINGS)
    for file, claims in _claims(files, whole, settings):
        account.remark(
            f"{file} gives another id than the tokenizer has, which goes by its other files",
            [claim.token for claim in claims if words.get(claim.token) != claim.id],
        )
        account.remark(
            f"special to {file} and not to the tokenizer, or the other way round",
            [
                claim.token
                for claim in claims
                if words.get(claim.token) == claim.id
                and claim.special is not None
                and claim.special != (claim.id in added and added[claim.id].special)
            ],
        )
    account.remark(
        f"missing; the class is guessed, and {WHOLE} does not say which tokens begin, end and pad texts",
        [SETTINGS] if whole and not settings else [],
    )
    for file, values in ((SETTINGS, settings), (SPECIAL, files.read(SPECIAL))):
        named = {role: _content(values.get(role)) for role in ROLES}
        account.remark(
            f"{file} names another token than the tokenizer has",
            [
                f"{role} {text}"
                for role, text in named.items()
                if text is not None and text != getattr(tokenizer, role, None)
            ],
        )
    _add_merges(account, files, whole)
    path = files.path(WHOLE)
    if path is not None and getattr(tokenizer, "is_fast", False):
        made = tokenizer.backend_tokenizer
        changed = [repr(text) for text in PROBES if not _is_kept(made, text)]
        account.remark("its normalizer changes this text before it is read", changed)
        if getattr(made.model, "dropout", None):  # otherwise the ids of a text would vary
            made.model.dropout = None
            account.remark("not applied: a text is always split in the same way", ["dropout"])
        expected = _encoded(path, path.stat().st_mtime_ns)
        wrong = [text for text, ids in zip(PROBES, expected, strict=True) if _ids(made, text) != ids]
        account.remark(
            f"{type(tokenizer).__name__} splits this text in another way than {WHOLE} says; name the right "
            f"tokenizer_class in {SETTINGS}",
            [repr(text) for text in wrong],
        )
    _add_templates(account, tokenizer, files, settings)
    if tokenizer.chat_template and getattr(tokenizer, "split_special_tokens", False):
        account.refuse(
            f"the chat template's own tokens would be spelt as text; remove it from {SETTINGS}",
            ["split_special_tokens"],
        )
    return account


def _is_kept(backend: Tokenizer, text: str) -> bool:
    """Whether normalisation leaves a text unchanged, except for SentencePiece's mark of a blank."""
    normalizer = backend.normalizer
    return not normalizer or normalizer.normalize_str(text).replace("\u2581", " ").strip() == text.strip()


def _ids(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@lru_cache(maxsize=8)
def _encoded(path: Path, changed: int) -> list[list[int]]:
    """Ids of PROBES under a tokenizer.json; `changed` is its modification time."""
    del changed
    backend = Tokenizer.from_file(str(path))
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
    return [_ids(backend, text) for text in PROBES]


def check_rows(tokenizer: Any, rows: int, name: str) -> None:
    """Check that a model has a row for every id of its tokenizer.

    Raises:
        UserError: an id has no row.
    """
    beyond = {id: token for token, id in tokenizer.get_vocab().items() if id >= rows}
    if beyond:
        first = min(beyond)
        raise UserError(
            f"{name}: its tokenizer has {len(beyond):,} ids beyond the {rows:,} rows of its embedding, "
            f"{first} ({beyond[first]!r}) first; give the embedding rows for them (resize_token_embeddings), "
            "or remove the tokens from the tokenizer's files"
        )


def _claims(
    files: ModelFiles, whole: dict[str, Any], settings: dict[str, Any]
) -> Iterator[tuple[str, list[Claim]]]:
    """Tokens and ids in each file; malformed entries are skipped."""
    listed = whole.get("added_tokens")
    listed = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    yield (
        WHOLE,
        list(_filter((entry.get("content"), entry.get("id"), entry.get("special")) for entry in listed)),
    )
    decoder = settings.get("added_tokens_decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    entries = [
        (entry, int(id)) for id, entry in decoder.items() if isinstance(entry, dict) and id.isdecimal()
    ]
    yield SETTINGS, list(_filter((entry.get("content"), id, entry.get("special")) for entry, id in entries))
    for file in (ADDED, WORDS):
        yield file, list(_filter((token, id, None) for token, id in files.read(file).items()))


def _filter(claims: Any) -> Iterator[Claim]:
    return (
        Claim(token, id, special if isinstance(special, bool) else None)
        for token, id, special in claims
        if isinstance(token, str) and isinstance(id, int)
    )


def _content(value: Any) -> str | None:
    """Text of a token, stored as text or as an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _add_merges(account: Account, files: ModelFiles, whole: dict[str, Any]) -> None:
    """Compare the merges in merges.txt with tokenizer.json's."""
    path, model = files.path(MERGES), whole.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if path is None or not isinstance(merges, list):
        return
    old = [line for line in path.read_text(encoding="utf-8").splitlines() if line and line[:8] != "#version"]
    new = [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in merges]
    if old != new:
        account.remark(f"has other merges than {WHOLE}, which is used", [MERGES])


def _add_templates(account: Account, tokenizer: Any, files: ModelFiles, settings: dict[str, Any]) -> None:
    """Remark on chat templates other than the one in use."""
    used = tokenizer.chat_template
    used = used.get("default") if isinstance(used, dict) else used
    account.count("chat templates", int(bool(used)))
    path = files.path(TEMPLATE)
    found = {
        TEMPLATE: path.read_text(encoding="utf-8") if path else None,
        SETTINGS: _template(settings.get("chat_template")),
        OLD_TEMPLATE: _template(files.read(OLD_TEMPLATE).get("chat_template")),
    }
    account.remark(
        "has another chat template than the one that is used",
        [file for file, text in found.items() if text and text.rstrip("\n") != (used or "").rstrip("\n")],
    )


def _template(value: Any) -> str | None:
    """A file's template; it may be one of a named list."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None

"""Make the datastore of a drafter, or find an earlier one of the same texts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from decode.errors import UserError
from decode.hardware import locked
from decode.model.load import load_tokenizer
from decode.model.target import Target
from distill.datastore.suffix_array import sort_places
from distill.datastore.texts import Texts
from distill.prompts.chat_template import Chat
from distill.prompts.records.fields import describe_unread
from distill.utils.atomic_files import reserve, write_json
from distill.utils.paths import bundled
from distill.utils.progress import bar, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish
from drafters.drafting import datastore
from drafters.drafting.datastore import (
    DEPTH,
    FORMAT,
    MAX_TOKENS,
    META,
    ORDER,
    TOKENS,
    Datastore,
    datastore_folder,
)

BATCH = 1_000_000  # characters per call of the tokenizer


def make_datastore(source: str, target: Target, most: int = MAX_TOKENS) -> str:
    """Make the datastore of these texts in the target's tokens, unless this machine has it.

    One of several processes makes it, and the others wait.

    Args:
        source: file or folder, see `Texts`.
        target: target with tokenizer and chat template.
        most: maximum number of tokens; further ones are omitted.

    Returns:
        Its key, see `Datastore.open`.

    Raises:
        UserError: no texts, a target without a tokenizer, or a damaged datastore.
    """
    texts = Texts(Path(bundled(source)).expanduser(), _chat(target))
    key = digest(f"{FORMAT} {DEPTH} {most} {target.vocab_size} {texts.key()}")
    folder = datastore_folder(key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            for killed in folder.parent.glob(f"{key}.*.tmp"):
                shutil.rmtree(killed, ignore_errors=True)
            say(f"drafter.store={source}: {_write(folder, texts, target, most)}, kept in {folder}")
        else:
            size = Datastore.open(key, target.vocab_size).size
            say(f"drafter.store={source}: {size:,} tokens, indexed before ({folder})")
    return key


def _chat(target: Target) -> Chat:
    name, revision = target.model.name_or_path, getattr(target.model.config, "_commit_hash", None)
    if not name:
        raise UserError("drafter.store: the target was built in memory, without a tokenizer; give it a path")
    tokenizer = load_tokenizer(name, revision)
    return Chat(tokenizer, "chat" if tokenizer.chat_template else "none")


def _write(folder: Path, texts: Texts, target: Target, most: int) -> str:
    """Read, tokenise and sort texts; returns a description."""
    kind = datastore.token_type(target.vocab_size)
    start = time.monotonic()
    try:
        size = write_datastore(folder, _tokens(texts, kind, target.vocab_size), target.vocab_size, most)
    except UserError as error:
        reason = f" ({texts.left_out[0]})" if texts.left_out else ""
        raise UserError(f"drafter.store={texts.source}: {error}{reason}") from None
    left_out = f"; left out: {texts.left_out[0]}" if texts.left_out else ""
    if (more := len(texts.left_out) - 1) > 0:
        left_out += f", and {more} more"
    if texts.unread:
        left_out += f"; {describe_unread(texts.unread)}"
    limit = " (the most that one has)" if size == most else ""
    megabytes = size * (kind.itemsize + 4) / 2**20
    return f"{size:,} tokens{limit} in {time.monotonic() - start:.0f} s, {megabytes:.1f} MiB{left_out}"


def write_datastore(
    folder: Path, batches: Iterable[np.ndarray], vocab_size: int, most: int = MAX_TOKENS
) -> int:
    """Write a datastore; its folder appears when it is finished.

    Args:
        folder: folder named by the key.
        batches: token ids of `token_type`, with a separator after each text.
        vocab_size: V of the target.
        most: maximum number of tokens.

    Returns:
        Its number of tokens.

    Raises:
        UserError: there are no tokens.
    """
    kind = datastore.token_type(vocab_size)
    with publish(folder) as temporary:
        temporary.mkdir()
        if not (size := _write_tokens(temporary / TOKENS, batches, kind, most)):
            raise UserError("no text in it")
        reserve(temporary / ORDER, 4 * size)
        order = np.memmap(temporary / ORDER, "<u4", "r+", shape=(size,))
        with bar(size, "datastore: sorting", "tokens", leave=False) as progress:
            for count in sort_places(np.memmap(temporary / TOKENS, kind, "r"), order, DEPTH):
                progress.update(count)
        order.flush()
        meta = {
            "format": FORMAT,
            "key": folder.name,
            "token_bytes": kind.itemsize,
            "vocab_size": vocab_size,
            "samples": {name: datastore.sample_hash(temporary / name) for name in (TOKENS, ORDER)},
        }
        write_json(temporary / META, meta)
    return size


def _tokens(texts: Texts, kind: np.dtype, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield token ids of the texts, in batches, with a separator after each text."""
    separator = np.iinfo(kind).max
    for batch in _batches(texts):
        encoded = texts.chat.tokenizer(
            [text for text, _ in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about texts longer than the context
        )
        rows = []
        for ids, (_, ends) in zip(encoded["input_ids"], batch, strict=True):
            rows.append(np.array([*ids, separator] if ends else ids, np.int64))
        tokens = np.concatenate(rows)
        if (largest := int(tokens[tokens != separator].max(initial=0))) >= vocab_size:
            raise UserError(f"its tokenizer writes token {largest}, and the target has {vocab_size}")
        yield tokens.astype(kind)


def _batches(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, size = [], 0
    for text, ends in texts:
        batch.append((text, ends))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_tokens(path: Path, tokens: Iterable[np.ndarray], kind: np.dtype, most: int) -> int:
    """Write at most `most` tokens, followed by fill; returns their number."""
    size, separator = 0, np.iinfo(kind).max
    with path.open("wb") as file, bar(0, "datastore: reading", "tokens", leave=False) as progress:
        for part in tokens:
            part = part[: most - size]
            file.write(part.tobytes())
            size += len(part)
            progress.update(len(part))
            if size == most:
                break
        file.write(np.full(DEPTH, separator, kind).tobytes())
    return size

"""Number of tokens of each prompt: counted by several processes, and cached."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decode.errors import UserError
from decode.hardware import cache_folder
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt, opening
from distill.utils.progress import Bar, bar
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish

FEW = 1000  # up to this many prompts are counted without the cache
CHUNK = 500  # prompts per task of a process
SECONDS = 30.0  # expected counting time that justifies several processes
SCHEMA = 1
COUNTS = np.dtype([("prompt", "<u8"), ("tokens", "<i4")])  # `content_hash`
_chat: list[Chat] = []  # chat of a counting process


class PromptTokens(NamedTuple):
    """Numbers of tokens.

    Attributes:
        tokens: (N,) tokens of each prompt up to the target's first answer; -1 for refused prompts.
        refusals: index -> reason of the chat template's refusal.
    """

    tokens: np.ndarray
    refusals: dict[int, str]


def count_tokens(prompts: Sequence[Prompt], chat: Chat, given: bool) -> PromptTokens:
    """Count tokens, and find prompts that the chat template refuses.

    Processes that need the same counts wait for the first one. Counts of an interrupted process are kept.
    Refused prompts are not cached.

    Args:
        prompts: prompts to count.
        chat: renders prompts.
        given: the prompts' own answers are rendered too, and must have a loss mask.
    """
    refusals: dict[int, str] = {}
    tokens = np.full(len(prompts), -1, np.int32)
    if len(prompts) <= FEW:
        _count(prompts, range(len(prompts)), chat, given, tokens, refusals)
        return PromptTokens(tokens, refusals)
    key = digest(json.dumps([SCHEMA, chat.fingerprint(), chat.template, given]))
    path = cache_folder() / "prompts" / f"{key}.npy"
    hashes = np.fromiter((p.content_hash for p in prompts), np.uint64, len(prompts))
    with _shared(path) as keeps:
        known = _remembered(path)
        places = np.minimum(np.searchsorted(known["prompt"], hashes), max(0, len(known) - 1))
        found = known["prompt"][places] == hashes if len(known) else np.zeros(len(prompts), bool)
        tokens[found] = known["tokens"][places[found]]
        try:
            _count(prompts, np.flatnonzero(~found).tolist(), chat, given, tokens, refusals)
        finally:
            new = np.flatnonzero(~found & (tokens >= 0))
            if keeps and len(new):
                rows = np.empty(len(new), COUNTS)
                rows["prompt"], rows["tokens"] = hashes[new], tokens[new]
                _write(path, np.concatenate([known, rows]))
    return PromptTokens(tokens, refusals)


@contextmanager
def _shared(path: Path) -> Iterator[bool]:
    """Hold the lock of the cache; yields False if the folder is not writable (no cache)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("a")
    except OSError:
        yield False
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _write(path: Path, counts: np.ndarray) -> None:
    with suppress(OSError), publish(path) as temporary, temporary.open("wb") as file:  # full disk: not cached
        np.save(file, counts[np.argsort(counts["prompt"])])


def _remembered(path: Path) -> np.ndarray:
    """Cached counts, sorted by hash; empty if there is no file or it is damaged."""
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.empty(0, COUNTS)
    return counts if counts.dtype == COUNTS and counts.ndim == 1 else np.empty(0, COUNTS)


def _count(
    prompts: Sequence[Prompt],
    chosen: Sequence[int],
    chat: Chat,
    given: bool,
    tokens: np.ndarray,
    refusals: dict[int, str],
) -> None:
    """Write the counts of the chosen prompts into `tokens`, and refusals into `refusals`."""
    with bar(len(chosen), "prompts", "prompts", leave=False) as shown:
        for index, result in zip(chosen, _results(prompts, chosen, chat, given, shown), strict=True):
            if isinstance(result, str):
                refusals[index] = result
            else:
                tokens[index] = result


def _results(
    prompts: Sequence[Prompt], chosen: Sequence[int], chat: Chat, given: bool, shown: Bar
) -> Iterator[int | str]:
    chunks = [chosen[start : start + CHUNK] for start in range(0, len(chosen), CHUNK)]
    texts = ([prompts[i] for i in chunk] for chunk in chunks)
    work: Callable[[list[Prompt]], list[int | str]] = partial(_count_chunk, given=given)
    _begin(chat)
    begun = time.monotonic()
    yield from _shown(map(work, islice(texts, 1)), shown)
    expected = (time.monotonic() - begun) * (len(chunks) - 1)
    processes = min(len(os.sched_getaffinity(0)), len(chunks) - 1)
    if expected < SECONDS or processes < 2:
        yield from _shown(map(work, texts), shown)
        return
    # Spawned, since forking a process with threads may hang it.
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (chat,)) as pool:
        try:
            yield from _shown(pool.map(work, texts), shown)
        finally:
            pool.shutdown(cancel_futures=True)


def _shown(parts: Iterator[list[int | str]], shown: Bar) -> Iterator[int | str]:
    for part in parts:
        yield from part
        shown.update(len(part))


def _begin(chat: Chat) -> None:
    _chat[:] = [chat]


def _count_chunk(prompts: list[Prompt], given: bool) -> list[int | str]:
    """Number of tokens of each prompt, or why it is refused."""
    chat, results = _chat[0], list[int | str]()
    for prompt in prompts:
        try:
            if given:
                results.append(chat.encode_answered(prompt.messages, prompt.tools)[1].index(1))
            else:
                chat.check_turns(prompt.messages, prompt.tools)
                results.append(len(chat.encode(opening(prompt.messages), prompt.tools)))
        except UserError as error:
            results.append(str(error))
    return results

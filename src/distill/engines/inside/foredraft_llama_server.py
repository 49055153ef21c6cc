"""llama.cpp's server in the package xllamacpp, with the flags of `llama-server`.

xllamacpp is llama.cpp as a wheel: its `Server` listens as `llama-server` does, but takes an object in place
of a command line. This is run as `python -m` with this folder on PYTHONPATH. It knows the flags of `TABLE`;
any other is an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import xllamacpp  # pyright: ignore[reportMissingImports]


class Flag(NamedTuple):
    """One flag of llama-server.

    Attributes:
        names: of the flag; the last one is its long name.
        fields: fields of `CommonParams` that get its value.
        read: from the word to the value.
    """

    names: tuple[str, ...]
    fields: tuple[str, ...]
    read: Callable[[str], Any]


def types(words: str) -> list[Any]:
    """The kinds of drafts: names of llama-server, with commas between them."""
    known = xllamacpp.common_speculative_type
    return [known[f"COMMON_SPECULATIVE_TYPE_{word.upper().replace('-', '_')}"] for word in words.split(",")]


def stored(word: str) -> Any:
    """The type of a cache: f32, f16, q8_0."""
    return xllamacpp.ggml_type[f"GGML_TYPE_{word.upper()}"]


def flash(word: str) -> Any:
    """Flash attention: on, off, auto."""
    names = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    return xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{names[word]}"]


DRAFT = "speculative.draft"
TABLE = (
    Flag(("-m", "--model"), ("model.path",), str),
    Flag(("-c", "--ctx-size"), ("n_ctx",), int),
    Flag(("-b", "--batch-size"), ("n_batch",), int),
    Flag(("-ub", "--ubatch-size"), ("n_ubatch",), int),
    Flag(("-np", "--parallel"), ("n_parallel",), int),
    Flag(("-t", "--threads"), ("cpuparams.n_threads", "cpuparams_batch.n_threads"), int),
    Flag(("-ctk", "--cache-type-k"), ("cache_type_k",), stored),
    Flag(("-ctv", "--cache-type-v"), ("cache_type_v",), stored),
    Flag(("-cram", "--cache-ram"), ("cache_ram_mib",), int),
    Flag(("-fa", "--flash-attn"), ("flash_attn_type",), flash),
    Flag(("-md", "--spec-draft-model"), (f"{DRAFT}.mparams.path",), str),
    Flag(("--spec-type",), ("speculative.types",), types),
    Flag(("--spec-draft-n-max",), (f"{DRAFT}.n_max",), int),
    Flag(("--spec-draft-p-min",), (f"{DRAFT}.p_min",), float),
    Flag(
        ("-td", "--spec-draft-threads"),
        (f"{DRAFT}.cpuparams.n_threads", f"{DRAFT}.cpuparams_batch.n_threads"),
        int,
    ),
    Flag(("-ctkd", "--spec-draft-type-k"), (f"{DRAFT}.cache_type_k",), stored),
    Flag(("-ctvd", "--spec-draft-type-v"), (f"{DRAFT}.cache_type_v",), stored),
    Flag(("--host",), ("hostnames",), lambda word: [word]),
    Flag(("--port",), ("port",), int),
)


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(usage="the flags of TABLE", allow_abbrev=False)
    for flag in TABLE:
        parser.add_argument(*flag.names, dest=flag.names[-1], type=flag.read)
    parser.add_argument("--no-warmup", dest="--warmup", action="store_false")
    given = vars(parser.parse_args())
    params = xllamacpp.CommonParams()
    params.warmup = given["--warmup"]
    threads = given["--threads"] = given["--threads"] or len(os.sched_getaffinity(0))
    given["--spec-draft-threads"] = given["--spec-draft-threads"] or threads  # else the package leaves -1
    for flag in TABLE:
        if (value := given[flag.names[-1]]) is not None:
            for field in flag.fields:
                assign(params, field, value)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:  # llama.cpp has printed why
        sys.exit(str(error))
    print(f"serving at {server.listening_address}", flush=True)
    signal.pause()


def assign(params: Any, field: str, value: Any) -> None:
    """Set a field, `a.b.c`."""
    *path, name = field.split(".")
    for part in path:
        params = getattr(params, part)
    setattr(params, name, value)


if __name__ == "__main__":
    main()

"""EAGLE-3, DFlash and draft models as GGUF files, converted by llama.cpp's own `convert_hf_to_gguf.py`.

Follows llama.cpp b11434 (`conversion/`, `src/models/eagle3.cpp`, `src/models/dflash.cpp`). The converter
reads vLLM's folders. An EAGLE-3 is one layer that reads three layers of the target; their ids in
`eagle_aux_hidden_state_layer_ids` number inputs, as ours do. Tokenizer and layer count come from the target's
folder, and the converter must know the tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.model.target import Target
from drafters.export import dflash, eagle3, hf_model
from drafters.export.eagle import draft_length
from drafters.export.layout import FILES, Format, Layout, Refusal, Saved, trained_depth
from drafters.export.llama_config import check_embedding, check_no_window, check_plain_attention
from drafters.export.shapes import check_taps, dtype_of

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "FOREDRAFT_LLAMA_CPP"
DRAFTER = "drafter.gguf"
TAPS = 3  # of an EAGLE-3 in llama.cpp
CONFIG = FILES[0]
TYPES = {"float16": "f16", "bfloat16": "bf16"}  # --outtype; any other dtype becomes f32
NOTE = f"TARGET.gguf is the target: the file passed as target=, or its folder converted by {SCRIPT}."


def _check_eagle3(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_target(target)
    yield from check_embedding(target)
    yield from check_taps(settings["taps"], target, exactly=TAPS)
    if settings["layers"] > 1:
        yield Refusal(f"{settings['layers']} layers, and llama.cpp reads one", {"layers": 1})
    if settings["fc_norm"]:
        yield Refusal(
            "llama.cpp has no fc_norm (a norm per tap); its norm_before_fc is one norm for all taps",
            {"fc_norm": False, "norm_before_fc": True},
        )
    yield from check_no_window(settings, "llama.cpp's EAGLE-3")
    yield from check_plain_attention(settings, "llama.cpp's EAGLE-3")
    if settings["norm_output"]:
        yield Refusal("llama.cpp feeds back the state before the final norm", {"norm_output": False})
    if (settings.get("rope") or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield Refusal("its converter rotates whole heads, and the target's positions rotate a part of each")


def _check_dflash(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_target(target)
    yield from dflash.VLLM.check(settings, target)
    if settings.get("window") is not None or settings.get("causal"):
        reason = "a window or a causal block, untested with llama.cpp's DFlash"
        yield Refusal(reason, {"window": None, "sinks": 0, "causal": False})
    if (settings.get("rope") or {}).get("rope_type") == "llama3":
        yield Refusal("its converter writes no llama3 scaling of positions for a DFlash")


def _check_lm(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check_target(target)
    yield from hf_model.VLLM.check(settings, target)


def _check_target(target: Target) -> Iterator[Refusal]:
    if not target.model.name_or_path:
        yield Refusal(
            "the converter reads the target's tokenizer, and this target was built in memory, without a "
            "path or hub id"
        )


def _eagle3(saved: Saved, target: Target) -> Layout:
    return _with_command(eagle3.VLLM.write(saved, target), "draft-eagle3", draft_length(saved.settings))


def _dflash(saved: Saved, target: Target) -> Layout:
    """All positions of the block, since in a shorter one the masks would see fewer masks."""
    return _with_command(dflash.VLLM.write(saved, target), "draft-dflash", saved.settings["depth"])


def _lm(saved: Saved, target: Target) -> Layout:
    """A draft model with the target's vocabulary size."""
    return _with_command(hf_model.VLLM.write(saved, target), "draft-simple", hf_model.TOKENS)


def _with_command(layout: Layout, kind: str, tokens: int) -> Layout:
    serve = (
        f"llama-server -m TARGET.gguf -md {{drafter}}/{DRAFTER} --spec-type {kind} "
        f"--spec-draft-n-max {tokens}"
    )
    return layout._replace(serve=serve, note=NOTE)


EAGLE3 = Format(_eagle3, _check_eagle3, draft_length)
DFLASH = Format(_dflash, _check_dflash, trained_depth)
LM = Format(_lm, _check_lm, lambda _: hf_model.TOKENS)


# -- the converter -------------------------------------------------------------------------------


def check_folder(llama_cpp: str | None) -> Path:
    """The converter in a folder of llama.cpp.

    Raises:
        UserError: no folder is named, or it has no converter.
    """
    if not llama_cpp:
        raise UserError(
            f"to=gguf needs llama.cpp's {SCRIPT}; name llama.cpp's source folder by "
            f"export.llama_cpp=<folder> (foredraft export: llama_cpp=) or {VARIABLE}"
        )
    script = Path(llama_cpp).expanduser() / SCRIPT
    if not script.is_file():
        raise UserError(
            f"llama_cpp={llama_cpp}: no {SCRIPT} there; pass the source folder of llama.cpp (git clone "
            "https://github.com/ggml-org/llama.cpp)"
        )
    return script.absolute()


def check_tokenizer(drafter: str, settings: Mapping[str, Any], target: Target, script: Path) -> None:
    """Check that the converter knows the target's tokenizer, by converting only the vocabulary (seconds).

    Args:
        drafter: short name.
        settings: of the drafter.
        target: of the drafter.
        script: from `check_folder`.

    Raises:
        UserError: an unknown tokenizer or model class, or a missing package.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write_target(target, Path(folder))
        if drafter == "lm":
            (Path(folder) / CONFIG).write_text(json.dumps(hf_model.config_of(settings)))
        _run([*_command(script, Path(folder), Path(folder) / "vocabulary.gguf"), "--vocab-only"])


def convert_on_write(layout: Layout, target: Target, script: Path) -> Layout:
    """A layout that is converted to GGUF when it is written.

    Args:
        layout: of one of this module's formats.
        target: of the drafter.
        script: from `check_folder`.
    """
    return layout._replace(finish=partial(_convert, layout, target, script))


def _convert(layout: Layout, target: Target, script: Path, folder: Path) -> None:
    """Replace weights and tokenizer by `drafter.gguf`; config.json stays."""
    converted = [path for path in folder.iterdir() if path.name != CONFIG]
    dtype = str(layout.model.dtype).removeprefix("torch.") if layout.model else dtype_of(layout.tensors)
    with tempfile.TemporaryDirectory() as target_folder:
        _write_target(target, Path(target_folder))
        words = ["--outtype", TYPES.get(dtype, "f32"), "--target-model-dir", target_folder]
        _run([*_command(script, folder, folder / DRAFTER), *words])
    for path in converted:
        path.unlink()


def _command(script: Path, folder: Path, out: Path) -> list[str]:
    return [sys.executable, str(script), str(folder), "--outfile", str(out), "--model-name", "drafter"]


def _write_target(target: Target, folder: Path) -> None:
    """Write the target's files that the converter reads: configuration and tokenizer."""
    for name, content in hf_model.target_files(target, CONFIG).items():
        (folder / name).write_bytes(content)


def _run(command: Sequence[str]) -> None:
    """Run the converter, without the Hub.

    Raises:
        UserError: it failed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"to=gguf: {_failure(done.stderr)}")


def _failure(text: str) -> str:
    """Cause of a failure in one line, from the converter's stderr."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if package := re.search(r"No module named '([\w.]+)'", lines[-1] if lines else ""):
        return (
            f"llama.cpp's {SCRIPT} needs the package {package[1]}, which {sys.executable} lacks; "
            f"pip install {package[1]}, or 'foredraft[gguf]' for all"
        )
    if "pre-tokenizer was not recognized" in text:
        return (
            f"llama.cpp's {SCRIPT} does not know the target's tokenizer (a list of hashes in its source); "
            "update llama.cpp, or add it there as convert_hf_to_gguf_update.py says"
        )
    if unknown := re.search(r"Model (\w+) is not supported", text):
        return f"llama.cpp's {SCRIPT} knows no {unknown[1]}; update llama.cpp, or choose another model"
    return f"llama.cpp's {SCRIPT} failed: {lines[-1] if lines else 'it wrote no reason'}"

"""A folder of llama.cpp with a stand-in for its converter."""

from __future__ import annotations

from pathlib import Path

from drafters.export.llama_cpp import SCRIPT

# Writes its arguments and what is in the folders it was given next to itself, and then the file, or fails.
CONVERTER = """
import json, pathlib, sys
here, args = pathlib.Path(__file__).parent, sys.argv[1:]
given = dict(zip(args[1::2], args[2::2]))
names = lambda folder: sorted(path.name for path in pathlib.Path(folder).iterdir())
config = json.loads((pathlib.Path(args[0]) / "config.json").read_text())
seen = {"args": args, "folder": names(args[0]), "architectures": config.get("architectures")}
if "--target-model-dir" in given:
    seen["target"] = names(given["--target-model-dir"])
(here / "seen.json").write_text(json.dumps(seen))
if (here / "error").exists():
    sys.exit((here / "error").read_text())
pathlib.Path(given["--outfile"]).write_bytes(b"GGUF")
"""


def write_converter(folder: Path) -> Path:
    """The folder, made: its converter leaves `seen.json` there, and fails with what is in a file `error`."""
    folder.mkdir()
    (folder / SCRIPT).write_text(CONVERTER)
    return folder

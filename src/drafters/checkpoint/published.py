"""What a target's own files say of it for a drafter's card: the name it is published under, its licence."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import try_to_load_from_cache

from decode.model import gguf
from decode.model.files.gguf.header import read_header
from decode.model.target import Target
from drafters.hub import download
from drafters.hub.untrusted_files import is_hub_id

CARD = "README.md"
FRONT = re.compile(r"\A---\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,63}")  # an identifier, as on the Hub
MOST = 1 << 20  # bytes of a card
LONGEST = 200  # characters of a name
REPOSITORY = "general.base_model.0.repo_url"
HUB = "https://huggingface.co/"


class Published(NamedTuple):
    """A target as others know it.

    Attributes:
        name: hub id, or the name in its file; "" if unknown.
        licence: identifier, as in apache-2.0; "" if unknown.
    """

    name: str = ""
    licence: str = ""


def published(target: Target) -> Published:
    """The name and licence of a target, from its card, or from its GGUF file and a card next to it.

    Nothing is downloaded: of a hub id, the card is read if it is in the cache (see `fetch_card`).
    """
    name, revision = _source(target)
    folder = Path(name).expanduser()
    if not name:
        return Published()
    if not folder.is_dir():
        card = try_to_load_from_cache(name, CARD, revision=revision) if is_hub_id(name) else None
        return Published(name, _licence(_front(Path(card)).get("license")) if isinstance(card, str) else "")
    if not (note := folder / gguf.NOTE).is_file():
        return Published("", _licence(_front(folder / CARD).get("license")))
    file = Path(json.loads(note.read_text())["file"])
    return _of_gguf(file) if file.is_file() else Published()


def fetch_card(target: Target) -> None:
    """Download the card of a target that is a hub id.

    Raises:
        UserError, RemoteError: see `download.snapshot`.
    """
    name, revision = _source(target)
    if is_hub_id(name) and not Path(name).is_dir():
        download.snapshot(name, revision, (CARD,))


def _source(target: Target) -> tuple[str, str | None]:
    """Folder or hub id that the target was loaded from, "" if none, and its commit."""
    return target.model.name_or_path or "", getattr(target.model.config, "_commit_hash", None)


@lru_cache(maxsize=8)
def _of_gguf(file: Path) -> Published:
    """From the keys of a file; those of a card next to it, `<file>.md`, come first."""
    keys, front = read_header(file).keys, _front(file.with_suffix(".md"))
    repository = str(keys.get(REPOSITORY, "")).removeprefix(HUB)
    names = [front.get("base_model"), repository if is_hub_id(repository) else "", keys.get("general.name")]
    name = next((one for one in names if isinstance(one, str) and one), "")
    name = name if is_hub_id(name) else Path(name).name  # it may be a path of the machine that wrote the file
    return Published(name[:LONGEST], _licence(front.get("license") or keys.get("general.license")))


def _front(card: Path) -> dict[str, Any]:
    """Front matter of a card; {} without a card, or if it is damaged."""
    if not card.is_file() or card.stat().st_size > MOST:
        return {}
    found = FRONT.match(card.read_text(errors="replace"))
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _licence(value: Any) -> str:
    text = value.lower() if isinstance(value, str) else ""
    return text if LICENCE.fullmatch(text) else ""

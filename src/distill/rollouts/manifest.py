"""Metadata of a store: the plan, and counts and hashes of a complete store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.errors import UserError
from distill.utils.atomic_files import read_json
from distill.utils.provenance import commit
from drafters.hub.untrusted_files import check_link

PLAN, MANIFEST = "plan.json", "manifest.json"
MOMENT = "moment of the chat template (prompts.moment)"
LABELS = {
    "config": "configuration of the target",
    "moment": MOMENT,
    "tokenizer": "tokenizer",
    "dtype": "dtype of the target",
    "sampler": "sampler",
}
COUNTED = ("rows", "prompt_tokens", "answer_tokens")
HASHED = ("config", "tokenizer", "prompts", "drafter")  # hashes; error messages omit them


REMADE = "remove it to have it written again, if the shards are of this plan"


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a store's manifest.

    Raises:
        UserError: it is damaged or missing.
    """
    advice = "remove it to have it written again from the shards"
    stored = read_json(path, advice, plan=dict, counts=dict, shards=list)
    if stored is None:
        raise UserError(f"{path}: missing; this store is not finished")
    for shard in stored["shards"]:
        known = isinstance(shard, dict) and isinstance(shard.get("sha256"), str)
        if not known or not all(isinstance(shard.get(name), int) for name in ("rows", "answer_tokens")):
            raise UserError(f"{path}: damaged (no hashes or counts of a shard); {advice}")
    if not all(isinstance(stored["counts"].get(name), int) for name in COUNTED):
        raise UserError(f"{path}: damaged (no counts); {advice}")
    return stored


def refuse_links(folder: Path) -> None:
    """Reject a store with links out of its folder, which could expose any file of this machine.

    Raises:
        UserError: a link out of the folder.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            check_link(path)


def refuse_other(where: str, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    """Reject a store that was made with another plan.

    Args:
        where: folder or URL, for the error.
        stored: content of its plan.json.
        expected: content that this run would write.

    Raises:
        UserError: names the first difference.
    """
    hint = "give another rollout.store"
    if stored.get("schema") != expected["schema"]:
        raise UserError(
            f"{where}: made by another version, which identifies targets differently "
            f"(schema {stored.get('schema')}, not {expected['schema']}); {hint} to make the answers again"
        )
    old, new = stored.get("plan"), expected["plan"]
    if not (isinstance(old, dict) and "target" in old and isinstance(stored.get("origin"), dict)):
        raise UserError(f"{where}: its {PLAN} is damaged; {REMADE}")
    if old["target"] != new["target"]:
        names = [
            f"{side['origin'].get('target', '?')} ({side['plan']['target']})" for side in (stored, expected)
        ]
        raise UserError(f"{where}: answers of another target, {names[0]}, not of {names[1]}; {hint}")
    first = [name for name in (*LABELS, "prompts") if name in new]
    for name in [*first, *(name for name in new if name not in first)]:
        if old.get(name) != new[name]:
            values = "" if name in HASHED else f", {old.get(name)}, and {new[name]} is wanted"
            what = LABELS.get(name, name if name == "prompts" else f"rollout setting {name}")
            other = "other prompts" if name == "prompts" else f"another {what}"
            raise UserError(f"{where}: made with {other}{values}; {hint}")


def total(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum counts over shards."""
    sums = {name: sum(s[name] for s in shards) for name in ("rows", "prompt_tokens", "answer_tokens")}
    kinds = {
        name: dict(sum((Counter(s[name]) for s in shards), Counter())) for name in ("finish_reason", "ids")
    }
    return sums | kinds


def versions() -> dict[str, str]:
    """Versions of the software that writes a store."""
    return {"foredraft": commit(), "transformers": transformers.__version__, "torch": torch.__version__}

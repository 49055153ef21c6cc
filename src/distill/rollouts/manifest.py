"""What a store says of itself: the plan it was begun with, and in the end counts and hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from decode.errors import UserError
from distill.utils.provenance import commit

PLAN, MANIFEST = "plan.json", "manifest.json"
WORDS = {"tokenizer": "tokenizer", "dtype": "dtype of the target", "sampler": "sampling law"}
HASHED = ("tokenizer", "prompts", "drafter")  # their values say nothing to a reader


def refuse_other(where: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare what a store was begun with with what is wanted now.

    Args:
        where: folder or url, for the error.
        found: content of its plan.json.
        wanted: the same, as this run would write it.

    Raises:
        UserError: the first thing that differs.
    """
    mend = "give another rollout.store"
    if found.get("schema") != wanted["schema"]:
        raise UserError(f"{where}: made with schema {found.get('schema')}, not {wanted['schema']}; {mend}")
    old, new = found["plan"], wanted["plan"]
    if old["target"] != new["target"]:
        names = [
            f"{side['origin'].get('target', '?')} ({side['plan']['target']})" for side in (found, wanted)
        ]
        raise UserError(f"{where}: answers of another target, {names[0]}, not of {names[1]}; {mend}")
    first = [name for name in (*WORDS, "prompts") if name in new]
    for name in [*first, *(name for name in new if name not in first)]:
        if old.get(name) != new[name]:
            values = "" if name in HASHED else f", {old.get(name)}, and {new[name]} is wanted"
            what = WORDS.get(name, name if name == "prompts" else f"rollout setting {name}")
            other = "other prompts" if name == "prompts" else f"another {what}"
            raise UserError(f"{where}: made with {other}{values}; {mend}")


def total(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all shards together."""
    sums = {name: sum(s[name] for s in shards) for name in ("rows", "prompt_tokens", "answer_tokens")}
    kinds = {
        name: dict(sum((Counter(s[name]) for s in shards), Counter())) for name in ("finish_reason", "ids")
    }
    return sums | kinds


def versions() -> dict[str, str]:
    """Of what made a store."""
    return {"foredraft": commit(), "transformers": transformers.__version__, "torch": torch.__version__}

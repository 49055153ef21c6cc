"""Metadata of a store: the plan, and once it is complete, counts and hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from decode.errors import UserError
from distill.utils.provenance import commit

PLAN, MANIFEST = "plan.json", "manifest.json"
LABELS = {"tokenizer": "tokenizer", "dtype": "dtype of the target", "sampler": "sampler"}
HASHED = ("tokenizer", "prompts", "drafter")  # hashes, which error messages leave out


def refuse_other(where: str, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a store that was made with another plan.

    Args:
        where: folder or URL, for the error.
        stored: content of its plan.json.
        expected: the content that this run would write.

    Raises:
        UserError: names the first difference.
    """
    hint = "give another rollout.store"
    if stored.get("schema") != expected["schema"]:
        raise UserError(f"{where}: made with schema {stored.get('schema')}, not {expected['schema']}; {hint}")
    old, new = stored["plan"], expected["plan"]
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
    """Counts summed over shards."""
    sums = {name: sum(s[name] for s in shards) for name in ("rows", "prompt_tokens", "answer_tokens")}
    kinds = {
        name: dict(sum((Counter(s[name]) for s in shards), Counter())) for name in ("finish_reason", "ids")
    }
    return sums | kinds


def versions() -> dict[str, str]:
    """Versions of the software that makes a store."""
    return {"foredraft": commit(), "transformers": transformers.__version__, "torch": torch.__version__}

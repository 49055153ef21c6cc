"""What a checkpoint's folder knows that scoring it again cannot measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# score.json is written by training, scorecard.json is in a folder that was given away.
CARDS = ("score.json", "scorecard.json")


def earlier(checkpoint: Path) -> dict[str, Any]:
    """How long and how far it was trained, as the scorecard beside its weights has it.

    Args:
        checkpoint: folder with weights.

    Returns:
        `step`, also where the folder's name alone says it, and `train_seconds`; what is unknown is
        left out.
    """
    name = checkpoint.resolve().name
    known = {"step": int(name)} if name.isdigit() else {}
    for card in (checkpoint / one for one in CARDS):
        try:
            found = json.loads(card.read_text())
        except (OSError, ValueError):
            continue  # none, or not one of ours: scored again all the same
        if isinstance(found, dict):
            kinds = {"step": int, "train_seconds": float}
            return known | {k: found[k] for k, kind in kinds.items() if isinstance(found.get(k), kind)}
    return known

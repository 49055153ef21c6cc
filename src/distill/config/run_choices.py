"""What a run decides about options that its command leaves open, when target, drafter and trainer are known.

`config.target_size` decides earlier, from configuration files and the number of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

from decode.model.target import Target
from distill.options.answers import OpenAIRolloutOptions
from distill.options.run import TrainOptions
from distill.prompts.chat_template import Chat
from distill.prompts.length import strictest
from distill.utils.run_record import OPEN, RunRecord
from drafters.base import Drafter
from drafters.export.formats import NATIVE


def record_choices(
    record: RunRecord, options: TrainOptions, trainer: L.Trainer, target: Target, chat: Chat
) -> None:
    """Record what target, machine and other options decide."""
    limit = strictest(options.prompts.max_tokens, options.max_tokens, target.max_positions)
    record.choose(limit.option or "the target's context", {"prompts.max_tokens": limit.tokens})
    record.choose("the clock", {"prompts.moment": chat.moment or None})
    named: dict[str, Any] = {"target.dtype": str(target.dtype).removeprefix("torch.")}
    if isinstance(options.rollout, OpenAIRolloutOptions):
        named["rollout.model"] = options.target.name
    if options.taps == "engine":
        named["engine.model"] = options.target.name
    record.choose("the target", named)
    device = trainer.strategy.root_device.type
    machine = {"accelerator": "gpu" if device == "cuda" else device, "devices": trainer.num_devices}
    machine["strategy"] = type(trainer.strategy).__name__
    record.choose("the machine", {f"trainer.{name}": value for name, value in machine.items()})
    if options.export.push_to:
        record.choose("export.push_to", {"export.to": NATIVE})


def record_drafter(record: RunRecord, drafter: Drafter, target: Target) -> None:
    """Record settings that follow from the target; sizes that are counted on the answers follow `fit`."""
    given = record.options.values["drafter"]
    found = _settings_of("drafter", given, drafter.settings)
    record.choose("the target and its answers", found)
    if given.get("draft_vocab_size") == "auto" and drafter.d2t is None:
        record.choose("the target", {"drafter.draft_vocab_size": target.vocab_size})


def _settings_of(name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Open options, by dotted name, with the values of the drafter's settings of the same names."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        known = settings.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping) and "settings" in known:
            found |= _settings_of(f"{name}.{key}", value, known["settings"])
        elif value in OPEN:
            found[f"{name}.{key}"] = known
    return found

"""The prompts of a run: read, mixed, split into what trains and what is scored, and written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.chat import Chat
from distill.files import publish, read_json, write_json
from distill.mixing import mix
from distill.progress import bar, first_rank, say
from distill.prompts import Prompt, hash64, held_out, opening, question, split
from distill.provenance import digest
from distill.sources import Reading, Rejected, Source, to_sources

START = 200  # characters of a prompt that is set aside
SHOWN = 3  # reasons, of records that are set aside
RECORD, QUARANTINE = "prompts.json", "quarantine.jsonl"


@dataclass(slots=True)
class Inputs:
    """Prompts, and where they come from.

    Attributes:
        train: to be answered, and trained on.
        held: to be scored, each up to the first place that the target answers.
        readings: of the sources.
        heldout: of the held-out file, where there is one.
        record: what a run writes down.
        refused: by the chat template, of `train`.
    """

    train: list[Prompt]
    held: list[Prompt]
    readings: list[Reading]
    heldout: list[Reading]
    record: dict[str, Any]
    refused: list[Rejected]

    @property
    def rejected(self) -> list[Rejected]:
        """Malformed records of all of them."""
        read = [one for reading in [*self.readings, *self.heldout] for one in reading.rejected]
        return read + self.refused


def read(cfg: DictConfig, chat: Chat, given: bool = False) -> Inputs:
    """Read what `cfg.prompts` names.

    Args:
        cfg: with `prompts`.
        chat: renders, and may refuse to.
        given: answers are taken as they are, and have to be rendered as well.

    Raises:
        UserError: nothing there, nothing of use, or, with prompts.strict, anything malformed.
    """
    options: Any = OmegaConf.to_container(cfg.prompts, resolve=True)
    if given and options["answers"] == "drop":
        raise UserError("rollout=given: prompts.answers=drop leaves given answers out; set it to keep")
    if not (sources := to_sources(options)) and not options["heldout"] and not options["self"]:
        raise UserError("prompts: none are named; give prompts.path, prompts.dataset or prompts.sources")
    readings = [source.read(options["strict"]) for source in sources]
    listed = mix(readings, options["limit"]) if readings else []
    heldout = []
    if options["heldout"]:
        scored_file = Source(options["heldout"], answers=options["answers"], max_bytes=options["max_bytes"])
        heldout = [scored_file.read(options["strict"])]
        train, held = held_out(listed, heldout[0].prompts)
    else:
        train, held = split(listed, options["heldout_share"])
    train, refused = _rendered(train, chat, given, options["strict"])
    scored = _openings(held)
    record = {
        "sources": [_counts(r) for r in readings],
        "heldout": [_counts(r) for r in heldout],
        "limit": options["limit"],
        "heldout_share": None if heldout else options["heldout_share"],
        "refused": len(refused),
        "train": {"prompts": len(train), "hash": _hash(train)},
        "held_out": {"prompts": len(scored), "hash": _hash(scored)},
        "held_out_of_sources": len(listed) - len(train) - len(refused),
    }
    return Inputs(train, scored, readings, heldout, record, refused)


def _rendered(
    prompts: list[Prompt], chat: Chat, given: bool, strict: bool
) -> tuple[list[Prompt], list[Rejected]]:
    """What the chat template takes, and what it refuses: roles, their order, answers without a mask."""
    kept, refused = [], []
    with bar(len(prompts), "prompts", "prompts", leave=False) as shown:
        for prompt in prompts:
            shown.update()
            try:
                if given:
                    chat.encode_answered(prompt.messages, prompt.tools)
                else:
                    chat.encode(opening(prompt.messages), prompt.tools)
            except UserError as error:
                start = json.dumps(prompt.messages)[:START]
                refused.append(Rejected(f"prompt {prompt.id}", 0, str(error), start))
                if strict or len(refused) == len(prompts):
                    raise UserError(str(refused[0])) from None
            else:
                kept.append(prompt)
    return kept, refused


def _openings(held: Sequence[Prompt]) -> list[Prompt]:
    """One answer of each is scored, and each once, however differently they go on."""
    kept: dict[int, Prompt] = {}
    for prompt in held:
        prompt = prompt._replace(messages=opening(prompt.messages))
        kept.setdefault(hash64([prompt.messages, prompt.tools]), prompt)
    return list(kept.values())


def _counts(reading: Reading) -> dict[str, Any]:
    source = reading.source
    return {
        "source": source.label,
        "revision": source.revision,
        "weight": source.weight,
        "records": reading.records,
        "quarantined": len(reading.rejected),
        "duplicates": reading.duplicates,
        "used": len(reading.prompts),
    }


def _hash(prompts: Sequence[Prompt]) -> str:
    """Of the questions, in any order."""
    return digest(" ".join(sorted(str(hash64(question(p))) for p in prompts)))


def keep_record(inputs: Inputs, folder: Path) -> None:
    """Write down in a run's folder what it trains on and is scored on, and what was set aside.

    Raises:
        UserError: the run began with other prompts.
    """
    record = folder / RECORD
    if kept := read_json(record):
        for part, what in (("train", "prompts"), ("held_out", "held-out prompts")):
            if kept[part] != inputs.record[part]:
                raise UserError(
                    f"{folder}: the {what} have changed since this run began; resume=never starts another"
                )
    elif first_rank():
        list_rejected(inputs, folder)
        write_json(record, inputs.record)


def list_rejected(inputs: Inputs, folder: Path) -> None:
    """Write down what was set aside."""
    if inputs.rejected and first_rank():
        with publish(folder / QUARANTINE) as temporary, temporary.open("w") as file:
            file.writelines(json.dumps(one._asdict()) + "\n" for one in inputs.rejected)


def describe(inputs: Inputs, folder: Path | None) -> None:
    """Say what was set aside, and what a mixture is made of."""
    if rejected := inputs.rejected:
        total = sum(r.records for r in [*inputs.readings, *inputs.heldout])
        where = f", listed in {folder / QUARANTINE}" if folder else ""
        say(f"prompts: {len(rejected)} of {total} records are malformed and left out{where}")
        for one in rejected[:SHOWN]:
            say(f"  {one}")
    if duplicates := sum(r.duplicates for r in inputs.readings):
        say(f"prompts: {duplicates} duplicates dropped")
    if len(inputs.readings) > 1:
        parts = ", ".join(f"{len(r.prompts)} of {r.source.label}" for r in inputs.readings)
        say(f"prompts: {parts}")

"""The prompts of a run: read, mixed, split into what trains and what is scored, and written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.files import publish, write_json
from distill.mixing import mix
from distill.progress import first_rank, say
from distill.prompts import Prompt, hash64, held_out, opening, question, split
from distill.provenance import digest
from distill.sources import Reading, Rejected, Source, to_sources

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
    """

    train: list[Prompt]
    held: list[Prompt]
    readings: list[Reading]
    heldout: list[Reading]
    record: dict[str, Any]

    @property
    def rejected(self) -> list[Rejected]:
        """Malformed records of all of them."""
        return [one for reading in [*self.readings, *self.heldout] for one in reading.rejected]


def read(cfg: DictConfig) -> Inputs:
    """Read what `cfg.prompts` names.

    Raises:
        UserError: nothing there, nothing of use, or, with prompts.strict, anything malformed.
    """
    options: Any = OmegaConf.to_container(cfg.prompts, resolve=True)
    if not (sources := to_sources(options)) and not options["heldout"] and not options["self"]:
        raise UserError("prompts: none are named; give prompts.path, prompts.dataset or prompts.sources")
    readings = [source.read(options["strict"]) for source in sources]
    given = mix(readings, options["limit"]) if readings else []
    heldout = []
    if options["heldout"]:
        listed = Source(options["heldout"], answers=options["answers"], max_bytes=options["max_bytes"])
        heldout = [listed.read(options["strict"])]
        train, held = held_out(given, heldout[0].prompts)
    else:
        train, held = split(given, options["heldout_share"])
    scored = _openings(held)
    record = {
        "sources": [_counts(r) for r in readings],
        "heldout": [_counts(r) for r in heldout],
        "limit": options["limit"],
        "heldout_share": None if heldout else options["heldout_share"],
        "train": {"prompts": len(train), "hash": _hash(train)},
        "held_out": {"prompts": len(scored), "hash": _hash(scored)},
        "held_out_of_sources": len(given) - len(train),
    }
    return Inputs(train, scored, readings, heldout, record)


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
    if record.exists():
        for part, what in (("train", "prompts"), ("held_out", "held-out prompts")):
            if json.loads(record.read_text())[part] != inputs.record[part]:
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

"""Read, mix and split the prompts of a run into training and held-out prompts, and record them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.options import PromptOptions
from distill.prompts.chat_template import Chat
from distill.prompts.length import Limit, Measured, check_share, set_aside
from distill.prompts.mixing import mix
from distill.prompts.prompt import Prompt, held_out, opening, pack, split
from distill.prompts.sources import Reading, Rejected, Source, to_sources
from distill.prompts.token_counts import count_tokens
from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import first_rank, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish

SHOWN = 3  # of what is set aside for one reason
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
        refused: by the chat template.
        limit: on the tokens of a prompt.
        too_long: of `train` and of `held`, and left out.
    """

    train: list[Prompt]
    held: list[Prompt]
    readings: list[Reading]
    heldout: list[Reading]
    record: dict[str, Any]
    refused: list[Rejected]
    limit: Limit
    too_long: tuple[Measured, Measured]

    @property
    def rejected(self) -> list[Rejected]:
        """Malformed records of all of them."""
        read = [one for reading in [*self.readings, *self.heldout] for one in reading.rejected]
        return read + self.refused

    @property
    def left_out(self) -> list[Rejected]:
        """Prompts that are too long."""
        return [one for measured in self.too_long for one in measured.long]


def read(
    options: PromptOptions, chat: Chat, limit: Limit, answers: str | None = None, score: bool = False
) -> Inputs:
    """Read, mix and split the prompts that the options name.

    Args:
        options: of the prompts.
        chat: renders, and may refuse to.
        limit: on the tokens of a prompt.
        answers: rollout.answers: given ones have to be rendered as well; None: no rollouts are made.
        score: held-out prompts are scored.

    Raises:
        UserError: nothing there, nothing of use, too many too long, or, with prompts.strict, anything
            malformed.
    """
    given = answers == "given"
    if given and options.answers == "drop":
        raise UserError("rollout=given: prompts.answers=drop leaves given answers out; set it to keep")
    if not (sources := to_sources(asdict(options))) and not options.heldout and not options.self:
        raise UserError("prompts: none are named; give prompts.path, prompts.dataset or prompts.sources")
    readings = [source.read(options.strict) for source in sources]
    listed = mix(readings, options.limit) if readings else []
    heldout = []
    if options.heldout:
        scored_file = Source(options.heldout, answers=options.answers, max_bytes=options.max_bytes)
        heldout = [scored_file.read(options.strict)]
        train, held = held_out(listed, heldout[0].prompts)
    else:
        train, held = split(listed, options.heldout_share)
    measured, refused = _rendered(train, chat, limit, given, options.strict)
    openings, refused_held = _rendered(_openings(held), chat, limit, False, options.strict)
    if answers:  # commands that score read training prompts too, and use none
        check_share(measured, limit, options.max_left_out, "prompts")
    if score:
        check_share(openings, limit, options.max_left_out, "held-out prompts")
    scored = openings.fit
    record = {
        "sources": [_counts(r) for r in readings],
        "heldout": [_counts(r) for r in heldout],
        "limit": options.limit,
        "heldout_share": None if heldout else options.heldout_share,
        "refused": len(refused) + len(refused_held),
        "too_long": {"tokens": limit.tokens, "train": len(measured.long), "held_out": len(openings.long)},
        "train": {"prompts": len(measured.fit), "hash": _hash(measured.fit)},
        "held_out": {"prompts": len(scored), "hash": _hash(scored)},
        "held_out_of_sources": len(listed) - len(train),
    }
    return Inputs(
        measured.fit, scored, readings, heldout, record, refused + refused_held, limit, (measured, openings)
    )


def _rendered(
    prompts: list[Prompt], chat: Chat, limit: Limit, given: bool, strict: bool
) -> tuple[Measured, list[Rejected]]:
    """Split prompts into those that the chat template renders and those that it rejects."""
    measured, refused = Measured(), []
    tokens, refusals = count_tokens(prompts, chat, given)
    for index, reason in refusals.items():
        refused.append(set_aside(prompts[index], reason))
        if strict or len(refused) == len(prompts):
            raise UserError(str(refused[0]))
    for prompt, count in zip(prompts, tokens.tolist(), strict=True):
        if count >= 0:
            measured.add(prompt, count, limit)
    return measured, refused


def _openings(held: Sequence[Prompt]) -> list[Prompt]:
    """Held-out prompts up to the first answer, without duplicates."""
    unique: dict[int, Prompt] = {}
    for prompt in held:
        first, given = opening(prompt.messages), ""
        if rest := prompt.messages[len(first) :]:
            given = str(rest[0].get("content") or "")
        prompt = replace(prompt, packed=pack(first, prompt.tools), reference=given)
        unique.setdefault(prompt.content_hash, prompt)
    return list(unique.values())


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
    """Hash of the questions, independent of order."""
    return digest(" ".join(sorted(str(p.question_hash) for p in prompts)))


def keep_record(inputs: Inputs, folder: Path) -> None:
    """Record training, held-out and rejected prompts in the run folder.

    Raises:
        UserError: the run began with other prompts.
    """
    record = folder / RECORD
    advice = "remove it to go on with the prompts as they are now; resume=never starts another run"
    if previous := read_json(record, advice, train=dict, held_out=dict):
        for part, what in (("train", "prompts"), ("held_out", "held-out prompts")):
            if previous[part] != inputs.record[part]:
                raise UserError(
                    f"{folder}: the {what} have changed since this run began; resume=never starts another"
                )
    elif first_rank():
        list_rejected(inputs, folder)
        write_json(record, inputs.record)


def list_rejected(inputs: Inputs, folder: Path) -> None:
    """Write the rejected prompts to a file."""
    listed = inputs.rejected + inputs.left_out
    if listed and first_rank():
        with publish(folder / QUARANTINE) as temporary, temporary.open("w") as file:
            file.writelines(json.dumps(one._asdict()) + "\n" for one in listed)


def describe(inputs: Inputs, folder: Path | None) -> None:
    """Print rejected and duplicate prompts, and the parts of a mixture."""
    where = f", listed in {folder / QUARANTINE}" if folder else ""
    if rejected := inputs.rejected:
        total = sum(r.records for r in [*inputs.readings, *inputs.heldout])
        say(f"prompts: {len(rejected)} of {total} records are malformed and left out{where}")
        for one in rejected[:SHOWN]:
            say(f"  {one}")
    if left_out := inputs.left_out:
        parts = zip(inputs.too_long, ("prompts", "held-out prompts"), strict=True)
        counts = " and ".join(measured.summary(what) for measured, what in parts if measured.long)
        say(f"prompts: {counts} have more than {inputs.limit} and are left out{where}")
        for one in left_out[:SHOWN]:
            say(f"  {one}")
    if duplicates := sum(r.duplicates for r in inputs.readings):
        say(f"prompts: {duplicates} duplicates dropped")
    if len(inputs.readings) > 1:
        parts = ", ".join(f"{len(r.prompts)} of {r.source.label}" for r in inputs.readings)
        say(f"prompts: {parts}")

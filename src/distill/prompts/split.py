"""Read, mix and split the prompts of a run into training and held-out prompts, and record them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.options.answers import PromptOptions
from distill.prompts.chat_template import Chat
from distill.prompts.length import LeftOut, Limit, Measured, set_aside
from distill.prompts.mixing import mix
from distill.prompts.prompt import Prompt, held_out, opening, pack, split
from distill.prompts.rendered import RenderedTexts
from distill.prompts.sources import Reading, Rejected, Source, to_sources
from distill.prompts.token_counts import count_tokens
from distill.utils.atomic_files import read_json, write_json
from distill.utils.progress import first_rank, say
from distill.utils.provenance import digest
from drafters.checkpoint.atomic import publish

SHOWN = 3  # omitted prompts shown per reason
RECORD, QUARANTINE = "prompts.json", "quarantine.jsonl"


@dataclass(slots=True)
class Inputs:
    """Prompts and their sources.

    Attributes:
        train: prompts to answer and train on.
        held: prompts to score, each up to the target's first answer.
        readings: readings of the sources.
        heldout: reading of the held-out file, if any.
        record: content of the run's record.
        refused: prompts that the chat template refuses.
        limit: limit on the tokens of a prompt.
        too_long: omitted prompts of `train` and `held`.
        none_held: why no prompt is held out; empty if one is.
    """

    train: list[Prompt]
    held: list[Prompt]
    readings: list[Reading]
    heldout: list[Reading]
    record: dict[str, Any]
    refused: list[Rejected]
    limit: Limit
    too_long: tuple[Measured, Measured]
    none_held: str = ""

    @property
    def rejected(self) -> list[Rejected]:
        """Malformed records of all sources."""
        read = [one for reading in [*self.readings, *self.heldout] for one in reading.rejected]
        return read + self.refused

    @property
    def left_out(self) -> list[Rejected]:
        """Prompts that are too long."""
        return [one for measured in self.too_long for one in measured.long]


def read(
    options: PromptOptions, chat: Chat, limit: Limit, answers: str | None = None, score: bool = False
) -> Inputs:
    """Read, mix and split the prompts of the options.

    Args:
        options: options of the prompts.
        chat: renders prompts, and may refuse.
        limit: limit on the tokens of a prompt.
        answers: rollout.answers: given answers are rendered too; None without rollouts.
        score: whether held-out prompts are scored.

    Raises:
        UserError: no usable prompts, too many too long ones, or, with prompts.strict, a malformed record.
    """
    given = answers == "given"
    if given and options.answers == "drop":
        raise UserError("rollout=given: prompts.answers=drop omits given answers; set prompts.answers=keep")
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
    unanswered = given and any("rollout=given" in one.reason for one in refused)
    advice = "set rollout=hf, which has the target answer" if unanswered else ""
    parts = (
        LeftOut("prompts", measured, refused, *_malformed(readings), limit, advice),
        LeftOut("held-out prompts", openings, refused_held, *_malformed(heldout), limit),
    )
    if answers:  # commands that only score do not use training prompts
        parts[0].check(options.max_left_out)
    if score:
        parts[1].check(options.max_left_out)
    none_held = "" if openings.fit else _why_none_held(listed, options, parts[1])
    if answers and listed and not train:
        raise UserError(_why_all_held(listed, options))
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
        *(measured.fit, scored, readings, heldout, record, refused + refused_held, limit),
        *((measured, openings), none_held),
    )


def _malformed(readings: Sequence[Reading]) -> tuple[list[Rejected], int, int]:
    """Malformed records, number of records read, and estimated number of unreadable ones."""
    malformed = [one for r in readings for one in r.rejected]
    return malformed, sum(r.records for r in readings), sum(r.lost for r in readings)


def _why_none_held(listed: Sequence[Prompt], options: PromptOptions, held: LeftOut) -> str:
    """Why no prompt is held out, and advice."""
    if held.count:
        return f"all {held.count} of {options.heldout or 'those that would be'} are left out"
    if not listed or options.heldout_share <= 0:
        return "prompts.heldout_share is 0" if listed else "there is no file of prompts to hold some out of"
    questions = {prompt.question_hash for prompt in listed}
    if len(questions) == 1:
        return (
            f"all {len(listed)} prompts begin with one question, and a question is trained on or held out as "
            "a whole, at any prompts.heldout_share"
        )
    enough = math.ceil(1000 * min(questions) / 2**64) / 1000
    return (
        f"by hash prompts.heldout_share={options.heldout_share:g} takes none of {len(questions)} questions"
        + (f", and {enough:g} takes one" if enough < 1 else "")
    )


def _why_all_held(listed: Sequence[Prompt], options: PromptOptions) -> str:
    where = options.heldout or f"prompts.heldout_share={options.heldout_share:g}"
    questions = len({prompt.question_hash for prompt in listed})
    return (
        f"prompts: none are left to train on: {where} holds out all {len(listed)} prompts, which ask "
        f"{questions} different questions; give others, or set prompts.heldout to another file"
    )


def _rendered(
    prompts: list[Prompt], chat: Chat, limit: Limit, given: bool, strict: bool
) -> tuple[Measured, list[Rejected]]:
    """Split prompts into those that the chat template renders and those that it rejects."""
    measured, refused = Measured(), []
    rendered = RenderedTexts(chat)
    faults = {i: fault for i, prompt in enumerate(prompts) if (fault := rendered.fault(prompt))}
    tokens, refusals = count_tokens(prompts, chat, given)
    for index, reason in sorted((refusals | faults).items()):
        tokens[index] = -1
        refused.append(set_aside(prompts[index], reason))
        if strict:
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
        "lost": reading.lost,
        "duplicates": reading.duplicates,
        "used": len(reading.prompts),
        "unread": dict(reading.unread),
    }


def _hash(prompts: Sequence[Prompt]) -> str:
    """Hash of the questions, independent of order."""
    return digest(" ".join(sorted(str(p.question_hash) for p in prompts)))


def keep_record(inputs: Inputs, folder: Path) -> None:
    """Record training, held-out and rejected prompts in the run folder.

    Raises:
        UserError: the run started with other prompts.
    """
    record = folder / RECORD
    advice = "remove it to continue with the prompts as they are now; resume=never starts another run"
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


def describe(inputs: Inputs, folder: Path | None, written: int = 0) -> None:
    """Print rejected and duplicate prompts, the parts of a mixture, and how many the target writes."""
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
    for reading in [*inputs.readings, *inputs.heldout]:
        if line := reading.unread_line():
            say(f"prompts: {line}")
    if written and inputs.readings:
        count = sum(len(r.prompts) for r in inputs.readings)
        say(f"prompts: {count} given, and {written} that the target writes (prompts.self)")
    if len(inputs.readings) > 1:
        parts = ", ".join(f"{len(r.prompts)} of {r.source.label}" for r in inputs.readings)
        say(f"prompts: {parts}")

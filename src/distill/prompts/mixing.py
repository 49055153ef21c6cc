"""Prompts of several sources, none twice, in the shares that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from decode.errors import UserError
from distill.prompts.prompt import Prompt, hash64
from distill.prompts.sources import Reading


def mix(readings: Sequence[Reading], limit: int) -> list[Prompt]:
    """Drop duplicates, take of every source its share, and mix.

    Which prompts are taken and in which order is by hash of what they say, so neither depends on the
    order of the files. One source without a limit stays as it is.

    Args:
        readings: their `prompts` and `duplicates` are brought up to date.
        limit: prompts in all; 0 takes as many as keep the shares exact.

    Raises:
        UserError: a source with nothing that is not in those before it.
    """
    seen: set[int] = set()
    for reading in readings:
        reading.duplicates = _drop_seen(reading.prompts, seen)
        if not reading.prompts:
            raise UserError(f"{reading.source.label}: every prompt of it is in a source before it")
    several = len(readings) > 1
    counts = [len(r.prompts) for r in readings]
    amounts = shares(counts, [r.source.weight for r in readings], limit)
    for reading, amount in zip(readings, amounts, strict=True):
        if amount < len(reading.prompts):
            reading.prompts = sorted(reading.prompts, key=_place)[:amount]
        if several:
            reading.prompts = [p._replace(id=f"{reading.source.short}/{p.id}") for p in reading.prompts]
    prompts = [p for r in readings for p in r.prompts]
    # By a second hash: what is taken of a large source has lower places than what is taken of a small one.
    mixed = sorted(prompts, key=lambda p: hash64(_place(p))) if several or limit else prompts
    return _named_apart(mixed)


def shares(counts: Sequence[int], weights: Sequence[float], limit: int) -> list[int]:
    """How many to take of each, none twice.

    Args:
        counts: that there are.
        weights: in whose ratio.
        limit: in all. What a source has too few of, the others give, in their ratio. 0 takes the
            largest amounts in this ratio.
    """
    parts = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    if not limit:
        total = min(count / part for count, part in zip(counts, parts, strict=True))
        return [int(total * part) for part in parts]
    left, open_ = min(limit, sum(counts)), set(range(len(counts)))
    taken = [0] * len(counts)
    while True:
        whole = sum((parts[i] for i in open_), Fraction())
        wanted = {i: left * parts[i] / whole for i in open_}
        full = [i for i in open_ if wanted[i] >= counts[i]]
        for i in full:
            taken[i] = counts[i]
        left, open_ = left - sum(counts[i] for i in full), open_ - set(full)
        if not full or not open_:
            break
    for i in open_:
        taken[i] = int(wanted[i])
    missing = left - sum(taken[i] for i in open_)
    for i in sorted(open_, key=lambda i: (taken[i] - wanted[i], i))[:missing]:  # largest remainders
        taken[i] += 1
    return taken


def _drop_seen(prompts: list[Prompt], seen: set[int]) -> int:
    kept = []
    for prompt in prompts:
        key = _place(prompt)
        if key not in seen:
            seen.add(key)
            kept.append(prompt)
    dropped = len(prompts) - len(kept)
    prompts[:] = kept
    return dropped


def _place(prompt: Prompt) -> int:
    # Of more than `split` hashes, so the two have nothing in common: the first few must not all be held out.
    return hash64([prompt.messages, prompt.tools])


def _named_apart(prompts: list[Prompt]) -> list[Prompt]:
    """Ids key the randomness of answers, so none may stand twice."""
    used: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        name = prompt.id
        while name in used:
            used[prompt.id] += 1
            name = f"{prompt.id}~{used[prompt.id]}"  # samples have #
        used[name] = 1
        prompts[i] = prompt._replace(id=name)
    return prompts

"""Mix prompts of several sources in given shares, without duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from decode.errors import UserError
from distill.prompts.prompt import Prompt, hash64
from distill.prompts.sources import Reading


def mix(readings: Sequence[Reading], limit: int) -> list[Prompt]:
    """Drop duplicates, sample every source by its share, and shuffle.

    Selection and order follow a hash of the content, so they are independent of the order of files. A single
    source without a limit keeps its order.

    Args:
        readings: their `prompts` and `duplicates` are updated.
        limit: total number of prompts; 0: the largest number with exact shares.

    Raises:
        UserError: all prompts of a source are in earlier sources.
    """
    seen: set[int] = set()
    for reading in readings:
        reading.duplicates = _drop_seen(reading.prompts, seen)
        if not reading.prompts:
            raise UserError(f"{reading.source.label}: all its prompts are in earlier sources; remove it")
    several = len(readings) > 1
    counts = [len(r.prompts) for r in readings]
    amounts = shares(counts, [r.source.weight for r in readings], limit)
    for reading, amount in zip(readings, amounts, strict=True):
        if amount < len(reading.prompts):
            reading.prompts = sorted(reading.prompts, key=lambda p: p.content_hash)[:amount]
        if several:
            reading.prompts = [replace(p, id=f"{reading.source.short}/{p.id}") for p in reading.prompts]
    prompts = [p for r in readings for p in r.prompts]
    # Shuffle by a second hash: prompts sampled from a large source have smaller first hashes.
    mixed = sorted(prompts, key=lambda p: hash64(p.content_hash)) if several or limit else prompts
    return _unique_ids(mixed)


def shares(counts: Sequence[int], weights: Sequence[float], limit: int) -> list[int]:
    """Number of prompts to take from each source.

    Args:
        counts: available prompts.
        weights: ratio of the shares.
        limit: total. If a source is too small, the others replace it in their ratio. 0: the largest
            amounts in exactly this ratio.
    """
    parts = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    if not limit:
        total = min(count / part for count, part in zip(counts, parts, strict=True))
        return [int(total * part) for part in parts]
    remaining, sources = min(limit, sum(counts)), set(range(len(counts)))
    amounts = [0] * len(counts)
    while True:  # use sources that are too small completely; distribute the rest
        total_part = sum((parts[i] for i in sources), Fraction())
        quotas = {i: remaining * parts[i] / total_part for i in sources}
        exhausted = [i for i in sources if quotas[i] >= counts[i]]
        for i in exhausted:
            amounts[i] = counts[i]
        remaining, sources = remaining - sum(counts[i] for i in exhausted), sources - set(exhausted)
        if not exhausted or not sources:
            break
    for i in sources:
        amounts[i] = int(quotas[i])
    missing = remaining - sum(amounts[i] for i in sources)
    for i in sorted(sources, key=lambda i: (amounts[i] - quotas[i], i))[:missing]:  # largest remainders
        amounts[i] += 1
    return amounts


def _drop_seen(prompts: list[Prompt], seen: set[int]) -> int:
    unique = []
    for prompt in prompts:
        if prompt.content_hash not in seen:
            seen.add(prompt.content_hash)
            unique.append(prompt)
    dropped = len(prompts) - len(unique)
    prompts[:] = unique
    return dropped


def _unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Make ids unique, since they seed the sampling of answers."""
    used: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        name = prompt.id
        while name in used:
            used[prompt.id] += 1
            name = f"{prompt.id}~{used[prompt.id]}"  # "#" is used by samples
        used[name] = 1
        if name != prompt.id:
            prompts[i] = replace(prompt, id=name)
    return prompts

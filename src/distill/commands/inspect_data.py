"""foredraft inspect-data: print rows of a rollout store with supervised tokens marked, and statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.generation.text import Detokenizer
from distill.config.build import TargetSource, quiet
from distill.options.commands import InspectOptions
from distill.rollouts import surprisal
from distill.rollouts.manifest import refuse_links
from distill.rollouts.shard import read_rows
from distill.rollouts.statistics import RowCounts
from distill.rollouts.store import SCHEMA, find
from distill.scoring.scorer import threads
from distill.utils.progress import bar, say, wants_color
from distill.utils.redact import printable

SUPERVISED, PLAIN = "\x1b[32m", "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"  # around supervised text without colour
# Control characters are tokens too, so they are shown by their Unicode symbols.
SYMBOLS = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "\u2421", 0x0A: "\u240a\n"}
Row = dict[str, Any]


def inspect(options: InspectOptions) -> float:
    """Print rows and statistics of a store.

    Returns:
        Mean surprisal of the sampled answers under the target minus its entropy, in nats; 0 without a sample.

    Raises:
        UserError: the store or row does not exist, or the store belongs to another tokenizer.
    """
    quiet()
    color = wants_color(options.color)
    folder = find(options.store, options.stores)
    manifest = read_manifest(folder)
    plan = manifest["plan"]
    moment = plan.get("moment") or None
    source = TargetSource(options.target)
    chat = source.chat(plan["template"], options.prompts.template_options, moment)
    if chat.fingerprint() != plan["tokenizer"]:
        raise UserError(
            f"store={folder}: made with another tokenizer, chat template or prompts.template_options than "
            f"target={options.target.path} has; name the target that it was made with"
        )
    say(f"store: {folder}")
    counts = RowCounts(source.config().vocab_size, options.max_tokens)
    total = sum(shard["rows"] for shard in manifest["shards"])
    rng = np.random.default_rng(options.seed)
    shown = _random_rows(rng, total, options.rows) if options.row is None else str(options.row)
    sampled = _random_rows(rng, total, options.sample)
    rows, sample = read(folder, manifest, counts, shown, sampled)
    if isinstance(shown, str) and not rows:
        raise UserError(f"row={shown}: no row of {folder} has this id")
    for number, row in rows:
        print(show(number, row, chat.tokenizer, color), end="\n\n")
    print(printable("\n".join(counts.lines(plan["stop"]))), flush=True)
    if not sample:
        return 0.0
    target = source.load(decodes=False)
    if plan["target"] != target.fingerprint():
        say(f"WARNING: the store names another target than {options.target.path}")
    reference = surprisal.reference_distribution(plan)
    with threads(options.threads):
        stats = surprisal.measure(target, sample, reference.sampler)
    print("\n".join(surprisal.lines(stats, reference)), flush=True)
    return stats.excess()[0]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a store's manifest.

    Raises:
        UserError: no store, an unfinished store, or files outside its folder.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        reason = "no manifest.json: unfinished, or not a store" if folder.is_dir() else "no such folder"
        raise UserError(f"store={folder}: {reason}; give a folder of outputs/rollouts")
    refuse_links(folder)
    try:
        manifest = json.loads(path.read_text())
        older = manifest["schema"] != SCHEMA
        for name in ("template", "tokenizer", "target", "answers", "sampler", "stop"):
            manifest["plan"][name]
        shards = [(Path(shard["file"]), shard["rows"]) for shard in manifest["shards"]]
        if any(str(file) != file.name for file, _ in shards):
            raise ValueError("a shard outside the folder")
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the manifest of a store of rollouts") from None
    if older:
        raise UserError(f"store={folder}: another version made it; make the answers again with this one")
    return manifest


def read(
    folder: Path, manifest: dict[str, Any], counts: RowCounts, shown: set[int] | str, sampled: set[int]
) -> tuple[list[tuple[int, Row]], list[Row]]:
    """Read a store shard by shard into `counts`; returns the numbered rows to show and the sampled rows.

    `shown` is a set of row numbers or one row id.

    Raises:
        UserError: a shard is missing or damaged.
    """
    rows: list[tuple[int, Row]] = []
    sample: list[Row] = []
    first = 0
    with bar(len(manifest["shards"]), "reading", "shards", leave=False) as progress:
        for shard in manifest["shards"]:
            path = folder / shard["file"]
            table = read_rows(path, counts.halves.shape[1])
            counts.add(table)
            ids = table["id"].to_pylist()
            for i, name in enumerate(ids):
                number = first + i
                if name == shown if isinstance(shown, str) else number in shown:
                    rows.append((number, table.slice(i, 1).to_pylist()[0]))
                if number in sampled:
                    sample += table.slice(i, 1).to_pylist()
            first += len(ids)
            progress.update(1)
    return rows, sample


def _random_rows(rng: np.random.Generator, total: int, count: int) -> set[int]:
    return {int(i) for i in rng.choice(total, min(count, total), replace=False)}


def show(number: int, row: Row, tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    """Format a row's text with special tokens; supervised text is in colour or in brackets."""
    before, after = (SUPERVISED, PLAIN) if color else (OPEN, CLOSE)
    num_supervised = sum(map(bool, row["loss_mask"]))
    text = "".join(
        f"{before}{part}{after}" if supervised else part
        for part, supervised in _parts(row["tokens"], row["loss_mask"], tokenizer)
    )
    header = (
        f"-- row {number}, id {row['id']}: {len(row['tokens']) - num_supervised} prompt tokens, "
        f"{num_supervised} supervised, finish_reason {row['finish_reason']}, ids {row['ids']}"
    )
    return printable(header.replace("\n", " ")) + f"\n{text}"


def _parts(
    tokens: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    """Yield runs of supervised and other text; a character of several tokens belongs to its last token."""
    text = Detokenizer(tokenizer)
    pieces = [(text.add(token), bool(flag)) for token, flag in zip(tokens, mask, strict=True)]
    pieces.append((text.end(), bool(mask[-1]) if len(mask) else False))
    for supervised, run in groupby(pieces, key=lambda piece: piece[1]):
        if joined := "".join(part for part, _ in run):
            yield printable(joined.translate(SYMBOLS)), supervised

"""Timings beyond a scorecard's, as scripts/benchmark.py asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine, span
from benchmarks.vs_transformers import Contender, hugging_face, ours, race
from decode.errors import UserError
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.build import build_drafter
from distill.config.read import read_options
from distill.config.validate import refused
from distill.options import DrafterOptions
from distill.report.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar, say
from drafters.models.lm import DraftLM
from drafters.registry import short_name

BUNDLED = "data/pocket-draft"  # the default of drafter.path


def decoders(cfg: DictConfig, folder: Path) -> float:
    """Race our loop against Hugging Face's on the held-out prompts; a table, and `out` as JSON.

    Args:
        cfg: composed from conf/benchmark_decode.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        Speed of our chain with the draft model over assisted generation with the same; without a draft model
        that of our plain decoding over `generate`.

    Raises:
        UserError: bad input.
    """
    del folder
    options = cfg.score
    target, chat, _, held = load_inputs(cfg)
    with refused():
        draft = _draft_model(cfg.drafter, target)
        contenders = _contenders(cfg, target, draft)
    prompts = encode(chat, held[: options.prompts])
    with (
        conditions(cfg, target) as found,
        bar(len(prompts) * options.repeats, "racing", "prompts") as shown,
    ):
        rows = race(
            contenders,
            prompts,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            progress=shown.update,
        )
    if cfg.temperature:  # everybody draws on their own
        for row in rows:
            row["differ"] = None
    card = {
        "what": "decode",
        "timed": "whole calls, the pass over the prompt included, batch 1",
        "rows": rows,
        "depth": cfg.depth,
        "ends": cfg.ends,
        "prompts": len(prompts),
        "draft_model": cfg.drafter.path if draft else None,
        **found,
    }
    write_json(Path(cfg.out), card)
    print(_table(card))
    speed = {row["name"]: row["tokens_per_second"] for row in rows}
    if draft:
        return speed["ours-lm-chain"] / speed["hf-assisted"]
    return speed["ours-plain"] / speed["hf-generate"]


def _draft_model(cfg: DictConfig, target: Target) -> DraftLM | None:
    """The draft model; none where no path was given and the bundled one is of another vocabulary."""
    try:
        draft = build_drafter(read_options(DrafterOptions, cfg), target)
    except UserError as error:
        if cfg.get("path") != BUNDLED:
            raise
        say(f"without assisted generation and our chain with a draft model: {error}")
        return None
    if not isinstance(draft, DraftLM):
        raise UserError("benchmark: Hugging Face can use drafter=lm_given too; give others as checkpoint=")
    return draft.to(target.device, target.dtype).eval().requires_grad_(False)


def _contenders(cfg: DictConfig, target: Target, draft: DraftLM | None) -> list[Contender]:
    """Plain decoding first: the others are compared with it."""
    sampler, stop = Sampler(cfg.temperature), stop_tokens(target) if cfg.ends else []
    chain = Plan(depth=cfg.depth, proposal="sampled" if cfg.temperature else "fixed")
    plans = {str(name): Plan(**shape) for name, shape in cfg.plans.items()}
    law = {"sampler": sampler, "stop": stop}
    contenders = [
        Contender("ours-plain", ours(target, None, Plan(), **law, seed=cfg.seed)),
        Contender("hf-generate", hugging_face(target, **law)),
        Contender("hf-prompt-lookup", hugging_face(target, **law, depth=cfg.depth)),
    ]
    if draft:
        assisted = hugging_face(target, **law, assistant=draft.model, depth=cfg.depth)
        contenders.insert(2, Contender("hf-assisted", assisted))
        contenders.append(Contender("ours-lm-chain", ours(target, draft, chain, **law, seed=cfg.seed)))
    if cfg.checkpoint:
        trained = load_drafter(cfg.checkpoint, target)
        for name, plan in plans.items():
            decode = ours(target, trained, plan, **law, taps=trained.taps, seed=cfg.seed)
            contenders.append(Contender(f"ours-{short_name(trained)}-{name}", decode))
    return contenders


def _table(card: dict[str, Any]) -> str:
    lines = [
        [
            row["name"],
            f"{row['tokens_per_second']:.1f}",
            span(row["spread"], 1),
            f"{row['ratio']:.2f}x",
            span(row["ratio_spread"], 2),
            f"{row['tau']:.2f}",
            "-" if row["differ"] is None else str(row["differ"]),
        ]
        for row in card["rows"]
    ]
    head = ["decoder", "tokens/s", "min..max", "ratio", "min..max", "tau", "differ"]
    return (
        f"{grid(head, lines)}\n"
        f"T={card['temperature']:g}, {card['dtype']}, draft of {card['depth']}, {card['prompts']} prompts, "
        f"up to {card['max_new_tokens']} tokens, {card['repeats']} repeats; {card['timed']}\n"
        f"{machine(card)}"
    )

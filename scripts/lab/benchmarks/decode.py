"""Timings beyond a scorecard's, as scripts/lab/benchmark.py asks for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks import in_llama_cpp
from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine, span
from benchmarks.near_ties import Differences
from benchmarks.vs_transformers import Contender, hugging_face, ours, race
from decode.errors import UserError
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.planning.auto import refused_plans
from decode.planning.round_timing import clock_of
from decode.sampling import Sampler
from distill.config.build import build_drafter
from distill.config.read import read_options
from distill.config.validate import refused
from distill.options.run import DrafterOptions
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar, say
from drafters.base import Drafter
from drafters.checkpoint.folder import first_line
from drafters.models.lm import DraftLM
from drafters.registry import short_name
from foredraft.custom_generate import assist

BUNDLED = "data/pocket-draft"  # the default of drafter.path


def decoders(cfg: DictConfig, folder: Path) -> float:
    """Race our loop against Hugging Face's on the held-out prompts; a table, and `out` as JSON.

    Args:
        cfg: composed from conf/lab/decode.yaml.
        folder: unused; nothing is written but `out`, and the logs of servers next to it.

    Returns:
        Speed of our chain with the draft model over assisted generation with the same; without a draft model
        that of our plain decoding over `generate`.

    Raises:
        UserError: bad input.
    """
    del folder
    options = cfg.score
    peer = in_llama_cpp.peer(cfg.llama_cpp, str(cfg.target.path))
    target, chat, _, held = load_inputs(cfg)
    with refused():
        draft = _draft_model(cfg.drafter, target)
        contenders = _contenders(cfg, target, draft)
    prompts = encode(chat, held[: options.prompts])
    with conditions(cfg, target) as found:
        if cfg.compiled:
            contenders[2:2] = _compiled(cfg, target, prompts)
        clock = clock_of(target)
        with (
            bar(len(prompts) * options.repeats, "racing", "prompts") as shown,
            _in_llama_cpp(cfg, peer, target, prompts, clock) as servers,
        ):
            contenders += servers
            results = race(
                contenders,
                prompts,
                max_new_tokens=options.max_new_tokens,
                repeats=options.repeats,
                clock=clock,
                progress=shown.update,
            )
    differences = Differences(target, prompts, results[0].texts)
    rows = [
        result.row | _differing(cfg, contender, differences, result.texts)
        for contender, result in zip(contenders, results, strict=True)
    ]
    card = {
        "what": "decode",
        "timed": "whole calls, the pass over the prompt included, batch 1",
        "clock": clock.__name__,
        "rows": rows,
        "depth": cfg.depth,
        "ends": cfg.ends,
        "prompts": len(prompts),
        "draft_model": cfg.drafter.path if draft else None,
        "llama_cpp": peer.told(found["threads"], clock.__name__) if peer else None,
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
    if not isinstance(draft, DraftLM) or draft.mapping is not None:
        raise UserError(
            "benchmark: Hugging Face can use drafter=lm_given too, of the target's vocabulary; give others "
            "as checkpoint="
        )
    return draft.to(target.device, target.dtype).eval().requires_grad_(False)


def _sampling(cfg: DictConfig, target: Target) -> dict[str, Any]:
    """What all contenders have to obey."""
    return {"sampler": Sampler(cfg.temperature), "stop": stop_tokens(target) if cfg.ends else []}


def _contenders(cfg: DictConfig, target: Target, draft: DraftLM | None) -> list[Contender]:
    """Plain decoding first: the others are compared with it."""
    chain = Plan(depth=cfg.depth, proposal="sampled" if cfg.temperature else "fixed")
    plans = {str(name): plan_of(shape) for name, shape in cfg.plans.items()}
    options = _sampling(cfg, target)
    contenders = [
        Contender("ours-plain", ours(target, None, Plan(), **options, seed=cfg.seed)),
        Contender("hf-generate", hugging_face(target, **options)),
        Contender("hf-prompt-lookup", hugging_face(target, **options, depth=cfg.depth)),
    ]
    if draft:
        assisted = hugging_face(target, **options, assistant=draft.model, depth=cfg.depth)
        contenders.insert(2, Contender("hf-assisted", assisted))
        contenders.append(Contender("ours-lm-chain", ours(target, draft, chain, **options, seed=cfg.seed)))
    if cfg.checkpoint:
        trained = load_drafter(cfg.checkpoint, target)
        for name, plan in _supported(plans, trained).items():
            decode = ours(
                trained.verifier(target), trained, plan, **options, taps=trained.taps, seed=cfg.seed
            )
            contenders.append(Contender(f"ours-{short_name(trained)}-{name}", decode))
            if not trained.traits.tunes_target:
                custom = hugging_face(target, **options, custom=assist(trained, plan))
                contenders.append(Contender(f"hf-{short_name(trained)}-{name}", custom))
    return contenders


def _supported(plans: Mapping[str, Plan], drafter: Drafter) -> dict[str, Plan]:
    """The plans that a drafter can draft; a line names the others.

    Raises:
        UserError: there is none.
    """
    refused = refused_plans(drafter, list(plans.values()))
    for name, plan in plans.items():
        if plan in refused:
            say(f"without plans.{name}: {refused[plan]}")
    supported = {name: plan for name, plan in plans.items() if plan not in refused}
    if not supported:
        raise next(iter(refused.values()), UserError("plans: none is given for checkpoint="))
    return supported


def _compiled(cfg: DictConfig, target: Target, prompts: Sequence[Sequence[int]]) -> list[Contender]:
    """Hugging Face's compiled loop, after a run over all prompts; nothing where it cannot be compiled.

    To be called with as many threads as are timed, for which the compiler writes its code.
    """
    room = min(max(map(len, prompts)) + cfg.score.max_new_tokens, target.max_positions or sys.maxsize)
    decode, begin = hugging_face(target, **_sampling(cfg, target), static=room), time.perf_counter()
    try:
        for prompt in prompts:  # all, since a sliding window that fills up compiles again
            decode(prompt, cfg.score.max_new_tokens)
    except RuntimeError as error:  # of the compiler, all of whose errors are such: no g++, say
        say(f"without the compiled loop: {first_line(error)}")
        return []
    seconds = time.perf_counter() - begin
    say(f"compiled Hugging Face's plain loop and ran it once in {seconds:.0f} s, which are not timed")
    return [Contender("hf-compiled", decode)]


@contextmanager
def _in_llama_cpp(
    cfg: DictConfig,
    peer: in_llama_cpp.Peer | None,
    target: Target,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float],
) -> Iterator[list[Contender]]:
    """Context of llama.cpp's servers, which yields them; none where no installation is given.

    To be entered with as many threads as are timed, which the servers get too.
    """
    if peer is None:
        yield []
        return
    with in_llama_cpp.contenders(
        peer,
        prompts,
        max_new_tokens=cfg.score.max_new_tokens,
        most=target.max_positions,
        sampler=Sampler(cfg.temperature),
        ends=cfg.ends,
        threads=torch.get_num_threads(),
        on_cpu_time=clock is time.process_time,
        logs=Path(cfg.out).with_suffix(".logs").absolute(),
    ) as servers:
        yield servers


def _differing(
    cfg: DictConfig, contender: Contender, differences: Differences, texts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    if cfg.temperature or not contender.alike:  # everybody draws on their own, or has other weights
        return {"differ": None, "near_ties": None, "largest_gap": None}
    return differences(texts)


def differing_column(row: dict[str, Any]) -> str:
    """The column of texts that differ: `3 (2 near ties)`."""
    if row["differ"] is None:
        return "-"
    if not row["differ"] or row["near_ties"] is None:
        return str(row["differ"])
    return f"{row['differ']} ({row['near_ties']} near tie{'s' * (row['near_ties'] != 1)})"


def _table(card: dict[str, Any]) -> str:
    lines = [
        [
            row["name"],
            f"{row['tokens_per_second']:.1f}",
            span(row["spread"], 1),
            f"{row['ratio']:.2f}x",
            span(row["ratio_spread"], 2),
            "-" if row["tau"] is None else f"{row['tau']:.2f}",
            differing_column(row),
        ]
        for row in card["rows"]
    ]
    head = ["decoder", "tokens/s", "min..max", "ratio", "min..max", "tau", "differ"]
    note = f"{_note(card['llama_cpp'])}\n" if card["llama_cpp"] else ""
    return (
        f"{grid(head, lines)}\n"
        f"T={card['temperature']:g}, {card['dtype']}, draft of {card['depth']}, {card['prompts']} prompts, "
        f"up to {card['max_new_tokens']} tokens, {card['repeats']} repeats; {card['timed']}; "
        f"clock: {card['clock']}\n{note}"
        f"{machine(card)}"
    )


def _note(served: dict[str, Any]) -> str:
    """What is different about llama.cpp's rows."""
    timed = "CPU time of its server" if served["clock"] == "process_time" else "time until its answer"
    return (
        f"llama.cpp {served['build']}: the weights as {served['file']} stores them, so its texts are its own "
        f"and not compared; {timed}, no prompt cache, a new server for each repeat"
    )

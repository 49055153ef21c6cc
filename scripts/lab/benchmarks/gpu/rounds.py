"""Speed and parts of decoding rounds on one device: scripts/lab/benchmark.py rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.common import conditions, encode, load_drafter, load_inputs, machine, span
from benchmarks.gpu.device import Operations, ceilings, kernels, waits
from benchmarks.gpu.random_target import random_drafter, random_prompts, random_target
from benchmarks.gpu.synthetic import SyntheticAcceptance, replayed
from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Generation, Proposer
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from distill.config.build import quiet
from distill.config.read import read_options
from distill.config.resolvers import device_of
from distill.config.validate import check_out, check_ranges, refused
from distill.options.run import DrafterOptions
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json

SHORTEST = 16  # new tokens: a quarter of them takes another number of rounds than half of them
Decode = partial[Generation]


def rounds(cfg: DictConfig, folder: Path) -> float:
    """Time plain and drafted rounds; a table, and `out` as JSON.

    Speeds are of undisturbed runs, interleaved. Further runs read the clock between the parts of a round,
    count reads by the host, and count operations and kernels.

    Args:
        cfg: composed from conf/lab/rounds.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        The best speed over plain decoding.

    Raises:
        UserError: bad input.
    """
    del folder
    if cfg.score.max_new_tokens < SHORTEST:
        raise UserError(f"score.max_new_tokens={cfg.score.max_new_tokens}: must be {SHORTEST} or more")
    target, prompts = _target_and_prompts(cfg)
    with refused():
        drafter = _drafter(cfg, target)
    plans = [plan_of(shape) for shape in cfg.plans.values()]
    target.tap(drafter.taps)
    with conditions(cfg, target) as found:
        decode = partial(
            generate,
            target,
            prompts=prompts,
            max_new_tokens=cfg.score.max_new_tokens,
            batch_size=1,
            sampler=Sampler(cfg.temperature),
            seed=cfg.seed,
        )
        proposers, differ = _proposers(cfg, target, drafter, plans, prompts, decode)
        timed = [(Plan(), None), *zip(plans, proposers, strict=True)]
        rows = _rows(target, timed, decode, cfg.score.repeats)
        most = ceilings(target.device)
    synthetic = None if cfg.acceptance is None else list(cfg.acceptance)
    for row, unlike in zip(rows[1:], differ, strict=True):
        row |= {"synthetic": synthetic, "differ": unlike}
    weights = target.bytes - _unread(target)
    card = {
        "what": "rounds",
        "rows": rows,
        "like": cfg.like,
        "drafter": type(drafter).__name__,
        "drafter_parameters": sum(weight.numel() for weight in drafter.parameters()),
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "weights_bytes": weights,
        "bound_ms": 1000 * weights / most["copy_bytes"],
        **most,
        **found,
    }
    write_json(Path(cfg.out), card)
    print(_table(card))
    return max((row["speedup"] for row in rows[1:]), default=1.0)


def _target_and_prompts(cfg: DictConfig) -> tuple[Target, list[list[int]]]:
    if cfg.like is None:
        if cfg.sizes:
            raise UserError("sizes: are for like=, a target with random weights")
        target, chat, _, held = load_inputs(cfg)
        return target, encode(chat, held[: cfg.score.prompts])
    quiet()
    check_ranges(cfg)
    check_out(cfg)
    sizes: Any = OmegaConf.to_container(cfg.sizes) if cfg.sizes else {}
    device = torch.device(device_of(cfg.trainer.accelerator))
    torch.manual_seed(cfg.seed)
    target = random_target(cfg.like, sizes, cfg.dtype, device)
    target.capture = cfg.target.capture
    prompts = random_prompts(cfg.score.prompts, cfg.prompt_tokens, target.vocab_size, cfg.seed)
    return target, prompts


def _drafter(cfg: DictConfig, target: Target) -> Any:
    if cfg.checkpoint:
        return load_drafter(cfg.checkpoint, target)
    torch.manual_seed(cfg.seed)
    drafter = random_drafter(read_options(DrafterOptions, cfg.drafter), target)
    return drafter.to(target.dtype).eval().requires_grad_(False)


def _proposers(
    cfg: DictConfig,
    target: Target,
    drafter: Any,
    plans: Sequence[Plan],
    prompts: Sequence[Sequence[int]],
    decode: Decode,
) -> tuple[list[Proposer], list[int | None]]:
    """What drafts for each plan, and how many texts of synthetic drafts differ from plain decoding's."""
    for plan in plans:
        drafter.check(plan)
    if cfg.acceptance is None:
        return [drafter] * len(plans), [None] * len(plans)
    found = [
        replayed(decode, target, drafter, plan, prompts, list(cfg.acceptance), cfg.seed) for plan in plans
    ]
    return [proposer for proposer, _ in found], [differ for _, differ in found]


def _rows(
    target: Target, timed: Sequence[tuple[Plan, Proposer | None]], decode: Decode, repeats: int
) -> list[dict[str, Any]]:
    """Plain decoding first."""
    for plan, proposer in timed:
        decode(proposer, plan=plan)  # warm up
    speeds: list[list[float]] = [[] for _ in timed]
    for repeat in range(repeats):
        order = list(range(len(timed)))
        for i in reversed(order) if repeat % 2 else order:
            plan, proposer = timed[i]
            out = decode(proposer, plan=plan)
            speeds[i].append(sum(len(o.tokens) - 1 for o in out.outputs) / out.times.total)
    rows = [
        _row(target, plan, proposer, decode, speed)
        for (plan, proposer), speed in zip(timed, speeds, strict=True)
    ]
    plain = rows[0]
    for row, speed in zip(rows, speeds, strict=True):
        ratios = [mine / other for mine, other in zip(speed, speeds[0], strict=True)]
        row |= {
            "speedup": statistics.median(ratios),
            "speedup_spread": [min(ratios), max(ratios)],
            "verify_over_plain": row["verify_ms"] / plain["verify_ms"],
        }
    return rows


def _row(
    target: Target, plan: Plan, proposer: Proposer | None, decode: Decode, speed: Sequence[float]
) -> dict[str, Any]:
    """Speed, and the parts of a round from runs of their own."""
    clocked = decode(proposer, plan=plan, clock=time.perf_counter)
    steps, times = _rounds(clocked), clocked.times
    row = {
        "decode": plan.name,
        "passes": clocked.passes,
        "slots": plan.nodes + 1,
        "tokens_per_second": statistics.median(speed),
        "spread": [min(speed), max(speed)],
        "tau": sum(sum(output.emitted) for output in clocked.outputs) / steps,
        "round_ms": 1000 * times.total / steps,
        "draft_ms": 1000 * times.draft / steps,
        "verify_ms": 1000 * times.verify / steps,
        "other_ms": 1000 * times.other / steps,
        "draft_share": times.draft / times.total,
    }
    if isinstance(proposer, SyntheticAcceptance):
        texts = zip(clocked.outputs, proposer.answers, strict=True)
        row["strayed"] = sum(output.tokens != answer for output, answer in texts)
    return row | _host(target, partial(decode, proposer, plan=plan))


def _host(target: Target, decode: Decode) -> dict[str, Any]:
    """The host's time, its reads, and the operations and kernels of a round: differences of two runs.

    Their texts have other lengths, and both have the same passes over the prompts, which drop out.
    """
    most, counts, started, ran = decode.keywords["max_new_tokens"], [], [], []
    for longest in (most // 2, most):
        with waits(target.device) as waited:
            out = decode(max_new_tokens=longest)
        seconds = out.times.prefill + out.times.total - waited.seconds
        counts.append((_rounds(out), waited.reads, seconds))
    for longest in (most // 4, most // 2):
        decode(max_new_tokens=longest)  # rounds of this length are captured before they are counted
        with Operations() as operations:
            out = decode(max_new_tokens=longest)
        started.append((_rounds(out), operations.count))
        outs: list[Generation] = []
        found = kernels(lambda n=longest, outs=outs: outs.append(decode(max_new_tokens=n)), target.device)
        ran.append(found and (_rounds(outs[0]), *found))
    steps, reads, seconds = (b - a for a, b in zip(*counts, strict=True))
    row: dict[str, Any] = {"host_ms": 1000 * seconds / steps, "reads": reads / steps}
    steps, number = (b - a for a, b in zip(*started, strict=True))
    row["operations"] = number / steps
    if ran[0] is None:
        return row | {"kernels": None, "kernels_ms": None}
    steps, number, seconds = (b - a for a, b in zip(*ran, strict=True))
    return row | {"kernels": number / steps, "kernels_ms": 1000 * seconds / steps}


def _rounds(out: Generation) -> int:
    """Rounds of a run that decoded one request after the other."""
    return sum(len(output.emitted) for output in out.outputs)


def _unread(target: Target) -> int:
    """Bytes of the input embedding, of which a pass reads some rows; 0 if the head is the same."""
    weight: Any = target.embed.weight
    return 0 if weight.data_ptr() == target.head.weight.data_ptr() else weight.nbytes


def _table(card: Mapping[str, Any]) -> str:
    lines = [
        [
            row["decode"] + (" SYNTHETIC" if row.get("synthetic") else ""),
            row["passes"],
            f"{row['tokens_per_second']:.1f}",
            span(row["spread"], 1),
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}",
            *(f"{row[f'{part}_ms']:.2f}" for part in ("round", "draft", "verify", "other", "host")),
            f"{row['verify_over_plain']:.2f}",
            f"{row['reads']:.1f}",
            f"{row['operations']:.0f}",
            "-" if row["kernels"] is None else f"{row['kernels']:.0f}",
        ]
        for row in card["rows"]
    ]
    head = ["decode", "passes", "tokens/s", "min..max", "speedup", "tau", "round, ms", "draft", "verify"]
    head += ["other", "host", "verify/plain", "reads", "operations", "kernels"]
    rates = card["rows"][-1].get("synthetic")
    note = f"\nSYNTHETIC: drafts are accepted at the rates {rates}, which no drafter has" if rates else ""
    return (
        f"{grid(head, lines)}\n"
        f"batch 1, T={card['temperature']:g}, {card['dtype']}, {card['prompts']} prompts, "
        f"{card['max_new_tokens']} tokens each; the weights are read in {card['bound_ms']:.2f} ms{note}\n"
        f"{machine(card)}"
    )

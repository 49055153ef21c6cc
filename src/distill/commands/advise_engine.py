"""foredraft advise engine=...: time an engine with a drafter, and predict what it gains there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode.errors import UserError
from decode.hardware import hardware
from decode.model.target import Target
from decode.sampling import Sampler
from distill.config.build import PromptReader, TargetSource, build_drafter, quiet
from distill.config.validate import refused
from distill.engine_costs import build
from distill.engine_costs.acceptance import KnownAcceptance, known_acceptance
from distill.engine_costs.costs import PAYS, EngineCosts
from distill.engine_costs.measure import Measured, measure
from distill.engine_costs.traffic_log import TrafficForecast, forecast, read_log
from distill.options.commands import AdviseEngineOptions
from distill.scoring.scorer import threads
from distill.scoring.tables import grid, with_interval
from distill.serving.diagnosis import CPU_DRAWS
from distill.utils.atomic_files import write_json
from distill.utils.provenance import commit
from drafters.base import Drafter, Text
from drafters.checkpoint import io as checkpoint_io
from drafters.registry import short_name

WANTED = (PAYS, 1.5, 2.0)  # speedups whose acceptance is named


def advise(options: AdviseEngineOptions) -> float:
    """Print costs, ceiling and the best draft length; write all results to `out`, if set.

    Returns:
        The predicted speedup at the first batch size; without an acceptance its ceiling.

    Raises:
        UserError: invalid options, no engine, or a drafter that it cannot serve.
    """
    quiet()
    build.check(options)
    with refused():
        sampler = Sampler(options.temperature, options.top_k, options.top_p)
    stated = options.acceptance
    known = known_acceptance(stated, options.checkpoint, options.temperature, max(options.lengths))
    log = read_log(Path(options.traffic)) if options.traffic else []
    if log and not known:
        raise UserError("traffic: needs the drafter's acceptance; give acceptance=0.7, or a checkpoint")
    chat, _, held = PromptReader(options.target, options.prompts, options.score).read()
    target = TargetSource(options.target).load(chat=chat)
    prompts = [chat.encode(p.messages, p.tools) for p in held[: options.score.prompts]]
    if options.checkpoint:
        drafter, weights = checkpoint_io.load(checkpoint_io.fetch(options.checkpoint), target), "trained"
    else:
        drafter = _untrained(options, target, prompts)
        weights = "random" if drafter.trains else "given"
        drafter = drafter.requires_grad_(False)
    root = Path(options.logs).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    with threads(options.score.threads), tempfile.TemporaryDirectory(dir=root) as exported:
        prepared = build.prepare(options, drafter, target, chat, sampler, prompts, root, Path(exported))
        lengths, batches = prepared.lengths, options.batch_sizes
        if known and len(known.survival) < lengths[0]:
            raise UserError(
                f"acceptance: known of {len(known.survival)} tokens, and the drafts have {lengths[0]} or "
                "more; give smaller lengths, or score the checkpoint with a longer chain"
            )
        measured = measure(
            prepared.engine, prompts, lengths, batches, options.passes, options.score.max_new_tokens
        )
    traffic = forecast(log, measured.costs, known.survival) if known and log else None
    card = {
        "what": "advise engine",
        "target": options.target.path,
        "drafter": short_name(drafter),
        "checkpoint": options.checkpoint,
        "weights": weights,
        "settings": _size(drafter),
        "temperature": options.temperature,
        "on_cpu": target.device.type == "cpu",
        "prompts": len(prompts),
        "max_new_tokens": options.score.max_new_tokens,
        "threads": options.score.threads,
        "acceptance": asdict(known) if known else None,
        "measured": asdict(measured),
        "results": [result(costs, known) for costs in measured.costs],
        "traffic": asdict(traffic) if traffic else None,
        "hardware": hardware(target.device),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(),
    }
    print("\n".join(describe(card, measured, known, traffic)))
    if options.out:
        write_json(Path(options.out), card)
    first = card["results"][0]
    return first["speedup"] if known else first["ceiling"]


def _untrained(options: AdviseEngineOptions, target: Target, prompts: Sequence[Sequence[int]]) -> Drafter:
    """The drafter of the options, with random weights; counts and vocabularies are of the prompts."""
    assert options.drafter
    torch.manual_seed(options.seed)
    with refused():
        drafter = build_drafter(options.drafter, target)
    if drafter.needs_fit:
        drafter.fit([Text(np.array(prompt), np.ones(len(prompt), bool)) for prompt in prompts], target)
    return drafter.to(target.device, target.dtype).eval()


def _size(drafter: Drafter) -> dict[str, Any]:
    """Settings that are numbers or texts, and the number of weights."""
    plain = {name: v for name, v in drafter.settings.items() if isinstance(v, bool | int | float | str)}
    return plain | {"weights": sum(weight.numel() for weight in drafter.parameters())}


def result(costs: EngineCosts, known: KnownAcceptance | None) -> dict[str, Any]:
    """What follows from the costs of one batch size."""
    ceiling_length, ceiling = costs.ceiling()
    found: dict[str, Any] = {
        "batch_size": costs.batch_size,
        "ceiling_length": ceiling_length,
        "ceiling": ceiling,
        "needed": {f"{speedup:g}": costs.needed(speedup) for speedup in WANTED},
        "speedup": None,
        "length": None,
        "draft": ceiling >= PAYS,
        "lengths": [],
    }
    if known:
        length, speedup = costs.best(known.survival)
        rows = [
            {"length": k, "tau": 1 + sum(known.survival[:k]), "speedup": costs.speedup(known.survival, k)}
            for k in costs.choices(known.survival)
            if k
        ]
        found |= {"length": length, "speedup": speedup, "draft": speedup >= PAYS, "lengths": rows}
    return found


def describe(
    card: Mapping[str, Any],
    measured: Measured,
    known: KnownAcceptance | None,
    traffic: TrafficForecast | None,
) -> Iterator[str]:
    """Lines of the report."""
    passes = ", ".join(f"{n}: {_ms(s)}" for n, s in measured.passes.items())
    yield f"{measured.engine}, a pass over n new tokens, ms: {passes}"
    for costs, found in zip(measured.costs, card["results"], strict=True):
        where = f"T={card['temperature']:g}, batch {costs.batch_size}"
        yield f"\n{card['drafter']} ({card['weights']} weights), {where}; plain round: {_ms(costs.plain)} ms"
        yield _table(costs, measured.passes, known, card["weights"] != "random")
        yield from _advice(found, known, where, measured.engine)
    if traffic:
        yield f"\n{_traffic(traffic, measured.costs)}"
    if card["temperature"] and card["on_cpu"] and measured.engine.startswith("vllm"):
        yield f"\n{CPU_DRAWS}"
    yield (
        f"\ntimed on {card['prompts']} prompts x {card['max_new_tokens']} tokens, in turns with plain ones, "
        f"on {card['hardware']}, load {card['load_average']:.2f}"
    )
    if known:
        yield f"acceptance: {known.source}"


def _table(
    costs: EngineCosts, passes: Mapping[int, float], known: KnownAcceptance | None, accepts: bool
) -> str:
    head = ["drafted", "ms a round", "plain rounds", "of it the pass", "if all accepted"]
    head += ["tau", "predicted"] if known else []
    head += ["tau there", "measured"] if accepts else []
    lines = []
    for one in costs.lengths:
        k = one.length
        verify = passes.get(k + 1)
        line = [str(k), _ms(one.seconds), f"{one.seconds / costs.plain:.2f}"]
        line += ["-" if verify is None else _ms(verify), f"{costs.speedup([1.0] * k, k):.2f}x"]
        if known and k <= len(known.survival):
            line += [f"{1 + sum(known.survival[:k]):.2f}", f"{costs.speedup(known.survival, k):.2f}x"]
        elif known:
            line += ["-", "-"]
        if accepts:
            line += [with_interval(f"{one.tau:.2f}", one.tau_interval)]
            line += [with_interval(f"{one.measured:.2f}x", one.measured_interval)]
        lines.append(line)
    return grid(head, lines)


def _advice(
    found: Mapping[str, Any], known: KnownAcceptance | None, where: str, engine: str
) -> Iterator[str]:
    yield f"ceiling: {found['ceiling']:.2f}x, with all of {found['ceiling_length']} drafted tokens accepted"
    rates = [f"{s}x: {'no rate' if a is None else f'{a:.2f}'}" for s, a in found["needed"].items()]
    yield f"accepted share of every token that gives {', '.join(rates)}"
    if found["ceiling"] < PAYS:
        yield f"=> {where}: do not draft here: {engine} gains less than {PAYS}x even if all is accepted"
    elif known and not found["draft"]:
        yield f"=> {where}: do not draft here: the best is {found['speedup']:.2f}x, with this acceptance"
    elif known:
        yield f"=> {where}: {found['speedup']:.2f}x with drafts of {found['length']} tokens"


def _traffic(traffic: TrafficForecast, costs: Sequence[EngineCosts]) -> str:
    beyond = (
        f"; {traffic.beyond} ran with more than {max(one.batch_size for one in costs)}, the largest batch "
        "that was timed"
        if traffic.beyond
        else ""
    )
    if not traffic.length:
        return f"traffic, {traffic.requests} requests: do not draft: no length gains time in all{beyond}"
    return (
        f"traffic, {traffic.requests} requests: with drafts of {traffic.length} tokens {traffic.gaining:.0%} "
        f"gain {PAYS}x or more, {traffic.losing:.0%} lose; all together {traffic.speedup:.2f}x{beyond}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

"""The scorecard: the real decoder against plain decoding, interleaved in one process."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.audit import audit
from decode.errors import UserError
from decode.generate import Generation, Output, Proposer, Times, generate
from decode.plan import Plan
from decode.sampling import Sampler
from decode.target import Target

SCHEMA = 1
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the scorecard."""

    sampler: Sampler
    plan: Plan
    batch_size: int = 1


@dataclass(slots=True)
class _Tally:
    """What all runs of one decoder at one setting gave. Tokens and rounds count run 0 alone."""

    outputs: list[Output] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    decoded: int = 0  # tokens behind `times.total`: all but each request's first
    kv_bytes: int = 0

    def add(self, generation: Generation, first_run: bool) -> None:
        if first_run:
            self.outputs += generation.outputs
        self.decoded += sum(len(o.tokens) - 1 for o in generation.outputs)
        for name in ("prefill", "draft", "verify", "total"):
            value = getattr(self.times, name) + getattr(generation.times, name)
            setattr(self.times, name, value)

    @property
    def speed(self) -> float:
        """Tokens a second, prefill excluded."""
        return self.decoded / self.times.total if self.times.total else 0.0


def score(
    target: Target,
    drafter: Proposer,
    prompts: Prompts,
    settings: Sequence[Setting],
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    seed: int = 0,
    repeats: int = 1,
    audit_prompts: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure a drafter; the first setting is the headline.

    Args:
        target: judged against itself without the drafter.
        drafter: what is scored.
        prompts: token ids.
        settings: rows.
        max_new_tokens: per prompt.
        stop: end tokens.
        seed: of all draws.
        repeats: runs that are timed; tokens are the same in each.
        audit_prompts: how many prompts the audit decodes, greedily, with the headline's plan.
        progress: called with (steps done, steps in all).

    Returns:
        The headline's fields, `rows` with one such dict a setting, and the audit.

    Raises:
        UserError: nothing to score on.
    """
    if not prompts:
        raise UserError("score: there are no prompts to score on")
    groups: dict[tuple[Sampler, int], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.sampler, setting.batch_size), []).append(setting)
    total = sum(-(-len(prompts) // batch) * repeats for _, batch in groups) + 1
    done = 0

    def advanced() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    rows: dict[Setting, dict[str, Any]] = {}
    for (sampler, batch), members in groups.items():
        decode = partial(generate, target, sampler=sampler, seed=seed, stop=stop)
        plain, *tallies = _race(
            decode,
            drafter,
            [Plan(), *(m.plan for m in members)],
            prompts,
            batch,
            repeats,
            max_new_tokens,
            advanced,
        )
        rows |= {m: _row(m, tally, plain) for m, tally in zip(members, tallies, strict=True)}
    checked = audit(
        target,
        drafter,
        prompts[:audit_prompts],
        plan=settings[0].plan,
        max_new_tokens=max_new_tokens,
        stop=stop,
    )
    advanced()
    ordered = [rows[s] for s in settings]
    return {
        **ordered[0],
        "rows": ordered,
        "audit": checked.report(),
        "audit_passed": checked.passed,
        "schema": SCHEMA,
        "seed": seed,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "hardware": hardware(target.device),
        "load_average": round(os.getloadavg()[0], 2),
        "kv_bytes_per_token": target.cache.store.bytes_per_token,
    }


def _race(
    decode: Callable[..., Generation],
    drafter: Proposer,
    plans: Sequence[Plan],
    prompts: Prompts,
    batch: int,
    repeats: int,
    max_new_tokens: int,
    advanced: Callable[[], None],
) -> list[_Tally]:
    """All plans over all prompts, a batch at a time in turn, so that they share the machine's moods."""
    tallies = [_Tally() for _ in plans]
    who = [drafter if plan.depth else None for plan in plans]
    for plan, proposer in zip(plans, who, strict=True):  # warm up allocator and kernels
        decode(proposer, prompts[:batch], plan=plan, max_new_tokens=min(8, max_new_tokens))
    for run in range(repeats):
        for number, start in enumerate(range(0, len(prompts), batch)):
            part = prompts[start : start + batch]
            names = list(range(start, start + len(part)))
            order = list(range(len(plans)))
            if (run + number) % 2:  # nobody always goes first
                order.reverse()
            for i in order:
                out = decode(who[i], part, plan=plans[i], requests=names, max_new_tokens=max_new_tokens)
                tallies[i].add(out, run == 0)
            advanced()
    return tallies


def _row(setting: Setting, tally: _Tally, plain: _Tally) -> dict[str, Any]:
    outputs, times, plan = tally.outputs, tally.times, setting.plan
    emitted = [sum(o.emitted) for o in outputs]
    rounds = [len(o.emitted) for o in outputs]
    survival, alpha, offered = _positions(outputs, plan.depth)
    latency = [o.ttft for o in outputs]
    return {
        "temperature": setting.sampler.temperature,
        "decode": plan.name,
        "rule": plan.rule,
        "batch_size": setting.batch_size,
        "nodes": plan.nodes,
        "tau": _ratio(sum(emitted), sum(rounds)),
        "tau_interval": _interval(emitted, rounds),
        "survival": survival,
        "alpha": alpha,
        "offered": offered,
        "acceptance_rate": _ratio(
            sum(sum(o.accepted) for o in outputs), sum(sum(o.drafted) for o in outputs)
        ),
        "rounds": sum(rounds),
        "tokens": sum(emitted),
        "tokens_per_second": tally.speed,
        "plain_tokens_per_second": plain.speed,
        "speedup": _ratio(tally.speed, plain.speed),
        "overhead": _ratio(_ratio(sum(emitted), sum(rounds)) * plain.speed, tally.speed) - 1,
        "draft_share": _ratio(times.draft, times.total),
        "verify_share": _ratio(times.verify, times.total),
        "other_share": _ratio(times.other, times.total),
        "ttft": _ratio(sum(latency), len(latency)),
        "tpot": _ratio(setting.batch_size * times.total, tally.decoded),
    }


def _positions(outputs: Sequence[Output], depth: int) -> tuple[list[float], list[float], list[float]]:
    """survival[j] = P(accepted >= j), alpha[j] = P(accepted >= j | j - 1 accepted, j offered).

    A round that an end token or the length cut is left out: what it would have accepted further
    is known, but no decoder would have emitted it.
    """
    seen = [
        (accepted, offered)
        for o in outputs
        for accepted, offered, emitted in zip(o.accepted, o.offered, o.emitted, strict=True)
        if emitted == accepted + 1
    ]
    levels = range(1, depth + 1)
    reached = [sum(a >= j for a, _ in seen) for j in levels]
    offered = [sum(o >= j for _, o in seen) for j in levels]
    tried = [sum(a >= j - 1 and o >= j for a, o in seen) for j in levels]
    return (
        [_ratio(n, len(seen)) for n in reached],
        [_ratio(n, t) for n, t in zip(reached, tried, strict=True)],
        [_ratio(n, len(seen)) for n in offered],
    )


def _interval(emitted: Sequence[int], rounds: Sequence[int]) -> list[float]:
    """95 % bootstrap interval of the ratio of sums, over prompts."""
    dice = random.Random(0)
    draws = []
    for _ in range(1000):
        chosen = dice.choices(range(len(rounds)), k=len(rounds))
        draws.append(_ratio(sum(emitted[i] for i in chosen), sum(rounds[i] for i in chosen)))
    draws.sort()
    return [draws[25], draws[974]]


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def hardware(device: torch.device) -> str:
    """Name of what the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = facts.get("model name") or platform.processor() or platform.machine()
    kind = f"family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"
    return f"{name} ({kind}), {os.cpu_count()} cores"

"""The scorecard: the real decoder against plain decoding, interleaved in one process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance, acceptance, counted, whole_rounds
from decode.evaluation.audit import Case, audit, steps
from decode.evaluation.replay import Counts, Rollout, agreement
from decode.evaluation.timing_ab import Prompts, Tally, compete
from decode.generation.generate import generate
from decode.generation.types import Output, Proposer
from decode.hardware import hardware
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

SCHEMA = 3
SAMPLES = 8  # texts a prompt is given in a full audit


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the scorecard."""

    sampler: Sampler
    plan: Plan
    batch_size: int = 1


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
    full_audit: bool = False,
    names: Sequence[int | str] | None = None,
    rollouts: Mapping[Sampler, Sequence[Rollout]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure a drafter; the first setting is the headline.

    Acceptance is replayed on the target's stored answers, and the decoder's must agree with it; the
    decoder, on fewer prompts, gives the times.

    Args:
        target: judged against itself without the drafter.
        drafter: what is scored.
        prompts: token ids.
        settings: rows.
        max_new_tokens: per prompt.
        stop: end tokens.
        seed: of all draws.
        repeats: runs that are timed; tokens are the same in each.
        audit_prompts: how many prompts the audit decodes: greedily with the headline's plan, and once
            at each temperature above 0 that is scored, or else at 1.
        full_audit: it decodes all prompts, with every plan, and draws several texts of each.
        names: of the prompts; they key the draws. Default 0, 1, ...
        rollouts: of each law that is scored, the target's answers to `prompts` and to any more.
        progress: called with (steps done, steps in all).

    Returns:
        The headline's fields, `rows` with one such dict a setting, and the audit.

    Raises:
        UserError: nothing to score on, or a headline that is not lossless.
    """
    check(prompts, settings[0].plan)
    rollouts = rollouts or {}
    names = list(range(len(prompts))) if names is None else names
    groups: dict[tuple[Sampler, int], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.sampler, setting.batch_size), []).append(setting)
    also = _audited(settings, full_audit)
    checked_prompts = prompts if full_audit else prompts[:audit_prompts]
    samples = SAMPLES if full_audit else 1
    total = sum(-(-len(prompts) // batch) * repeats for _, batch in groups)
    total += steps(len(checked_prompts), also, samples) + len(rollouts)
    done = 0

    def advanced() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    rows: dict[Setting, dict[str, Any]] = {}
    decoded: dict[Setting, Counts] = {}
    for (sampler, batch), members in groups.items():
        decode = partial(generate, target, sampler=sampler, seed=seed, stop=stop)
        plain, *tallies = compete(
            decode,
            drafter,
            [Plan(), *(m.plan for m in members)],
            prompts,
            batch,
            repeats,
            max_new_tokens,
            names,
            advanced,
        )
        for setting, tally in zip(members, tallies, strict=True):
            rows[setting], decoded[setting] = _row(setting, tally, plain), counted(tally.outputs)
    for sampler, answers in rollouts.items():
        scored = [s for s in settings if s.sampler == sampler]
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed}
        measure = partial(acceptance, target, drafter, answers, sampler=sampler, **options)
        plans = list(dict.fromkeys(s.plan for s in scored if not s.plan.lossy and s.plan.adapt is None))
        accepted = dict(zip(plans, measure(plans=plans), strict=True))
        for setting in (s for s in scored if not s.plan.lossy):
            found = accepted.get(setting.plan)
            if found is None:  # how deep it drafts is a matter of company
                (found,) = measure(plans=[setting.plan], batch_size=setting.batch_size)
            rows[setting] |= {"replay": _replay(found, decoded[setting], len(prompts))}
        advanced()
    checked = audit(
        target,
        drafter,
        checked_prompts,
        plan=settings[0].plan,
        max_new_tokens=max_new_tokens,
        stop=stop,
        also=also,
        samples=samples,
        seed=seed,
        advanced=advanced,
    )
    ordered = [rows[s] for s in settings]
    return {
        **ordered[0],
        "rows": ordered,
        "replay_agrees": all(row["replay"]["agrees"] for row in ordered if row.get("replay")),
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


def check(prompts: Prompts, headline: Plan) -> None:
    """Refuse what cannot be scored.

    Raises:
        UserError: no prompts, or a headline that is not lossless.
    """
    if not prompts:
        raise UserError("score: there are no prompts to score on")
    if headline.lossy:
        raise UserError(f"decode: {headline.name} cannot be the headline; put it under score.plans")


def _audited(settings: Sequence[Setting], full: bool) -> list[Case]:
    """What the audit decodes beside the headline's plan greedily: each law that is scored, with the
    first plan it is scored with; in full every law and plan."""
    settings = [s for s in settings if not s.plan.lossy]
    plans = list(dict.fromkeys(s.plan for s in settings))
    drawn = list(dict.fromkeys((s.sampler, s.plan) for s in settings if s.sampler.temperature > 0))
    drawn = drawn or [(Sampler(1.0), plan) for plan in plans]
    if full:
        return [*((Sampler(0.0), plan) for plan in plans if plan != settings[0].plan), *drawn]
    first: dict[Sampler, Plan] = {}
    for sampler, plan in drawn:
        first.setdefault(sampler, plan)
    return list(first.items())


def _row(setting: Setting, tally: Tally, plain: Tally) -> dict[str, Any]:
    outputs, times, plan = tally.outputs, tally.times, setting.plan
    counts = counted(outputs)
    survival, alpha, offered = _positions(outputs, plan.depth)
    latency = [o.ttft for o in outputs]
    return {
        "temperature": setting.sampler.temperature,
        "decode": plan.name,
        "rule": plan.rule,
        "lossy": plan.lossy,
        "batch_size": setting.batch_size,
        "nodes": plan.nodes,
        "tau": counts.tau,
        "tau_interval": counts.interval(),
        "survival": survival,
        "alpha": alpha,
        "offered": offered,
        "acceptance_rate": _ratio(
            sum(sum(o.accepted) for o in outputs), sum(sum(o.drafted) for o in outputs)
        ),
        "rounds": int(sum(counts.rounds)),
        "tokens": sum(counts.tokens),
        "tokens_per_second": tally.speed,
        "plain_tokens_per_second": plain.speed,
        "speedup": _ratio(tally.speed, plain.speed),
        "overhead": _ratio(counts.tau * plain.speed, tally.speed) - 1,
        "draft_share": _ratio(times.draft, times.total),
        "verify_share": _ratio(times.verify, times.total),
        "other_share": _ratio(times.other, times.total),
        "ttft": _ratio(sum(latency), len(latency)),
        "tpot": _ratio(setting.batch_size * times.total, tally.decoded),
        "timed": {  # of every batch, plain decoding's beside it: what an interval is drawn from
            "seconds": tally.seconds,
            "tokens": tally.tokens,
            "plain_seconds": plain.seconds,
            "plain_tokens": plain.tokens,
        },
        "replay": None,
    }


def _replay(accepted: Acceptance, decoded: Counts, shared: int) -> dict[str, Any]:
    """Acceptance on all answers; on the `shared` first ones the decoder must agree.

    `chosen_by` is tau on the answers that the decoder's tau is not measured on: what picks the best
    checkpoint must not be what it is then reported by.
    """
    same, others = accepted.counts.part(0, shared), accepted.counts.part(shared)
    low, high = (-math.inf, math.inf) if accepted.estimate else agreement(decoded, same)
    return accepted.report() | {
        "counts": accepted.counts._asdict(),
        "difference_interval": [low, high] if math.isfinite(low) else None,
        "agrees": low <= 0 <= high,
        "chosen_by": others.tau if others.tokens else accepted.counts.tau,
    }


def _positions(outputs: Sequence[Output], depth: int) -> tuple[list[float], list[float], list[float]]:
    """survival[j] = P(accepted >= j), alpha[j] = P(accepted >= j | j - 1 accepted, j offered)."""
    seen = whole_rounds(outputs)
    levels = range(1, depth + 1)
    reached = [sum(a >= j for a, _ in seen) for j in levels]
    offered = [sum(o >= j for _, o in seen) for j in levels]
    tried = [sum(a >= j - 1 and o >= j for a, o in seen) for j in levels]
    return (
        [_ratio(n, len(seen)) for n in reached],
        [_ratio(n, t) for n, t in zip(reached, tried, strict=True)],
        [_ratio(n, len(seen)) for n in offered],
    )


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0

"""Score a drafter: time the decoder against plain decoding, replay acceptance, audit losslessness."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance, acceptance, round_counts
from decode.evaluation.audit import Case, audit, num_batches
from decode.evaluation.estimates import MIN_SAMPLES, decoded_counts, kaplan_meier
from decode.evaluation.quality import Judge, Quality, quality
from decode.evaluation.replay import ContextPart, Counts, Rollout, agreement, by_context, why_inexact
from decode.evaluation.rows import DECODED, Replay, Row, Timing
from decode.evaluation.scorecard import Conditions, Scorecard
from decode.evaluation.teacher_forced import TargetResults
from decode.evaluation.timing_ab import DecodeTimings, Prompts, time_interleaved
from decode.generation.generate import generate
from decode.generation.types import Output, Proposer, Traits
from decode.hardware import hardware
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

AUDIT_SAMPLES = 8  # answers to each prompt in a full audit


@dataclass(frozen=True, slots=True)
class Setting:
    """Configuration of one scorecard row."""

    sampler: Sampler
    plan: Plan
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Prompts that no drafter was trained on.

    Attributes:
        prompts: token ids, decoded for timing.
        names: of the prompts; they key the random draws. Default 0, 1, ...
        rollouts: for each sampler the target's answers, first to `prompts`, then to any other prompts.
        reserved: number of first answers excluded from checkpoint selection; 0: the answers to `prompts`.
    """

    prompts: Prompts
    names: Sequence[int | str] | None = None
    rollouts: Mapping[Sampler, Sequence[Rollout]] = field(default_factory=dict)
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How a drafter is scored.

    Attributes:
        max_new_tokens: per prompt.
        stop: end tokens.
        seed: of all draws.
        repeats: timed runs; tokens are the same in each.
        audit_prompts: prompts that the audit decodes: greedily with the headline's plan, and once at each
            scored temperature above 0.
        audit_drawn: audit at temperature 1, too, if none above 0 is scored.
        full_audit: audit all prompts with every plan and several answers per prompt.
        judge: scores answers of lossy plans and of plain decoding; see `Quality`.
    """

    max_new_tokens: int
    stop: Sequence[int] = ()
    seed: int = 0
    repeats: int = 1
    audit_prompts: int = 16
    audit_drawn: bool = True
    full_audit: bool = False
    judge: Judge | None = None


def score(
    target: Target,
    drafter: Proposer,
    held_out: HeldOut,
    settings: Sequence[Setting],
    options: ScoreOptions,
    progress: Callable[[int, int], None] | None = None,
    known: TargetResults | None = None,
) -> Scorecard:
    """Measure a drafter.

    Decoding `held_out.prompts` gives times and counts of accepted tokens. Acceptance is replayed on all
    stored answers, and must agree with the counts on shared prompts.

    Args:
        target: baseline without the drafter.
        drafter: drafter to score.
        held_out: prompts and answers.
        settings: rows, with resolved plans; the first is the headline.
        options: how to measure.
        progress: called with (steps done, total steps).
        known: of this very target, kept between checkpoints.

    Raises:
        UserError: no prompts, or a headline that is not lossless.
    """
    check(held_out.prompts, settings[0].plan)
    known = known or TargetResults(target)
    assert known.target is target
    if reason := target.abilities.decode:
        return _score_by_replay(known, drafter, held_out, settings, options, reason, progress)
    cases = _audit_cases(settings, options.full_audit, options.audit_drawn)
    audited = held_out.prompts if options.full_audit else held_out.prompts[: options.audit_prompts]
    samples = AUDIT_SAMPLES if options.full_audit else 1
    groups: dict[tuple[Sampler, int], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.sampler, setting.batch_size), []).append(setting)
    batches = options.repeats * sum(-(-len(held_out.prompts) // size) for _, size in groups)
    others = len(held_out.rollouts) + sum(setting.plan.lossy for setting in settings)
    advance = _Progress(batches + num_batches(len(audited), cases, samples) + others, progress)

    decoded: dict[Setting, tuple[Row, Counts]] = {}
    for members in groups.values():
        rows = _decode(target, drafter, held_out, members, options, advance)
        decoded |= dict(zip(members, rows, strict=True))
    replays: dict[Setting, Replay] = {}
    for sampler, rollouts in held_out.rollouts.items():
        members = [s for s in settings if s.sampler == sampler and not s.plan.lossy]
        for setting, result in _accept(known, drafter, rollouts, members, options).items():
            shared = len(held_out.prompts), held_out.reserved
            replayed = _replay(result, decoded[setting][1], *shared)
            replays[setting] = replace(replayed, by_context=_contexts(setting, rollouts, result))
        advance()
    report = audit(
        target,
        drafter,
        audited,
        plan=settings[0].plan,
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
        also=cases,
        samples=samples,
        seed=options.seed,
        on_batch=advance,
        tie_widths=known.tie_widths,
    )
    return Scorecard(
        rows=[replace(decoded[s][0], replay=replays.get(s)) for s in settings],
        audit=report,
        conditions=_conditions(target, len(held_out.prompts), options),
    )


def check(prompts: Prompts, headline: Plan) -> None:
    """Check that a score is possible.

    Raises:
        UserError: no prompts, or a headline that is not lossless.
    """
    if not prompts:
        raise UserError("score: there are no prompts to score on")
    if headline.lossy:
        raise UserError(f"decode: {headline.name} cannot be the headline; put it under score.plans")


def check_replayable(plan: Plan, sampler: Sampler, drafter: Proposer | None = None) -> None:
    """Check that a plan can be scored without decoding.

    Engines verify only chains for targets that only they can decode, so trees are refused.

    Raises:
        UserError: not a chain, or its acceptance is not a function of the target's answers.
    """
    if not plan.depth or plan.has_siblings:
        raise UserError(
            f"decode: {plan.name} cannot be scored for a target that only an engine can decode, and engines "
            "verify chains for it; use decode=chain, and chains in score.plans"
        )
    plan = plan.resolved(sampler.temperature, (drafter.traits if drafter else Traits()).proposals)
    if reason := why_inexact(plan, sampler, drafter):
        raise UserError(
            f"decode: {plan.name} at T={sampler.temperature:g} cannot be replayed ({reason}), and an engine "
            "decodes this target; choose another rule or length, such as decode=chain"
        )


def _score_by_replay(
    known: TargetResults,
    drafter: Proposer,
    held_out: HeldOut,
    settings: Sequence[Setting],
    options: ScoreOptions,
    reason: str,
    progress: Callable[[int, int], None] | None,
) -> Scorecard:
    """`score` for a target that cannot be decoded here: only acceptance on stored answers.

    Raises:
        UserError: no answers, or a plan that cannot be replayed.
    """
    if not all(held_out.rollouts.get(setting.sampler) for setting in settings):
        raise UserError("score: this target is scored only by replay; set score.replay_prompts to 1 or more")
    advance = _Progress(len(held_out.rollouts), progress)
    for setting in settings:
        check_replayable(setting.plan, setting.sampler, drafter)
    rows: dict[Setting, Row] = {}
    for sampler, rollouts in held_out.rollouts.items():
        members = [s for s in settings if s.sampler == sampler]
        for setting, result in _accept(known, drafter, rollouts, members, options).items():
            replayed = _replay(result, None, 0, held_out.reserved)
            contexts = _contexts(setting, rollouts, result)
            rows[setting] = _replayed_row(setting, replace(replayed, by_context=contexts))
        advance()
    return Scorecard(
        rows=[rows[setting] for setting in settings],
        audit=None,
        conditions=replace(_conditions(known.target, 0, options), elsewhere=reason),
    )


class _Progress:
    """Counts steps and reports them."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._done, self._total, self._report = 0, total, report

    def __call__(self) -> None:
        self._done += 1
        if self._report:
            self._report(self._done, self._total)


def _decode(
    target: Target,
    drafter: Proposer,
    held_out: HeldOut,
    settings: Sequence[Setting],
    options: ScoreOptions,
    advance: Callable[[], None],
) -> list[tuple[Row, Counts]]:
    """Time settings of one sampler and batch size, interleaved with plain decoding."""
    sampler, batch_size = settings[0].sampler, settings[0].batch_size
    names = list(range(len(held_out.prompts))) if held_out.names is None else held_out.names
    plain, *tallies = time_interleaved(
        partial(
            generate, target, sampler=sampler, seed=options.seed, stop=options.stop, clock=time.perf_counter
        ),
        drafter,
        [Plan(), *(s.plan for s in settings)],
        held_out.prompts,
        batch_size,
        options.repeats,
        options.max_new_tokens,
        names,
        advance,
        first_in_pairs=_in_pairs(settings, -(-len(held_out.prompts) // batch_size)),
    )
    rows = []
    for setting, tally in zip(settings, tallies, strict=True):
        row = _row(setting, tally, plain)
        if setting.plan.lossy:
            measured = _quality(target, drafter, held_out.prompts, setting, options, names, tally, plain)
            row = replace(row, quality=measured)
            advance()
        rows.append((row, round_counts(tally.outputs)))
    return rows


def _in_pairs(settings: Sequence[Setting], batches: int) -> bool:
    """Whether plain decoding is timed on one batch of each pair.

    Not where lossy answers are compared with its own, or where batches are enough for an interval of the
    speedup and pairs are not.
    """
    return not any(s.plan.lossy for s in settings) and not MIN_SAMPLES <= batches < 2 * MIN_SAMPLES


def _quality(
    target: Target,
    drafter: Proposer,
    prompts: Prompts,
    setting: Setting,
    options: ScoreOptions,
    names: Sequence[int | str],
    tally: DecodeTimings,
    plain: DecodeTimings,
) -> Quality:
    """Quality of a lossy setting's answers, decoded once more."""
    decode = partial(
        generate,
        target,
        drafter,
        prompts,
        plan=setting.plan,
        sampler=setting.sampler,
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
        seed=options.seed,
        requests=names,
        batch_size=setting.batch_size,
    )
    answers, plainly = ([output.tokens for output in one.outputs] for one in (tally, plain))
    return quality(target, setting.plan, setting.sampler, prompts, answers, plainly, decode, options.judge)


def _accept(
    known: TargetResults,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    settings: Sequence[Setting],
    options: ScoreOptions,
) -> dict[Setting, Acceptance]:
    """Acceptance of lossless settings of one sampler on the target's answers."""
    if not settings:
        return {}
    measure = partial(
        acceptance,
        known.target,
        drafter,
        rollouts,
        sampler=settings[0].sampler,
        read=known.read,
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
        seed=options.seed,
    )
    plans = list(dict.fromkeys(s.plan for s in settings if s.plan.adapt is None))
    by_plan = dict(zip(plans, measure(plans=plans), strict=True))
    results: dict[Setting, Acceptance] = {}
    for setting in settings:
        if setting.plan in by_plan:
            results[setting] = by_plan[setting.plan]
        else:  # the depth of an adaptive draft depends on the other rows
            (results[setting],) = measure(plans=[setting.plan], batch_size=setting.batch_size)
    return results


def _audit_cases(settings: Sequence[Setting], full: bool, drawn: bool = True) -> list[Case]:
    """Cases that the audit decodes in addition to the headline's plan at temperature 0.

    Each sampler with its first scored plan; in a full audit every sampler and plan. With `drawn` and no
    sampler above temperature 0, temperature 1.
    """
    settings = [s for s in settings if not s.plan.lossy]
    plans = list(dict.fromkeys(s.plan for s in settings))
    sampled = list(dict.fromkeys((s.sampler, s.plan) for s in settings if s.sampler.temperature > 0))
    if drawn and not sampled:
        sampled = [(Sampler(1.0), plan) for plan in plans]
    if full:
        return [*((Sampler(0.0), plan) for plan in plans if plan != settings[0].plan), *sampled]
    first: dict[Sampler, Plan] = {}
    for sampler, plan in sampled:
        first.setdefault(sampler, plan)
    return list(first.items())


def _conditions(target: Target, prompts: int, options: ScoreOptions) -> Conditions:
    return Conditions(
        seed=options.seed,
        prompts=prompts,
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        hardware=hardware(target.device),
        load_average=round(os.getloadavg()[0], 2),
        kv_bytes_per_token=0 if target.abilities.decode else target.cache.store.bytes_per_token,
    )


def _described(setting: Setting) -> dict[str, Any]:
    """Fields of a row that describe its setting."""
    plan = setting.plan
    return {
        "temperature": setting.sampler.temperature,
        "decode": plan.name,
        "rule": plan.rule.name,
        "lossy": plan.lossy,
        "batch_size": setting.batch_size,
        "nodes": plan.nodes,
        "plan": plan.settings,
    }


def _row(setting: Setting, tally: DecodeTimings, plain: DecodeTimings) -> Row:
    """One setting from the runs with and without the drafter."""
    outputs, times = tally.outputs, tally.times
    counts = round_counts(outputs)
    survival, alpha, offered = _positions(outputs, setting.plan.depth)
    latencies = [o.ttft for o in outputs]
    num_accepted, num_drafted = sum(sum(o.accepted) for o in outputs), sum(sum(o.drafted) for o in outputs)
    return Row(
        **_described(setting),
        tau=counts.tau,
        tau_interval=counts.interval(),
        survival=survival,
        alpha=alpha,
        offered=offered,
        acceptance_rate=_ratio(num_accepted, num_drafted),
        rounds=int(sum(counts.rounds)),
        tokens=sum(counts.tokens),
        tokens_per_second=tally.speed,
        plain_tokens_per_second=plain.speed,
        speedup=_ratio(tally.speed, plain.speed),
        overhead=_ratio(counts.tau * plain.speed, tally.speed) - 1,
        draft_share=_ratio(times.draft, times.total),
        verify_share=_ratio(times.verify, times.total),
        other_share=_ratio(times.other, times.total),
        ttft=_ratio(sum(latencies), len(latencies)),
        tpot=_ratio(setting.batch_size * times.total, tally.decoded),
        timing=Timing(
            seconds=tally.seconds,
            tokens=tally.tokens,
            plain_seconds=plain.seconds,
            plain_tokens=plain.tokens,
            passes=tally.passes,
            plain_passes=plain.passes,
        ),
    )


def _replayed_row(setting: Setting, replay: Replay) -> Row:
    """One setting of a target that an engine decodes."""
    counts, survival = replay.counts, replay.survival
    unknown: dict[str, Any] = dict.fromkeys(DECODED)
    return Row(
        **_described(setting),
        tau=replay.tau,
        tau_interval=replay.tau_interval,
        survival=survival,
        alpha=[_ratio(s, before) for before, s in pairwise([1.0, *survival])],
        offered=[],
        rounds=round(sum(counts.rounds)),
        tokens=sum(counts.tokens),
        replay=replay,
        **unknown,
    )


def _contexts(setting: Setting, rollouts: Sequence[Rollout], result: Acceptance) -> list[ContextPart]:
    return by_context(rollouts, result.keeps, setting.plan.depth) if result.keeps else []


def _replay(result: Acceptance, decoded: Counts | None, shared: int, reserved: int) -> Replay:
    """Acceptance on all answers, compared with the decoder's on the first `shared` ones if it ran.

    The best checkpoint must not be reported by the answers that selected it, so `selection_tau` uses the
    answers after the first `shared` and `reserved` ones.
    """
    shared = min(shared, len(result.counts.tokens))
    same, others = result.counts.part(0, shared), result.counts.part(max(shared, reserved))
    low, high = -math.inf, math.inf
    if decoded and not result.estimate:
        low, high = agreement(decoded.part(0, shared), same)
    return Replay(
        method=f"estimate ({result.estimate})" if result.estimate else "exact",
        tau=result.counts.tau,
        tau_interval=result.counts.interval(),
        survival=result.survival,
        prompts=len(result.counts.tokens),
        counts=result.counts,
        difference_interval=[low, high] if math.isfinite(low) else None,
        agrees=low <= 0 <= high,
        selection_tau=others.tau if others.tokens else result.counts.tau,
    )


def _positions(outputs: Sequence[Output], depth: int) -> tuple[list[float], list[float], list[float]]:
    """survival[j] = P(accepted >= j), alpha[j] = P(accepted >= j | j - 1 accepted, j offered), offered[j].

    alpha counts tokens of the text, like survival.
    """
    counts = decoded_counts(outputs, depth)
    lengths = [(e, o) for out in outputs for e, o in zip(out.emitted, out.draft_lengths, strict=True)]
    levels = range(1, depth + 1)
    num_offered = [sum(o >= j for _, o in lengths) for j in levels]
    num_tried = [sum(min(e, o) >= j for e, o in lengths) for j in levels]
    return (
        kaplan_meier(counts),
        [_ratio(n, t) for n, t in zip(counts[0, 1:].tolist(), num_tried, strict=True)],
        [_ratio(n, len(lengths)) for n in num_offered],
    )


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0

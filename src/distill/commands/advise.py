"""foredraft advise: predict the fastest draft plan on this machine and an upper bound on its speedup."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance, acceptance
from decode.evaluation.replay import Rollout
from decode.hardware import hardware
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import best_forecast, forecast, plain_counts, supported_plans
from decode.planning.cost_model import PLAIN, Costs, MeasuredCosts, batch_seconds
from decode.planning.oracle import least_seconds, min_seconds_per_row
from decode.planning.round_timing import clock_of, measure
from decode.sampling import Sampler
from distill.config.build import PromptReader, TargetSource, build_drafter, quiet
from distill.config.validate import refused
from distill.options.commands import AdviseOptions
from distill.rollouts.heldout import held_out_answers
from distill.scoring.scorer import threads
from distill.scoring.tables import grid
from distill.scoring.target_drift import only_untuned
from distill.serving import engine_settings
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from distill.utils.provenance import commit
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io

SIDE_BY_SIDE = 16  # answers replayed in one batch


class DrafterProfile(NamedTuple):
    """Acceptance and costs of one drafter with one sampler."""

    name: str
    plans: list[Plan]
    acceptances: list[Acceptance]
    costs: MeasuredCosts


def advise(options: AdviseOptions) -> float:
    """Print the fastest plan for every temperature and batch size; write all results to `out`, if set.

    Returns the predicted speedup of the first choice.

    Raises:
        UserError: invalid options, or no drafter.
    """
    quiet()
    with refused():
        samplers = [Sampler(t, options.top_k, options.top_p, options.min_p) for t in options.temperatures]
    if not samplers or not options.batch_sizes:
        raise UserError("advise: give temperatures and batch_sizes, at least one of each")
    chat, _, held = PromptReader(options.target, options.prompts, options.score).read()
    target = TargetSource(options.target).load(chat=chat)
    drafters = _drafters(options, target)
    score = options.score
    results = []
    with threads(score.threads):
        for sampler in samplers:
            limits = sampler, score.max_new_tokens, options.seed, Path(options.answers)
            rollouts = held_out_answers(target, chat, held[: score.replay_prompts], *limits)
            profiles = [_profile(options, target, name, one, rollouts, sampler) for name, one in drafters]
            for batch in options.batch_sizes:
                results.append(_result(profiles, rollouts, sampler, batch, options.adapt))
    card = {
        "what": "advise",
        "results": results,
        "target": options.target.path,
        "prompts": min(len(held), score.replay_prompts),
        "max_new_tokens": score.max_new_tokens,
        "clock": clock_of(target).__name__,
        "hardware": hardware(target.device),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(),
    }
    print(describe(card))
    if options.out:
        write_json(Path(options.out), card)
    return results[0]["choice"]["speedup"]


def _drafters(options: AdviseOptions, target: Target) -> list[tuple[str, Drafter]]:
    """Drafters to compare, with distinct names."""
    sources = [str(source) for source in [options.checkpoint, *options.checkpoints] if source]
    drafters = [(source, checkpoint_io.load(checkpoint_io.fetch(source), target)) for source in sources]
    if options.drafter is not None:
        with refused():
            drafter = build_drafter(options.drafter, target)
        if drafter.trains or drafter.needs_fit:
            raise UserError(
                f"drafter={checkpoint_io.short_name(drafter)} must be trained first; "
                "train it and give the checkpoint"
            )
        drafter = drafter.to(target.device, target.dtype).eval().requires_grad_(False)
        drafters.append((checkpoint_io.short_name(drafter), drafter))
    if not drafters:
        raise UserError("advise: give checkpoint=<folder or hub id>, or drafter=ngram")
    for source, drafter in drafters:
        only_untuned(drafter, source)
    kinds = [checkpoint_io.short_name(drafter) for _, drafter in drafters]
    duplicates = {kind for kind in kinds if kinds.count(kind) > 1}
    return [
        (f"{kind} ({source})" if kind in duplicates else kind, drafter)
        for kind, (source, drafter) in zip(kinds, drafters, strict=True)
    ]


def candidates(
    chains: int,
    trees: Sequence[int],
    widths: Sequence[int],
    confidences: Sequence[float],
    proposals: Sequence[str],
) -> list[Plan]:
    """List candidate plans: chains of 1 to `chains` tokens, the longest chain per threshold, and trees.

    A tree of n nodes and width w has depth log2 n, or more if n nodes need it. Trees deeper than `chains`
    are omitted.
    """
    plans = []
    for proposal in proposals:
        if proposal != "hybrid":
            plans += [Plan(k, proposal=proposal) for k in range(1, chains + 1)]
            plans += [Plan(chains, proposal=proposal, min_confidence=threshold) for threshold in confidences]
        if proposal == "sampled":
            continue  # a dynamic tree of sampled nodes is not lossless
        for nodes in trees:
            for width in widths:
                depth = max(round(np.log2(nodes)), -(-(nodes - width) // width**2) + 1, 1)
                if depth <= min(chains, nodes):
                    plans.append(Plan(depth, width, nodes, proposal=proposal))
    return list(dict.fromkeys(plans))


def _profile(
    options: AdviseOptions,
    target: Target,
    name: str,
    drafter: Drafter,
    rollouts: Sequence[Rollout],
    sampler: Sampler,
) -> DrafterProfile:
    """Acceptance and costs of one drafter."""
    proposals = [p for p in options.proposals if p == "fixed" or sampler.temperature]
    with refused():
        plans = supported_plans(
            drafter, candidates(options.chains, options.trees, options.widths, options.confidences, proposals)
        )
    target = drafter.verifier(target)
    target.tap(drafter.taps)
    common: dict[str, Any] = {"max_new_tokens": options.score.max_new_tokens, "seed": options.seed}
    what = f"{name}, T={sampler.temperature:g}"
    with bar(len(rollouts) * len(plans), f"replaying {what}", "answers", leave=False) as moving:
        acceptances = acceptance(
            target,
            drafter,
            rollouts,
            plans,
            sampler,
            stop=stop_tokens(target),
            batch_size=SIDE_BY_SIDE,
            every_start=True,
            progress=lambda done: (moving.update(done - moving.n), None)[1],
            **common,
        )
    with bar(1, f"timing {what}", "rounds", leave=False) as moving:

        def progress(done: int, total: int) -> None:
            moving.total = total
            moving.update(done - moving.n)

        costs = measure(
            target,
            drafter,
            [r.prompt for r in rollouts],
            plans,
            sampler,
            options.batch_sizes,
            repeats=options.repeats,
            progress=progress,
            **common,
        )
    return DrafterProfile(name, plans, acceptances, costs)


def _result(
    profiles: Sequence[DrafterProfile], rollouts: Sequence[Rollout], sampler: Sampler, batch: int, adapt: bool
) -> dict[str, Any]:
    """Forecasts, choice and oracle of one temperature and batch size, as JSON."""
    tokens = plain_counts(rollouts)
    tables = [(p, forecast(p.plans, p.acceptances, p.costs, batch, adapt, tokens)) for p in profiles]
    drafters = []
    for profile, rows in tables:
        chosen = best_forecast(rows)
        survival = {plan: a.survival for plan, a in zip(profile.plans, profile.acceptances, strict=True)}
        chain = engine_settings.best_chain(rows, survival, batch)
        drafters.append(
            {
                "name": profile.name,
                "costs": profile.costs.table(batch),
                "rows": [row.report() for row in rows],
                "choice": chosen.report() | {"setting": decode_overrides(chosen.plan)},
                "num_speculative_tokens": chain.tokens,
                "served": chain._asdict(),
            }
        )
    best = max(drafters, key=lambda drafter: drafter["choice"]["speedup"])
    return {
        "temperature": sampler.temperature,
        "batch_size": batch,
        "drafters": drafters,
        "choice": {"drafter": best["name"]} | best["choice"],
        "oracle": oracle(profiles, rollouts, batch),
    }


def oracle(profiles: Sequence[DrafterProfile], rollouts: Sequence[Rollout], batch: int) -> dict[str, Any]:
    """Compute the upper bound: the speedup if the best draft of all drafters were known in every round.

    Each row is charged its share of a round at the batch size with the smallest share.
    """
    starts = [len(r.answer) - 1 for r in rollouts]
    rows = -(-max(len(rollouts), batch) // batch) * batch
    order = [i % len(rollouts) for i in range(rows)]  # same order as in the cost model's batches
    plain = [_plain_speed(one.costs, np.array(starts, float)[order], batch) for one in profiles]
    keeps, prices, left_out = (
        [[np.zeros((n, 0)) for n in starts]],
        [_share(profiles[0].costs, PLAIN, batch)],
        [],
    )
    for profile, plain_speed in zip(profiles, plain, strict=True):
        # Drafters were timed at different moments. Scaling by the pace makes plain decoding take equally long
        # in every profile, so the bound holds for every predicted speedup.
        pace = plain_speed / plain[0]
        for plan, acceptances in zip(profile.plans, profile.acceptances, strict=True):
            if acceptances.keeps is None:
                left_out.append(f"{profile.name} {plan.name}")
                continue
            keeps.append(acceptances.keeps)
            prices.append(pace * _share(profile.costs, plan, batch))
    answers = list(zip(*keeps, strict=True))

    def least(prices: Sequence[float]) -> list[float]:
        return [least_seconds(one, prices) if n else 0.0 for one, n in zip(answers, starts, strict=True)]

    seconds, rounds = least(prices), least([1.0] * len(prices))
    total = sum(starts[i] for i in order)
    speed = total / sum(seconds[i] for i in order)
    return {
        "tau": sum(starts) / sum(rounds),
        "tokens_per_second": speed,
        "speedup": speed / plain[0],
        "drafts": len(prices),
        "left_out": left_out,
    }


def _share(costs: Costs, plan: Plan, batch: int) -> float:
    return min_seconds_per_row(np.array([costs.round_seconds(plan, b) for b in range(1, batch + 1)]))


def _plain_speed(costs: Costs, rounds: np.ndarray, batch: int) -> float:
    price = np.array([costs.round_seconds(PLAIN, b) for b in range(1, batch + 1)])
    return float(rounds.sum() / batch_seconds(rounds.reshape(-1, batch), price).sum())


def decode_overrides(plan: Plan) -> str:
    """Overrides of train.py, foredraft score and foredraft generate that select a plan."""
    if not plan.depth:
        return "decode=chain decode.depth=0"
    if plan.width > 1:
        shape = f"decode.depth={plan.depth} decode.width={plan.width} decode.nodes={plan.nodes}"
        return f"decode=dynamic decode.proposal={plan.proposal} {shape}"
    text = f"decode=chain decode.depth={plan.depth}"
    if plan.proposal != "fixed":
        text += f" decode.proposal={plan.proposal}"
    if plan.min_confidence:
        text += f" decode.min_confidence={plan.min_confidence:g}"
    if plan.adapt is not None:
        curves = ",".join(f"{batch}:[{','.join(map(str, curve))}]" for batch, curve in plan.adapt.costs)
        text += f" 'decode.adapt={{prior:{plan.adapt.prior},costs:{{{curves}}}}}'"
    return text


def describe(card: dict[str, Any]) -> str:
    """Format the results as text."""
    texts = [_result_text(result) for result in card["results"]]
    settings = "\n".join(_engine_lines(card["results"]))
    footer = (
        f"predicted from {card['prompts']} answers and rounds timed by {card['clock']} on "
        f"{card['hardware']}, load {card['load_average']:.2f}; ~: not exact replay"
    )
    return "\n\n".join([*texts, settings, footer])


def _engine_lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield engine settings per drafter and temperature, over the batch sizes."""
    chains: dict[tuple[str, float], list[engine_settings.ServedChain]] = {}
    for result in results:
        for one in result["drafters"]:
            served = engine_settings.ServedChain(**one["served"])
            chains.setdefault((one["name"], result["temperature"]), []).append(served)
    for (name, temperature), served in chains.items():
        yield from engine_settings.lines(name, temperature, served)


def _result_text(result: dict[str, Any]) -> str:
    where = f"T={result['temperature']:g}, batch {result['batch_size']}"
    parts = []
    for one in result["drafters"]:
        verify = one["costs"]["verify"]
        lines = [
            [
                row["decode"],
                f"{row['tau']:.2f}{'~' if row['estimate'] else ''}",
                _ms(row["round_seconds"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}x",
                "{:.2f}..{:.2f}".format(*row["speedup_interval"]),
                "-"
                if row["full_batch_tokens_per_second"] is None
                else f"{row['full_batch_tokens_per_second']:.0f}",
            ]
            for row in one["rows"]
        ]
        head = ["decode", "tau", "ms a round", "tokens/s", "speedup", "95 %", "tokens/s, batch full"]
        parts += [
            f"{one['name']}, {where}",
            f"verify(n), ms, {one['costs']['passes']}: " + _curve(verify["slots"], verify["seconds"]),
            *(
                f"draft(k), ms, {curve['proposal']}, width {curve['width']}: "
                + _curve(curve["depth"], curve["seconds"])
                for curve in one["costs"]["draft"]
            ),
            grid(head, lines),
        ]
    return "\n".join([*parts, *_advice(result, where)])


def _advice(result: dict[str, Any], where: str) -> Iterator[str]:
    chosen, best = result["choice"], result["oracle"]
    low, high = chosen["speedup_interval"]
    if chosen["decode"] == PLAIN.name:
        yield f"=> {where}: do not draft; nothing here is faster than plain decoding"
    else:
        yield (
            f"=> {where}: {chosen['drafter']}, {chosen['decode']}, {chosen['speedup']:.2f}x "
            f"({low:.2f}..{high:.2f}): {chosen['setting']}"
        )
    for one in result["drafters"]:
        tokens = one["num_speculative_tokens"]
        yield (
            f"   serving {one['name']} with this many requests running, if costs are as here: "
            + (f"num_speculative_tokens={tokens}" if tokens else "without speculation")
        )
    yield (
        f"   oracle: the best of {best['drafts']} drafts known in every round: tau {best['tau']:.2f}, no "
        f"more than {best['speedup']:.2f}x"
        + (f"; without {', '.join(best['left_out'])}" if best["left_out"] else "")
    )


def _curve(x: Sequence[float], seconds: Sequence[float]) -> str:
    return ", ".join(f"{at:g}: {_ms(s)}" for at, s in zip(x, seconds, strict=True))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

"""foredraft limit: accepted tokens of optimal draft trees, and the share that a drafter reaches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode.errors import UserError
from decode.evaluation.estimates import interval
from decode.evaluation.replay import Rollout
from decode.generation.finite import check_logits
from decode.hardware import hardware
from decode.limits.entropy_bound import Entropy, best_trees, bound, entropy, published_bound
from decode.limits.tree_efficiency import RoundStart, first_level_bound, round_starts, tree_acceptance
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.build import PromptReader, TargetSource, quiet
from distill.config.validate import refused
from distill.options.commands import LimitOptions
from distill.rollouts.heldout import held_out_answers
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from distill.utils.progress import bar
from distill.utils.provenance import commit
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.registry import short_name

BATCH = 8  # rounds evaluated together


def limits(options: LimitOptions) -> float:
    """Print the table, and write it to `out`, if set.

    Returns:
        The drafter's share of the optimal trees' accepted tokens; mu if there is no share.

    Raises:
        UserError: invalid options, or a plan that only scoring can choose.
    """
    quiet()
    with refused():
        sampler = Sampler(options.temperature, options.top_k, options.top_p, options.min_p)
    plan = options.decode if options.checkpoint else Plan()
    if not isinstance(plan, Plan):
        raise UserError(
            "decode=auto and decode=calibrated choose a plan when a checkpoint is scored; name one here"
        )
    if not options.nodes:
        raise UserError("nodes=[]: give at least one tree size, as in nodes=[16,64]")
    chat, _, held = PromptReader(options.target, options.prompts, options.score).read()
    target = TargetSource(options.target).load(chat=chat)
    drafter = None
    if options.checkpoint:
        drafter = checkpoint_io.load(checkpoint_io.fetch(options.checkpoint), target)
    if drafter:
        drafter.check(plan)
        plan = plan.resolved(0.0)  # the bound applies to fixed trees
        target = drafter.verifier(target)
        target.tap(drafter.taps)
    new = options.score.max_new_tokens
    rollouts = held_out_answers(target, chat, held, sampler, new, options.seed, Path(options.answers))
    entropies = entropy(_distributions(target, rollouts, sampler))
    starts = _starts(options, target, drafter, rollouts, plan, sampler)
    card = _card(options, target, drafter, entropies, starts, plan, sampler)
    print(describe(card))
    if options.out:
        write_json(Path(options.out), card)
    fraction = card["drafter"] and card["drafter"]["fraction"]
    return fraction[0] if fraction else card["mu"][0]


def _distributions(target: Target, rollouts: Sequence[Rollout], sampler: Sampler) -> list[torch.Tensor]:
    """Distribution of every answer token, (T, V) per answer."""
    probs = []
    for prompt, answer in rollouts:
        tokens = torch.tensor([prompt + answer], device=target.device)
        logits = target.head(target.read(tokens).last[0, len(prompt) - 1 : -1])
        check_logits(target, logits, prompt + answer, len(prompt), "a prompt with its answer")
        probs.append(sampler.probs(logits))
    return probs


def _starts(
    options: LimitOptions,
    target: Target,
    drafter: Drafter | None,
    rollouts: Sequence[Rollout],
    plan: Plan,
    sampler: Sampler,
) -> list[RoundStart]:
    """Sample the drafter's round starts; without a drafter, sample all positions."""
    if drafter:
        prompts = [r.prompt for r in rollouts]
        common = {
            "max_new_tokens": options.score.max_new_tokens,
            "stop": stop_tokens(target),
            "seed": options.seed,
        }
        starts = round_starts(target, drafter, prompts, plan, sampler, batch_size=BATCH, **common)
    else:
        starts = [
            RoundStart(i, r.prompt + r.answer[:position])
            for i, r in enumerate(rollouts)
            for position in range(1, len(r.answer))
        ]
    random.Random(options.seed).shuffle(starts)
    # Sorted by length: less padding.
    return sorted(starts[: options.starts], key=lambda start: len(start.context))


def _card(
    options: LimitOptions,
    target: Target,
    drafter: Drafter | None,
    entropies: Entropy,
    starts: Sequence[RoundStart],
    plan: Plan,
    sampler: Sampler,
) -> dict[str, Any]:
    sizes = sorted({int(n) for n in options.nodes} | ({plan.nodes} if drafter and plan.depth else set()))
    contexts, groups = [s.context for s in starts], [s.request for s in starts]
    parts = []
    with bar(len(contexts), "best trees", "starts", leave=False) as shown:
        for first in range(0, len(contexts), BATCH):
            part = contexts[first : first + BATCH]
            parts.append(best_trees(target, part, sizes[-1], sampler).cumsum(1).cpu())
            shown.update(len(part))
    best = torch.cat(parts)[:, [n - 1 for n in sizes]].numpy()  # (M, sizes)
    mu, mu2 = entropies.moments
    mus = interval(entropies.sums[:, 0], entropies.counts)
    trees = [
        {
            "nodes": n,
            "bound": bound(n, mu, mu2),
            "published": published_bound(n, mu, mu2),
            "best": _mean(best[:, i], groups),
        }
        for i, n in enumerate(sizes)
    ]
    doubling = (
        (best[:, -1] - best[:, 0]) / np.log2(sizes[-1] / sizes[0]) if len(sizes) > 1 else best[:, 0] * 0
    )
    drafter_stats = (
        _drafter_stats(target, drafter, contexts, groups, plan, sampler, best, sizes) if drafter else None
    )
    return {
        "temperature": sampler.temperature,
        "bounded": sampler.temperature > 0,
        "mu": [mu, *mus],
        "mu2": mu2,
        "correlation": entropies.correlation,
        "positions": int(entropies.counts.sum()),
        "starts": len(starts),
        "trees": trees,
        "per_doubling": _mean(doubling, groups),
        "expected_per_doubling": float(np.log(2) / mu) if mu else None,
        "drafter": drafter_stats,
        "target": options.target.path,
        "hardware": hardware(target.device),
        "commit": commit(),
    }


def _drafter_stats(
    target: Target,
    drafter: Drafter,
    contexts: Sequence[list[int]],
    groups: Sequence[int],
    plan: Plan,
    sampler: Sampler,
    best: np.ndarray,
    sizes: Sequence[int],
) -> dict[str, Any]:
    """Share of the optimal trees and losses of a plan; for sampled plans, a bound on the first level."""
    facts: dict[str, Any] = {"name": short_name(drafter), "plan": plan.name, "nodes": plan.nodes}
    if plan.proposal_temperature(sampler.temperature) is not None:
        most = first_level_bound(target, drafter, contexts, plan, sampler, BATCH).cpu().numpy()
        return facts | {"fraction": None, "first_level": _mean(most, groups)}
    trees = tree_acceptance(target, drafter, contexts, plan, sampler, BATCH)
    chosen, ranked = trees.chosen.cpu().numpy(), trees.ranked.cpu().numpy()
    oracle = best[:, list(sizes).index(plan.nodes)]

    def ratio(part: np.ndarray) -> list[float]:
        return [float(part.sum() / oracle.sum()), *interval(part, oracle, groups)]

    return facts | {
        "kept": _mean(chosen, groups),
        "fraction": ratio(chosen),
        "coverage_loss": ratio(oracle - ranked),
        "shape_loss": ratio(ranked - chosen),
    }


def _mean(values: np.ndarray, groups: Sequence[int]) -> list[float]:
    """Mean with its interval, resampled by text."""
    return [float(values.mean()), *interval(values, np.ones(len(values)), groups)]


def describe(card: dict[str, Any]) -> str:
    """Format the results as text."""
    lines = [
        [
            str(tree["nodes"]),
            f"{tree['bound']:.2f}" if card["bounded"] else "-",
            f"{tree['published']:.2f}" if card["bounded"] else "-",
            _with_interval(tree["best"]),
        ]
        for tree in card["trees"]
    ]
    text = [
        f"T={card['temperature']:g}: mu = {_with_interval(card['mu'])} nats a token, "
        f"mu2 = {card['mu2']:.3f}, "
        f"on {card['positions']} tokens of the target's own; entropies k tokens apart correlate by "
        + ", ".join(f"{c:.2f}" for c in card["correlation"][:4]),
        "",
        f"draft tokens kept, {card['starts']} starts; the target's own token comes on top",
        grid(["nodes", "bound", "published", "best tree [95 %]"], lines),
    ]
    if not card["bounded"]:
        text.append(
            "T=0: the target is certain, mu = 0, and there is no bound: a drafter that knows it keeps all"
        )
    else:
        text.append(
            f"a doubling of the nodes brings {_with_interval(card['per_doubling'])} tokens; ln 2 / mu is "
            f"{card['expected_per_doubling']:.3f}"
        )
        over = [str(tree["nodes"]) for tree in card["trees"] if tree["best"][0] > tree["bound"]]
        if over:
            text.append(
                f"at {', '.join(over)} nodes the best trees keep more than the bound: the bound assumes "
                "independent tokens, and the entropies of real text are correlated"
            )
    return "\n".join([*text, *_drafter_lines(card["drafter"])])


def _drafter_lines(drafter: dict[str, Any] | None) -> list[str]:
    if not drafter:
        return []
    name = f"\n{drafter['name']}, {drafter['plan']}: "
    if drafter["fraction"] is None:
        return [
            name + "its tokens are sampled, so the bound on fixed trees does not apply. No lossless rule "
            f"accepts the first level more often than {_with_interval(drafter['first_level'], '.1%')}"
        ]
    return [
        name
        + f"{drafter['kept'][0]:.3f} tokens kept, {_with_interval(drafter['fraction'], '.1%')} of the best "
        f"trees of {drafter['nodes']} nodes. Lost to nodes that it did not look at: "
        f"{_with_interval(drafter['coverage_loss'], '.1%')}; to its choice among those that it did: "
        f"{_with_interval(drafter['shape_loss'], '.1%')}"
    ]


def _with_interval(values: Sequence[float], form: str = ".3f") -> str:
    """Format a mean and its interval."""
    mean, low, high = (format(value, form) for value in values)
    return f"{mean} [{low}, {high}]"

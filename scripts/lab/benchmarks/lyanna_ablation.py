"""Ablation of Lyanna's hidden-state reuse, by replay where nothing is drawn; head products per draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from benchmarks.common import conditions, encode, load_drafter, load_inputs
from decode.errors import UserError
from decode.evaluation.fixed_replay import NO_COIN, Step, matched, walk
from decode.evaluation.replay import Counts, Rollout, RoundStarts, agreement
from decode.generation.generate import generate
from decode.generation.types import Proposer
from decode.model.head import Head
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.validate import refused
from distill.rollouts.heldout import held_out_answers
from distill.scoring.tables import grid
from distill.utils.atomic_files import write_json
from drafters.base import Drafter
from drafters.models.lyanna import Lyanna

HEAD_TOKENS = 16  # decoded to count head products


class Difference(NamedTuple):
    """Difference of two acceptance lengths and its 99 % interval, paired by prompt."""

    difference: float
    interval: list[float]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Acceptance length with and without reused states.

    Attributes:
        states_reused: share of the states from a rejection on that the next round uses; None: not replayed.
        salvage_rate: share of rounds that accept more tokens than with fresh nodes only; None: not replayed.
        equal_nodes: the plan's nodes split between fresh and old states, minus all fresh.
        equal_forwards: nodes of old states added to the plan's, minus the plan.
        fresh_control: as many fresh nodes added, minus the plan.
    """

    states_reused: float | None
    salvage_rate: float | None
    equal_nodes: Difference
    equal_forwards: Difference
    fresh_control: Difference


def lyanna(cfg: DictConfig, folder: Path) -> float:
    """Score a Lyanna checkpoint with and without state reuse; print a table, write `out` as JSON.

    Stored answers are replayed. Where the plan draws tokens, `samples` answers to each prompt are decoded.

    Args:
        cfg: composed from conf/lab/lyanna.yaml.
        folder: unused; nothing is written but `out`.

    Returns:
        The difference at equal nodes.

    Raises:
        UserError: bad input, another drafter, or a plan without merging of old states.
    """
    del folder
    target, chat, _, held = load_inputs(cfg)
    drafter = load_drafter(cfg.checkpoint, target)
    if not isinstance(drafter, Lyanna):
        raise UserError(f"checkpoint={cfg.checkpoint}: the ablation is of drafter=lyanna")
    target.tap(drafter.taps)
    with refused():
        sampler = Sampler(cfg.temperature)
        plan = instantiate(cfg.decode).resolved(cfg.temperature, drafter.traits.proposals)
    if not replace(drafter.reuse, drawn=True).merges(plan):
        raise UserError(
            "old states are merged only with drafter.reuse.mode=tree_merge and a dynamic tree "
            "(decode=dynamic)"
        )
    prompts = held[: cfg.score.replay_prompts]
    new, root = cfg.score.max_new_tokens, Path(cfg.answers)
    drawn = plan.proposal_temperature(sampler.temperature) is not None
    ids = encode(chat, prompts)
    with conditions(cfg, target) as found:
        if drawn:
            result = decoded_ablation(target, drafter, ids, plan, sampler, cfg.samples, new, cfg.seed)
        else:
            rollouts = held_out_answers(target, chat, prompts, sampler, new, cfg.seed, root)
            result = reuse_ablation(target, drafter, rollouts, plan, sampler)
        products = head_products(target, drafter, ids[0], plan)
    card = {"what": "lyanna", **asdict(result), "head_products": products, "prompts": len(prompts)}
    write_json(Path(cfg.out), card | found)
    arms = {"equal nodes": result.equal_nodes, "equal passes": result.equal_forwards}
    arms |= {"as many fresh nodes": result.fresh_control}
    print(grid(["", "tau", "99 % interval"], [[name, *_cells(arm)] for name, arm in arms.items()]))
    answers = f"{len(prompts)} prompts, {cfg.samples} answers each" if drawn else f"{len(prompts)} answers"
    print(f"differences over {plan.name}, all fresh, T={sampler.temperature:g}, {answers}")
    if result.states_reused is not None:
        reused, longer = result.states_reused, result.salvage_rate
        print(f"{reused:.1%} of states reused, {longer:.1%} of rounds longer by them")
    print(f"{products:g} head products a draft")
    return result.equal_nodes.difference


def _cells(arm: Difference) -> list[str]:
    low, high = arm.interval
    return [f"{arm.difference:+.3f}", f"{low:+.3f}..{high:+.3f}"]


@contextmanager
def reuse_mode(drafter: Lyanna, mode: str) -> Iterator[None]:
    """Context with another reuse mode of the drafter, in hybrid trees as in fixed ones."""
    before, drafter.reuse = drafter.reuse, replace(drafter.reuse, mode=mode, drawn=True)
    try:
        yield
    finally:
        drafter.reuse = before


def _differences(drafter: Lyanna, plan: Plan, count: Callable[[Plan], Counts]) -> dict[str, Difference]:
    """Those of `Reuse`, from the counts of each plan with the drafter's mode of the moment."""
    wide = replace(plan, nodes=plan.nodes + drafter.reuse.nodes)

    def counts(mode: str, plan: Plan) -> Counts:
        with reuse_mode(drafter, mode):
            return count(plan)

    base = counts("none", plan)

    def over_base(arm: Counts) -> Difference:
        return Difference(arm.tau - base.tau, agreement(arm, base))

    return {
        "equal_nodes": over_base(counts("tree_merge", plan)),
        "equal_forwards": over_base(counts("tree_merge", wide)),
        "fresh_control": over_base(counts("none", wide)),
    }


def reuse_ablation(
    target: Target, drafter: Lyanna, rollouts: Sequence[Rollout], plan: Plan, sampler: Sampler
) -> Reuse:
    """Replay with `tree_merge` and without, at equal nodes and at equal passes of the target.

    Args:
        target: that wrote the rollouts.
        drafter: what is scored.
        rollouts: drawn by plain decoding with `sampler`.
        plan: a dynamic tree of fixed nodes.
        sampler: of the rollouts.
    """
    states = _ReusedStates(target, drafter, plan, sampler)

    def count(form: Plan) -> Counts:
        on_step = states if drafter.reuse.merges(form) and form == plan else None
        keeps = walk(target, drafter, rollouts, form, sampler, on_step=on_step)
        rounds = [RoundStarts(keep, form.depth).count for keep in keeps]
        return Counts([len(r.answer) - 1 for r in rollouts], rounds)

    found = _differences(drafter, plan, count)
    return Reuse(
        states_reused=states.num_reused / max(states.num_rejected, 1),
        salvage_rate=states.num_longer / max(states.num_rounds, 1),
        **found,
    )


def decoded_ablation(
    target: Target,
    drafter: Lyanna,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    samples: int,
    max_new_tokens: int,
    seed: int,
) -> Reuse:
    """Decode with `tree_merge` and without: a hybrid tree has no replay.

    Args:
        target: that decodes.
        drafter: what is scored.
        prompts: token ids.
        plan: a dynamic hybrid tree.
        sampler: above temperature 0.
        samples: answers to each prompt, of different random draws.
        max_new_tokens: of each answer.
        seed: of all random draws.
    """

    def count(form: Plan) -> Counts:
        tokens, rounds = [0] * len(prompts), [0.0] * len(prompts)
        for sample in range(samples):
            outputs = generate(
                target,
                drafter,
                prompts,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                plan=form,
                seed=seed,
                samples=[sample] * len(prompts),
                stop=stop_tokens(target),
            ).outputs
            for row, output in enumerate(outputs):
                tokens[row] += len(output.tokens) - 1
                rounds[row] += len(output.emitted)
        return Counts(tokens, rounds)

    return Reuse(states_reused=None, salvage_rate=None, **_differences(drafter, plan, count))


class _ReusedStates:
    """Counts states and rounds while `walk` decodes."""

    def __init__(self, target: Target, drafter: Lyanna, fresh: Plan, sampler: Sampler) -> None:
        self._target, self._drafter, self._fresh, self._sampler = target, drafter, fresh, sampler
        self.num_rounds = self.num_longer = self.num_rejected = self.num_reused = 0

    def __call__(self, step: Step) -> None:
        """Callback of `walk`; does not change the state."""
        drafted = step.state.drafted
        with reuse_mode(self._drafter, "none"):
            alone = self._drafter.propose(step.state, self._target, self._sampler, NO_COIN, self._fresh)
        step.state.drafted = drafted
        depth = step.draft.depth
        fresh_accepted = matched(alone, step.ahead)
        for accepted, fresh, more in zip(step.accepted, fresh_accepted, step.goes_on, strict=True):
            self.num_rounds += 1
            self.num_longer += accepted > fresh
            if more and accepted < depth:
                self.num_rejected += depth - accepted
                self.num_reused += depth - accepted - 1


class _CountedDrafter:
    """Counts drafts of a drafter and the head products in them."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.drafts, self.products = drafter, 0, 0
        self.new_state, self.advance, self.select = drafter.new_state, drafter.advance, drafter.select
        self.traits = drafter.traits

    def propose(self, *args: Any) -> Any:
        product = Head.product

        def counted(head: Head, states: Tensor) -> Tensor:
            self.products += 1
            return product(head, states)

        self.drafts += 1
        with mock.patch.object(Head, "product", counted):
            return self._drafter.propose(*args)


def head_products(target: Target, drafter: Drafter, prompt: list[int], plan: Plan) -> float:
    """Matrix products with an output head in a draft, decoding greedily: 1 for Lyanna, K for Medusa."""
    counted = _CountedDrafter(drafter)
    proposer = cast("Proposer", counted)
    generate(target, proposer, [prompt], sampler=Sampler(0.0), plan=plan, max_new_tokens=HEAD_TOKENS)
    return counted.products / max(counted.drafts, 1)

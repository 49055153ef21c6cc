"""foredraft rollout: generate the target's answers without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decode.errors import UserError
from decode.model.target import Target
from distill.config.build import TargetSource, quiet
from distill.config.validate import refused
from distill.options.commands import RolloutCommandOptions
from distill.prompts import split
from distill.prompts.chat_template import Chat
from distill.rollouts.produce import fill, open_store, rollout_plan
from distill.rollouts.store import RolloutPlan, begun_moments, moment_of
from distill.rollouts.vllm_server import check_vllm
from distill.utils.progress import say


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is answered, and by what.

    Attributes:
        target: the target.
        chat: its template and tokenizer.
        inputs: the prompts.
        plan: of the rows.
    """

    target: Target
    chat: Chat
    inputs: split.Inputs
    plan: RolloutPlan


def roll_out(options: RolloutCommandOptions) -> float:
    """Generate the missing shards of a store; `train.py` with the same settings uses the store.

    Returns the number of answer tokens.

    Raises:
        UserError: invalid options, before any work starts.
    """
    return answer(options, read_work(options))


def read_work(options: RolloutCommandOptions) -> Work:
    """Read the prompts and load the target.

    Raises:
        UserError: invalid options.
    """
    quiet()
    check_vllm(options)
    moment = options.prompts.moment or moment_of(options.rollout.store)
    chat, result = _read(options, moment)
    if options.rollout.refresh_every:
        raise UserError("rollout.refresh_every: answers are regenerated only in training; leave it 0 here")
    target = TargetSource(options.target).load(decodes=False, chat=chat)
    plan = rollout_plan(options, target, chat, result.train)
    for begun in [] if moment else begun_moments(Path(options.stores), plan):
        chat, result = _read(options, begun)
        plan = rollout_plan(options, target, chat, result.train)
        say(f"rollouts: continuing a store of {begun}, as with prompts.moment={begun}")
        break
    return Work(target=target, chat=chat, inputs=result, plan=plan)


def answer(options: RolloutCommandOptions, work: Work) -> float:
    """Generate the missing shards; arguments from `read_work`, result and errors as of `roll_out`."""
    target, chat, inputs = work.target, work.chat, work.inputs
    with refused():
        store = open_store(options, Path(options.stores), target, chat, work.plan, inputs.train)
        split.list_rejected(inputs, store.folder)
        split.describe(inputs, store.folder, options.prompts.self)
        fill(options, target, chat, store, options.rollout.drafter, None)
    say(str(store.mirror.url if store.mirror else store.folder))
    return float(store.manifest()["counts"]["answer_tokens"])


def _read(options: RolloutCommandOptions, moment: str | None) -> tuple[Chat, split.Inputs]:
    """Read the chat template, with `moment` as the current date, and the prompts."""
    prompts = options.prompts
    source = TargetSource(options.target)
    chat = source.chat(prompts.template, prompts.template_options, moment)
    limit = source.limit(prompts.max_tokens, options.max_tokens)
    return chat, split.read(prompts, chat, limit, options.rollout.answers)

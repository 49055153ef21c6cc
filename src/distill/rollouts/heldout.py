"""Answers of the target to held-out prompts, generated once per sampling distribution and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler
from distill.engines.base import InProcess
from distill.prompts.chat_template import Chat
from distill.prompts.length import NO_LIMIT
from distill.prompts.prompt import Prompt, prompts_digest
from distill.rollouts.answers_bar import AnswersBar
from distill.rollouts.store import RolloutPlan, RolloutStore
from distill.rollouts.writer import Writer

SHARD = 32  # prompts per shard, decoded in one batch


def held_out_answers(
    target: Target,
    chat: Chat,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    root: Path,
) -> list[Rollout]:
    """Generate the answers, or read stored ones.

    Args:
        target: model that answers.
        chat: renders prompts.
        prompts: held-out prompts.
        sampler: distribution of the answers.
        max_new_tokens: maximum length of an answer.
        seed: seed of all draws; a decoder with rule `match` and the same seed draws the same text.
        root: folder of the stores.

    Raises:
        UserError: the store holds answers of another distribution or target.
    """
    plan = RolloutPlan(
        target=target.fingerprint(),
        config=target.config_hash(),
        tokenizer=chat.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        stop=stop_tokens(target),
        template=chat.template,
        answers="write",
        server="",
        drafter="",
        prompts=prompts_digest(prompts),
        samples=1,
        self_prompts=0,
        until="answer",
        sampler=asdict(sampler),
        prompt_sampler={},
        max_prompt_tokens=target.max_positions or NO_LIMIT,
        max_new_tokens=max_new_tokens,
        shard_size=SHARD,
        batch_size=SHARD,
        seed=seed,
        moment=chat.moment,
    )
    store = RolloutStore(root, plan, prompts)
    if not store.complete:
        label = f"held-out answers at T={sampler.temperature:g}"
        with AnswersBar(store, label, leave=False) as shown:
            writer = Writer(InProcess(target, SHARD, seed), chat, plan, shown.part)
            store.fill(writer, shown.shards, target.idle)
    store.check()
    store.check_rows(target.vocab_size)
    return read_answers(store)


def read_answers(store: RolloutStore) -> list[Rollout]:
    """Read the rows of a store.

    Raises:
        UserError: the stored sampling settings differ from the plan's.
    """
    stored = store.manifest()["plan"]
    for name, value in asdict(store.plan).items():
        if stored[name] != value:
            raise UserError(
                f"{store.folder}: drawn with {name}={stored[name]}, but {value} is scored; replay on answers "
                "of another distribution would be wrong: remove the folder"
            )
    texts = ((np.asarray(t.tokens).tolist(), int(np.argmax(t.loss_mask))) for t in store.texts())
    return [Rollout(tokens[:start], tokens[start:]) for tokens, start in texts]

"""What the target answers to the held-out prompts, once for every law that is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler
from distill.engines.base import InProcess
from distill.prompts.chat_template import Chat
from distill.prompts.length import NO_LIMIT
from distill.prompts.prompt import Prompt, prompts_digest
from distill.rollouts.store import RolloutPlan, RolloutStore
from distill.rollouts.writer import Writer
from distill.utils.progress import bar

SHARD = 32  # prompts decoded side by side


def held_out_answers(
    target: Target,
    chat: Chat,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    root: Path,
) -> list[Rollout]:
    """Make the answers, or read them where they were made before.

    Args:
        target: answers.
        chat: renders.
        prompts: held out.
        sampler: the law.
        max_new_tokens: per answer.
        seed: of all draws; a decoder with the same seed that matches draws the same text.
        root: folder of the stores.

    Raises:
        UserError: the store there holds answers of another law or target.
    """
    plan = RolloutPlan(
        target=target.fingerprint(),
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
    )
    store = RolloutStore(root, plan, prompts)
    if not store.complete:
        label = f"held-out answers at T={sampler.temperature:g}"
        with bar(store.shards, label, "shards", store.shards - len(store.missing()), leave=False) as shown:

            def done(missing: int) -> None:
                shown.update(store.shards - missing - shown.n)

            store.fill(Writer(InProcess(target, SHARD, seed), chat, plan), done, target.wait)
    store.check()
    return read_answers(store)


def read_answers(store: RolloutStore) -> list[Rollout]:
    """The rows of a store, which must have been drawn from the law of its plan.

    Raises:
        UserError: they were not.
    """
    drawn = store.manifest()["plan"]
    for name, wanted in asdict(store.plan).items():
        if drawn[name] != wanted:
            raise UserError(
                f"{store.folder}: drawn with {name}={drawn[name]}, but {wanted} is scored; replay on answers "
                "of another law would be wrong: remove the folder"
            )
    texts = ((list(text.tokens), text.loss_mask.index(1)) for text in store.texts())
    return [Rollout(tokens[:start], tokens[start:]) for tokens, start in texts]

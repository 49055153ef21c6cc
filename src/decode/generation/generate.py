"""Speculative decoding: `generate` decodes a batch to the end, `stream` one prompt round by round.

Both run the loop of `decode.generation.loop`. Plain decoding is the same loop with empty drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from decode.errors import UserError
from decode.generation.forward_only import write_forward
from decode.generation.loop import Loop
from decode.generation.types import Generation, Piece, Proposer, Round, Times, Until
from decode.integers import token_ids, whole_number
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verification.target_probs import EditLogits


def generate(
    target: Target,
    drafter: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    plan: Plan | None = None,
    seed: int = 0,
    requests: Sequence[int | str] | None = None,
    samples: Sequence[int] | None = None,
    stop: Sequence[int] = (),
    until: Until | None = None,
    coin: Any = None,
    on_round: Callable[[Round], None] | None = None,
    clock: Callable[[], float] | None = None,
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
    edit: EditLogits | None = None,
) -> Generation:
    """Decode prompts in a batch, with exactly the target's distribution.

    Args:
        target: the model to decode with.
        drafter: the proposer; None for plain decoding.
        prompts: token ids, at least one per prompt.
        max_new_tokens: limit per request; lower if the target's context ends first.
        sampler: temperature and other warpers.
        plan: shape of the draft and verification rule; default plain decoding.
        seed: seed of all random draws.
        requests: identifiers that key each request's random draws; default 0, 1, ...
        samples: index of each row among the samples of its request; default 0.
        stop: end tokens; the one that ends a request is emitted.
        until: factory of a stop test per request, such as `StopStrings`.
        coin: replaces the keyed coin (tests).
        on_round: called after the prefill and after every round.
        clock: time source of `Generation.times`; must synchronise with the device at each reading. None: wall
            time without synchronisation; on a GPU only prefill and total are then exact.
        batch_size: maximum number of requests to decode at a time; others join in order as requests end.
            None: all at once.
        progress: called often, with the number of requests that are done; one that runs counts by its
            tokens, as a share of its limit.
        edit: changes the target's logits, before the sampler; the requests that it gets are indices of
            prompts. A drafter drafts without it.

    Raises:
        UserError: a prompt that is empty or leaves no room in the context; an unknown token; an invalid
            number; a drafter with a target that cannot verify drafts; logits that are not finite.
    """
    prompts, limits = _checked(target, prompts, max_new_tokens)
    if batch_size is not None:
        batch_size = whole_number(batch_size, "batch_size", 1)
    if not prompts:
        return Generation([], Times())
    names = range(len(prompts)) if requests is None else requests
    if len(names) != len(prompts):
        raise UserError(f"requests: {len(names)} for {len(prompts)} prompts; give one for each")
    coin = KeyedCoin(seed, names, samples) if coin is None else coin
    stop = token_ids(stop)
    plan, rest = plan or Plan(), (until, on_round, clock)
    with target.lock:
        if target.abilities.own_cache and drafter is None and on_round is None and edit is None:
            rest = (until, clock, batch_size, names, progress)
            return _in_turn(target, prompts, limits, sampler, coin, stop, *rest)
        loop = Loop(target, drafter, prompts, limits, sampler, plan, coin, stop, *rest, batch_size, edit)
        loop.names = names
        for _ in loop.rounds():
            if progress:
                progress(loop.done)
    return Generation(loop.outputs, loop.times, loop.passes)


def _in_turn(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    sampler: Sampler,
    coin: Any,
    stop: Sequence[int],
    until: Until | None,
    clock: Callable[[], float] | None,
    batch_size: int | None,
    names: Sequence[int | str],
    progress: Callable[[float], None] | None,
) -> Generation:
    """Plain decoding through the target's own cache, one batch after the other; rows start together."""
    if target.abilities.replay:
        name, reason = type(target.model).__name__, target.abilities.replay
        raise UserError(
            f"target: {name} cannot write answers here: {reason}; take them from a server or a file "
            "(rollout=openai, rollout=given)"
        )
    whole, size = Generation([], Times()), batch_size or len(prompts)
    for first in range(0, len(prompts), size):
        part, rows = slice(first, first + size), range(first, min(first + size, len(prompts)))
        texts, here = (prompts[part], limits[part]), coin.select(rows)
        whole = whole.followed_by(
            write_forward(target, *texts, sampler, here, stop, until, clock, names[part])
        )
        if progress:
            progress(rows.stop)
    return whole


def stream(
    target: Target,
    drafter: Proposer | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    plan: Plan | None = None,
    seed: int = 0,
    request: int | str = 0,
    sample: int = 0,
    stop: Sequence[int] = (),
    until: Until | None = None,
    coin: Any = None,
) -> Generator[Piece, None, None]:
    """Decode one prompt and yield the tokens of the prefill and of every round as they are settled.

    The concatenated pieces equal the output of `generate` for the same arguments, with `request` and
    `sample` as this prompt's entries of `requests` and `samples`. The iterator may be closed early.

    Raises:
        UserError: immediately if `generate` would raise; from the iterator if the target has started another
            text since the last piece, or its logits are not finite.
    """
    coin = KeyedCoin(seed, [request], [sample]) if coin is None else coin
    prompts, limits = _checked(target, [prompt], max_new_tokens)
    loop = Loop(target, drafter, prompts, limits, sampler, plan or Plan(), coin, token_ids(stop), until)
    return loop.pieces()


def _checked(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """The prompts as lists, and the maximum number of new tokens of each.

    Raises:
        UserError: a prompt that is empty, leaves no room, or has an unknown token.
    """
    most, known, limits = whole_number(max_new_tokens, "max_new_tokens", 1), target.num_embeddings, []
    texts = [token_ids(prompt) for prompt in prompts]
    for i, text in enumerate(texts):
        if not text:
            raise UserError(f"prompt {i} is empty: give at least one token")
        if not 0 <= min(text) <= max(text) < known:
            wrong = next(token for token in text if not 0 <= token < known)
            raise UserError(f"prompt {i} has token {wrong}; the target has tokens 0 to {known - 1}")
        room = most if target.max_positions is None else target.max_positions - len(text)
        if room < 1:
            raise UserError(
                f"prompt {i} has {len(text)} tokens and leaves no room in the target's "
                f"context of {target.max_positions}: shorten it"
            )
        limits.append(min(most, room))
    return texts, limits

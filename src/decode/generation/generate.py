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
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


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
) -> Generation:
    """Decode prompts in a batch, with exactly the target's distribution.

    Args:
        target: the model to decode with.
        drafter: the proposer; None for plain decoding.
        prompts: token ids, at least one per prompt.
        max_new_tokens: limit per request; lower if the target's context ends first.
        sampler: temperature and other warpers.
        plan: shape of the draft and acceptance rule; default plain decoding.
        seed: seed of all random draws.
        requests: identifiers that key each request's random draws; default 0, 1, ...
        samples: index of each row among the samples of its request; default 0.
        stop: end tokens; the one that ends a request is emitted.
        until: factory of a stop test per request, such as `StopStrings`.
        coin: replaces the keyed coin (tests).
        on_round: called after the prefill and after every round.
        clock: time source of `Generation.times`, which also waits for the device at every reading. None: wall
            time without waiting; on a GPU only prefill and total are then exact.
        batch_size: most requests that are decoded at a time: others join, in their order, as requests end.
            None: all at once.

    Raises:
        UserError: an empty prompt, or one that leaves no room in the target's context; a target that can
            verify no drafts, and a drafter.
    """
    if not prompts:
        return Generation([], Times())
    names = range(len(prompts)) if requests is None else requests
    coin = KeyedCoin(seed, names, samples) if coin is None else coin
    limits = _limits(target, prompts, max_new_tokens)
    if target.abilities.own_cache and drafter is None and on_round is None:
        if target.abilities.replay:
            name, reason = type(target.model).__name__, target.abilities.replay
            raise UserError(
                f"target: {name} cannot write answers here: {reason}; take them from a server or a file "
                "(rollout=openai, rollout=given)"
            )
        # All rows of such a batch begin together, so one batch follows the other.
        whole, size = Generation([], Times()), batch_size or len(prompts)
        for first in range(0, len(prompts), size):
            part, rows = slice(first, first + size), range(first, min(first + size, len(prompts)))
            texts, here = (prompts[part], limits[part]), coin.select(rows)
            whole = whole.followed_by(write_forward(target, *texts, sampler, here, stop, until, clock))
        return whole
    loop = Loop(
        *(target, drafter, prompts, limits, sampler, plan or Plan(), coin, stop, until, on_round, clock),
        batch_size,
    )
    for _ in loop.rounds():
        pass
    return Generation(loop.outputs, loop.times)


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
        UserError: immediately for a prompt that `generate` rejects; from the iterator if the target has
            started another text since the last piece.
    """
    coin = KeyedCoin(seed, [request], [sample]) if coin is None else coin
    limits = _limits(target, [prompt], max_new_tokens)
    loop = Loop(target, drafter, [prompt], limits, sampler, plan or Plan(), coin, stop, until)
    return loop.pieces()


def _limits(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Maximum number of new tokens per prompt; rejects prompts that leave no room."""
    limits = []
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty: give at least one token")
        room = max_new_tokens
        if target.max_positions is not None:
            room = min(room, target.max_positions - len(prompt))
        if room < 1:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and leaves no room in the target's "
                f"context of {target.max_positions}: shorten it, or ask for at least one token"
            )
        limits.append(room)
    return limits

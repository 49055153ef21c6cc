"""Decoding prompts: `generate` a batch to the end, `stream` one round by round.

Both run the one loop of `decode.generation.loop`; plain decoding is that loop with nothing drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from decode.errors import UserError
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
    clock: Callable[[], float] = time.perf_counter,
) -> Generation:
    """Decode all prompts in one batch, distributed exactly as the target.

    Args:
        target: the model whose law is kept.
        drafter: what proposes, or None for plain decoding.
        prompts: token ids, at least one each.
        max_new_tokens: per request; fewer where the target's context ends.
        sampler: the law.
        plan: how much to draft and which rule verifies it.
        seed: of all randomness.
        requests: names that key each request's randomness; default 0, 1, ...
        samples: which sample of its request each row is; default 0.
        stop: end tokens; emitted, then the request is over.
        until: makes the test that ends a request, as `stop.StopStrings` does.
        coin: replaces the keyed coin (tests).
        on_round: observer.
        clock: of `Generation.times`.

    Raises:
        UserError: an empty prompt, or one that fills the target's context.
    """
    if not prompts:
        return Generation([], Times())
    names = range(len(prompts)) if requests is None else requests
    coin = KeyedCoin(seed, names, samples) if coin is None else coin
    limits = _limits(target, prompts, max_new_tokens)
    loop = Loop(target, drafter, prompts, limits, sampler, plan or Plan(), coin, stop, until, on_round, clock)
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
    """Decode one prompt; yields what the prefill and then every round settled, as it happens.

    The pieces joined are what `generate` gives for the same arguments, `request` and `sample`
    being this prompt's entries of `requests` and `samples`. Closing the iterator early leaves
    nothing behind.

    Raises:
        UserError: at once for a prompt that `generate` refuses; from the iterator where its
            target has begun another text since the last piece.
    """
    coin = KeyedCoin(seed, [request], [sample]) if coin is None else coin
    limits = _limits(target, [prompt], max_new_tokens)
    loop = Loop(target, drafter, [prompt], limits, sampler, plan or Plan(), coin, stop, until)
    return loop.pieces()


def _limits(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
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

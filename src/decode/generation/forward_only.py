"""Plain decoding through the target's own cache, for targets that cannot roll back their state.

Recurrent states cannot skip padding or forget a token. So all rows start with their first token and read
one column at a time: a row reads its prompt, then its newest token. Draws are keyed by position, as in
the speculative loop, so both write the same texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from decode.draft import Draft
from decode.generation.finite import broken_slot, not_finite
from decode.generation.types import Generation, Output, Times, Until
from decode.model.own_cache import OwnCache
from decode.model.target import Target
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.verification.descent import match
from decode.verification.target_probs import TargetProbs


@torch.inference_mode()
def write_forward(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    sampler: Sampler,
    coin: KeyedCoin,
    stop: Sequence[int],
    until: Until | None,
    clock: Callable[[], float] | None,
    names: Sequence[int | str],
) -> Generation:
    """Decode a batch plainly; see `generate` for the arguments, and `requests` for `names`."""
    clock, device = clock or time.perf_counter, target.device
    outputs, times, begin = [Output([]) for _ in prompts], Times(), clock()
    tests = [until() for _ in prompts] if until else None
    texts = [list(prompt) for prompt in prompts]  # of all requests, growing
    rows = list(range(len(prompts)))  # running requests
    seen = _seen(target, texts) if sampler.needs_history else None
    cache, read = OwnCache(target.base, target.head.weight), min(map(len, prompts))
    last = cache.read(torch.tensor([text[:read] for text in texts], device=device))[:, -1]  # (B, D)
    while True:
        drawn = [max(read - len(prompts[request]), 0) for request in rows]  # tokens of each answer so far
        here = coin.at(np.full(len(rows), read), np.array([max(count - 1, 0) for count in drawn]))
        logits = target.head(last)[:, None]  # (B, 1, V)
        draft = Draft.empty(len(rows), device)
        result = match(draft, TargetProbs(logits, sampler, seen), here)
        running = []
        table = torch.stack([result.tokens[:, 0], broken_slot(logits, draft)], 1).tolist()
        for row, (request, (token, broken)) in enumerate(zip(rows, table, strict=True)):
            if broken:
                raise not_finite(target, [texts[request][:read]], f"prompt {names[request]}")
            if len(texts[request]) == read:
                texts[request].append(token)
                _emit(outputs[request], token, clock() - begin)
                ends = token in stop or (tests is not None and tests[request](token))
                outputs[request].stopped = ends
                if ends or len(outputs[request].tokens) == limits[request]:
                    continue
            running.append(row)
        times.prefill = times.prefill or clock() - begin
        if not running:
            times.total = clock() - begin - times.prefill
            return Generation(outputs, times, "uncompiled")
        if len(running) < len(rows):
            cache.select(running)
            coin, rows = coin.select(running), [rows[row] for row in running]
            seen = None if seen is None else seen[running]
        tokens = torch.tensor([[texts[request][read]] for request in rows], device=device)  # (B, 1)
        if seen is not None:
            seen.scatter_(1, tokens, value=True)
        last, read = cache.read(tokens)[:, -1], read + 1


def _seen(target: Target, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B, V) bool: tokens of each text, for the repetition penalty."""
    seen = torch.zeros(len(texts), target.vocab_size, dtype=torch.bool, device=target.device)
    for row, text in enumerate(texts):
        seen[row, torch.tensor(text, device=target.device)] = True
    return seen


def _emit(output: Output, token: int, seconds: float) -> None:
    """Add a token as a round without a draft would; the first token belongs to no round."""
    if output.tokens:
        output.emitted.append(1)
        for column in (output.accepted, output.draft_lengths, output.drafted):
            column.append(0)
    else:
        output.ttft = seconds
    output.tokens.append(token)

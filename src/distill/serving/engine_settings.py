"""Settings of vLLM for the draft length, from forecasts of several batch sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from decode.plan import Plan
from decode.planning.auto import Forecast
from decode.planning.cost_model import fastest


class ServedChain(NamedTuple):
    """Best chain for a server with a constant batch size.

    Attributes:
        batch_size: number of running requests.
        tokens: draft length; 0: serve without speculation.
        drawn: draft tokens are sampled, not the most likely ones.
        survival: share of rounds that accept at least j tokens, j from 1.
    """

    batch_size: int
    tokens: int
    drawn: bool = False
    survival: Sequence[float] = ()


def best_chain(
    rows: Sequence[Forecast], survival: Mapping[Plan, Sequence[float]], batch_size: int
) -> ServedChain:
    """Choose among the chains that an engine supports: fixed or sampled, verified token by token."""
    proposals = ("fixed", "sampled")
    plain = [Plan(row.plan.depth, proposal=p) for row in rows for p in proposals if row.plan.depth]
    chains = [row for row in rows if not row.plan.depth or row.plan in plain]
    plan = chains[fastest([row.throughput.full for row in chains])].plan  # pyright: ignore[reportArgumentType]
    return ServedChain(batch_size, plan.depth, plan.proposal == "sampled", survival.get(plan, ()))


def schedule(chains: Sequence[ServedChain]) -> list[list[int]]:
    """Draft lengths by batch size in vLLM's form: [first, last, tokens], from 1 without gaps.

    An unmeasured batch size uses the length of the next larger one, whose rounds cost more; vLLM keeps the
    last length for larger batches.
    """
    ranges: list[list[int]] = []
    first = 1
    for chain in sorted(chains, key=lambda one: one.batch_size):
        if ranges and ranges[-1][2] == chain.tokens:
            ranges[-1][1] = chain.batch_size
        else:
            ranges.append([first, chain.batch_size, chain.tokens])
        first = chain.batch_size + 1
    return ranges


def speculative_config(chains: Sequence[ServedChain]) -> dict[str, Any]:
    """Keys of vLLM's --speculative-config besides method and model; empty: serve without speculation.

    Sampled drafts are verified as a block, which accepts at least as much (Sun et al., arXiv:2403.10444).
    """
    longest = max(chain.tokens for chain in chains)
    if not longest:
        return {}
    ranges = schedule(chains)
    config: dict[str, Any] = {"num_speculative_tokens": longest}
    config |= {"num_speculative_tokens_per_batch_size": ranges} if len(ranges) > 1 else {}
    if any(chain.drawn for chain in chains):
        config |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    return config


def synthetic_config(survival: Sequence[float]) -> dict[str, Any]:
    """Keys that make vLLM accept drafts at given rates, to time a drafter on a machine."""
    return {
        "num_speculative_tokens": len(survival),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(s, 4) for s in survival],
    }


def lines(name: str, temperature: float, chains: Sequence[ServedChain]) -> Iterator[str]:
    """Format the engine settings of one drafter and temperature as text."""
    config = speculative_config(chains)
    if not config:
        yield f"   vLLM, {name}, T={temperature:g}: without --speculative-config"
        return
    yield f"   vLLM, {name}, T={temperature:g}, into --speculative-config: {json.dumps(config)}"
    longest = max(chains, key=lambda chain: chain.tokens)
    if longest.survival:
        yield (
            "   vLLM, to time such acceptance on another machine, drafts accepted at these rates whatever "
            f"they are: {json.dumps(synthetic_config(longest.survival))}"
        )

"""Test whether stored tokens were sampled from the target: surprisal against entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.evaluation.sampling_tests import surprisals
from decode.generation.finite import check_states
from decode.model.target import Target
from decode.sampling import Sampler
from distill.utils.progress import bar

CHUNK = 256  # positions processed at once
MAX_Z = 4.0  # standard errors; false alarms in 1 of 16,000 correct stores
MAX_ZERO_PROB_SHARE = 0.01  # share of tokens with probability 0 that rounding may explain


class SurprisalStats(NamedTuple):
    """Statistics of N supervised tokens under the reference distribution.

    Attributes:
        entropy: (N,) entropy of the distribution at each token, in nats.
        surprisal: (N,) -log p of the token; infinite where p is 0.
        variance: (N,) variance of the surprisal under the distribution.
        likeliest: (N,) bool, whether the token has the largest logit.
        place: (N,) index of the token among its row's supervised tokens, from 0.
    """

    entropy: np.ndarray
    surprisal: np.ndarray
    variance: np.ndarray
    likeliest: np.ndarray
    place: np.ndarray

    @property
    def possible(self) -> np.ndarray:
        """(N,) bool, whether the token has probability above 0."""
        return np.isfinite(self.surprisal)

    def excess(self) -> tuple[float, float]:
        """Mean of surprisal - entropy over the possible tokens, and its standard error.

        For tokens drawn from the distribution, differences are martingale increments with mean 0, so their
        variances add up even if rows share prompts.
        """
        possible = self.possible
        count = max(1, int(possible.sum()))
        difference = float((self.surprisal - self.entropy)[possible].sum()) / count
        return difference, math.sqrt(float(self.variance[possible].sum())) / count


class Reference(NamedTuple):
    """Distribution that stored tokens are compared with.

    Attributes:
        sampler: applied to the target's logits.
        name: name in reports.
        drawn: whether the store's plan samples its tokens from this distribution.
    """

    sampler: Sampler
    name: str
    drawn: bool


def reference_distribution(plan: dict[str, Any]) -> Reference:
    """The sampler of a store's plan if its tokens are samples, else the target at temperature 1."""
    sampler = Sampler(**plan["sampler"])
    if plan["answers"] == "given":
        return Reference(Sampler(1.0), "T=1", False)
    if sampler.temperature == 0 or sampler.needs_history:
        return Reference(Sampler(1.0), "T=1", False)
    is_truncated = sampler != Sampler(sampler.temperature)
    return Reference(sampler, f"T={sampler.temperature:g}{' and its warpers' if is_truncated else ''}", True)


@torch.no_grad()
def measure(target: Target, rows: Sequence[dict[str, Any]], sampler: Sampler) -> SurprisalStats:
    """Run the target on rows, one by one.

    Args:
        target: reference model; rows are truncated to its context.
        rows: rows with `tokens` and `loss_mask`.
        sampler: turns logits into the distribution; must not need the history.

    Raises:
        UserError: the target's hidden states are not finite.
    """
    parts: list[tuple[Tensor, ...]] = []
    with bar(len(rows), "entropy", "rows", leave=False) as progress:
        for row in rows:
            tokens = torch.tensor(row["tokens"][: target.max_positions], device=target.device)
            mask = torch.tensor(row["loss_mask"][: len(tokens)], dtype=torch.bool, device=target.device)
            # (A,) positions that predict a supervised token; the first token of a row has no prediction.
            before = mask[1:].nonzero()[:, 0]
            if len(before):
                last = target.read(tokens[None]).last[0]  # (T, D)
                number = mask.cumsum(0)[before]  # (A,) index among supervised tokens
                check_states(target, last[None], [tokens.tolist()], "a stored row")
                for at, place in zip(before.split(CHUNK), number.split(CHUNK), strict=True):
                    parts.append((*_statistics(target.head(last[at]), tokens[at + 1], sampler), place))
            progress.update(1)
    columns = zip(*parts, strict=True) if parts else [[torch.zeros(0)]] * len(SurprisalStats._fields)
    return SurprisalStats(*(torch.cat(list(column)).cpu().numpy() for column in columns))


def _statistics(logits: Tensor, token: Tensor, sampler: Sampler) -> tuple[Tensor, ...]:
    """(A, V) logits and (A,) tokens -> entropy, surprisal, variance, likeliest, each (A,)."""
    probs = sampler.probs(logits).double()  # (A, V)
    probs = probs / probs.sum(-1, keepdim=True)
    surprisal, entropy, variance = surprisals(probs, probs.log(), token)
    return entropy, surprisal, variance, logits.gather(1, token[:, None])[:, 0] == logits.amax(-1)


def lines(stats: SurprisalStats, reference: Reference) -> list[str]:
    """Format the statistics and a verdict as lines of text."""
    count = len(stats.entropy)
    if not count:
        return ["entropy                - (no supervised token in the sample)"]
    possible = stats.possible
    difference, error = stats.excess()
    z = difference / error if error else math.inf if difference else 0.0
    num_impossible = count - int(possible.sum())
    surprisal = stats.surprisal[possible].mean() if possible.any() else math.inf
    result = [
        f"entropy at {reference.name:<12}{stats.entropy.mean():.3f} nats, over {count:,} supervised tokens",
        f"surprisal              {surprisal:.3f} nats, "
        f"{difference:+.3f} +- {error:.3f} from the entropy (z = {z:.1f})",
        f"the target's likeliest {stats.likeliest.mean():.1%} of the tokens",
    ]
    if num_impossible:
        result.append(
            f"without a chance       {num_impossible:,} tokens with probability 0; left out of the surprisal"
        )
    return [*result, _verdict(reference, z, num_impossible / count), *_places(stats)]


def _verdict(reference: Reference, z: float, impossible_share: float) -> str:
    if abs(z) <= MAX_Z and impossible_share <= MAX_ZERO_PROB_SHARE:
        return "surprisal and entropy agree, as expected of tokens drawn from this target"
    if reference.drawn:
        return (
            "WARNING: surprisal and entropy differ: these tokens were not drawn from this target at "
            f"{reference.name}, though the store says so (another target, other weights, re-encoded text?)"
        )
    if z < 0:
        return "surprisal is below the entropy: answers are likelier than samples, for example greedy ones"
    return (
        "WARNING: surprisal is above the entropy: this target would not write these answers, and a drafter "
        "trained on them learns text that it will not meet"
    )


def mismatch_warning(target: Target, rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str | None:
    """Return a warning if answers are unlikely to be samples of the target; None otherwise.

    Args:
        target: target of the run.
        rows: a sample of rows with `tokens` and `loss_mask`.
        plan: plan of their store.
    """
    reference = reference_distribution(plan)
    stats = measure(target, rows, reference.sampler)
    difference, error = stats.excess()
    impossible = 1 - stats.possible.mean() if len(stats.possible) else 0.0
    if impossible <= MAX_ZERO_PROB_SHARE and (not error or difference / error <= MAX_Z):
        return None
    chance = f", and no chance for {impossible:.0%} of them" if impossible > MAX_ZERO_PROB_SHARE else ""
    return (
        f"WARNING: the target would not write these answers: {difference:.2f} nats a token above its own "
        f"entropy{chance}, in {len(rows)} rows; a drafter learns text that it will not meet. "
        "foredraft inspect-data shows details"
    )


def _places(stats: SurprisalStats) -> list[str]:
    """Table by position in the answer, in ranges of doubling size."""
    result = ["  answer tokens            count  entropy  surprisal"]
    first, last = 0, 8
    while first <= stats.place.max():
        in_range = (stats.place >= first) & (stats.place < last)
        if in_range.any():
            possible = in_range & stats.possible
            surprisal = stats.surprisal[possible].mean() if possible.any() else math.inf
            name, entropy = f"{first + 1}..{last}", stats.entropy[in_range].mean()
            result.append(f"  {name:<20}{in_range.sum():>10,}{entropy:>9.3f}{surprisal:>11.3f}")
        first, last = last, last * 2
    return result

"""Were stored tokens drawn from the target? Their surprisal beside the target's entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.evaluation.sampling_tests import surprisals
from decode.model.target import Target
from decode.sampling import Sampler
from distill.utils.progress import bar

CHUNK = 256  # places whose laws are made together
BELIEVED = 4.0  # standard deviations: one honest store in 16,000 is doubted
CHANCELESS = 0.01  # share of tokens without a chance under the law that rounding may explain


class Surprise(NamedTuple):
    """Supervised tokens as the target sees them.

    Attributes:
        entropy: (N,) of the law at each, in nats.
        surprisal: (N,) -log p of the token; infinite where the law gives it no chance.
        variance: (N,) of the surprisal under the law.
        likeliest: (N,) whether the target thinks no token likelier.
        place: (N,) number of the token among its row's supervised ones, from 0.
    """

    entropy: np.ndarray
    surprisal: np.ndarray
    variance: np.ndarray
    likeliest: np.ndarray
    place: np.ndarray

    @property
    def possible(self) -> np.ndarray:
        """(N,) whether the law gives the token a chance."""
        return np.isfinite(self.surprisal)

    def excess(self) -> tuple[float, float]:
        """Mean of surprisal - entropy over the possible tokens, and its standard error.

        Given the tokens before it each difference has mean 0 if the token was drawn from its law, so
        their variances add up, whatever rows have in common.
        """
        fine = self.possible
        count = max(1, int(fine.sum()))
        difference = float((self.surprisal - self.entropy)[fine].sum()) / count
        return difference, math.sqrt(float(self.variance[fine].sum())) / count


class Law(NamedTuple):
    """The law that a store's tokens are measured by.

    Attributes:
        sampler: makes it from the target's logits.
        name: of it, for people.
        drawn: whether the store says that its tokens are draws from it.
    """

    sampler: Sampler
    name: str
    drawn: bool


def law_of(plan: dict[str, Any]) -> Law:
    """By a store's plan: its own law where its tokens are draws, else the target's at temperature 1."""
    own = Sampler(**plan["sampler"])
    if plan["answers"] == "given":
        return Law(Sampler(1.0), "T=1", False)
    if own.temperature == 0 or own.needs_history:
        return Law(Sampler(1.0), "T=1", False)
    warped = own != Sampler(own.temperature)
    return Law(own, f"T={own.temperature:g}{' and its warpers' if warped else ''}", True)


@torch.no_grad()
def measure(target: Target, rows: Sequence[dict[str, Any]], sampler: Sampler) -> Surprise:
    """Read rows with the target, one by one.

    Args:
        target: reads; what is beyond its context is left out.
        rows: with `tokens` and `loss_mask`.
        sampler: makes the law of the logits; without a memory.
    """
    parts: list[tuple[Tensor, ...]] = []
    with bar(len(rows), "entropy", "rows", leave=False) as shown:
        for row in rows:
            tokens = torch.tensor(row["tokens"][: target.max_positions], device=target.device)
            mask = torch.tensor(row["loss_mask"][: len(tokens)], dtype=torch.bool, device=target.device)
            # (A,) places of the rows that predict supervised tokens; the first token has nothing before it.
            before = mask[1:].nonzero()[:, 0]
            if len(before):
                last = target.read(tokens[None]).last[0]  # (T, D)
                number = mask.cumsum(0)[before]  # (A,)
                for at, place in zip(before.split(CHUNK), number.split(CHUNK), strict=True):
                    parts.append((*_laws(target.head(last[at]), tokens[at + 1], sampler), place))
            shown.update(1)
    columns = zip(*parts, strict=True) if parts else [[torch.zeros(0)]] * len(Surprise._fields)
    return Surprise(*(torch.cat(list(column)).cpu().numpy() for column in columns))


def _laws(logits: Tensor, token: Tensor, sampler: Sampler) -> tuple[Tensor, ...]:
    """(A, V) logits and (A,) tokens -> entropy, surprisal, variance, likeliest, each (A,)."""
    law = sampler.probs(logits).double()
    law = law / law.sum(-1, keepdim=True)
    own, entropy, variance = surprisals(law, law.log(), token)
    return entropy, own, variance, logits.gather(1, token[:, None])[:, 0] == logits.amax(-1)


def lines(found: Surprise, law: Law) -> list[str]:
    """Figures, and whether they are those of tokens drawn from the target."""
    count = len(found.entropy)
    if not count:
        return ["entropy                - (no supervised token in the sample)"]
    fine = found.possible
    difference, error = found.excess()
    z = difference / error if error else math.inf if difference else 0.0
    chanceless = count - int(fine.sum())
    result = [
        f"entropy at {law.name:<12}{found.entropy.mean():.3f} nats, over {count:,} supervised tokens",
        f"surprisal              {found.surprisal[fine].mean() if fine.any() else math.inf:.3f} nats, "
        f"{difference:+.3f} +- {error:.3f} from the entropy (z = {z:.1f})",
        f"the target's likeliest {found.likeliest.mean():.1%} of the tokens",
    ]
    if chanceless:
        result.append(
            f"without a chance       {chanceless:,} tokens under that law; left out of the surprisal"
        )
    return [*result, _verdict(law, z, chanceless / count), *_places(found)]


def _verdict(law: Law, z: float, chanceless: float) -> str:
    if abs(z) <= BELIEVED and chanceless <= CHANCELESS:
        return "surprisal and entropy agree: as of tokens that were drawn from this target"
    if law.drawn:
        return (
            "WARNING: surprisal and entropy differ: these tokens were not drawn from this target at "
            f"{law.name}, though the store says so (another target, other weights, re-encoded text?)"
        )
    if z < 0:
        return "surprisal is below the entropy: as of answers that are likelier than draws, greedy ones say"
    return (
        "WARNING: surprisal is above the entropy: this target would not write these answers, and a drafter "
        "that is taught on them learns what it will not meet"
    )


def doubt(target: Target, rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str | None:
    """One line where answers that the target did not write in this process are unlikely to be its own.

    Args:
        target: reads them.
        rows: with `tokens` and `loss_mask`; a sample.
        plan: of their store.
    """
    law = law_of(plan)
    found = measure(target, rows, law.sampler)
    difference, error = found.excess()
    chanceless = 1 - found.possible.mean() if len(found.possible) else 0.0
    if chanceless <= CHANCELESS and (not error or difference / error <= BELIEVED):
        return None
    chance = f", and no chance for {chanceless:.0%} of them" if chanceless > CHANCELESS else ""
    return (
        f"WARNING: the target would not write these answers: {difference:.2f} nats a token above its own "
        f"entropy{chance}, in {len(rows)} rows; a drafter learns from them what it will not meet. "
        "foredraft inspect-data says more"
    )


def _places(found: Surprise) -> list[str]:
    """By place in the answer, in ranges that double."""
    result = ["  answer tokens            count  entropy  surprisal"]
    first, last = 0, 8
    while first <= found.place.max():
        here = (found.place >= first) & (found.place < last)
        if here.any():
            fine = here & found.possible
            surprisal = found.surprisal[fine].mean() if fine.any() else math.inf
            name, entropy = f"{first + 1}..{last}", found.entropy[here].mean()
            result.append(f"  {name:<20}{here.sum():>10,}{entropy:>9.3f}{surprisal:>11.3f}")
        first, last = last, last * 2
    return result

"""A vector in the taps' place that a drafter's fusion turns into a given feature.

Our P-EAGLE learns the masks' feature as such. Other programs keep what is fused into one: as many
numbers more as there are taps, so that there is a choice, which the norms before `fc` take up.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 200
CLOSE = 1e-9  # of mean squares


def fused_from(feature: Tensor, fc: Tensor, norms: list[Tensor], eps: float) -> Tensor | None:
    """A vector m with fc(norms(m)) = feature.

    With u = norms(m) / weights this is a linear system whose unknowns lie on spheres, one for each
    norm: Newton's steps on the radii, inside the system's solutions.

    Args:
        feature: (D,).
        fc: (D, L * D).
        norms: weights of the RMS norms, side by side over L * D inputs; none: there is no norm.
        eps: of the norms.

    Returns:
        (L * D,) in fp64; None: none was found.
    """
    feature = feature.double()
    system = fc.double() * (torch.cat(norms).double() if norms else 1.0)
    gram, info = torch.linalg.cholesky_ex(system @ system.T)
    if info:
        return None

    def least(x: Tensor) -> Tensor:
        """(D, n) -> (L * D, n), the shortest that the system turns into it."""
        return system.T @ torch.cholesky_solve(x, gram)

    def free(x: Tensor) -> Tensor:
        """What of (L * D, n) the system does not see."""
        return x - least(system @ x)

    base = least(feature[:, None])
    if not norms:
        return base[:, 0]
    dice = torch.Generator().manual_seed(0)
    u = base + free(torch.randn(len(base), 1, generator=dice, dtype=torch.float64))
    radius = 1 / (1 + eps)  # mean square that a vector is to have whose norm's output has this one
    for _ in range(STEPS):
        parts = u[:, 0].split([len(norm) for norm in norms])
        off = torch.stack([part.square().mean() - radius for part in parts])  # (norms,)
        if off.abs().max() < CLOSE:
            return u[:, 0] * (1 + eps) ** 0.5
        slopes = free(torch.block_diag(*[2 * part[:, None] / len(part) for part in parts]))  # (L * D, norms)
        step = slopes @ torch.linalg.lstsq(slopes.T @ slopes, off[:, None]).solution
        u = u - step * min(1.0, float(u.norm() / (2 * step.norm() + 1e-30)))
    return None

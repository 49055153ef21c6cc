"""Divergences and weights of conf/ with their plain formulas, and heads that a test of the loss needs."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import yaml
from hydra.utils import instantiate
from workbench import CONF

from decode.model.head import Head
from distill.losses import reference
from distill.losses.weights import DPace, Focal, Streak, constant, decay, first

V = 11
REDUCED = [7, 2, 9, 4, 0]  # the target's ids of a draft vocabulary
FLOOR, BETA, K, FADE = 1e-10, 0.3, 3, 3.0
TEXT = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(4))
NUMBERS = {"topk": {"k": K}, "reverse_kl": {"floor": FLOOR}, "jsd": {"beta": BETA}}  # other than conf's


def objectives() -> dict[str, tuple]:
    """Name -> the divergence of its yaml, and the function of this name in the reference, if it has one."""
    found = {}
    for path in sorted((CONF / "objective").glob("*.yaml")):
        settings = yaml.safe_load(path.read_text()) | NUMBERS.get(path.stem, {})
        if "terms" in settings:  # test_mix.py
            continue
        numbers = [value for key, value in settings.items() if not key.startswith("_")]
        plain = getattr(reference, path.stem, None)
        found[path.stem] = instantiate(settings), plain and (lambda r, f=plain, n=numbers: f(r, *n))
    return found


OBJECTIVES = objectives()
PAIRS = {name: pair for name, pair in OBJECTIVES.items() if pair[1]}
WEIGHT_PAIRS = {
    "constant": (constant, reference.constant),
    "decay": (partial(decay, rate=0.7), partial(reference.decay, rate=0.7)),
    "streak": (Streak(0.1, 0.0), partial(reference.streak, smoothing=0.1)),
    "streak by token": (Streak(0.1, 0.0, "token"), partial(reference.streak, smoothing=0.1)),
    "dpace": (DPace(0.5, 0.0), partial(reference.dpace, smoothing=0.5)),
    "dpace by token": (DPace(0.5, 0.0, "token"), partial(reference.dpace, smoothing=0.5)),
    "first": (first, reference.first),
    "focal": (Focal(2.0, "overlap"), partial(reference.focal, gamma=2.0)),
    "focal by token": (Focal(0.5, "token"), partial(reference.focal, gamma=0.5)),
    "focal by greedy": (Focal(1.0), partial(reference.focal, gamma=1.0)),
}
DIVERGENCES = {name: pair[0] for name, pair in PAIRS.items()}
WEIGHTS = {name: pair[0] for name, pair in WEIGHT_PAIRS.items()}


def drafted(head, vocabulary: str):
    """The target's head, or one that reads but five of its tokens."""
    if vocabulary == "full":
        return head
    ids = torch.tensor(REDUCED)
    return dataclasses.replace(head, weight=head.weight[ids], bias=head.bias[ids], d2t=ids)


def trainable(head: Head, change=torch.clone) -> Head:
    """The same head with weights that take a gradient."""
    weight, bias = (change(w).requires_grad_() for w in (head.weight, head.bias))
    return dataclasses.replace(head, weight=weight, bias=bias)


def acceptance_of(weights: str) -> str:
    return weights.partition(" by ")[2] or "overlap"


def rounded(ragged, dtype):
    """The same inputs in another precision."""
    head, last, anchors, hidden = ragged
    head = dataclasses.replace(head, weight=head.weight.to(dtype), bias=head.bias.to(dtype))
    return head, last.to(dtype), anchors, [h.to(dtype) for h in hidden]

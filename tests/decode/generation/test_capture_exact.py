"""Traced rounds, enumerated: the numbers in their table decide as the coins of the uncaptured loop do."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from captured_law import FirstRounds

from decode.depth_policy import DepthPolicy
from decode.generation.capture import rows
from decode.generation.capture.round import FixedRound
from decode.generation.capture.rows import bucket
from decode.plan import Plan
from decode.rng import KeyedCoin, Purpose, TableCoin
from decode.sampling import Sampler

TREE = ((0,), (1,), (0, 0))
SAMPLED, SEVERAL = Plan(2, proposal="sampled"), Plan(2, proposal="sampled", drafts=2)
# A chain's length changes with what was accepted, so that only verification is captured.
ADAPTIVE = replace(SAMPLED, adapt=DepthPolicy(0.45, ((1, (1.0, 1.42, 1.64)), (4, (1.0, 1.43, 1.65)))))
SIBLINGS, HYBRID = Plan(tree=TREE, proposal="sampled"), Plan(tree=TREE, proposal="hybrid")
PLANS = {
    "plain": Plan(),
    "match, chosen chain": Plan(2),
    "match, chosen tree": Plan(2, 2, 4),
    "match, chain": replace(SAMPLED, rule="match"),
    "token": SAMPLED,
    "block": replace(SAMPLED, rule="block"),
    "token, adaptive": ADAPTIVE,
    "block, adaptive": replace(ADAPTIVE, rule="block"),
    "recursive, siblings": SIBLINGS,
    "recursive, repeating siblings": replace(SIBLINGS, replacement=True),
    "recursive, hybrid": HYBRID,
    "recursive, dynamic hybrid": Plan(2, 2, 3, proposal="hybrid"),
    "traversal, siblings": replace(SIBLINGS, rule="traversal"),
    "traversal, hybrid": replace(HYBRID, rule="traversal"),
    "kseq": replace(SEVERAL, rule="kseq"),
    "select": replace(SEVERAL, rule="select"),
}


class Played(NamedTuple):
    """What is enumerated."""

    sampler: Sampler
    rounds: int


PLAYED = {
    "T=1": Played(Sampler(1.0), 1),
    "two warped rounds": Played(Sampler(1.5, top_k=2, top_p=0.95), 2),
}
PROMPT, OTHERS = [1, 2, 0, 1, 1, 0], [[2, 0, 1], [0, 0, 2, 1, 0], [1]]


@pytest.fixture
def check(tiny_target, make_drafter):
    """Compares a plan's traced rounds with the enumerated ones."""

    def checked(plan: str, played: str) -> int:
        # Of three tokens, two siblings would leave one.
        target = tiny_target(vocab=4 if "siblings" in plan else 3)
        drafter = make_drafter("eagle", target) if PLANS[plan].depth else None
        rounds = FirstRounds(target, drafter, PLANS[plan], *PLAYED[played])
        return rounds.check(PROMPT, OTHERS)

    return checked


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("played", PLAYED)
@pytest.mark.ci("two warped rounds-token", "T=1-traversal, siblings")
def test_traced_rounds_have_the_targets_distribution(check, plan, played):
    assert check(plan, played) > 1


@pytest.mark.parametrize("slots", [len(PROMPT) + 3, len(PROMPT) + 2])
def test_a_slot_too_few_for_the_last_draft_is_found(check, slots, monkeypatch):
    """The prompt, the root, and two drafted tokens."""
    monkeypatch.setattr(rows, "bucket", lambda count, least: bucket(count, 1) if least == 1 else slots)
    if slots > len(PROMPT) + 2:
        check("token", "T=1")
    else:
        with pytest.raises(AssertionError, match=r"^captured, "):
            check("token", "T=1")


# -- seeded bugs of the draws ---------------------------------------------------------------------


def with_keys(monkeypatch, change):
    """Numbers of other keys are read."""
    uniforms = KeyedCoin._uniforms
    monkeypatch.setattr(TableCoin, "_uniforms", lambda self, key, *given: uniforms(self, change(key), *given))


def two_purposes_share_numbers(monkeypatch):
    def change(key):
        return key._replace(purpose=Purpose.ACCEPT) if key.purpose == Purpose.RESIDUAL else key

    with_keys(monkeypatch, change)


def depths_share_a_number(monkeypatch):
    with_keys(monkeypatch, lambda key: key._replace(slot=0))


def siblings_share_a_number(monkeypatch):
    with_keys(monkeypatch, lambda key: key._replace(number=0))


def tokens_are_accepted_by_the_number_of_another_row(monkeypatch):
    flip = KeyedCoin.flip
    monkeypatch.setattr(
        TableCoin,
        "flip",
        lambda self, accept, proposal, *given: flip(self, accept.roll(1), proposal.roll(1), *given).roll(-1),
    )


def the_numbers_of_the_first_text_are_kept(monkeypatch):
    monkeypatch.setattr(FixedRound, "feed", lambda *_: None)


def tokens_are_drawn_in_single_precision(monkeypatch):
    """Which no number from the middle of its interval shows."""

    def draw(self, weights, key, active):
        cdf = weights.float().cumsum(-1)
        u = self._uniforms(key, 1 if active.ndim == 1 else active.shape[1], weights.device)
        places = (u.reshape(*active.shape, 1) * cdf[..., -1:]).float()
        return torch.searchsorted(cdf, places, right=True)[..., 0].clamp_max(weights.shape[-1] - 1)

    monkeypatch.setattr(TableCoin, "draw", draw)


BUGS = {
    two_purposes_share_numbers: "token",
    depths_share_a_number: "token",
    siblings_share_a_number: "recursive, siblings",
    tokens_are_accepted_by_the_number_of_another_row: "token",
    the_numbers_of_the_first_text_are_kept: "plain",
    tokens_are_drawn_in_single_precision: "plain",
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.ci("two_purposes_share_numbers", "tokens_are_accepted_by_the_number_of_another_row")
def test_seeded_bug_of_the_draws_is_found(bug, check, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=r"^captured, "):
        check(BUGS[bug], "T=1")

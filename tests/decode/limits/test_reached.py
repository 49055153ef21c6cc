"""How much of the best trees a drafter keeps, and what bounds tokens that are drawn."""

import itertools

import pytest
import torch

from decode.draft import PAD, Draft
from decode.limits.entropy_bound import best_trees
from decode.limits.tree_efficiency import (
    first_level_bound,
    path_probs,
    round_starts,
    transport,
    tree_acceptance,
)
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.lm import DraftLM

CONTEXTS = [[0, 1, 2, 1, 0], [2, 2, 1], [1, 0, 1, 2]]
WARM = Sampler(0.8)


@pytest.fixture
def own(tiny_target):
    """A target, and itself as its drafter."""
    target = tiny_target(vocab=8)
    drafter = DraftLM.for_target(target, path=None, layers=len(target.layers), train=False, lora=None)
    target.tap(drafter.taps)
    return target, drafter


def test_path_probabilities_are_products():
    probs = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    draft = Draft(torch.tensor([[0, 2, PAD]]), torch.tensor([[-1, 0, 1]]), depth=3)
    assert path_probs(draft, probs).tolist() == [pytest.approx([0.5, 0.35, 0.0])]


def test_target_as_its_own_drafter_keeps_the_best_trees(own):
    target, drafter = own
    plan = Plan(depth=6, width=6, nodes=6)  # no best tree is wider or deeper
    found = tree_acceptance(target, drafter, CONTEXTS, plan, Sampler(1.0), batch_size=2)
    best = best_trees(target, CONTEXTS, plan.nodes, Sampler(1.0)).sum(1)  # drafts are ranked so at any T
    assert found.chosen.tolist() == pytest.approx(best.tolist(), abs=1e-12)
    assert found.ranked.tolist() == pytest.approx(best.tolist(), abs=1e-12)


def test_another_drafter_keeps_less_than_the_best_trees(own, make_drafter):
    target, _ = own
    eagle = make_drafter("eagle", target)
    target.tap(eagle.taps)
    plan = Plan(depth=3, width=2, nodes=4)
    found = tree_acceptance(target, eagle, CONTEXTS, plan, WARM)
    best = best_trees(target, CONTEXTS, plan.nodes, WARM).sum(1)
    assert (found.chosen <= found.ranked + 1e-12).all()
    assert (found.ranked <= best + 1e-12).all()
    assert (best - found.chosen).max() > 0.01


def test_rounds_begin_behind_settled_tokens(own):
    target, drafter = own
    options = {"batch_size": 2, "max_new_tokens": 6, "stop": [], "seed": 0}
    found = round_starts(target, drafter, CONTEXTS, Plan(depth=2), Sampler(0.0), **options)
    for request, prompt in enumerate(CONTEXTS):
        mine = [start.context for start in found if start.request == request]
        assert [len(context) - len(prompt) for context in mine] == [1, 4]  # all drafted is right: 3 a round
        assert all(context[: len(prompt)] == prompt for context in mine)


def brute(p, q, k):
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(p)), n) for n in range(len(p) + 1))
    return 1 + min((p[list(s)].sum() - q[list(s)].sum() ** k).item() for s in sets)


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_transport_bound_is_the_minimum_over_all_sets(draws):
    dice = torch.Generator().manual_seed(0)
    p, q = (torch.rand(20, 6, generator=dice, dtype=torch.float64) ** 3 for _ in range(2))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    found = transport(p, q, torch.full((20,), draws))
    assert found.tolist() == pytest.approx([brute(*pair, draws) for pair in zip(p, q, strict=True)])
    if draws == 1:
        assert found.tolist() == pytest.approx(torch.minimum(p, q).sum(1).tolist())


@pytest.mark.parametrize(
    "plan", [Plan(2, proposal="sampled"), Plan(2, 2, 4, proposal="hybrid")], ids=["sampled", "hybrid"]
)
def test_draws_of_the_target_itself_are_always_accepted(own, plan):
    target, drafter = own
    assert first_level_bound(target, drafter, CONTEXTS, plan, WARM).tolist() == pytest.approx([1.0] * 3)

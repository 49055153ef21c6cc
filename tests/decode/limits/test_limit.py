"""The entropy limit, and the trees that no drafter can beat."""

import heapq
import itertools
import math

import numpy as np
import pytest
import torch

from decode.draft import PAD, Draft
from decode.limits.entropy_bound import best_trees, bound, entropy, published_bound
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


def paths(target, context, count, sampler):
    """Probabilities of the likeliest paths below a context, one at a time, by passes without a cache."""
    heap, found = [(-1.0, [])], []
    while len(found) <= count:
        mass, path = heapq.heappop(heap)
        found.append(-mass)
        last = target.read(torch.tensor([[*context, *path]])).last[0, -1]
        for token, p in enumerate(sampler.probs(target.head(last)).tolist()):
            heapq.heappush(heap, (mass * p, [*path, token]))
    return found[1:]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.6, top_p=0.9)], ids=["plain", "nucleus"])
def test_best_trees_hold_the_likeliest_of_all_paths(tiny_target, sampler, window):
    target = tiny_target(window=window)
    contexts = [[0, 1, 2, 1], [2, 2], [1, 0, 1]]
    found = best_trees(target, contexts, 24, sampler)
    for row, context in zip(found, contexts, strict=True):
        assert row.tolist() == pytest.approx(paths(target, context, 24, sampler), abs=1e-12)


def test_greedy_target_keeps_every_level_and_has_no_bound(tiny_target):
    assert best_trees(tiny_target(), [[0, 1]], 7, Sampler(0.0)).tolist() == [[1.0] * 7]
    assert bound(64, 0.0, 0.0) == published_bound(64, 0.0, 0.0) == math.inf


class Independent:
    """A target whose rows are independent draws, whatever came before."""

    device = torch.device("cpu")

    def __init__(self, draw, seed=0):
        self.draw, self.dice = draw, np.random.default_rng(seed)

    def start(self, rows, capacity):
        pass

    def keep(self, counts):
        pass

    def extend(self, tokens):
        pass

    def forward(self, tokens, block=None, scratch=0):
        return tokens

    def head(self, tokens):
        rows = [self.draw(self.dice) for _ in range(tokens.numel())]
        return torch.tensor(np.array(rows)).view(*tokens.shape, -1).log()


def zipf(size, power):
    weights = 1 / np.arange(1, size + 1) ** power
    return weights / weights.sum()


ROWS = {
    "even": lambda dice: np.array([0.5, 0.5]),
    "peaked": lambda dice: np.array([0.9, 0.1]),
    "zipf": lambda dice: zipf(50, 1.5),
    "dirichlet": lambda dice: dice.dirichlet(np.full(20, 0.3)) + 1e-12,
    "mixture": lambda dice: np.r_[0.97, np.full(9, 0.03 / 9)] if dice.random() < 0.7 else zipf(10, 0.7),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.ci("dirichlet", "zipf", "even")
def test_independent_rows_keep_the_bound_and_its_slope(rows):
    sizes, texts = [2**k for k in range(2, 10)], 24
    target = Independent(ROWS[rows])
    sample = torch.tensor(np.array([target.draw(target.dice) for _ in range(4000)]))
    mu, mu2 = entropy([sample]).moments
    kept = best_trees(target, [[0, 0]] * texts, sizes[-1], Sampler(1.0)).cumsum(1).mean(0)
    values = {size: kept[size - 1].item() for size in sizes}
    assert all(values[size] <= bound(size, mu, mu2) for size in sizes)
    slope = (values[512] - values[32]) / 4
    assert slope == pytest.approx(math.log(2) / mu, rel=0.1)
    assert published_bound(512, mu, mu2) > bound(512, mu, mu2)


def test_moments_and_correlation_of_rows():
    even, sure = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    found = entropy([torch.stack([even, even, sure, sure] * 8), torch.stack([sure] * 2)], lags=2)
    assert found.counts.tolist() == [32, 2]
    assert found.moments == pytest.approx((16 * math.log(2) / 34, 16 * math.log(2) ** 2 / 34))
    assert found.correlation[1] < -0.8 < found.correlation[0]


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

"""Drafts drawn over vocabularies of 150,000 tokens and more, where float32 sums of a softmax miss 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scripted import Oracle

from decode.draft import Draft
from decode.draft_check import draft_fault
from decode.errors import UserError
from decode.evaluation.audit import audit
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.result import normalised

SIZES = (151_936, 262_144)
SPREAD = 4.0  # standard deviation of the logits
ONE = Sampler(1.0)
CHAIN = Plan(depth=2, proposal="sampled", rule="token")
ONE_DEEP = replace(CHAIN, depth=1)
PROMPTS = [[5, 1, 7], [100_000, 3]]


@pytest.fixture(scope="module", params=SIZES)
def target(request, tiny_target) -> Target:
    """A target in float32 whose logits have that spread."""
    target = tiny_target(request.param, hidden=16, dtype=torch.float32)
    torch.nn.init.normal_(target.head.weight, std=SPREAD / 4)  # of states of length 4
    return target


class Scripted(Oracle):
    """Draws chains from a q of its own, made by `make` from spread logits."""

    def __init__(self, make) -> None:
        super().__init__([], 0)
        self.make = make

    def advance(self, state, target, tokens, taps, counts, root):
        pass

    def propose(self, state, target, sampler, coin, plan):
        logits = SPREAD * torch.randn(len(state), 1, target.vocab_size)
        q = self.make(logits)
        token = (q.double() + torch.rand(q.shape).double().mul(q > 0) * 1e-12).argmax(-1)
        return Draft.chain(token, q)


def decoded(target, drafter, plan=CHAIN):
    return generate(target, drafter, PROMPTS, max_new_tokens=6, sampler=ONE, plan=plan)


@pytest.mark.parametrize(
    ("name", "options"), [("lm", {}), ("skip", {}), ("eagle", {"draft_vocab_size": None})]
)
def test_drawn_drafts_over_a_large_vocabulary_pass_their_audit(target, make_drafter, name, options):
    drafter = make_drafter(name, target, depth=2, **options)
    if name == "lm":  # the others draft with the target's head
        with torch.no_grad():
            logits = drafter.model(input_ids=torch.tensor([[1, 2]])).logits
            drafter.model.lm_head.weight *= SPREAD / logits.std()
    target.tap(drafter.taps)
    found = audit(target, drafter, PROMPTS, plan=CHAIN, max_new_tokens=8, also=[(ONE, CHAIN)])
    assert found.passed, found
    assert found.sampled[0].draft_tokens > 0, "nothing was drawn"


@pytest.mark.parametrize("rule", ["recursive", "traversal", "kseq"])
def test_every_rule_that_reads_q_takes_drafts_over_a_large_vocabulary(target, make_drafter, rule):
    drafter = make_drafter("eagle", target, depth=2)
    plan = Plan(depth=2, proposal="sampled", drafts=2, rule=rule)
    target.tap(drafter.taps)
    assert sum(o.drafted[0] for o in decoded(target, drafter, plan).outputs) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_plain_softmax_is_a_distribution(target, dtype):
    found = decoded(target, Scripted(lambda logits: logits.softmax(-1).to(dtype)), ONE_DEEP)
    assert all(len(o.tokens) == 6 for o in found.outputs)


WRONG = {
    "0.999": lambda logits: 0.999 * logits.softmax(-1),
    "1.001": lambda logits: 1.001 * logits.softmax(-1),
    "NaN": lambda logits: logits.softmax(-1).index_fill(-1, torch.tensor([7]), torch.nan),
    "negative": lambda logits: logits.softmax(-1).index_fill(-1, torch.tensor([7]), -1e-5),
    "half precision, 0.98": lambda logits: (0.98 * logits.softmax(-1)).bfloat16(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_q_over_a_large_vocabulary_that_is_no_distribution_is_refused(target, wrong):
    with pytest.raises(UserError, match="drafted a q that is no distribution"):
        decoded(target, Scripted(WRONG[wrong]), ONE_DEEP)


def test_no_honest_softmax_is_refused_and_no_sum_of_0_999_is_taken():
    for size in (49_152, *SIZES):
        for spread in (0.5, 3.5, 4.0, 4.5):
            q = (spread * torch.randn(2, 8, size)).softmax(-1)
            draft = Draft.chain(q.argmax(-1), q)
            assert not draft_fault(draft, size, reads_probs=True).any(), (size, spread)
            assert draft_fault(Draft.chain(q.argmax(-1), q * 0.999), size, reads_probs=True).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_verification_reads_q_as_it_is_drawn_from(dtype):
    q = (SPREAD * torch.randn(3, 262_144, dtype=torch.float64)).softmax(-1).to(dtype)
    drawn = q.double() / q.double().sum(-1, keepdim=True)
    torch.testing.assert_close(normalised(q.float()).double(), drawn, rtol=1e-5, atol=0)


def test_a_drawn_child_whose_mass_is_below_the_smallest_number_is_left_out(tiny_target, make_drafter):
    target = tiny_target(8, hidden=16, dtype=torch.float32)
    target.head.weight.data.mul_(60)
    drafter = make_drafter("eagle", target, depth=2)
    target.tap(drafter.taps)
    tree = ((0,), (1,), (2,), (0, 0), (0, 1))
    plan = Plan(depth=2, width=3, nodes=5, tree=tree, proposal="hybrid", rule="recursive")
    for temperature in (0.4, 0.5, 0.6, 0.7, 0.8, 1.0):
        sampler = Sampler(temperature)
        found = generate(target, drafter, [[1, 2], [3]], max_new_tokens=40, sampler=sampler, plan=plan)
        assert all(len(o.tokens) == 40 for o in found.outputs)

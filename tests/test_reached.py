"""Weights that no answer reaches, in one process of several."""

from __future__ import annotations

import torch
from torch import nn

from distill.reached import Reached


def test_what_no_process_reached_has_no_gradient():
    weights = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    reached = Reached(lambda: weights)
    for part in (0, 1):  # two micro-batches
        loss = reached.join((weights[part].exp() * 2).sum().reshape(()))
        loss.backward()
    assert all(weight.grad is not None for weight in weights), "DDP would wait"
    assert not weights[2].grad.any()
    reached.leave_out(lambda marks: marks)
    assert [weight.grad is None for weight in weights] == [False, False, True]


def test_another_process_may_have_reached_it():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    reached = Reached(lambda: weights)
    reached.join(weights[0].sum()).backward()
    reached.leave_out(lambda marks: marks + torch.tensor([0.0, 1.0]))
    assert all(weight.grad is not None for weight in weights)
    reached.join(weights[0].sum()).backward()
    reached.leave_out(lambda marks: marks)
    assert weights[1].grad is None, "each optimizer step counts anew"


def test_a_loss_that_reaches_everything_is_left_as_it_is():
    weight = nn.Parameter(torch.ones(2))
    loss = torch.utils.checkpoint.checkpoint(lambda w: w.sin().sum(), weight, use_reentrant=False)
    assert Reached(lambda: [weight]).join(loss) is loss

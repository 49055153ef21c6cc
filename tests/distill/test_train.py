"""What a run decides from its options."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.train import COMPILED_STEPS, _kernels


@pytest.mark.parametrize(
    ("option", "device", "steps", "budget", "compiles"),
    [
        ("auto", "cpu", COMPILED_STEPS, None, True),
        ("auto", "cpu", COMPILED_STEPS - 1, None, False),
        ("auto", "cuda", COMPILED_STEPS, None, False),
        ("auto", "cpu", 10**7, object(), False),  # how many steps a budget has is known only at its end
        ("always", "cuda", 1, object(), True),
        ("never", "cpu", COMPILED_STEPS, None, False),
    ],
)
def test_objective_is_compiled_where_it_is_asked_for_or_pays(option, device, steps, budget, compiles):
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, max_steps=steps)
    options: Any = SimpleNamespace(compile_objective=option)
    assert (_kernels(options, trainer, budget) is not None) == compiles

"""What a run decides from its options."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.train import COMPILED_STEPS, _kernels


@pytest.mark.parametrize(
    ("option", "device", "steps", "compiles"),
    [
        ("auto", "cpu", COMPILED_STEPS, True),
        ("auto", "cpu", COMPILED_STEPS - 1, False),
        ("auto", "cuda", COMPILED_STEPS, True),
        ("auto", "cuda", COMPILED_STEPS - 1, False),
        ("always", "cuda", 1, True),
        ("never", "cpu", COMPILED_STEPS, False),
    ],
)
def test_objective_is_compiled_where_it_is_asked_for_or_pays(option, device, steps, compiles):
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, max_steps=steps)
    options: Any = SimpleNamespace(compile_objective=option)
    assert (_kernels(options, trainer) is not None) == compiles

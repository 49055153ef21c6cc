"""gradient_checkpointing=true: the same gradients, fewer activations kept for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from workbench import Bench, train

from drafters.base import Batch

OPTIONS = {
    "eagle": {},
    "eagle3": {"layers": 2, "draft_vocab_size": 10},
    "p_eagle": {"draft_vocab_size": 10},
    "prism": {},
    "lm": {},
    "lm with adapters": {"lora": {"r": 2, "alpha": 4}},
    "hf_dllm": {},
    "hf_dllm with a prefix": {"prefix": "causal"},
    "hf_dllm with adapters": {"lora": {"r": 2, "alpha": 4}},
    "medusa2": {},
    "prompt": {},
    "prompt with ensembles": {"ensemble": 2},
    "tidar": {},
}
REFUSE = ["medusa", "hydra", "mlp", "lstm"]


def kept_and_slopes(drafter, batch, target) -> tuple[int, list[Tensor]]:
    """Bytes that the unroll keeps for its backward pass, each storage once, and what that gives."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        steps = list(drafter.unroll(batch, target))
    dice = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for step in steps:
        total = total + (step.hidden * torch.randn(step.hidden.shape, generator=dice)).sum()
    trained = [w for n, w in drafter.named_parameters() if w.requires_grad and "lm_head" not in n]
    return sum(storages.values()), list(torch.autograd.grad(total, trained))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_same_and_less_is_kept(name, tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16)  # float64
    tokens = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(0))
    drafter, other = (make_drafter(name.split()[0], target, **OPTIONS[name]).train() for _ in range(2))
    read = target.read(tokens)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), read.taps, read.last)
    much, want = kept_and_slopes(drafter, batch, target)
    other.checkpoint_gradients()
    little, found = kept_and_slopes(other, batch, target)
    assert little < 0.8 * much
    for mine, other in zip(found, want, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("drafter", ["eagle", "lm"])
@pytest.mark.ci("eagle")
def test_a_run_trains_with_it(drafter, tmp_path):
    """In mixed precision, as is the default."""
    bench = Bench(tmp_path)
    more = [option for option in bench.command if drafter == "eagle" or option != "drafter.depth=2"]
    more += [f"drafter={drafter}", "score.enabled=false"]
    taken = [train([*more, f"gradient_checkpointing={on}"]) for on in ("false", "true")]
    assert [done.code for done in taken] == [0, 0]
    losses = [done.out.split("loss ")[-1].split()[0] for done in taken]
    assert losses[0] == losses[1]


def test_an_answer_of_its_own_is_the_same(tiny_target, make_drafter):
    """On-policy training copies the draft model, checkpointing and all."""
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter("lm", target)
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(0))
    want = drafter.as_target(target).read(tokens).last
    drafter.checkpoint_gradients()
    twin = drafter.as_target(target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.zero_()
    torch.testing.assert_close(twin.read(tokens).last, want, rtol=0, atol=0)


@pytest.mark.parametrize("drafter", REFUSE)
@pytest.mark.ci("mlp")
def test_a_drafter_that_keeps_next_to_nothing_says_so(drafter, tmp_path):
    done = train([f"drafter={drafter}", "gradient_checkpointing=true", f"output_dir={tmp_path}"])
    assert done.code == 2
    assert "gradient_checkpointing: this drafter keeps next to nothing" in done.err

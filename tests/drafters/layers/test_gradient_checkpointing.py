"""gradient_checkpointing=true: the same gradients, fewer activations kept for them."""

from __future__ import annotations

import pytest
import torch
from drafter_checks import batch_of
from torch import Tensor

from decode.errors import UserError
from drafters import optional
from drafters.layers.decoder_layer import DecoderLayer

VARIANTS = {
    "eagle3 of two layers": {"layers": 2, "draft_vocab_size": 10},
    "p_eagle with fewer tokens": {"draft_vocab_size": 10},
    "lm with adapters": {"lora": {"r": 2, "alpha": 4}},
    "hf_dllm with a prefix": {"prefix": "causal"},
    "hf_dllm with adapters": {"lora": {"r": 2, "alpha": 4}},
    "prompt with ensembles": {"ensemble": 2},
}


def kept_and_slopes(drafter, batch, target) -> tuple[int, list[Tensor | None]]:
    """Bytes that the unroll keeps for its backward pass, each storage once, and what that gives."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept, or its place would be given away
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        steps = list(drafter.unroll(batch, target))
    dice = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for step in steps:
        total = total + (step.hidden * torch.randn(step.hidden.shape, generator=dice)).sum()
    trained = [w for n, w in drafter.named_parameters() if w.requires_grad and "lm_head" not in n]
    return sum(kept.nbytes() for kept in storages.values()), list(
        torch.autograd.grad(total, trained, allow_unused=True)
    )


def test_every_drafter_keeps_less_or_has_no_layers(drafter_name, tiny_target, make_drafter):
    compare(drafter_name, {}, tiny_target, make_drafter)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_the_same_and_less_is_kept(name, tiny_target, make_drafter):
    compare(name.split()[0], VARIANTS[name], tiny_target, make_drafter)


def compare(name, options, tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16)  # float64
    tokens = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(0))
    drafter, other = (make_drafter(name, target, **options).train() for _ in range(2))
    if not drafter.trains:
        pytest.skip("used as it is")
    batch = batch_of(target, tokens)
    much, want = kept_and_slopes(drafter, batch, target)
    if not isinstance(drafter, optional.CheckpointsGradients):
        with pytest.raises(UserError, match="this drafter has no layers to recompute"):
            optional.checkpoint_gradients(other)
        assert not any(isinstance(module, DecoderLayer) for module in drafter.modules())
        return
    optional.checkpoint_gradients(other)
    little, found = kept_and_slopes(other, batch, target)
    assert little < 0.8 * much
    for mine, other in zip(found, want, strict=True):
        assert (mine is None) == (other is None)
        if mine is None:  # of a head, which is not in the sum
            continue
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_copy_that_answers_is_the_same(tiny_target, make_drafter):
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

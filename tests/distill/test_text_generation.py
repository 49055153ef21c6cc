"""A model whose tuned copies follow its weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from workbench import make_target

from decode.model.load import load_target
from decode.model.target import Target
from distill.text_generation import Model


class Tunes(nn.Module):
    """Verifies with a copy of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def verifier(self, target: Target) -> Target:
        tuned = copy.deepcopy(target.model)
        tuned.get_output_embeddings().weight.data.mul_(self.scale.sum())
        return Target(tuned)


def test_tuned_copy_of_a_target_follows_new_weights_of_either(tmp_path):
    target, drafter = load_target(str(make_target(tmp_path))), Tunes()
    model = Model(target, chat=None)
    seen = [model.verifier(drafter)]
    assert model.verifier(drafter) is seen[0]
    target.model.get_submodule("model.layers.0.mlp.down_proj").weight.data.mul_(2)
    seen.append(model.verifier(drafter))
    drafter.scale.data[1] = 5
    seen.append(model.verifier(drafter))
    assert len({verifier.fingerprint() for verifier in seen}) == 3
    assert seen[2].fingerprint() == drafter.verifier(target).fingerprint()
    assert model.verifier(drafter) is seen[2]

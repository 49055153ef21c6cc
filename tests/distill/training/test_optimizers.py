"""Muon for hidden matrices, AdamW for what reads and writes tokens."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, OPTConfig

from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
from distill.training.module import DistillModule
from distill.training.optim import hidden_matrices, muon, warm_up_and_decay

RATE = 0.01
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LAYER = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
HIDDEN = {
    "eagle": {"fc", *LAYER},
    "eagle3": {"fc", *LAYER},
    "medusa": {"0"},
    "hydra": {"skip", "linear"},
    "medusa2": {"0", "up", "down"},
    "mlp": {"0", "1", "2"},
    "lm": LLAMA,
    "hf_dllm": LLAMA,
}


def optimized(drafter, target):
    """The module's optimizer and schedule."""
    make = partial(muon, lr=RATE, momentum=0.95, betas=(0.9, 0.95), weight_decay=0.0)
    module = DistillModule(target, drafter, Objective(kl, constant), make, 0.0, 1.0)
    module._trainer = SimpleNamespace(max_steps=8)
    found = module.configure_optimizers()
    return found["optimizer"], found["lr_scheduler"]["scheduler"]


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(name, tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter(name, target)
    optimizer, _ = optimized(drafter, target)
    names = {id(w): name for name, w in drafter.named_parameters() if w.requires_grad}
    parts = {type(p).__name__: [w for g in p.param_groups for w in g["params"]] for p in optimizer.parts}
    assert {names[id(w)].split(".")[-2] for w in parts["Muon"]} <= HIDDEN[name]
    matrices = [w.shape for w in parts["AdamW"] if w.ndim == 2]
    assert all(40 in shape or 10 in shape for shape in matrices), "a matrix that is not Muon's has tokens"
    assert sorted(id(w) for w in parts["Muon"] + parts["AdamW"]) == sorted(names)


def test_embeddings_are_found_whatever_their_name():
    """Falcon's are `word_embeddings`; its head is tied to them."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for config in (FalconConfig(**sizes), OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16)):
        model = AutoModelForCausalLM.from_config(config)
        found = {id(weight) for weight in hidden_matrices(model)}
        names = {name for name, weight in model.named_parameters() if id(weight) in found}
        assert names
        assert not [name for name in names if "embed" in name or "head" in name]


def test_group_keeps_its_own_rate(tiny_target, make_drafter):
    """Medusa-2's adapters wait for the heads, whichever optimizer has them."""
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter("medusa2", target)
    optimizer, schedule = optimized(drafter, target)
    lora = {id(w) for w in drafter.lora.parameters()}
    want = [group.rate for group in drafter.param_groups()]
    for step in range(8):
        for group in optimizer.param_groups:
            (tuned,) = {id(w) in lora for w in group["params"]}
            assert group["lr"] == pytest.approx(RATE * want[tuned](step / 8))
        optimizer.step()
        schedule.step()


def test_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = warm_up_and_decay(optimizer, 10, warmup=0.28, final_lr=0.2), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    fall = [0.2 + 0.4 * (1 + math.cos(math.pi * i / 7)) for i in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, *fall, 0.2])


def test_optimizers_have_their_settings_and_step_by_the_loaded_groups():
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = muon([{"params": weights, "hidden": [True, False]}], RATE, 0.9, (0.8, 0.7), 0.1)
    hidden, rest = (part.param_groups[0] for part in optimizer.parts)
    assert (hidden["momentum"], hidden["weight_decay"]) == (0.9, 0.1)
    assert (rest["betas"], rest["weight_decay"]) == ((0.8, 0.7), 0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    for rate in (0.0, RATE):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight in weights:
            weight.grad = torch.eye(4)
        optimizer.step()
        assert [bool((weight == 1).all()) for weight in weights] == [rate == 0.0] * 2


def test_orthogonal_step_has_the_size_of_adamws():
    """0.2 sqrt(max(n, m)) times a matrix whose singular values are near 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    optimizer = muon([{"params": [weight], "hidden": [True]}], RATE, 0.95, (0.9, 0.95), 0.0)
    weight.grad = torch.randn(64, 16)
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach()) / (RATE * 0.2 * 64**0.5)
    assert ((values > 0.6) & (values < 1.3)).all()


def test_what_muon_refuses_is_found_before_any_work(bench):
    before = bench.runs()
    bench.train("optimizer=muon", "optimizer.optimizer.momentum=-1").refused("momentum")
    assert bench.runs() == before

"""Muon for hidden matrices, AdamW for what reads and writes tokens."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, OPTConfig
from workbench import Bench, final, kill_in_training, same

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
    """The module's optimizer and schedule, and the names of each part's weights."""
    make = partial(muon, lr=RATE, momentum=0.95, betas=(0.9, 0.95), weight_decay=0.0)
    module = DistillModule(target, drafter, Objective(kl, constant), make, 0.0, 1.0)
    module._trainer = SimpleNamespace(max_steps=8)
    found = module.configure_optimizers()
    names = {id(w): name for name, w in drafter.named_parameters()}
    parts = {
        type(part).__name__: [names[id(w)] for group in part.param_groups for w in group["params"]]
        for part in found["optimizer"].parts
    }
    return found["optimizer"], found["lr_scheduler"]["scheduler"], parts


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(name, tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter(name, target)
    _, _, parts = optimized(drafter, target)
    assert {n.split(".")[-2] for n in parts["Muon"]} <= HIDDEN[name]
    rest = [w for n, w in drafter.named_parameters() if n in parts["AdamW"] and w.ndim == 2]
    assert all(40 in w.shape or 10 in w.shape for w in rest), "a matrix that is not Muon's has tokens"
    every = [n for n, w in drafter.named_parameters() if w.requires_grad]
    assert sorted(parts["Muon"] + parts["AdamW"]) == sorted(every)


def test_embeddings_are_found_whatever_their_name():
    """Falcon's are `word_embeddings`; its head is tied to them."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for config in (FalconConfig(**sizes), OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16)):
        model = AutoModelForCausalLM.from_config(config)
        found = {id(weight) for weight in hidden_matrices(model)}
        names = {name for name, weight in model.named_parameters() if id(weight) in found}
        assert names
        assert not [name for name in names if "embed" in name or "head" in name]


def test_a_group_keeps_its_own_rate(tiny_target, make_drafter):
    """Medusa-2's adapters wait for the heads, whichever optimizer has them."""
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter("medusa2", target)
    optimizer, schedule, _ = optimized(drafter, target)
    lora = {id(w) for w in drafter.lora.parameters()}
    want = [group.rate for group in drafter.param_groups()]
    for step in range(8):
        for group in optimizer.param_groups:
            (tuned,) = {id(w) in lora for w in group["params"]}
            assert group["lr"] == pytest.approx(RATE * want[tuned](step / 8))
        optimizer.step()
        schedule.step()


def test_a_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = warm_up_and_decay(optimizer, 10, warmup=0.28, final_lr=0.2), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    fall = [0.2 + 0.4 * (1 + math.cos(math.pi * i / 7)) for i in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, *fall, 0.2])


def test_both_optimizers_have_their_settings_and_step_by_the_groups_they_were_loaded_with():
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


def test_an_orthogonal_step_has_the_size_of_adamws():
    """0.2 sqrt(max(n, m)) times a matrix whose singular values are near 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    optimizer = muon([{"params": [weight], "hidden": [True]}], RATE, 0.95, (0.9, 0.95), 0.0)
    weight.grad = torch.randn(64, 16)
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach()) / (RATE * 0.2 * 64**0.5)
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.proof
def test_a_killed_run_with_muon_ends_as_if_nothing_had_happened(tmp_path, tmp_path_factory, monkeypatch):
    bench = Bench(tmp_path_factory.mktemp("muon"))
    more = ["optimizer=muon", "score.enabled=false", "score.every=2"]
    straight = bench.train(*more, f"output_dir={tmp_path / 'a'}").succeeded()
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(*more, f"output_dir={tmp_path / 'b'}") == 9
    resumed = bench.train(*more, f"output_dir={tmp_path / 'b'}")
    assert "resuming from step 2" in resumed.out
    assert same(final(straight.folder), final(resumed.folder))


def test_what_muon_refuses_is_found_before_any_work(tmp_path):
    bench = Bench(tmp_path)
    done = bench.train("optimizer=muon", "optimizer.optimizer.momentum=-1")
    done.refused("momentum")
    assert not bench.runs()

"""EAGLE and Medusa in the files of their authors' code: loaded by its rules it is the same drafter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from eagles import EAGLE3, build, difference, written
from faces import K, V
from served_authors import Authored, medusa
from transformers import Qwen3Config, Qwen3ForCausalLM

from decode.errors import UserError
from decode.model.target import LAST, Target
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.registry import short_name

NAME = "some/target"
EAGLES = ["eagle with a bias", "eagle without", "hass", "eagle3", "eagle3, every token"]
MEDUSAS = [{}, {"own_head": False}, {"bias": True}, {"depth": 5}]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target and a drafter of a case."""
    return partial(build, tiny_target, make_drafter)


@pytest.fixture
def target(tiny_target) -> Target:
    target = tiny_target(vocab=V, layers=2, hidden=16, dtype=torch.float32)
    target.model.config._name_or_path = target.model.name_or_path = NAME
    target.tap([LAST])
    return target


def folder_of(layout, path):
    path.mkdir()
    layout.write(path)
    return path


def same(drafter, back):
    """Bit for bit, and of the same settings but for those of training and of a bias that there is not."""
    ours, theirs = drafter.state_dict(), back.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(value.equal(ours[name]) for name, value in theirs.items())
    of_training = {"anchors", "depth_weight", "rate", "feature_noise", "feature_weight", "detach"}
    told = drafter.settings.keys() - of_training - {"info_rank", "hot_tokens"}
    told -= set() if short_name(drafter) == "medusa" else {"depth"}
    assert {k: back.settings.get(k) for k in told} == {k: drafter.settings[k] for k in told}


# -- EAGLE -----------------------------------------------------------------------------------------


def loaded(layout, target) -> Authored:
    return Authored(layout, target.head.weight)


@pytest.mark.parametrize("case", EAGLES)
def test_the_authors_eagle_computes_the_drafters_logits(made, case, tmp_path):
    target, drafter = made(case)
    layout = written(drafter, target, "authors")
    assert difference(target, drafter, loaded(layout, target)) < 1e-5
    assert f"use_eagle3={case.startswith('eagle3')}" in layout.note
    assert ("model.safetensors.index.json" in layout.note) is not case.startswith("eagle3")
    folder = folder_of(layout, tmp_path / "theirs")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    same(drafter, checkpoint_io.load(folder, target))


@pytest.mark.parametrize("case", ["eagle without", "eagle3"])
def test_positions_that_are_scaled_linearly_are_written_as_they_are_read(made, make_drafter, case):
    target, _ = made(case)
    target.config.rope_parameters = dict(LINEAR)
    options = {"taps": None, **EAGLE3} if case == "eagle3" else {}
    drafter = make_drafter(case.split()[0], target, depth=K, **options).requires_grad_(False)
    layout = written(drafter, target, "authors")
    assert layout.config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert difference(target, drafter, loaded(layout, target), texts=5) < 1e-5
    plain = layout._replace(config=layout.config | {"rope_scaling": None})
    assert difference(target, drafter, loaded(plain, target), texts=5) > 1e-3


def test_classes_of_targets_that_the_authors_code_has_not_are_refused(tiny_target, make_drafter):
    """EAGLE has no Mistral, and its EAGLE-3 no Qwen2 or Mixtral; Medusa has no Qwen3."""
    mistral = tiny_target(vocab=V, layers=8, hidden=16, window=32, dtype=torch.float32)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 8}
    qwen3 = Target(Qwen3ForCausalLM(Qwen3Config(vocab_size=V, **shape)).float().eval())
    for target in (mistral, qwen3):
        target.model.config._name_or_path = target.model.name_or_path = NAME
    options = {"eagle": {}, "eagle3": {"taps": None, **EAGLE3}, "medusa": {}}
    taken = {
        (name, type(target.model).__name__)
        for name, more in options.items()
        for target in (mistral, qwen3)
        if "authors" in formats.accepting(name, make_drafter(name, target, **more).settings, target)
    }
    assert taken == {
        ("eagle", "Qwen3ForCausalLM"),
        ("eagle3", "Qwen3ForCausalLM"),
        ("medusa", "MistralForCausalLM"),
    }


def test_heads_that_do_not_fill_the_hidden_size_are_refused(made):
    target, drafter = made("eagle without")
    with pytest.raises(UserError, match="2 heads of 4 are not 16 together"):
        formats.check("eagle", drafter.settings | {"head_dim": 4}, target, "authors")


# -- Medusa ----------------------------------------------------------------------------------------


@torch.no_grad()
def gap(run, drafter, target) -> float:
    """Largest difference of a logit on random features."""
    features = torch.randn(100, 16, generator=torch.Generator().manual_seed(7))
    heads = [drafter.lm_heads.head_for(j, target.head) for j in range(1, drafter.depth + 1)]
    pairs = zip(run(features), heads, drafter.blocks, strict=True)
    return max(float((row - head(block(features))).abs().max()) for row, head, block in pairs)


@pytest.mark.parametrize("form", MEDUSAS, ids=str)
def test_the_authors_medusa_computes_the_drafters_logits(target, make_drafter, tmp_path, form):
    drafter = make_drafter("medusa", target, **{"depth": K} | form).requires_grad_(False)
    layout = written(drafter, target, "authors")
    folder = folder_of(layout, tmp_path / "theirs")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "medusa_lm_head.pt"]
    assert gap(medusa(folder, NAME, target.head.weight), drafter, target) < 1e-5
    assert ("builds 5 heads" in layout.note) is (drafter.depth != 5)
    back = checkpoint_io.load(folder, target)
    assert gap(medusa(folder, NAME, target.head.weight), back, target) < 1e-5
    if drafter.settings["own_head"]:  # a shared head is read as one of each depth
        same(drafter, back)


def test_a_shared_head_is_in_the_file_once(target, make_drafter, tmp_path):
    sizes = []
    for own in (True, False):
        drafter = make_drafter("medusa", target, depth=K, own_head=own)
        folder = folder_of(written(drafter, target, "authors"), tmp_path / str(own))
        sizes.append((folder / "medusa_lm_head.pt").stat().st_size)
    assert sizes[0] - sizes[1] >= (K - 1) * target.head.weight.nbytes

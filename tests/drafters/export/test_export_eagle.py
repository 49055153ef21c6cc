"""EAGLE in the files of vLLM and SGLang: loaded by their rules it is the same drafter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import eagles
import pytest
import torch
from eagles import EAGLE3, SERVED, build, written
from faces import K, V
from served_eagle import IDS, Loaded, LoadError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from drafters import vocabulary
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.export.layout import Layout

YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 4}


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target and a drafter of a case."""
    return partial(build, tiny_target, make_drafter)


def loaded_by(layout: Layout, engine: str, target) -> Loaded:
    return Loaded(layout, engine, target.embed.weight, target.head.weight)


def difference(target, drafter, layout, engine, texts=100) -> float:
    return eagles.difference(target, drafter, loaded_by(layout, engine, target), texts)


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_an_engine_computes_the_drafters_logits(made, case, engine):
    target, drafter = made(case)
    layout = written(drafter, target, engine)
    assert difference(target, drafter, layout, engine) < 1e-5
    # vLLM 0.32 has no parameter for a map of the whole vocabulary and refuses to load one.
    smaller = layout.config.get("draft_vocab_size", V) < V
    maps = {"d2t", "t2d"} if smaller else set()
    assert {"d2t", "t2d", "embed_tokens.weight"} & layout.tensors.keys() == maps
    assert layout.config["max_position_embeddings"] >= target.config.max_position_embeddings
    assert layout.config["torch_dtype"] == "float32"
    served = layout.command("T", "D")
    assert "T" in served.split()
    assert '"model": "D"' in served if engine == "vllm" else "D --speculative-num-steps" in served


def test_both_engines_load_the_same_files_of_an_eagle3(made):
    target, drafter = made("eagle3, other taps")
    one, other = (written(drafter, target, engine) for engine in ("vllm", "sglang"))
    assert one.config == other.config
    assert all(tensor.equal(other.tensors[name]) for name, tensor in one.tensors.items())
    assert one.serve != other.serve


def test_default_taps_go_unnamed_and_others_by_both_conventions(made):
    target, drafter = made("eagle3")
    assert drafter.taps == (2, 4, 5)
    assert not {IDS, "eagle_config"} & written(drafter, target, "vllm").config.keys()
    config = written(made("eagle3, other taps")[1], target, "vllm").config
    assert config[IDS] == [1, 3]
    assert config["eagle_config"][IDS] == [0, 2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_broken_export_is_caught(made, engine):
    """Each is what other trainers have shipped."""
    target, drafter = made("eagle3, other taps")
    layout = written(drafter, target, engine)
    for name in ("d2t", "norm.weight", "midlayer.hidden_norm.weight"):
        less = {k: v for k, v in layout.tensors.items() if k != name}
        with pytest.raises(LoadError, match=r"d2t is missing|stays random"):
            loaded_by(layout._replace(tensors=less), engine, target)
    ids = layout.tensors["d2t"] + torch.arange(12)
    absolute = layout._replace(tensors=layout.tensors | {"d2t": ids})
    with pytest.raises(AssertionError):  # out of the vocabulary, or other tokens
        difference(target, drafter, absolute, engine, texts=2)
    config = layout.config | {IDS: [2, 4], "eagle_config": {IDS: [1, 3]}}  # ours as outputs
    assert difference(target, drafter, layout._replace(config=config), engine, texts=2) > 1e-2
    swapped = layout.tensors["fc.weight"].unflatten(1, (2, -1)).flip(1).flatten(1)
    swapped = layout._replace(tensors=layout.tensors | {"fc.weight": swapped})
    assert difference(target, drafter, swapped, engine, texts=2) > 1e-2


def test_scaled_positions_are_there_for_readers_of_any_version(made, tiny_target, make_drafter):
    target, _ = made("eagle3")
    target.config.rope_parameters = dict(YARN)
    drafter = make_drafter("eagle3", target, taps=None, **EAGLE3).requires_grad_(False)
    layout = written(drafter, target, "vllm")
    assert difference(target, drafter, layout, "vllm", texts=5) < 1e-5
    old = {k: v for k, v in layout.config.items() if k != "rope_parameters"}
    new = {k: v for k, v in layout.config.items() if k not in ("rope_scaling", "rope_theta")}
    one, other = (LlamaRotaryEmbedding(LlamaConfig(**config)) for config in (old, new))
    assert one.inv_freq.equal(other.inv_freq)
    assert one.attention_scaling == other.attention_scaling != 1.0
    plain = layout.config | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    assert difference(target, drafter, layout._replace(config=plain), "vllm", texts=5) > 1e-3


def test_the_targets_head_is_shared_as_far_as_it_goes(made):
    target, drafter = made("eagle without")
    target.head = replace(target.head, scale=0.5, softcap=30.0)
    config = written(drafter, target, "sglang").config
    assert (config["logit_scale"], config["final_logit_softcapping"]) == (0.5, 30.0)


def test_a_vocabulary_that_is_not_counted_is_refused(made):
    target, drafter = made("eagle3")
    target.model.config._name_or_path = target.model.name_or_path = "some/target"
    drafter.d2t.fill_(-1)
    for to in ("vllm", "speculators"):
        with pytest.raises(UserError, match="has not been counted"):
            written(drafter, target, to)


def test_a_confidence_head_stays_here(made):
    target, drafter = made("eagle without")
    drafter.add_confidence()
    layout = written(drafter, target, "vllm")
    assert not any("confidence" in name for name in layout.tensors)
    loaded_by(layout, "vllm", target)


@pytest.mark.parametrize("name", ["eagle", "medusa", "dflash"])
def test_tokens_that_are_not_drafted_here_are_by_vllm(tiny_target, make_drafter, name):
    """All were trained: the file is that of the same drafter without a draft vocabulary."""
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafters = [make_drafter(name, target, depth=K, draft_vocab_size=size) for size in (None, 7)]
    layouts = [written(drafter, target, "vllm") for drafter in drafters]
    whole, reduced = (layout.tensors for layout in layouts)
    assert layouts[0].config == layouts[1].config
    assert whole.keys() == reduced.keys()
    assert all(value.equal(reduced[key]) for key, value in whole.items())


def test_a_vocabulary_whose_size_was_chosen_is_written_as_any_other(tiny_target, make_drafter, monkeypatch):
    for name, value in {"FEWEST": 1, "STEP": 1, "SPARED": 0.3}.items():
        monkeypatch.setattr(vocabulary, name, value)
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle3", target, depth=K, draft_vocab_size=V // 4)
    drafter.sizes_vocabulary = True
    drafter.fit([Text([1, 2, 2, 3], [1, 1, 1, 1])] * 20, target)
    size = len(drafter.d2t)
    assert size == drafter.settings["draft_vocab_size"] < V // 4
    layout = written(drafter, target, "vllm")
    loaded_by(layout, "vllm", target)
    assert layout.config["draft_vocab_size"] == len(layout.tensors["lm_head.weight"]) == size


def test_sglang_is_told_which_tokens_to_draft(tiny_target, make_drafter, tmp_path):
    """Its `load_token_map` reads a list of ids with `weights_only`."""
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle", target, depth=K, draft_vocab_size=7)
    layout = written(drafter, target, "sglang")
    assert "d2t" not in layout.tensors
    layout.write(tmp_path)
    ids = torch.load(tmp_path / "token_map.pt", weights_only=True)  # noqa: TID251  (as SGLang reads it)
    assert ids == drafter.d2t.tolist()
    assert "--speculative-token-map /a/drafter/token_map.pt" in layout.command("t", "/a/drafter")


def test_a_bias_of_zeros_is_read_as_none(made, tmp_path):
    """SGLang's files have one for every EAGLE; vLLM has none."""
    target, drafter = made("eagle without")
    written(drafter, target, "sglang").write(tmp_path)
    back = checkpoint_io.load(tmp_path, target)
    assert not back.settings["bias"]
    assert "fc.bias" not in written(back, target, "vllm").tensors

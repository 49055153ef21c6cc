"""GGUF files of drafters: what they hold, and draft models as transformers reads them.

tests/engines/test_llama_cpp.py has llama.cpp itself read them.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from ggufs import F16, F32, Q8_0, QWEN35, QWEN35_KEYS, random_model, tiny_llama, words, write_gguf
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from workbench import enlarge

from decode.errors import UserError
from decode.model import gguf
from decode.model.files.gguf.header import read_header
from decode.model.files.gguf.rope import Rope
from decode.model.load import load_model, load_target
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.export.llama_cpp import file as gguf_file
from drafters.hf.mtp_weights import KNOWN
from drafters.layers.rope import frequencies

TAKEN = {
    "eagle3": {"fc_norm": False, "norm_before_fc": True, "taps": [1, 4, 6], "draft_vocab_size": None},
    "dflash": {"taps": [2, 4]},
    "dspark": {"taps": [2, 4], "markov_rank": 32},
    "lm": {"layers": 2},
}
LAYER = {
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
}
BLOCK = LAYER | {"attn_q_norm", "attn_k_norm"}
HELD = {  # tensors of a layer, and others
    "eagle3": (LAYER | {"attn_norm_2"}, {"fc", "enc.output_norm", "output_norm", "output"}),
    "dflash": (BLOCK, {"fc", "enc.output_norm", "output_norm"}),
    "dspark": (BLOCK, {"fc", "enc.output_norm", "output_norm", "markov_w1", "markov_w2"}),
    "lm": (LAYER, {"token_embd", "output_norm"}),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory, own_cache):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "target.gguf", tiny_llama(layers=8), F32)


@pytest.fixture(scope="module")
def target(file):
    return load_target(str(file), "float32")


def exported(drafter, target, folder, kind=None):
    """The header of a drafter's file."""
    folder.mkdir()
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "gguf")
    gguf_file.write_on(layout, gguf_file.target_file(None, target), kind).write(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "drafter.gguf"]
    return read_header(folder / "drafter.gguf")


@pytest.mark.parametrize("kind", [None, "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", TAKEN)
def test_file_has_the_drafters_tensors_and_the_targets_tokenizer(
    name, kind, file, target, make_drafter, tmp_path
):
    header = exported(make_drafter(name, target, **TAKEN[name]), target, tmp_path / "out", kind)
    layer, others = HELD[name]
    expected = {f"blk.{i}.{part}.weight" for i in header.layers for part in layer}
    assert set(header.tensors) == expected | {f"{part}.weight" for part in others}
    assert len(header.layers) == header.keys[f"{header.architecture}.block_count"]
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    assert kinds == {(kind or "f32").upper()}
    assert {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) == 1} == {"F32"}
    theirs = read_header(file).keys
    for key, value in header.keys.items():
        if key.startswith("tokenizer.") and key != "tokenizer.ggml.mask_token_id":
            assert np.array_equal(value, theirs[key])
    assert sum(key.startswith("tokenizer.") for key in theirs) <= len(header.keys)


def test_mtp_layer_is_one_more_layer_beside_the_targets_tables(make_drafter, tmp_path, own_cache):
    model = random_model("qwen3_5_text", **QWEN35, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "target.gguf", model, F16, architecture="qwen35", keys=QWEN35_KEYS)
    target, theirs = load_target(str(file), "float32", decodes=False), read_header(file)
    form = {"gate": True, "qk_norm": True, "zero_centred": True} | KNOWN["qwen3_5_text"]._asdict()
    head = make_drafter("mtp", target, family="qwen", **form)
    header = exported(head, target, tmp_path / "out", "f16")
    parts = BLOCK - {"ffn_norm"} | {"post_attention_norm"}
    parts |= {f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    tables = {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert set(header.tensors) == {f"blk.4.{part}.weight" for part in parts} | tables
    for name in tables:
        assert header.tensors[name]._replace(blocks=None) == theirs.tensors[name]._replace(blocks=None)
        assert np.array_equal(header.tensors[name].blocks, theirs.tensors[name].blocks)
    added = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    assert {key: header.keys[key] for key in added} == added
    for key, value in theirs.keys.items():
        assert key in added or np.array_equal(header.keys[key], value)
    gate = head.layer.gate_proj.weight.unflatten(0, (4, 32))
    rows = torch.from_numpy(header.tensors["blk.4.attn_q.weight"].values()).unflatten(0, (4, 2, 32))
    torch.testing.assert_close(rows[:, 1], gate.detach(), rtol=1e-3, atol=1e-3)  # queries, gate of a head
    for options, said in (({"family": ""}, "a new head"), ({"norm_output": False}, "norm_output=false")):
        other = make_drafter("mtp", target, **{"family": "qwen"} | form | options)
        with pytest.raises(UserError, match=said):
            formats.check("mtp", other.settings, target, "gguf")


def test_reduced_vocabulary_has_a_table_of_target_ids(target, make_drafter, tmp_path):
    drafter = make_drafter("eagle3", target, **TAKEN["eagle3"] | {"draft_vocab_size": 64})
    ids = torch.arange(100, 228, 2)
    drafter.d2t.copy_(ids)
    header = exported(drafter, target, tmp_path / "out", "q4_0")
    table = header.tensors["d2t"]
    assert (table.kind, table.blocks.view(np.int64).ravel().tolist()) == ("I64", ids.tolist())
    assert header.tensors["output.weight"].shape == (64, target.hidden_size)


def test_row_that_is_no_multiple_of_a_block_is_kept_in_half_precision():
    assert gguf_file.kind_of(torch.zeros(4, 64), "q4_0") == "q4_0"
    assert gguf_file.kind_of(torch.zeros(4, 48), "q4_0") == "f16"
    assert gguf_file.kind_of(torch.zeros(1, 64), "q4_0") == "f32"
    assert gguf_file.kind_of(torch.zeros(4, 64, dtype=torch.bfloat16), None) == "bf16"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_draft_model_is_the_same_in_transformers(kind, target, make_drafter, tmp_path):
    if kind == "llama":
        drafter = make_drafter("lm", target, **TAKEN["lm"])
    else:
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": len(words())}
        config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](**shape, tie_word_embeddings=False)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        enlarge(model, 6)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
        model.save_pretrained(tmp_path / "draft")
        drafter = make_drafter("lm", target, path=str(tmp_path / "draft"))
    exported(drafter, target, tmp_path / "out")
    read = load_model(str(tmp_path / "out" / "drafter.gguf")).eval()
    texts = torch.randint(3, len(words()), (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, want = (model(input_ids=texts).logits for model in (read, drafter.model.eval()))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "linear": {"factor": 2.0},
}


def test_draft_model_of_a_file_is_that_file(target, make_drafter, tmp_path):
    file = write_gguf(tmp_path / "draft.gguf", tiny_llama(seed=1), Q8_0)
    sha = hashlib.sha256(file.read_bytes()).hexdigest()
    drafter = make_drafter("lm", target, path=str(file), train=False)
    (tmp_path / "checkpoint").mkdir()
    checkpoint_io.save(drafter, target, tmp_path / "checkpoint")
    assert str(tmp_path) not in (tmp_path / "checkpoint" / "config.json").read_text()
    loaded = checkpoint_io.load(tmp_path / "checkpoint", target)
    exported(loaded, target, tmp_path / "same")
    assert (tmp_path / "same" / "drafter.gguf").read_bytes() == file.read_bytes()
    layout = formats.write_layout(checkpoint_io.as_saved(loaded), target, "gguf")
    served = gguf_file.target_file(None, target)
    assert f"draft.gguf itself, SHA-256 {sha}." in gguf_file.write_on(layout, served, None).note
    assert exported(loaded, target, tmp_path / "f16", "f16").tensors["token_embd.weight"].kind == "F16"
    trained = make_drafter("lm", target, path=str(file))
    assert exported(trained, target, tmp_path / "trained").tensors["token_embd.weight"].kind == "F32"
    moved = file.rename(tmp_path / "moved.gguf")
    assert gguf.file_of(sha) is None
    make_drafter("lm", target, path=str(moved), train=False)
    assert gguf.file_of(sha) == moved
    file = moved
    file.write_bytes(file.read_bytes() + b"more")
    assert exported(loaded, target, tmp_path / "changed").tensors["token_embd.weight"].kind == "F32"
    assert f"SHA-256 {sha}, was not found" in gguf_file.write_on(layout, served, None).note


@pytest.mark.parametrize("sha", ["", "../../../etc", "0" * 63, "0" * 64])
def test_file_that_a_checkpoint_names_is_known_here_or_not_read(sha, own_cache):
    assert gguf.file_of(sha) is None


@pytest.mark.parametrize("scaling", SCALINGS)
def test_positions_in_the_file_are_the_drafters(scaling, target, make_drafter, tmp_path, monkeypatch):
    """By what llama.cpp computes from a file's keys (decode/model/files/gguf/rope.py)."""
    rope = {"rope_type": scaling, "original_max_position_embeddings": 64, **SCALINGS[scaling]}
    monkeypatch.setattr(target.config, "rope_parameters", {"rope_theta": 1e4} | rope)
    drafter = make_drafter("eagle3", target, **TAKEN["eagle3"])
    header = exported(drafter, target, tmp_path / "out")
    size = drafter.settings["head_dim"]
    theirs = Rope(header, size, 256).everywhere()
    ours, scale = frequencies(size, 1e4, rope, torch.empty(0))
    np.testing.assert_allclose(theirs.frequencies, ours, rtol=1e-5)
    assert theirs.scale == pytest.approx(scale)


@pytest.mark.parametrize(("named", "said"), [("/nowhere.gguf", "no such file"), ("/tmp", "no GGUF file")])
def test_missing_file_of_the_target_is_refused(named, said, target):
    with pytest.raises(UserError, match=f"^target_gguf={named}: {said}"):
        gguf_file.target_file(named, target)


OTHERS = {
    "hidden_size": {"hidden_size": 32},
    "number of layers": {"layers": 2},
}


@pytest.mark.parametrize("said", OTHERS)
def test_file_of_another_model_is_refused(said, target, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", tiny_llama(**{"layers": 8} | OTHERS[said]), F32)
    with pytest.raises(UserError, match=f"its {said} is .*, the target's"):
        gguf_file.target_file(str(other), target)
    write_gguf(other, tiny_llama(layers=8), F32, tokenizer=False)
    with pytest.raises(UserError, match="its number of tokens is 0"):
        gguf_file.target_file(str(other), target)


def test_yarn_that_llama_cpp_does_not_compute_is_refused(target, make_drafter, monkeypatch):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"attention_factor": 1.5}
    monkeypatch.setattr(target.config, "rope_parameters", {"rope_theta": 1e4} | rope)
    drafter = make_drafter("eagle3", target, **TAKEN["eagle3"])
    with pytest.raises(UserError, match="YaRN with the usual settings alone"):
        formats.check("eagle3", drafter.settings, target, "gguf")


def test_draft_model_of_another_class_is_refused(target, make_drafter):
    drafter = make_drafter("lm", target, **TAKEN["lm"])
    settings = dict(drafter.settings)
    settings["config"] = settings["config"] | {"model_type": "mistral", "sliding_window": 32}
    with pytest.raises(UserError, match=r"a window in its layers, and llama.cpp's mistral has none"):
        formats.check("lm", settings, target, "gguf")


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_drafter_of_hidden_states_is_refused_where_llama_cpp_keeps_none(
    kind, target, make_drafter, monkeypatch
):
    drafter = make_drafter(kind, target, **TAKEN[kind])
    formats.check(kind, drafter.settings, target, "gguf")
    monkeypatch.setattr(target.config, "model_type", "qwen2")
    with pytest.raises(UserError, match=r"no hidden states of a qwen2 target.*drafter=lm or lm_given"):
        formats.check(kind, drafter.settings, target, "gguf")
    draft_model = make_drafter("lm", target, **TAKEN["lm"])
    assert "gguf" in formats.accepting("lm", draft_model.settings, target)

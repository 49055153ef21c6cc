"""Everything in a GGUF file is read, or accounted for; what is read is what was written."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggufs import F32, pieces, settings, tiny_llama, vocabulary, weights, words, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from decode.errors import UserError
from decode.model import gguf
from decode.model.load import load_config, load_model, load_target, load_tokenizer, stop_tokens

GEMMA = pieces(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")) | {
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_space_prefix": False,
}
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 16, "head_dim": 32}
SHORT, LONG = [1 + 0.1 * at for at in range(8)], [2 + 0.3 * at for at in range(8)]
QWEN35 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN35_KEYS = {
    "qwen35.rope.dimension_count": 8,
    "qwen35.rope.dimension_sections": [2, 1, 1, 0],
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 16,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 6,
    "qwen35.ssm.inner_size": 48,
}
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(kind: str, **more: Any) -> Any:
    """A random model of a class, in fp32, whose norms are not all 1."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(words()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | more)))
    for weight in model.float().parameters():
        weight.data.mul_(6) if weight.dim() > 1 else weight.data.add_(torch.randn(weight.shape) * 0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "architecture", "more", "keys"),
    [
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", "llama", {"head_dim": 32}, {"llama.rope.dimension_count": None}),
        ("mistral", "llama", {"sliding_window": None}, {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
        ("qwen2", "qwen2", {"num_key_value_heads": 4}, {"qwen2.attention.head_count_kv": None}),
        ("qwen3", "qwen3", {"head_dim": 32}, {}),
        ("phi3", "phi3", {}, {}),
        ("qwen3_5_text", "qwen35", QWEN35, QWEN35_KEYS),
        ("gemma2", "gemma2", WINDOWS | {"sliding_window": 4096}, GEMMA),
        (
            "gemma2",
            "gemma2",
            WINDOWS | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
            GEMMA
            | {
                "gemma2.attention.sliding_window": 16,
                "gemma2.attn_logit_softcapping": 20.0,
                "gemma2.final_logit_softcapping": 10.0,
            },
        ),
        (
            "gemma3_text",
            "gemma3",
            WINDOWS
            | {
                "num_hidden_layers": 7,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            },
            GEMMA
            | {
                "gemma3.attention.sliding_window": 16,
                "gemma3.rope.freq_base": 1e6,
                "gemma3.rope.scaling.type": "linear",
                "gemma3.rope.scaling.factor": 8.0,
            },
        ),
    ],
)
def test_a_class_computes_what_its_original_does(tmp_path, kind, architecture, more, keys):
    model = random_model(kind, **more)
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture=architecture, keys=keys)
    loaded = load_model(str(path)).eval()
    ids = torch.randint(5, len(words()), (2, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-5
    account = gguf.account_of(gguf.converted(path)[0])
    # Every key and tensor is in one place.
    written = settings(model, architecture) | vocabulary() | {"general.architecture": ""} | keys
    assert account.read["tensors"] == len(weights(model, architecture))
    named = sum(len(names) for names in account.harmless.values())
    assert account.read["keys"] + named == sum(value is not None for value in written.values())
    assert not account.unread


def test_long_factors_of_phi3_are_read(tmp_path):
    scale = math.sqrt(1 + math.log(4) / math.log(64))
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    parameters |= {"short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 1.0}
    model = random_model("phi3", original_max_position_embeddings=64, rope_parameters=parameters)
    keys = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": scale}
    tensors = {f"rope_factors_{name}.weight": np.array(f) for name, f in (("short", SHORT), ("long", LONG))}
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture="phi3", keys=keys, tensors=tensors)
    loaded = load_model(str(path)).eval()
    for length in (60, 120):
        ids = torch.randint(5, len(words()), (1, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-5


def test_layers_that_draft_are_named(tmp_path, capsys):
    keys = QWEN35_KEYS | {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    tensors = {"blk.4.nextn.eh_proj.weight": np.ones((64, 128))}
    model = random_model("qwen3_5_text", **QWEN35)
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture="qwen35", keys=keys, tensors=tensors)
    assert load_config(str(path)).num_hidden_layers == 4
    assert "blk.4.nextn.eh_proj.weight: layers that draft" in capsys.readouterr().err


def test_answers_end_at_every_token_that_the_file_names(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", keys=ends)
    assert stop_tokens(load_target(str(path))) == [2, 0]


def test_a_file_that_names_no_end_says_so_each_time(tmp_path, capsys):
    path = write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.eos_token_id": None})
    assert load_config(str(path)).eos_token_id is None
    assert stop_tokens(load_target(str(path))) == []
    assert "names no token that ends an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}, [1, 67]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [67]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1, 67, 2]),
        (pieces(), [1, 259, 260]),
        (pieces() | {"tokenizer.ggml.add_space_prefix": False}, [1, 260]),
        (
            pieces() | {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.bos_token_id": None},
            [1, 259, 260],
        ),
    ],
)
def test_texts_begin_and_end_as_the_file_says(tmp_path, keys, expected):
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", keys=keys)))
    assert tokenizer("a")["input_ids"] == expected


def test_words_of_llama3_that_are_tokens_are_not_made_by_merges(tmp_path):
    # "Ġ5" is a token that no merge makes.
    tokens = [*words()[:-1], "Ġ5"]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["Ġ Ġ"]}
    ours = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", pre="llama-bpe", keys=keys)))
    assert ours.convert_ids_to_tokens(ours.encode(" a", add_special_tokens=False)) == ["Ġ", "a"]
    assert ours.backend_tokenizer.model.ignore_merges
    plain = load_tokenizer(str(write_gguf(tmp_path / "b.gguf", pre="qwen2", keys=keys)))
    assert not plain.backend_tokenizer.model.ignore_merges


def test_whole_tokens_outside_of_the_bytes_alphabet_stay_whole(tmp_path):
    tokens = words()
    tokens[1:3] = DEEPSEEK
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", pre="qwen2", keys=keys)))
    assert len(tokenizer) == len(tokens)
    assert tokenizer(f"a{DEEPSEEK[1]}")["input_ids"] == [1, 67, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode([1, 67, 2]) == f"{DEEPSEEK[0]}a{DEEPSEEK[1]}"
    assert tokenizer.decode([1, 67, 2], skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        (
            {"llama.attention.sliding_window": 128},
            {},
            "sliding_window: settings that transformers' LlamaConfig",
        ),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, {}, "expert_count and 1 more: settings"),
        ({"llama.nextn_predict_layers": 1}, {}, "nextn_predict_layers: settings"),
        ({"llama.logit_scale": 0.5}, {}, "logit_scale"),
        ({"llama.attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping"),
        ({"llama.attention.value_length": 8}, {}, "value_length"),
        ({"llama.attention.key_length": 32}, {}, "weights are missing or of another shape"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, "head_count_kv differs from layer to layer"),
        ({"llama.no_such_setting": 3}, {}, "llama.no_such_setting: settings that"),
        ({"xielu.eps": 0.5}, {}, "another kind of file or model"),
        ({"qwen2.block_count": 2}, {}, "another kind of file or model"),
        ({"general.quantization_version": 1}, {}, "as those of version 2"),
        ({"general.type": "adapter", "adapter.type": "lora"}, {}, "it holds a adapter"),
        ({"general.type": "mmproj"}, {}, "it holds a mmproj, and no model"),
        ({"general.architecture": "clip"}, {}, "another kind of file or model"),
        ({"tokenizer.ggml.model": None}, {}, "it has no tokenizer; give a model's whole GGUF file"),
        ({"split.count": 2}, {}, "llama-gguf-split --merge"),
        ({"llama.vocab_size": 300}, {}, "vocab_size is 300, and token_embd.weight has 261 rows"),
        ({"tokenizer.ggml.tokens": words()[:-1]}, {}, "its tokens are 260, and token_embd.weight has 261"),
        ({"tokenizer.ggml.eos_token_id": 4000}, {}, "eos_token_id is 4,000, of 261 tokens"),
        ({"tokenizer.ggml.eot_token_id": 4000}, {}, "eot_token_id is 4,000, of 261 tokens"),
        ({"tokenizer.ggml.suppress_tokens": [1]}, {}, "suppress_tokens: settings of the tokenizer"),
        ({"tokenizer.ggml.token_type": None}, {}, "which tokens are special"),
        ({}, {"blk.2.attn_q.weight": np.ones((64, 64))}, "block_count is 2, and its tensors are of 3 layers"),
        ({}, {"blk.0.attn_q.bias": np.ones(64)}, "weights are missing"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4)}, "attn_sinks.weight: tensors that no weight of Llama"),
        ({}, {"blk.0.attn_norm.bias": np.ones(64)}, "attn_norm.bias: tensors that no weight"),
        ({}, {"blk.1.ffn_up.weight": np.ones((96, 64))}, "1 weights are missing or of another shape"),
    ],
)
def test_what_would_make_another_model_is_refused_in_one_line(tmp_path, keys, tensors, reason):
    path = write_gguf(tmp_path / "m.gguf", keys=keys, tensors=tensors)
    with pytest.raises(UserError, match=reason) as error:
        load_config(str(path))
    assert str(error.value).startswith(f"target={path}: ")
    assert "\n" not in str(error.value)


def test_what_changes_nothing_is_accounted_for(tmp_path, capsys):
    keys = {
        "general.name": "tiny",
        "general.license": "mit",
        "general.quantization_version": 2,
        "general.sampling.temp": 0.6,
        "llama.logit_scale": 1.0,
        "quantize.imatrix.file": "imatrix.dat",
        "vendor.note": "hello",
        "tokenizer.ggml.fim_pre_token_id": 1,
    }
    path = write_gguf(tmp_path / "m.gguf", keys=keys, tensors={"blk.0.attn_norm.bias": np.zeros(64)})
    account = gguf.account_of(gguf.converted(path)[0])
    harmless = {name for names in account.harmless.values() for name in names}
    unread = {name for names in account.unread.values() for name in names}
    assert unread == {"general.sampling.temp", "vendor.note"}
    own = {"general.architecture", "blk.0.attn_norm.bias"}
    assert harmless == keys.keys() - unread | own
    shown = capsys.readouterr().err
    assert f"target={path}: GGUF: general.sampling.temp: sampling that llama.cpp does" in shown
    assert f"target={path}: GGUF: vendor.note: keys that nothing here reads" in shown


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.block_count": 10**6},
        {"llama.block_count": 2**32 - 1},
        {"llama.embedding_length": 2**20},
        {"llama.vocab_size": 2**31},
        {"llama.feed_forward_length": 2**31},
        {"llama.attention.head_count": 2**31},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count_kv": 2**31},
        {"llama.attention.key_length": 2**31},
        {"llama.rope.dimension_count": 2**31},
    ],
)
def test_hostile_sizes_are_refused_before_anything_is_made_of_them(tmp_path, keys):
    path = write_gguf(tmp_path / "m.gguf", keys=keys)
    load_config(str(write_gguf(tmp_path / "warm.gguf")))
    begun = time.process_time()
    with pytest.raises(UserError) as error:
        load_config(str(path))
    assert time.process_time() - begun < 2
    assert "\n" not in str(error.value)


def _header(tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")


@pytest.mark.parametrize(
    "content",
    [
        _header(keys=2**60),
        _header(tensors=2**60, keys=1, rest=ARCHITECTURE),
        _header(keys=1, rest=struct.pack("<Q", 2**63)),
        _header(keys=1, rest=_text("a") + struct.pack("<IIQ", 9, 0, 2**60)),
        _header(keys=1, rest=_text("a") + struct.pack("<IIQ", 9, 8, 2**60)),
        _header(keys=1, rest=_text("a") + struct.pack("<IIQ", 9, 9, 2**60)),
        _header(keys=1, rest=_text("a") + struct.pack("<I", 77)),
        _header(keys=2, rest=ARCHITECTURE * 2),
        _header(1, 1, ARCHITECTURE + _text("t") + struct.pack("<I", 2**31)),
        _header(1, 1, ARCHITECTURE + _text("t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
        _header(1, 1, ARCHITECTURE + _text("t") + struct.pack("<IQIQ", 1, 32, 999, 0)),
        _header(1, 1, ARCHITECTURE + _text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)),
        _header(1, 1, ARCHITECTURE + _text("t") + struct.pack("<IQIQ", 1, 8, 0, 2**62)),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"",
    ],
)
def test_a_header_that_lies_is_one_line_at_once(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    begun = time.process_time()
    with pytest.raises(UserError, match="damaged, or no GGUF model") as error:
        load_config(str(path))
    assert time.process_time() - begun < 1
    assert "\n" not in str(error.value)


def test_bytes_behind_the_last_tensor_are_named(tmp_path, capsys):
    path: Path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    path.write_bytes(path.read_bytes() + bytes(5000))
    load_config(str(path))
    assert "bytes behind the last tensor" in capsys.readouterr().err

"""Everything in a GGUF file is read, or accounted for; what is read is what was written."""

import copy
import math
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggufs import (
    F32,
    PLAIN,
    QWEN35,
    QWEN35_KEYS,
    converter_factors,
    pieces,
    random_model,
    settings,
    tiny_llama,
    under,
    vocabulary,
    weights,
    words,
    write_gguf,
)
from torch import Tensor

from decode.errors import UserError
from decode.model import gguf
from decode.model.load import load_config, load_model, load_target, load_tokenizer, stop_tokens

pytestmark = pytest.mark.usefixtures("own_cache")


TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
GEMMA = pieces(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))
GEMMA |= under("tokenizer.ggml", **TOKENS, add_space_prefix=False)
CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
GEMMA2_KEYS = GEMMA | under("gemma2", attention__sliding_window=16, **CAPS)
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 16, "head_dim": 32}
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
ROPES = {"sliding_attention": PLAIN, "full_attention": SCALED}
GEMMA3 = WINDOWS | {"num_hidden_layers": 7, "rope_parameters": ROPES}
GEMMA3_KEYS = {"attention__sliding_window": 16, "rope__freq_base": 1e6, "rope__scaling__type": "linear"}
GEMMA3_KEYS = GEMMA | under("gemma3", **GEMMA3_KEYS, rope__scaling__factor=8.0)
SHORT, LONG = [1 + 0.1 * at for at in range(8)], [2 + 0.3 * at for at in range(8)]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]


def check_refused(path: Path, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        load_config(str(path))
    assert "\n" not in str(error.value)


def check_logits(path: Path, model: Any, rows: int = 2, length: int = 120) -> None:
    loaded = load_model(str(path)).eval()
    ids = torch.randint(5, len(words()), (rows, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-5


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
        ("gemma2", "gemma2", WINDOWS | CAPS, GEMMA2_KEYS),
        ("gemma3_text", "gemma3", GEMMA3, GEMMA3_KEYS),
    ],
)
def test_class_computes_what_its_original_does(tmp_path, kind, architecture, more, keys):
    model = random_model(kind, **more)
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture=architecture, keys=keys)
    check_logits(path, model)
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
    keys = under("phi3.rope.scaling", original_context_length=64, attn_factor=scale)
    tensors = {f"rope_factors_{name}.weight": np.array(f) for name, f in (("short", SHORT), ("long", LONG))}
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture="phi3", keys=keys, tensors=tensors)
    for length in (60, 120):
        check_logits(path, model, 1, length)


def test_layers_that_draft_are_named(tmp_path, capsys):
    keys = QWEN35_KEYS | {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    tensors = {"blk.4.nextn.eh_proj.weight": np.ones((64, 128))}
    model = random_model("qwen3_5_text", **QWEN35)
    path = write_gguf(tmp_path / "m.gguf", model, F32, architecture="qwen35", keys=keys, tensors=tensors)
    assert load_config(str(path)).num_hidden_layers == 4
    assert "blk.4.nextn.eh_proj.weight: layers that draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "stops"), [({"eot_token_id": 0, "eom_token_id": 2}, [2, 0]), ({"eos_token_id": None}, [])]
)
def test_answers_end_at_every_token_that_the_file_names(tmp_path, capsys, ends, stops):
    path = str(write_gguf(tmp_path / "m.gguf", keys=under("tokenizer.ggml", **ends)))
    assert stop_tokens(load_target(path)) == stops
    assert ("names no token that ends an answer" in capsys.readouterr().err) == (not stops)


@pytest.mark.parametrize(
    ("base", "keys", "expected"),
    [
        ({}, {"pre": "llama-bpe", "add_bos_token": None}, [1, 67]),
        ({}, {"pre": "llama-bpe"}, [67]),
        ({}, {"add_bos_token": True, "add_eos_token": True}, [1, 67, 2]),
        (pieces(), {}, [1, 259, 260]),
        (pieces(), {"add_space_prefix": False}, [1, 260]),
        (pieces(), {"add_bos_token": None, "bos_token_id": None}, [1, 259, 260]),
    ],
)
def test_texts_begin_and_end_as_the_file_says(tmp_path, base, keys, expected):
    path = write_gguf(tmp_path / "m.gguf", keys=base | under("tokenizer.ggml", **keys))
    assert load_tokenizer(str(path))("a")["input_ids"] == expected


def test_words_of_llama3_that_are_tokens_are_not_merged(tmp_path):
    # "Ġ5" is a token that no merge makes.
    tokens = [*words()[:-1], "Ġ5"]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["Ġ Ġ"]}
    ours = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", pre="llama-bpe", keys=keys)))
    assert ours.convert_ids_to_tokens(ours.encode(" a", add_special_tokens=False)) == ["Ġ", "a"]
    assert ours.backend_tokenizer.model.ignore_merges
    plain = load_tokenizer(str(write_gguf(tmp_path / "b.gguf", pre="qwen2", keys=keys)))
    assert not plain.backend_tokenizer.model.ignore_merges


def test_tokens_outside_of_the_bytes_alphabet_stay_whole(tmp_path):
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
    ("keys", "reason"),
    [
        ({"llama.attention.key_length": 32}, "weights are missing or of another shape"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
        ({"general.architecture": "clip"}, "another kind of file or model"),
        ({"general.quantization_version": 1}, "as those of version 2"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "it holds a adapter"),
        ({"general.type": "mmproj"}, "it holds a mmproj, not a model"),
        ({"tokenizer.ggml.model": None}, "it has no tokenizer; give a model's whole GGUF file"),
        ({"tokenizer.ggml.pre": "viking"}, "its text is split by 'viking', which this version"),
        ({"split.count": 2}, "llama-gguf-split --merge"),
        ({"llama.vocab_size": 300}, "vocab_size is 300, and token_embd.weight has 261 rows"),
        ({"tokenizer.ggml.tokens": words()[:-1]}, "its tokens are 260, and token_embd.weight has 261"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "eos_token_id is 4,000, of 261 tokens"),
        ({"tokenizer.ggml.eot_token_id": 4000}, "eot_token_id is 4,000, of 261 tokens"),
        ({"blk.2.attn_q.weight": np.ones((64, 64))}, "block_count is 2, and its tensors are of 3 layers"),
        ({"blk.1.ffn_up.weight": None}, r"1 weights are missing .*layers\.1\.mlp\.up_proj"),
    ],
    ids=str,
)
def test_file_of_another_model_is_refused(tmp_path, keys, reason):
    kind = "tensors" if any(name.startswith("blk") for name in keys) else "keys"
    path = write_gguf(tmp_path / "m.gguf", **{kind: keys})
    check_refused(path, f"^target={re.escape(str(path))}: .*{reason}")


def test_harmless_keys_are_accounted_for(tmp_path, capsys):
    keys = {"general.name": "tiny", "general.license": "mit", "general.quantization_version": 2}
    keys |= {"general.sampling.temp": 0.6, "llama.logit_scale": 1.0, "quantize.imatrix.file": "imatrix.dat"}
    keys |= {"vendor.note": "hello", "tokenizer.ggml.fim_pre_token_id": 1}
    path = write_gguf(tmp_path / "m.gguf", keys=keys, tensors={"blk.0.attn_norm.bias": np.zeros(64)})
    account = gguf.account_of(gguf.converted(path)[0])
    harmless = {name for names in account.harmless.values() for name in names}
    unread = {name for names in account.unread.values() for name in names}
    assert unread == {"general.sampling.temp", "vendor.note"}
    own = {"general.architecture", "blk.0.attn_norm.bias"}
    assert harmless == keys.keys() - unread | own
    shown = capsys.readouterr().err
    assert f"target={path}: GGUF: general.sampling.temp: llama.cpp's default sampling" in shown
    assert f"target={path}: GGUF: vendor.note: keys that nothing here reads" in shown


HUGE = ("vocab_size", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
HUGE += ("attention.key_length", "rope.dimension_count")
SIZES = [("block_count", 10**6), ("block_count", 2**32 - 1), ("embedding_length", 2**20)]
SIZES += [("attention.head_count", 0), *((name, 2**31) for name in HUGE)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_hostile_sizes_are_refused_before_anything_is_made_of_them(tmp_path, name, size):
    load_config(str(write_gguf(tmp_path / "warm.gguf")))
    path = write_gguf(tmp_path / "m.gguf", keys={f"llama.{name}": size})
    begun = time.process_time()
    check_refused(path, "target=")
    assert time.process_time() - begun < 2


def _header(tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
TENSORS = [("<I", 2**31), ("<IQQIQ", 2, 2**62, 2**62, 0, 0), ("<IQIQ", 1, 32, 999, 0), ("<IQIQ", 1, 0, 0, 0)]
TENSORS += [("<IQIQ", 1, 8, 0, 2**62)]


@pytest.mark.parametrize(
    "content",
    [
        _header(keys=2**60),
        _header(tensors=2**60, keys=1, rest=ARCHITECTURE),
        _header(keys=1, rest=struct.pack("<Q", 2**63)),
        *(_header(keys=1, rest=_text("a") + struct.pack("<IIQ", 9, kind, 2**60)) for kind in (0, 8, 9)),
        _header(keys=1, rest=_text("a") + struct.pack("<I", 77)),
        _header(keys=2, rest=ARCHITECTURE * 2),
        *(_header(1, 1, ARCHITECTURE + _text("t") + struct.pack(*tensor)) for tensor in TENSORS),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"",
    ],
)
def test_header_that_lies_is_refused_at_once(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    begun = time.process_time()
    check_refused(path, "damaged, or no GGUF model")
    assert time.process_time() - begun < 1


def test_bytes_behind_the_last_tensor_are_named(tmp_path, capsys):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(5000))
    load_config(str(path))
    assert "bytes after the last tensor" in capsys.readouterr().err


# -- positions ---------------------------------------------------------------------------------------


SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
SHAPE |= {"max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SAID_YARN = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64}
SCALE = 1 + 0.1 * math.log(4)  # of attention, by yarn
BOTH = {"scaling__attn_factor": 1.5, "scaling__yarn_beta_fast": 32.0, "scaling__yarn_attn_factor": SCALE}


def logits(model: Any) -> Tensor:
    torch.manual_seed(0)
    ids = torch.randint(3, len(words()), (2, 300))
    with torch.no_grad():
        return model.eval()(ids).logits


def original(parameters: dict[str, Any] | None, **shape: Any) -> Any:
    """A random model whose positions are these, with the same weights each time."""
    model = tiny_llama(**(SHAPE | shape))
    if parameters:
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_theta": 10000.0} | parameters
        state, model = model.state_dict(), type(model)(config)
        model.load_state_dict(state)
    return model


def keys(**said: Any) -> dict[str, Any]:
    return {f"llama.rope.{name.replace('__', '.')}": value for name, value in said.items()}


@pytest.mark.parametrize(
    ("said", "parameters"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, LINEAR),
        ({"scaling__factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"freq_base": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"freq_base": None, "dimension_count": None}, None),
        (SAID_YARN, YARN),
        (SAID_YARN | BOTH, YARN | {"attention_factor": 1.5 * SCALE}),
    ],
    ids=str,
)
def test_scaled_positions_are_those_of_the_original(tmp_path, said, parameters):
    model = original(parameters)
    loaded = load_model(str(write_gguf(tmp_path / "m.gguf", model, F32, keys=keys(**said))))
    assert loaded.dtype == torch.float32
    expected = logits(model)
    assert (logits(loaded) - expected).abs().max() < 1e-4
    if parameters:  # such a file without its keys is another model
        assert (logits(original(None)) - expected).abs().max() > 1


@pytest.mark.parametrize(
    ("factor", "low", "high", "length", "base", "size"),
    [
        (8.0, 1.0, 4.0, 8192, 500000.0, 128),  # Llama 3.1
        (32.0, 1.0, 4.0, 8192, 500000.0, 64),  # Llama 3.2
        (8.0, 1.0, 4.0, 128, 10000.0, 64),
        (4.0, 1.0, 2.0, 2048, 10000.0, 32),
        (16.0, 1.0, 4.0, 256, 10000.0, 8),  # too few of them to solve for
        (8.0, 2.0, 8.0, 16384, 500000.0, 128),  # the same factors as of 1, 4 and 8192
    ],
)
def test_llama3_factors_give_back_their_angles(tmp_path, factor, low, high, length, base, size):
    parameters = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": low}
    parameters |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    model = original(parameters, head_dim=size)
    factors = {"rope_freqs.weight": converter_factors(factor, low, high, length, base, size)}
    path = write_gguf(tmp_path / "m.gguf", model, F32, keys=keys(freq_base=base), tensors=factors)
    loaded = load_model(str(path))
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(logits(loaded), logits(model))
    if size >= 32:  # others make the same factors with fewer
        same = {"low_freq_factor": 1.0, "high_freq_factor": high / low}
        same["original_max_position_embeddings"] = round(length / low)
        assert loaded.config.rope_parameters == parameters | same


@pytest.mark.parametrize(
    ("said", "factors", "reason"),
    [
        ({}, [1.0, 2.0] * 16, "rope_freqs.weight are not of Llama 3's scaling"),
        ({}, [1.0, -2.0] * 16, "rope_freqs.weight does not have 32 factors above 0"),
        ({}, [1.0] * 8, "rope_freqs.weight does not have 32 factors"),
        ({"scaling__type": "longrope", "scaling__factor": 4.0}, None, "of type 'longrope' is not read"),
        ({"scaling__factor": 4.0}, [8.0] * 32, "at once"),
        ({"scaling__attn_factor": 1.5}, None, "attn_factor with scaling of type 'linear'"),
        ({"dimension_count": 32}, None, "rotates positions differently"),
        ({"dimension_count": 1 << 31}, None, "dimension_count is 2147483648, of 64 dimensions"),
        ({"freq_base": float("nan")}, None, "freq_base is nan"),
        ({"freq_base_swa": 1e4}, None, "positions of layers with windows"),
        ({"dimension_sections": [4, 4, 4, 0]}, None, "rope.dimension_sections: settings of positions"),
        ({"scaling__alpha": 1000.0}, None, "rope.scaling.alpha: settings of positions"),
        (SAID_YARN | {"scaling__yarn_beta_fast": 16.0}, None, "yarn_beta_fast is 16, and programs differ"),
        (SAID_YARN | {"scaling__yarn_attn_factor": 1.0}, None, "yarn_attn_factor is 1, and programs differ"),
        (SAID_YARN | {"scaling__yarn_ext_factor": 0.5}, None, "yarn_ext_factor: settings of positions"),
    ],
)
def test_other_positions_are_refused(tmp_path, said, factors, reason):
    tensors = {"rope_freqs.weight": np.array(factors)} if factors else {}
    path = write_gguf(tmp_path / "m.gguf", original(None), F32, keys=keys(**said), tensors=tensors)
    with pytest.raises(UserError, match=reason) as error:
        load_config(str(path))
    assert str(error.value).startswith(f"target={path}: ")
    assert "\n" not in str(error.value)

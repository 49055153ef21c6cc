"""Every key of config.json is read, known to be harmless, or named."""

import json
import logging.config

import pytest
from families import BASE, EXPERTS, save

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.files.config_keys import SHARE
from decode.model.load import load_config, load_model, load_target, stop_tokens

SMALL = BASE | {"num_hidden_layers": 1}


@pytest.fixture
def llama(tmp_path):
    say_once.cache_clear()
    return save(tmp_path / "model", "llama", SMALL)


def change(folder, **values):
    path = folder / "config.json"
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in kept.items() if value != "gone"}))
    return folder


def said(folder, capsys):
    """What is said of a folder, which is made of it as often as it is read."""
    load_config(str(folder))
    load_config(str(folder))
    head = f"target={folder}: config.json: "
    return [line.removeprefix(head) for line in capsys.readouterr().err.splitlines() if head in line]


def refused(folder, reason):
    with pytest.raises(UserError, match=reason) as caught:
        load_config(str(folder))
    assert "\n" not in str(caught.value)


def test_an_ordinary_configuration_needs_no_word(llama, capsys):
    assert said(llama, capsys) == []
    old = {"torch_dtype": "float32", "rope_theta": 10_000.0, "rope_parameters": "gone", "rope_scaling": None}
    assert said(change(llama, **old, temperature=0.7, unsloth_fixed=True, unk_token_id=3), capsys) == []


def test_keys_that_the_class_does_not_know_are_named_with_how_many(llama, capsys):
    change(llama, sliding_window=4, logit_scale=0.5, use_qk_norm=None)
    assert said(llama, capsys) == [
        "sliding_window and 1 more: not read by LlamaConfig; if the model needs them, it is computed without"
    ]


@pytest.mark.timeout(60)
def test_more_layers_than_tensors_are_refused_before_they_are_made(llama):
    change(llama, num_hidden_layers=10**6)
    with pytest.raises(UserError, match=r"config\.json has 1,000,000 layers, and the files \d+ tensors"):
        load_model(str(llama))


def test_a_word_of_the_code_is_no_key(llama, capsys):
    change(llama, scaling=0.3)
    assert said(llama, capsys) == [
        "scaling: not read by LlamaConfig; if the model needs them, it is computed without"
    ]


@pytest.mark.parametrize(
    "values", [{SHARE: 0.5}, {"rope_parameters": {"rope_theta": 1e4, SHARE: 0.25}}], ids=str
)
def test_a_rotated_share_of_heads_that_the_class_does_not_use_is_refused(values, llama):
    refused(change(llama, **values), f"{SHARE}: LlamaConfig's model rotates whole heads")


def test_a_whole_share_and_one_that_the_class_uses_are_read(llama, tmp_path, capsys):
    assert said(change(llama, **{SHARE: 1.0}), capsys) == []
    phi = save(tmp_path / "phi", "phi", SMALL | {SHARE: 0.5})
    assert said(phi, capsys) == []
    refused(change(phi, **{SHARE: 1.0}), f"{SHARE}: given twice with different values")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_key_that_stands_twice_is_refused(file, llama):
    (llama / file).write_text('{"model_type": "llama", "eos_token_id": 2, "eos_token_id": 3}')
    with pytest.raises(
        UserError, match=rf"{file} is not a valid JSON file \(the key 'eos_token_id' stands twice"
    ):
        load_target(str(llama))


@pytest.mark.parametrize("ends", [-5, [2, 99_999], 10**12], ids=str)
def test_ends_of_config_json_that_are_no_tokens_are_named(ends, llama, capsys):
    (llama / "generation_config.json").unlink(missing_ok=True)
    (line,) = said(change(llama, eos_token_id=ends), capsys)
    wrong = ends[-1] if isinstance(ends, list) else ends
    assert line.startswith(f"eos_token_id {wrong}: no token of the ")
    assert stop_tokens(load_target(str(llama))) == ([2] if isinstance(ends, list) else [])


def test_a_key_that_only_the_class_of_models_reads_is_read(tmp_path, capsys):
    folder = save(tmp_path / "model", "qwen3_moe", SMALL | EXPERTS | {"head_dim": 16})
    assert load_model(str(folder)).model.layers[0].self_attn.head_dim == 16
    assert not capsys.readouterr().err.count("head_dim")


def test_keys_inside_another_configuration_are_named_with_their_path(tmp_path, capsys):
    text = SMALL | {"model_type": "gemma3_text", "head_dim": 8, "frobnicate": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert any(line.startswith("text_config.frobnicate: not read") for line in said(tmp_path, capsys))


def test_angles_given_twice_are_refused(llama):
    refused(change(llama, rope_theta=500_000.0), "rope_theta: given twice with different values")
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    change(llama, rope_theta="gone", rope_scaling=yarn)
    refused(llama, "rope_scaling and rope_parameters: given twice")
    change(llama, rope_parameters="gone", rope_scaling=yarn | {"type": "linear"})
    refused(llama, r"type and rope_type of .*\(linear, yarn\)")


def test_the_same_angles_given_twice_are_read(llama, capsys):
    assert said(change(llama, rope_theta=10_000.0), capsys) == []


def test_unused_parameters_of_positions_are_named(llama, capsys):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "low_freq_factor": 1.0}
    logging.config.dictConfig({"version": 1})  # as Hydra does, which disables the logs that are there
    lines = said(change(llama, rope_parameters=rope), capsys)
    assert len(lines) == 1
    assert "low_freq_factor" in lines[0]
    change(llama, rope_parameters=rope | {"rope_type": "frobnicated"})
    with pytest.raises(UserError, match="frobnicated") as caught:
        load_model(str(llama))
    assert "\n" not in str(caught.value)


def test_a_value_that_the_class_replaces_is_named(tmp_path, capsys):
    folder = save(tmp_path / "model", "qwen2", SMALL)
    change(folder, sliding_window=4, use_sliding_window=False)
    assert said(folder, capsys) == []
    change(folder, use_sliding_window="gone")
    assert said(folder, capsys) == ["sliding_window: the class replaced the value by another"]


def test_another_class_in_architectures_is_named(llama, capsys):
    lines = said(change(llama, architectures=["MistralForCausalLM"]), capsys)
    assert len(lines) == 1
    assert lines[0].startswith("MistralForCausalLM: architectures names another class than LlamaForCausalLM")


def test_another_file_of_weights_is_refused(llama):
    refused(change(llama, transformers_weights="other.safetensors"), "transformers_weights: names another")


@pytest.mark.parametrize(
    "values", [{"num_attention_heads": 0}, {"head_dim": 7}, {"hidden_size": -1}, {"rope_parameters": []}]
)
def test_values_that_make_no_model_are_one_line(values, llama):
    change(llama, **values)
    with pytest.raises(UserError) as caught:
        load_model(str(llama))
    assert "\n" not in str(caught.value)


def test_keys_that_shapes_cannot_tell_are_named_where_the_file_lacks_them(llama, capsys):
    assert said(change(llama, rms_norm_eps="gone", rope_parameters="gone"), capsys) == [
        "rms_norm_eps=1e-06 and 1 more: not in the file; the class's own value is taken"
    ]

"""Every key of a configuration, and every file of a tokenizer, is read, known to be harmless, or named."""

import json
import logging.config
import re

import pytest
from families import BASE, EXPERTS, save
from workbench import TEMPLATE, make_target, options_of

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.files.config_keys import SHARE
from decode.model.files.generation import account_of_generation
from decode.model.load import load_config, load_model, load_target, load_tokenizer, stop_tokens
from distill.config.build import TargetSource
from distill.options.commands import GenerateOptions

SMALL = BASE | {"num_hidden_layers": 1}
GONE = "gone"
TWICE = "given twice with different values"
OLD = {"torch_dtype": "float32", "rope_theta": 1e4, "rope_parameters": GONE, "rope_scaling": None}
HARMLESS = {"temperature": 0.7, "unsloth_fixed": True, "unk_token_id": 3}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "low_freq_factor": 1.0}
IMPOSSIBLE = {"num_attention_heads": 0, "head_dim": 7, "hidden_size": -1, "rope_parameters": []}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def _said_nothing():
    say_once.cache_clear()


@pytest.fixture
def llama(tmp_path):
    return save(tmp_path / "model", "llama", SMALL)


def change(folder, **values):
    path = folder / "config.json"
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in kept.items() if value != GONE}))
    return folder


def said(folder, capsys, file="config.json"):
    """What is said of a file, once, however often it is read."""
    load_config(str(folder))
    load_config(str(folder))
    head = f"target={folder}: {file}: "
    return [line.removeprefix(head) for line in capsys.readouterr().err.splitlines() if head in line]


def check_refused(load, folder, reason):
    with pytest.raises(UserError, match=reason) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, ""),
        (OLD | HARMLESS, ""),
        ({"rope_theta": 1e4}, ""),  # the same angles twice
        ({SHARE: 1.0}, ""),
        ({"dtype": "float32", "torch_dtype": "torch.float32"}, ""),
        ({"dtype": "float32", "torch_dtype": None}, ""),
        ({"sliding_window": 4, "logit_scale": 0.5, "use_qk_norm": None}, "sliding_window and 1 more: not"),
        ({"scaling": 0.3}, "scaling: not read by LlamaConfig"),  # a word of the code, and no key
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM: .* another class than Llama"),
        ({"rms_norm_eps": GONE, "rope_parameters": GONE}, "rms_norm_eps=1e-06 and 1 more: not in the file"),
        ({"rope_parameters": LINEAR}, "rope_parameters: .*low_freq_factor"),
        ({"eos_token_id": -5}, "eos_token_id -5: no token of the "),
    ],
    ids=str,
)
def test_keys_of_a_llama_are_read_or_named(values, line, llama, capsys):
    logging.config.dictConfig({"version": 1})  # as Hydra does, which disables the logs that are there
    found = said(change(llama, **values), capsys)
    assert len(found) == bool(line), found
    assert re.match(line, "".join(found)), found


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({SHARE: 0.5}, f"{SHARE}: LlamaConfig's model rotates whole heads"),
        ({"rope_parameters": {"rope_theta": 1e4, SHARE: 0.25}}, f"{SHARE}: .* rotates whole heads"),
        ({"rope_theta": 5e5}, f"rope_theta: {TWICE}"),
        ({"rope_scaling": YARN | {"rope_theta": 1e4}}, f"rope_scaling and rope_parameters: {TWICE}"),
        ({"rope_parameters": GONE, "rope_scaling": YARN | {"type": "linear"}}, r"type .*\(linear, yarn\)"),
        ({"rope_parameters": LINEAR | {"rope_type": "frobnicated"}}, "frobnicated"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, f"dtype and torch_dtype: {TWICE}"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights: names another file"),
        ({"num_hidden_layers": 10**6}, r"1,000,000 layers, and the files \d+ tensors"),  # before it is made
        *(({name: value}, "target=") for name, value in IMPOSSIBLE.items()),
    ],
    ids=str,
)
@pytest.mark.timeout(60)
def test_values_of_no_or_another_model_are_refused(values, reason, llama):
    check_refused(load_model, change(llama, **values), reason)


def test_share_of_rotated_dimensions_is_read_where_the_class_uses_it(tmp_path, capsys):
    phi = save(tmp_path / "phi", "phi", SMALL | {SHARE: 0.5})
    assert said(phi, capsys) == []
    check_refused(load_config, change(phi, **{SHARE: 1.0}), f"{SHARE}: {TWICE}")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_key_that_stands_twice_is_refused(file, llama):
    (llama / file).write_text('{"model_type": "llama", "eos_token_id": 2, "eos_token_id": 3}')
    check_refused(load_target, llama, f"{file} is not a valid JSON file .*'eos_token_id' stands twice")


@pytest.mark.parametrize(("ends", "stops"), [(-5, []), ([2, 99_999], [2]), (10**12, [])], ids=str)
def test_ends_that_are_no_tokens_are_left_out(ends, stops, llama):
    (llama / "generation_config.json").unlink(missing_ok=True)
    assert stop_tokens(load_target(str(change(llama, eos_token_id=ends)))) == stops


def test_key_that_only_the_class_of_models_reads_is_read(tmp_path, capsys):
    folder = save(tmp_path / "model", "qwen3_moe", SMALL | EXPERTS | {"head_dim": 16})
    assert load_model(str(folder)).model.layers[0].self_attn.head_dim == 16
    assert "head_dim" not in capsys.readouterr().err


def test_keys_of_an_inner_configuration_are_named_with_their_path(tmp_path, capsys):
    text = SMALL | {"model_type": "gemma3_text", "head_dim": 8, "frobnicate": 2}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert any(line.startswith("text_config.frobnicate: not read") for line in said(tmp_path, capsys))


def test_dtypes_of_an_inner_configuration_are_one(tmp_path):
    text = SMALL | {"model_type": "gemma3_text", "head_dim": 8, "dtype": "float16", "torch_dtype": "float32"}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    check_refused(load_config, tmp_path, rf"text_config\.dtype and text_config\.torch_dtype: {TWICE}")


def test_value_that_the_class_replaces_is_named(tmp_path, capsys):
    folder = save(tmp_path / "model", "qwen2", SMALL)
    assert said(change(folder, sliding_window=4, use_sliding_window=False), capsys) == []
    (line,) = said(change(folder, use_sliding_window=GONE), capsys)
    assert line == "sliding_window: the class replaced the value by another"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05, "do_sample": True},
            ["temperature=0.7", "top_k=20", "repetition_penalty=1.05"],
        ),
        ({"suppress_tokens": [3]}, ["suppress_tokens=[3]"]),
        ({"forced_eos_token_id": 2, "min_new_tokens": 4}, ["forced_eos_token_id=2", "min_new_tokens=4"]),
        ({"bad_words_ids": [[3]], "stop_strings": ["x"]}, ["bad_words_ids=[[3]]", "stop_strings=['x']"]),
        ({"no_repeat_ngram_size": 3}, ["no_repeat_ngram_size=3"]),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "suppress_tokens": [], "num_beams": 1}, []),
        ({"min_length": 0, "max_new_tokens": 99, "forced_bos_token_id": None, "eos_token_id": [1, 2]}, []),
        ({"frobnicate": 2, "eos_token_id": [60, 61]}, ["frobnicate", "eos_token_id 61"]),
    ],
    ids=str,
)
def test_options_that_engines_apply_are_named(values, named):
    found = account_of_generation(values, 61).unread
    assert sorted(name for names in found.values() for name in names) == sorted(named)


@pytest.mark.parametrize(("text", "reason"), [("{", "JSON"), ('{"eos_token_id": "2"}', "eos_token_id '2'")])
def test_damaged_generation_file_is_refused_before_weights_are_read(text, reason, llama):
    (llama / "generation_config.json").write_text(text)
    (llama / "model.safetensors").unlink()
    check_refused(load_target, llama, reason)


def test_options_of_generation_are_said_once(llama, capsys):
    (llama / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1}))
    for _ in range(2):
        load_target(str(llama))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "generation_config" in line]
    assert line.startswith(f"target={llama}: generation_config.json: repetition_penalty=1.1: engines apply")


# -- files of a tokenizer ----------------------------------------------------------------------------


SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
WHOLE, OTHER = "tokenizer.json", "chat_template.json"
END = {"content": "<|end|>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}]}
REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": ""}
BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.fixture
def folder(tmp_path):
    return make_target(tmp_path / "model")


def write(folder, file, values):
    """Change values of a file; of tokenizer.json, parts of its parts."""
    path = folder / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    if file == WHOLE:
        values = {part: (before[part] or {}) | value for part, value in values.items()}
    path.write_text(json.dumps(before | values))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({ADDED: {"<|end|>": 3}, SETTINGS: {"chat_template": TEMPLATE + "\n"}}, ""),
        ({SPECIAL: {"eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>"}}, ""),
        ({ADDED: {"<|end|>": 7, "<|more|>": 9}}, "<|end|> and 1 more: added_tokens.json gives another id"),
        ({SETTINGS: {"added_tokens_decoder": {"3": END | {"single_word": False}}}}, "<|end|>: special to "),
        ({SPECIAL: {"eos_token": "<|user|>"}}, "eos_token <|end|>: tokenizer_config.json names another"),
        ({OTHER: {"chat_template": TEMPLATE}}, ""),
        ({SETTINGS: {"chat_template": "other"}}, "tokenizer_config.json: has another chat template"),
        ({WHOLE: {"normalizer": {"type": "Lowercase"}}}, "its normalizer changes this text"),
        ({WHOLE: {"normalizer": REPLACE}}, "its normalizer changes this text"),
        ({WHOLE: {"normalizer": {"type": "NFC"}}}, ""),
        ({WHOLE: {"normalizer": BLANKS}}, ""),
        ({WHOLE: {"pre_tokenizer": DIGITS}}, ""),
        ({WHOLE: {"pre_tokenizer": DIGITS}, SETTINGS: QWEN}, "Qwen2Tokenizer splits this text in another"),
    ],
    ids=str,
)
def test_files_that_disagree_are_named_once(changes, said, folder, capsys):
    assert (folder / "chat_template.jinja").is_file()
    for file, values in changes.items():
        write(folder, file, values)
    load_tokenizer(str(folder))
    load_tokenizer(str(folder))
    lines = [line for line in capsys.readouterr().err.splitlines() if f"target={folder}: tokenizer: " in line]
    assert len(lines) == bool(said), lines
    assert said in "".join(lines)


def test_other_merges_are_named(folder, capsys):
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    load_tokenizer(str(folder))
    assert "merges.txt: has other merges than tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "1.0"}'])
def test_damaged_tokenizer_is_refused_in_one_line(text, folder):
    (folder / WHOLE).write_text(text)
    check_refused(load_tokenizer, folder, "")


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (-9, True), (1, False), (3, False)])
def test_ids_without_a_row_are_refused_before_work_starts(missing, fits, folder):
    rows = json.loads((folder / "config.json").read_text())["vocab_size"] - missing
    write(folder, "config.json", {"vocab_size": rows})
    options = options_of(f"target={folder}", "prompt=hi", cls=GenerateOptions, name="generate").target
    if fits:  # rows without a token are only padding
        TargetSource(options).chat("chat")
        return
    with pytest.raises(UserError, match=f"{missing} ids beyond the {rows} rows of its embedding, {rows} "):
        TargetSource(options).chat("chat")


def test_dropout_is_not_applied_and_named(folder, capsys):
    write(folder, WHOLE, {"model": {"dropout": 0.5}})
    tokenizer = load_tokenizer(str(folder))
    assert "dropout: not applied" in capsys.readouterr().err
    text = "The quick brown fox jumps over the lazy dog, again and again."
    assert len({tuple(tokenizer.encode(text)) for _ in range(9)}) == 1


def test_control_tokens_that_would_be_spelt_as_text_are_refused(folder):
    write(folder, SETTINGS, {"split_special_tokens": True})
    with pytest.raises(UserError, match=r"split_special_tokens: .*spelt"):
        load_tokenizer(str(folder))

"""What generation_config.json asks for is read, or named where engines would apply it."""

import json

import pytest
from families import BASE, save

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.files.generation import account_of_generation
from decode.model.load import load_target

ENGINES = "engines apply it by default, and here only the options of this program are applied"


def test_defaults_of_engines_are_named_with_their_values():
    raw = {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05, "do_sample": True}
    found = account_of_generation(raw | {"eos_token_id": [1, 2]}, 61)
    assert found.unread == {ENGINES: ["temperature=0.7", "top_k=20", "repetition_penalty=1.05"]}
    assert found.read == {"keys": 1}


@pytest.mark.parametrize(
    "values",
    [
        {"suppress_tokens": [3]},
        {"forced_eos_token_id": 2},
        {"min_new_tokens": 4},
        {"bad_words_ids": [[3]]},
        {"no_repeat_ngram_size": 3},
        {"stop_strings": ["x"]},
    ],
)
def test_what_changes_a_text_is_named(values):
    names = [f"{key}={value}" for key, value in values.items()]
    assert list(account_of_generation(values, 61).unread.values()) == [names]


def test_values_that_change_nothing_need_no_word():
    raw = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "suppress_tokens": [],
        "num_beams": 1,
        "min_length": 0,
    }
    assert (
        account_of_generation(raw | {"max_new_tokens": 99, "forced_bos_token_id": None}, 61).remarks() == []
    )


def test_unknown_options_and_ends_without_a_row_are_named():
    found = account_of_generation({"frobnicate": 2, "eos_token_id": [60, 61]}, 61)
    assert [name for names in found.unread.values() for name in names] == ["frobnicate", "eos_token_id 61"]


@pytest.mark.parametrize(("text", "reason"), [("{", "JSON"), ('{"eos_token_id": "2"}', "eos_token_id '2'")])
def test_a_damaged_file_is_refused_before_weights_are_read(text, reason, tmp_path):
    folder = save(tmp_path / "model", "llama", BASE)
    (folder / "generation_config.json").write_text(text)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=reason) as caught:
        load_target(str(folder))
    assert "\n" not in str(caught.value)


def test_a_run_says_it_once(tmp_path, capsys):
    say_once.cache_clear()
    folder = save(tmp_path / "model", "llama", BASE)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1}))
    for _ in range(2):
        load_target(str(folder))
    head = f"target={folder}: generation_config.json: repetition_penalty=1.1: {ENGINES}"
    assert [line for line in capsys.readouterr().err.splitlines() if "generation_config" in line] == [head]

"""Files of a tokenizer that disagree are named, and ids without a row are refused before work starts."""

import json

import pytest
from workbench import TEMPLATE, make_target, options_of

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.load import load_tokenizer
from distill.config.build import read_chat
from distill.options import GenerateOptions


@pytest.fixture
def folder(tmp_path):
    say_once.cache_clear()
    return make_target(tmp_path / "model")


def write(folder, file, values):
    path = folder / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | values))


def said(folder, capsys):
    load_tokenizer(str(folder))
    load_tokenizer(str(folder))
    head = f"target={folder}: tokenizer: "
    return [line.removeprefix(head) for line in capsys.readouterr().err.splitlines() if head in line]


def test_files_that_agree_need_no_word(folder, capsys):
    write(folder, "added_tokens.json", {"<|end|>": 3})
    write(folder, "special_tokens_map.json", {"eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>"})
    write(folder, "tokenizer_config.json", {"chat_template": TEMPLATE + "\n"})
    assert said(folder, capsys) == []


def test_another_id_of_an_added_token_is_named(folder, capsys):
    write(folder, "added_tokens.json", {"<|end|>": 7, "<|more|>": 9})
    assert said(folder, capsys) == [
        "<|end|> and 1 more: added_tokens.json gives another id than the tokenizer has, which goes by its "
        "other files"
    ]


def test_a_token_that_is_special_to_one_file_alone_is_named(folder, capsys):
    entry = {"content": "<|end|>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"3": entry | {"single_word": False}}})
    lines = said(folder, capsys)
    assert len(lines) == 1
    assert lines[0].startswith("<|end|>: special to ")


def test_another_end_token_of_a_file_is_named(folder, capsys):
    write(folder, "special_tokens_map.json", {"eos_token": "<|user|>"})
    assert said(folder, capsys) == [
        "eos_token <|end|>: tokenizer_config.json names another token than the tokenizer has"
    ]


def test_another_template_is_named(folder, capsys):
    assert (folder / "chat_template.jinja").is_file()
    write(folder, "tokenizer_config.json", {"chat_template": "other"})
    write(folder, "chat_template.json", {"chat_template": TEMPLATE})
    assert said(folder, capsys) == [
        "tokenizer_config.json: has another chat template than the one that is used"
    ]


def test_other_merges_are_named(folder, capsys):
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    assert said(folder, capsys) == ["merges.txt: has other merges than tokenizer.json, which is used"]


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_one_line(text, folder):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (-9, True), (1, False), (3, False)])
def test_ids_without_a_row_are_refused_before_work_starts(missing, fits, folder):
    path = folder / "config.json"
    rows = json.loads(path.read_text())["vocab_size"] - missing
    write(folder, "config.json", {"vocab_size": rows})
    options = options_of(f"target={folder}", "prompt=hi", cls=GenerateOptions, name="generate").target
    if fits:  # rows without a token are only padding
        read_chat(options, "chat")
        return
    with pytest.raises(UserError, match=f"{missing} ids beyond the {rows} rows of its embedding, {rows} "):
        read_chat(options, "chat")


def test_a_class_that_splits_in_another_way_than_the_file_is_named(folder, capsys):
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, whole["pre_tokenizer"]],
    }
    whole["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(whole))
    assert not any("splits this text" in line for line in said(folder, capsys))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    lines = said(folder, capsys)
    assert any("Qwen2Tokenizer splits this text in another way than tokenizer.json" in line for line in lines)


def change_whole(folder, part, values):
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole[part] = values if whole[part] is None else whole[part] | values
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def test_dropout_is_not_applied_and_named(folder, capsys):
    change_whole(folder, "model", {"dropout": 0.5})
    assert said(folder, capsys) == ["dropout: not applied: a text is always split in the same way"]
    tokenizer = load_tokenizer(str(folder))
    text = "The quick brown fox jumps over the lazy dog, again and again."
    assert len({tuple(tokenizer.encode(text)) for _ in range(9)}) == 1


@pytest.mark.parametrize(
    ("normalizer", "lossy"),
    [
        ({"type": "Lowercase"}, True),
        ({"type": "Replace", "pattern": {"String": "e"}, "content": ""}, True),
        ({"type": "NFC"}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, False),
    ],
    ids=str,
)
def test_a_normalizer_that_changes_texts_is_named(normalizer, lossy, folder, capsys):
    change_whole(folder, "normalizer", normalizer)
    lines = [line for line in said(folder, capsys) if "its normalizer changes this text" in line]
    assert bool(lines) == lossy


def test_control_tokens_that_would_be_spelt_as_text_are_refused(folder):
    write(folder, "tokenizer_config.json", {"split_special_tokens": True})
    with pytest.raises(
        UserError, match="split_special_tokens: the chat template's own tokens would be spelt"
    ):
        load_tokenizer(str(folder))

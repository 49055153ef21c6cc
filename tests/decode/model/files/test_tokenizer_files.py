"""Files of a tokenizer that disagree are named, and ids without a row are refused before work starts."""

import json

import pytest
from workbench import TEMPLATE, make_target, options_of

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.load import load_tokenizer
from distill.config.build import TargetSource
from distill.options import GenerateOptions

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
WHOLE, OTHER = "tokenizer.json", "chat_template.json"
END = {"content": "<|end|>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}]}
REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": ""}
BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.fixture
def folder(tmp_path):
    say_once.cache_clear()
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
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


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

"""Drafters of other programs: read here, or refused in a line that names what reads them."""

from __future__ import annotations

import json

import pytest

from decode.errors import UserError
from drafters.checkpoint import folder, unread
from drafters.export import formats

# Of `models/registry.py` of vLLM 0.33, and SGLang's others.
READ = """
    DFlashDraftModel DSparkDraftModel Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM
    Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM Eagle3Qwen3vlForCausalLM EagleLlamaForCausalLM
    LlamaForCausalLMEagle3 PEagleDraftModel PeagleLlamaForCausalLM PeagleQwen3ForCausalLM Qwen3DSparkModel
"""
SGLANG_READ = ["LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"]
NAMES = [(program, name) for program, names in unread.KNOWN.items() for name in sorted(names)]
NEW = {"Gemma5DSparkModel": "a DSpark", "Glm7MoeMTPModel": "an MTP head", "EagleOlmo9ForCausalLM": "an EAGLE"}


def _of(name):
    return {"dflash_config": {}} if "DFlash" in name else {}


def refused(tmp_path, **config) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16} | config))
    with pytest.raises(UserError) as error:
        folder.read_config(tmp_path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("program", "name"), NAMES)
def test_an_architecture_that_is_not_read_names_its_reader(tmp_path, program, name):
    line = refused(tmp_path, architectures=[name], **_of(name))
    assert f"{name} is " in line
    assert "no drafter here" in line
    assert program in line.partition("; ")[2]


@pytest.mark.parametrize(("name", "kind"), NEW.items())
def test_a_newer_name_is_told_by_its_kind(tmp_path, name, kind):
    line = refused(tmp_path, architectures=[name])
    assert f"{name} is {kind}" in line
    assert "the program that wrote it can read it" in line


@pytest.mark.parametrize("name", [*READ.split(), *SGLANG_READ])
def test_an_architecture_that_is_read_has_a_reader(name):
    config = {"architectures": [name], "num_hidden_layers": 1, **_of(name)}
    assert unread.refusal(config) == ""
    assert formats.find_reader(config)


def test_an_mtp_head_with_a_targets_config_is_read():
    config = {"architectures": ["MiMoMTPModel"], "num_nextn_predict_layers": 1}
    assert unread.refusal(config) == ""
    assert unread.refusal(config | {"num_nextn_predict_layers": 0})


@pytest.mark.parametrize("kind", unread.OF_SPECULATORS)
def test_a_kind_of_speculators_names_its_reader(tmp_path, kind):
    line = refused(tmp_path, speculators_model_type=kind, architectures=["Eagle3DraftModel"])
    assert "speculators 0.9" in line


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark", "mtp"])
def test_all_other_kinds_of_speculators_are_read(kind):
    assert unread.refusal({"speculators_model_type": kind}) == ""
    assert formats.find_reader({"speculators_model_type": kind})

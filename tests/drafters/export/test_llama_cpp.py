"""How llama.cpp's converter is run for `to=gguf`; a stand-in writes down what it was given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_converter import write_converter
from workbench import make_target

from decode.errors import UserError
from decode.model.load import load_target
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats, llama_cpp

TOKENIZER = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SERVED = {"eagle3": ("draft-eagle3", 3), "dflash": ("draft-dflash", 3), "lm": ("draft-simple", 5)}
TAKEN = {"eagle3": {"fc_norm": False, "taps": [1, 4, 6]}, "dflash": {"taps": [2, 4]}, "lm": {}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_converter(tmp_path / "llama.cpp")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_target(tmp_path_factory.mktemp("target"), layers=8)), "float32")


@pytest.mark.parametrize("name", SERVED)
def test_the_converter_is_given_drafter_and_target_and_leaves_one_file(
    name, target, make_drafter, folder, tmp_path
):
    drafter = make_drafter(name, target, **TAKEN[name])
    script = llama_cpp.check_folder(str(folder))
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "gguf")
    out = tmp_path / "out"
    out.mkdir()
    llama_cpp.convert_on_write(layout, target, script).write(out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "drafter.gguf"]
    seen = json.loads((folder / "seen.json").read_text())
    args = ["--outfile", str(out / "drafter.gguf"), "--model-name", "drafter", "--outtype", "f32"]
    assert seen["args"][:-2] == [str(out), *args]
    assert seen["args"][-2] == "--target-model-dir"
    assert set(TOKENIZER) <= set(seen["target"])
    assert "model.safetensors" in seen["folder"]
    kind, tokens = SERVED[name]
    command = layout.command("some/target", "out")
    assert f"-md out/drafter.gguf --spec-type {kind} --spec-draft-n-max {tokens}" in command


def test_a_draft_model_has_the_targets_vocabulary(target, make_drafter, draft_folder):
    drafter = make_drafter("lm", target, path=draft_folder(target.vocab_size + 3))
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "gguf")
    assert layout.config["vocab_size"] == target.vocab_size


@pytest.mark.parametrize("name", SERVED)
def test_the_tokenizer_is_tried_on_the_class_that_will_be_converted(name, target, make_drafter, folder):
    drafter = make_drafter(name, target, **TAKEN[name])
    llama_cpp.check_tokenizer(name, drafter.settings, target, llama_cpp.check_folder(str(folder)))
    seen = json.loads((folder / "seen.json").read_text())
    assert seen["args"][-1] == "--vocab-only"
    assert set(TOKENIZER) <= set(seen["folder"])
    assert seen["architectures"] == ["LlamaForCausalLM"]


FAILURES = {
    "ModuleNotFoundError: No module named 'sentencepiece'": "needs the package sentencepiece",
    "NotImplementedError: BPE pre-tokenizer was not recognized": "does not know the target's tokenizer",
    "ERROR:hf-to-gguf:Model OddForCausalLM is not supported": "knows no OddForCausalLM",
    "ValueError: Can not map tensor": "failed: ValueError: Can not map tensor",
    "": "failed: ",
}


@pytest.mark.parametrize("said", FAILURES)
def test_a_converter_that_fails_is_one_line(said, target, make_drafter, folder):
    (folder / "error").write_text(f"INFO: began\nTraceback\n{said}\n")
    drafter = make_drafter("eagle3", target, **TAKEN["eagle3"])
    with pytest.raises(UserError, match=re.escape(FAILURES[said])) as error:
        llama_cpp.check_tokenizer("eagle3", drafter.settings, target, llama_cpp.check_folder(str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("named", "said"), [(None, llama_cpp.VARIABLE), ("/nowhere", "no convert_hf_to_gguf")]
)
def test_a_missing_folder_is_refused(named, said):
    with pytest.raises(UserError, match=said):
        llama_cpp.check_folder(named)

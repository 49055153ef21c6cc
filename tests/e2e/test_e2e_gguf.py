"""`target=/path/model.gguf`: trained, scored and read again by its own name."""

from __future__ import annotations

import json
import shutil

import pytest
from ggufs import tiny_llama, write_gguf
from workbench import foredraft


@pytest.fixture(scope="module")
def trained(bench, own_cache):
    """A GGUF file, and the checkpoint of the bench's quick run on it."""
    file = write_gguf(bench.root / "tiny.gguf")
    bench.train(f"target={file}").succeeded()
    return file, bench.runs()[-1] / "checkpoints" / "best"


def test_run_names_the_file_and_its_hash(bench, trained):
    file, checkpoint = trained
    target = json.loads((checkpoint / "config.json").read_text())["target"]
    assert (target["name"], len(target["revision"])) == (str(file), 64)
    assert json.loads((checkpoint / "score.json").read_text())["target"] == str(file)
    manifest = next((bench.root / "outputs" / "rollouts").glob("*/manifest.json"))
    origin = json.loads(manifest.read_text())["origin"]
    assert origin == {"target": str(file), "revision": target["revision"]}


def test_commands_about_a_checkpoint_find_the_file_again(trained, bench, tmp_path):
    file, checkpoint = trained
    words = [f"checkpoint={checkpoint}", "prompt=say 1", "max_new_tokens=4", "plain=false"]
    assert f"target={file} target.revision=" in foredraft("generate", *words).succeeded().out
    store = next((bench.root / "outputs" / "rollouts").iterdir())
    foredraft("inspect-data", f"store={store}", "rows=1", "sample=0").succeeded()
    foredraft("export", f"checkpoint={checkpoint}", "to=native", f"out={tmp_path / 'out'}").succeeded()


def test_changed_file_is_refused_by_its_checkpoint(trained, tmp_path):
    file, checkpoint = trained
    kept = shutil.copy2(file, tmp_path / "kept.gguf")
    try:
        write_gguf(file, tiny_llama(seed=1))
        done = foredraft("generate", f"checkpoint={checkpoint}", "prompt=say 1")
    finally:
        shutil.copy2(kept, file)
    assert done.code == 2
    assert "its SHA-256 is" in done.err


def test_damaged_file_is_named(bench, tmp_path):
    file = tmp_path / "half.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    done = bench.train(f"target={file}")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"error: target={file}: damaged")

"""`target=/path/model.gguf`: trained, scored and read again by its own name."""

from __future__ import annotations

import json
import shutil

import pytest
from ggufs import tiny_llama, write_gguf
from workbench import foredraft


@pytest.fixture(scope="module")
def trained(bench, own_cache):
    """The bench's quick run on a GGUF file; its checkpoint."""
    file = write_gguf(bench.root / "tiny.gguf")
    done = bench.train(f"target={file}")
    assert done.code == 0, done.err
    return file, bench.runs()[-1] / "checkpoints" / "best"


def test_a_run_names_the_file_and_its_hash(bench, trained):
    file, checkpoint = trained
    target = json.loads((checkpoint / "config.json").read_text())["target"]
    assert target["name"] == str(file)
    assert len(target["revision"]) == 64
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["target"] == str(file)
    manifest = next((bench.root / "outputs" / "rollouts").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["origin"] == {
        "target": str(file),
        "revision": target["revision"],
    }


def test_commands_about_a_checkpoint_find_the_file_again(trained, bench, tmp_path):
    file, checkpoint = trained
    done = foredraft(
        "generate", f"checkpoint={checkpoint}", "prompt=say 1", "max_new_tokens=4", "plain=false"
    )
    assert done.code == 0, done.err
    assert f"as in training: target={file} target.revision=" in done.out
    store = next((bench.root / "outputs" / "rollouts").iterdir())
    done = foredraft("inspect-data", f"store={store}", "rows=1", "sample=0")
    assert done.code == 0, done.err
    exported = foredraft("export", f"checkpoint={checkpoint}", "to=native", f"out={tmp_path / 'out'}")
    assert exported.code == 0, exported.err


def test_a_file_that_has_changed_is_refused_by_its_checkpoint(trained, tmp_path):
    file, checkpoint = trained
    kept = shutil.copy2(file, tmp_path / "kept.gguf")
    try:
        write_gguf(file, tiny_llama(seed=1))
        done = foredraft("generate", f"checkpoint={checkpoint}", "prompt=say 1")
    finally:
        shutil.copy2(kept, file)
    assert done.code == 2
    assert "its SHA-256 is" in done.err


def test_a_damaged_file_is_one_line(bench, tmp_path):
    file = tmp_path / "half.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    done = bench.train(f"target={file}")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"error: target={file}: damaged, or no GGUF model")

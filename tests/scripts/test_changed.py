"""scripts/changed.py: tests of a tier run where its files, or files that it imports, have changed."""

import subprocess

import pytest

import changed

FILES = {
    "src/drafters/zoo/one.py": "from drafters.base import Drafter\nfrom drafters import optional\n",
    "src/drafters/base.py": "",
    "src/drafters/optional.py": "",
    "src/drafters/other.py": "",
    "scripts/lab/benchmark.py": "",
    "scripts/lab/results/eagle.json": "",
    "conf/lab/auto.yaml": "",
    "docs/proofs.md": "At commit COMMIT on a machine: 3 passed\n",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clone whose docs/proofs.md names its first commit."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add files"]):
        subprocess.run([*git, *words], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    page = tmp_path / "docs" / "proofs.md"
    page.write_text(FILES["docs/proofs.md"].replace("COMMIT", first[:12]))
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "tiers"),
    [
        ("src/drafters/zoo/one.py", ["zoo"]),
        ("src/drafters/base.py", ["zoo"]),
        ("src/drafters/optional.py", ["zoo"]),
        ("src/drafters/other.py", []),
        ("scripts/lab/benchmark.py", ["lab"]),
        ("conf/lab/auto.yaml", ["lab"]),
        ("scripts/lab/results/eagle.json", []),
        ("docs/proofs.md", []),
    ],
)
def test_a_change_runs_the_tests_of_its_tier(repository, file, tiers):
    assert [tier for tier in changed.CODE if not changed.main(tier)] == []
    (repository / file).write_text((repository / file).read_text() + "# new\n")
    assert [tier for tier in changed.CODE if not changed.main(tier)] == tiers


def test_without_the_commit_of_the_proofs_all_run(repository):
    (repository / "docs" / "proofs.md").write_text("At commit 0123456789ab on a machine\n")
    assert [tier for tier in changed.CODE if not changed.main(tier)] == ["zoo", "lab"]

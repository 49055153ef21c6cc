"""Results on file, and the README's table, which is made of them."""

import json

import pytest
from cards import audit
from compared import FAST, SLOW, card, row, timing
from workbench import ROOT

from decode.errors import UserError
from distill.report.readme_results import BEGIN, END, as_text, headline, insert, results
from distill.scoring.compare import Choice, read

TREE = "tree-7 (depth 3, width 3)"
BOTH = Choice([0.0, 1.0])


@pytest.fixture
def scored(tmp_path):
    """Two runs: the one with a tree and a chain at two batch sizes, the other with less."""
    rows = [
        row(FAST, speedup=1.2, decode=TREE, timing=timing(1.1, 1.2, 1.3, 1.2, 1.2)),
        row(SLOW, speedup=1.34567, decode="chain-2"),
        row(FAST, batch=8, speedup=0.6, decode=TREE),
        row(SLOW, batch=8, speedup=0.9, decode="chain-2"),
        row(SLOW, 1.0, speedup=2.0, decode=TREE),
    ]
    plain = [row(SLOW, decode=TREE, speedup=1.4), row(SLOW, 1.0, decode=TREE, replay=None)]
    nothing = {"parameters": 0, "train_seconds": 0.0}
    return read([card(tmp_path / "a", rows), card(tmp_path / "b", plain, "ngram", **nothing)])


def test_the_readmes_table_is_made_of_docs_results():
    """foredraft compare --results docs/results.json --readme README.md wrote both."""
    text = (ROOT / "README.md").read_text()
    kept = json.loads((ROOT / "docs" / "results.json").read_text())
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n{headline(kept, 'README.md')}\n"
    assert as_text(kept) == (ROOT / "docs" / "results.json").read_text()
    assert all(run["audit_passed"] and run["control"] == "none" for run in kept["runs"])


def test_tau_is_of_one_plan_and_speedup_of_the_fastest(scored):
    kept = results(scored, BOTH)
    table, said = headline(kept, "R.md").split("\n\n")
    _, _, first, second = (line.strip("| ").split(" | ") for line in table.splitlines())
    assert first[0] == "ngram"
    assert first[2:] == ["9.00~ (8.00..10.00)", f"1.40x, {TREE[:6]}", "-", "-", "-"]
    assert second[0] == "eagle"
    assert second[1].startswith(f"{157 / 63:.2f} (")  # the tree's, whichever is faster
    assert second[3:] == ["1.35x, chain-2", "0.90x, chain-2", "1.5 min", "1.50 M"]
    assert said.endswith("`foredraft compare RUN ... --temperatures 0 1 --batch 1 --readme R.md`.")
    assert json.loads(as_text(kept)) == kept
    table, said = headline(results(scored, Choice([0.0], decode="tree-7")), "R.md").split("\n\n")
    eagle = table.splitlines()[-1].split(" | ")
    assert eagle[2].startswith("1.20x (1.1")
    assert eagle[3] == "0.60x"
    assert "--decode tree-7" in said


def test_tuned_targets_controls_and_failed_audits_are_marked(tmp_path):
    more = {"lossless_to": "tuned target", "control": "shuffled_taps", "audit": audit(mismatches=9)}
    text = headline(results(read([card(tmp_path / "a", [row(FAST)], **more)]), Choice()), "R.md")
    assert "| eagle (tuned target, control=shuffled_taps: no real score, audit FAILED) |" in text


def test_only_the_text_between_the_comments_is_replaced(scored, tmp_path):
    document = tmp_path / "R.md"
    document.write_text(f"Above.\n\n{BEGIN}\nold\n{END}\n\nBelow: é.\n", encoding="utf-8")
    kept = results(scored, BOTH)
    for _ in range(2):
        insert(document, kept)
        text = document.read_text(encoding="utf-8")
        assert text == f"Above.\n\n{BEGIN}\n{headline(kept, 'R.md')}\n{END}\n\nBelow: é.\n"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_document_without_a_place_is_left_alone(scored, tmp_path, text):
    document = tmp_path / "R.md"
    document.write_text(text)
    with pytest.raises(UserError, match="put <!-- results -->"):
        insert(document, results(scored, BOTH))
    assert document.read_text() == text
    with pytest.raises(UserError, match="name a Markdown file"):
        insert(tmp_path / "nowhere.md", results(scored, BOTH))

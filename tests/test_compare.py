"""The table over runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.compare import main
from workbench import command

from decode.errors import UserError
from decode.replay import Counts, agreement
from decode.score import SCHEMA
from distill.compare import difference, read, table

ROOT = Path(__file__).resolve().parents[1]
TOKENS = [30, 20, 41, 8]


def row(rounds, temperature=0.0, batch=1, speedup=1.5, tokens=TOKENS, lossy=False, **more):
    counts = Counts(tokens, rounds)
    replay = {
        "method": "exact",
        "tau": counts.tau,
        "tau_interval": counts.interval(),
        "survival": [0.5, 0.25],
        "counts": counts._asdict(),
    }
    decoded = {"tau": 9.0, "tau_interval": [8.0, 10.0], "survival": [0.9], "tpot": 0.004, "draft_share": 0.25}
    setting = {"temperature": temperature, "batch_size": batch, "decode": "chain-2", "lossy": lossy}
    return setting | decoded | {"speedup": speedup, "replay": replay} | more


def card(folder, rows, drafter="eagle", **more):
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"schema": SCHEMA, "dtype": "float32", "hardware": "a machine", "audit_passed": True}
    costs = {"parameters": 1_500_000, "drafter_kv_bytes_per_token": 512, "train_seconds": 90.0}
    whole = facts | costs | {"drafter": drafter, "rows": rows} | more
    (folder / "score.json").write_text(json.dumps(whole))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    """Three runs: of a run's folder `best` is read."""
    slow = [row([20.0, 15.0, 30.0, 5.0], speedup=1.1), row([25.0, 18.0, 33.0, 7.0], 1.0, speedup=9.0)]
    fast = [
        row([1.0] * 4, batch=8),
        row([1.0] * 4, lossy=True),
        row([10.0, 9.0, 16.0, 4.0], speedup=1.4),
        row([12.0, 10.0, 17.0, 4.0], 1.0, speedup=0.5),
    ]
    card(tmp_path / "a" / "checkpoints" / "best", slow, "bigram")
    return [str(tmp_path / "a"), card(tmp_path / "b", fast), card(tmp_path / "c", fast, audit_passed=False)]


def test_the_fastest_comes_first_with_all_its_costs(runs):
    head, *lines = table(read(runs[:2]), [0.0, 1.0]).splitlines()
    assert head.split()[:2] == ["drafter", "decode"]
    first, second = lines[0].split(), lines[1].split()
    assert first[:3] == ["eagle", "chain-2", f"{99 / 39:.2f}"]
    assert second[:3] == ["bigram", "chain-2", f"{99 / 70:.2f}"]
    assert f"{99 / 43:.2f}" in lines[0]  # T=1
    # 0.25 of 4 ms a token, 9 tokens a round.
    for cell in ("0.50  0.25    -    -", "1.40x", "25%", "9.00", "1.5 min", "1.50 M", "512 B", "pass"):
        assert cell in lines[0]
    assert "4 held-out prompts" in lines[2]
    assert lines[-1] == "float32, a machine"


def test_what_was_given_away_has_its_card_by_another_name(tmp_path):
    folder = Path(card(tmp_path / "a", [row([1.0] * 4)]))
    (folder / "score.json").rename(folder / "scorecard.json")
    assert read([str(folder)])[0].card["drafter"] == "eagle"


def test_two_runs_of_one_drafter_are_told_apart_and_a_failed_audit_is_seen(runs):
    lines = table(read(runs), [0.0]).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:3]] == ["eagle (b)", "eagle (c)"]
    assert lines[2].endswith("FAIL")


def test_the_order_may_be_that_of_tau(tmp_path):
    long = card(tmp_path / "long", [row([9.0, 8.0, 15.0, 4.0], speedup=1.1)])
    fast = card(tmp_path / "fast", [row([20.0, 15.0, 30.0, 5.0], speedup=1.9)])
    for by, order in (("tau", ["long", "fast"]), ("speedup", ["fast", "long"])):
        lines = table(read([long, fast]), [0.0], by=by).splitlines()[1:3]
        assert [line.split()[1].strip("()") for line in lines] == order


def test_a_difference_is_paired_by_prompt(runs):
    scored = read(runs[:2])
    text = table(scored, [0.0], against="bigram")
    mine, base = Counts(TOKENS, [10.0, 9.0, 16.0, 4.0]), Counts(TOKENS, [20.0, 15.0, 30.0, 5.0])
    low, high = agreement(mine, base)
    assert f"{mine.tau - base.tau:+.2f} ({low:+.2f}..{high:+.2f})" in text
    assert 0 < low < high
    assert "less bigram's, T=0" in text


def test_answers_that_are_not_the_same_are_not_subtracted():
    other = row([10.0, 9.0, 16.0, 4.0], tokens=[30, 20, 41, 9])
    assert difference(row([20.0, 15.0, 30.0, 5.0]), other) is None
    assert difference(row([1.0] * 4, replay=None), row([1.0] * 4)) is None


def test_what_was_counted_is_marked_and_what_was_not_trained_has_no_time(tmp_path):
    estimate = row([10.0, 9.0, 16.0, 4.0])
    estimate["replay"]["method"] = "an estimate"
    counted = row([1.0] * 4, replay=None, speedup=1.2)
    paths = [card(tmp_path / "x", [estimate]), card(tmp_path / "y", [counted], "ngram")]
    text = (tmp_path / "y" / "score.json").read_text()
    (tmp_path / "y" / "score.json").write_text(text.replace('"train_seconds"', '"other"'))
    lines = table(read(paths), [0.0]).splitlines()
    assert f"{99 / 39:.2f}~ (" in lines[1]
    assert "9.00~ (8.00..10.00)" in lines[2]
    assert " 0.90 " in lines[2]
    assert " min" not in lines[2]


def test_what_is_wrong_is_said_in_a_line(runs, tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no score\.json there"):
        read(["nowhere"])
    card(tmp_path / "old", [], schema=2)
    with pytest.raises(UserError, match="a scorecard of version 2, this one reads"):
        read([str(tmp_path / "old")])
    (tmp_path / "old" / "score.json").write_text("[]")
    with pytest.raises(UserError, match="a scorecard of version none"):
        read([str(tmp_path / "old")])
    with pytest.raises(UserError, match=r"bigram: not scored at temperature 0\.7, batch 1"):
        table(read(runs), [0.7])
    with pytest.raises(UserError, match="against=medusa: no such run; there are bigram, eagle"):
        table(read(runs), [0.0], against="medusa")


def test_the_command_writes_what_it_prints_and_refuses_in_one_line(runs, tmp_path):
    out = tmp_path / "table.txt"
    script = str(ROOT / "scripts" / "compare.py")
    done = subprocess.run([sys.executable, script, *runs, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text() == table(read(runs), [0.0]) + "\n"
    wrong = command(main, ["compare.py", "nowhere"])
    assert (wrong.code, wrong.out) == (2, "")
    assert (
        wrong.err == "error: nowhere: no score.json there; give a run's folder, a checkpoint or a scorecard\n"
    )

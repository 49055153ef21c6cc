"""The table over runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cards import audit, row_of
from compared import FAST, SLOW, TOKENS, card, row, timing
from workbench import foredraft

from decode.errors import UserError
from decode.evaluation.replay import Counts
from distill.scoring.compare import Choice, comparison, read, table
from distill.scoring.paired import tau_difference

BOTH = Choice([0.0, 1.0])
FAR = {"kl": 0, "reverse_kl": 0, "top1_agreement": 1, "greedy_prefix": 1, "prompts": 6, "tokens": 90}


@pytest.fixture
def runs(tmp_path):
    """Three runs, one of them the folder of a run, whose best checkpoint is read."""
    slow = [row(SLOW, speedup=1.1), row([25.0, 18.0, 33.0, 7.0, 20.0, 22.0], 1.0, speedup=9.0)]
    fast = [
        row([1.0] * 6, batch=8),
        row([1.0] * 6, lossy=True),
        row(FAST, speedup=1.4),
        row([12.0, 10.0, 17.0, 4.0, 11.0, 15.0], 1.0, speedup=0.5),
    ]
    card(tmp_path / "a" / "checkpoints" / "best", slow, "bigram")
    return [
        str(tmp_path / "a"),
        card(tmp_path / "b", fast),
        card(tmp_path / "c", fast, audit=audit(mismatches=9)),
    ]


def column(scored, choice, name):
    """Of every run, by name."""
    found = comparison(scored, choice)
    return {line[0]: line[found.head.index(name)] for line in found.lines}


def test_fastest_comes_first_with_all_its_costs(runs):
    head, first, second, *notes = table(read(runs[:2]), BOTH).splitlines()
    assert head.split()[:3] == ["drafter", "decode", "speedup"]
    assert first.split()[:3] == ["eagle", "chain-2", "1.40x"]
    assert second.split()[:3] == ["bigram", "chain-2", "1.10x"]
    # tau at T=0 and T=1; 0.25 of 4 ms a token, 9 tokens a round.
    cells = f"{157 / 63:.2f} (", f"{157 / 69:.2f} (", "0.50  0.25    -    -", "25%", "9.00"
    for cell in (*cells, "1.5 min", "1.50 M", "512 B", "pass"):
        assert cell in first
    assert "6 held-out prompts" in notes[0]
    assert notes[-1] == "float32, a machine"
    assert table(read(runs), Choice()).splitlines()[2].endswith("FAIL")


def test_runs_are_told_apart_by_given_names_or_folders(runs, tmp_path):
    exported = Path(card(tmp_path / "export", [row(FAST)]))
    (exported / "score.json").rename(exported / "scorecard.json")
    odd = card(tmp_path / "depth=2", [row(FAST)], "medusa")  # a sweep's folder is no name
    same = card(tmp_path / "more" / "b", [row(FAST)])
    for words, names in (
        ([runs[0], f"mine={runs[1]}", f"other={runs[2]}"], ["bigram", "mine", "other"]),
        ([str(exported)], ["eagle"]),
        ([odd], ["medusa"]),
        (runs, ["bigram", "eagle (b)", "eagle (c)"]),
        ([runs[1], same], [f"eagle ({runs[1]})", f"eagle ({same})"]),
    ):
        assert [one.name for one in read(words)] == names
    with pytest.raises(UserError, match="mine: two runs of that name"):
        read([f"mine={runs[0]}", f"mine={runs[1]}"])


def test_runs_are_ordered_by_tau_or_by_speedup(tmp_path):
    other = row([1.0] * 6, speedup=5.0, decode="tree-4")
    long = card(tmp_path / "long", [row(FAST, speedup=1.1)])
    fast = card(tmp_path / "fast", [row(SLOW, speedup=1.9), other])
    for by, order in (("tau", ["long", "fast"]), ("speedup", ["fast", "long"])):
        lines = table(read([long, fast]), Choice(by=by)).splitlines()[1:3]
        assert [line.split()[1].strip("()") for line in lines] == order
        assert ("tree-4" in "".join(lines)) == (by == "speedup")


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_the_terminal_and_says_what_it_leaves_out(tmp_path, width):
    tree = "tree-7 (depth 3, width 3)"
    scored = read([card(tmp_path / name, [row(FAST, speedup=1.2, decode=tree)], name) for name in ("a", "b")])
    whole = comparison(scored, Choice())
    assert max(map(len, whole.text().splitlines())) > 140
    lines = whole.text(width).splitlines()
    assert max(map(len, lines)) <= width
    head, left_out = lines[0], " ".join(lines)
    for name in whole.head:
        assert name in head or re.search(rf"left out here: [^()]*{re.escape(name)}", left_out), name
    assert all(name in head for name in ("drafter", "decode", "speedup", "tau T=0"))
    assert whole.text(400).splitlines()[0] == whole.text().splitlines()[0]


def test_batch_and_plan_are_chosen(tmp_path):
    """The fastest lossless plan at a batch, or the one that is named, in short or in full."""
    tree = "tree-7 (depth 3, width 3)"
    rows = [
        row(FAST, speedup=1.2, decode=tree),
        row(SLOW, speedup=1.3),
        row(SLOW, speedup=9.0, decode="typical", lossy=True),
        row(FAST, batch=8, speedup=0.6, decode=tree),
        row(SLOW, batch=8, speedup=0.9),
        row(FAST, 1.0, speedup=2.0, decode=tree),
        row(SLOW, 1.0, speedup=1.0),
    ]
    scored = read([card(tmp_path / "a", rows)])
    for choice, *cells in (
        (Choice(), "chain-2", "1.30x"),
        (Choice(batch=8), "chain-2", "0.90x"),
        (Choice(decode="tree-7"), tree, "1.20x"),
        (Choice(batch=8, decode=tree), tree, "0.60x"),
    ):
        assert [column(scored, choice, name)["eagle"] for name in ("decode", "speedup")] == cells
    # A line is of one plan at all temperatures, where it can be.
    assert column(scored, BOTH, "tau T=1")["eagle"].startswith(f"{157 / 107:.2f}")
    del rows[-1]
    scored = read([card(tmp_path / "a", rows)])
    assert column(scored, BOTH, "tau T=1")["eagle"].startswith(f"{157 / 63:.2f}")
    assert f"eagle: T=1: {tree}" in table(scored, BOTH)
    for name in ("tree-9", "typical"):  # which is lossy
        with pytest.raises(UserError, match=rf"decode={name}: eagle .* of tree-7 .*, chain-2$"):
            table(scored, Choice(decode=name))


def test_difference_is_paired_by_prompt(runs):
    scored = read(runs[:2])
    found = tau_difference(row_of(row(FAST)), row_of(row(SLOW)))
    assert found.value == pytest.approx(157 / 63 - 157 / 107)
    low, high = found.interval
    assert 0 < low < found.value < high
    near = tau_difference(row_of(row(SLOW)), row_of(row([1.1 * rounds for rounds in SLOW]))).interval
    single = Counts(TOKENS, SLOW).interval()
    assert 0 < near[0] < near[1], "a tenth better on every prompt"
    assert near[1] - near[0] < (single[1] - single[0]) / 5
    more, less = (
        f"{found.value:+.2f} ({low:+.2f}..{high:+.2f})",
        f"{-found.value:+.2f} ({-high:+.2f}..{-low:+.2f})",
    )
    against = column(scored, Choice(against="bigram"), "tau vs bigram, T=0")
    assert against == {"eagle": more, "bigram": "-"}
    assert column(scored, Choice(), "tau vs best, T=0") == {"eagle": "-", "bigram": less}
    assert "best" not in table(scored[:1], Choice()).splitlines()[0]
    other = row(FAST, tokens=[*TOKENS[:-1], 9])
    assert tau_difference(row_of(row(SLOW)), row_of(other)) is None, "different answers"
    assert tau_difference(row_of(row(FAST, replay=None)), row_of(row(FAST))) is None


def test_plain_decoding_is_no_drafts_speedup(tmp_path):
    """decode=auto may have chosen it; it is shown where it is asked for."""
    plain = row([1.0] * 6, speedup=1.05, decode="plain", nodes=0)
    card(tmp_path / "a", [plain, row(SLOW, speedup=0.8), plain | {"batch_size": 8}])
    (scored,) = read([str(tmp_path / "a")])
    assert column([scored], Choice(), "speedup") == {"eagle": "0.80x"}
    assert column([scored], Choice(by="tau"), "speedup") == {"eagle": "0.80x"}
    assert column([scored], Choice(decode="plain"), "speedup") == {"eagle": "1.05x"}
    assert {size: one.decode for size, one in scored.by_batch(0.0).items()} == {1: "chain-2", 8: "plain"}


def test_speedups_are_divided_where_that_is_fair(tmp_path):
    """Each was measured over plain decoding in its own process: one machine, the same texts."""
    one = row(FAST, speedup=1.5, timing=timing(1.4, 1.5, 1.6, 1.5, 1.5))
    two = row(SLOW, speedup=1.2, timing=timing(1.1, 1.2, 1.3, 1.2, 1.2))
    hot = {"temperature": 1.0}
    for mine, other, more, ratio in (
        (one, two, {}, "0.80 (0.79..0.81)"),
        (one, two, {"hardware": "another"}, "other hardware"),
        (one, two, {"prompts_digest": "77"}, "other prompts"),
        (one, two, {"target_drift": FAR}, "other target"),
        (one, two, {"seed": 3}, "0.80 (0.79..0.81)"),  # draws nothing at T=0
        (one | hot, two | hot, {"seed": 3}, "other seed"),
        (one, two | {"timing": None}, {}, "not timed by batch"),
    ):
        paths = [
            card(tmp_path / "a", [mine]),
            card(tmp_path / "b", [other], "bigram", lossless_to="", **more),
        ]
        scored, choice = read(paths), Choice([mine["temperature"]])
        assert column(scored, choice, "speedup vs best")["bigram"] == ratio
        assert column(scored, choice, "speedup")["eagle"].startswith("1.50x (1.4")
    assert column(scored, choice, "speedup")["bigram"] == "1.20x", "a card from before has no interval"


def test_estimates_and_controls_are_marked(tmp_path):
    text = table(read([card(tmp_path / "a", [row(FAST)], control="shuffled_taps")]), Choice())
    assert "eagle: control=shuffled_taps: no real score" in text
    estimate = row(FAST)
    estimate["replay"]["method"] = "an estimate"
    counted = row([1.0] * 6, replay=None, speedup=1.2)
    paths = [card(tmp_path / "x", [estimate]), card(tmp_path / "y", [counted], "ngram")]
    text = (tmp_path / "y" / "score.json").read_text()
    (tmp_path / "y" / "score.json").write_text(text.replace('"train_seconds"', '"other"'))
    lines = table(read(paths), Choice()).splitlines()
    assert f"{157 / 63:.2f}~ (" in lines[1]
    assert "9.00~ (8.00..10.00)" in lines[2]
    assert " 0.90 " in lines[2]
    assert " min" not in lines[2]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Choice([0.7]), r"T=0\.7, batch 1; it was at T=0 batch 1, T=1 batch 1:"),
        (Choice(batch=8), "bigram: not scored at T=0, batch 8"),
        (Choice(against="medusa"), "against=medusa: no such run; there are bigram, eagle"),
    ],
)
def test_missing_setting_is_named(runs, choice, reason):
    with pytest.raises(UserError, match=reason):
        table(read(runs), choice)


def test_missing_or_old_card_is_named(tmp_path):
    old = card(tmp_path / "old", [], schema=2)
    no_card = r"^nowhere: no score\.json there"
    for word, reason in ("nowhere", no_card), ("mine=nowhere", no_card), (old, "a scorecard of version 2"):
        with pytest.raises(UserError, match=reason):
            read([word])


@pytest.mark.parametrize(
    "text", ["[]", "{", "", "[" * 100_000, '{"schema": []}', '{"schema": 4, "rows": [3]}']
)
def test_damaged_scorecard_is_named_and_left_out(text, runs, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    file = tmp_path / "bad" / "score.json"
    file.write_text(text)
    assert [one.name for one in read([runs[0], str(file), runs[1]])] == ["bigram", "eagle"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"left out: {file}: ")
    with pytest.raises(UserError, match="score the checkpoint again"):
        read([str(file)])


REPLAY = row(FAST)["replay"]


SPOILT = [
    {"tau_interval": [2.0]},
    {"replay": {**REPLAY, "tau_interval": []}},
    {"replay": {**REPLAY, "difference_interval": [1.0]}},
    {"replay": {**REPLAY, "counts": {"tokens": TOKENS, "rounds": FAST[:-1]}}},
    {"timing": {**timing(1, 1, 1, 1, 1), "tokens": []}},
    {"tokens": 10**400},
]


@pytest.mark.parametrize("spoilt", SPOILT)
def test_scorecard_with_lists_of_wrong_lengths_is_left_out(spoilt, runs, tmp_path, capsys):
    read([runs[0], card(tmp_path / "bad", [row(FAST) | spoilt])])
    assert "its scorecard is damaged (rows[0]." in capsys.readouterr().err


def test_command_writes_the_table_it_prints(runs, tmp_path):
    out = tmp_path / "table.txt"
    done = foredraft("compare", *runs, "--out", str(out), "--html", str(tmp_path / "page.html")).succeeded()
    assert done.out == out.read_text() == table(read(runs), Choice()) + "\n"
    assert "<h2>Speedup</h2>" in (tmp_path / "page.html").read_text()
    foredraft("compare", "nowhere").refused("nowhere: no score.json there")
    (tmp_path / "rollouts").mkdir()
    foredraft("compare", str(tmp_path / "rollouts")).refused("rollouts: no score.json there")
    done = foredraft("compare", str(tmp_path / "rollouts"), *runs).succeeded()
    assert f"left out: 1 of 4, which are no runs or have no scores: {tmp_path / 'rollouts'}" in done.err
    foredraft("compare", runs[0], "--batch", "8").refused("batch 8")


def test_objectives_of_runs_are_named(runs, tmp_path):
    for name, path in (("kl", "distill.losses.divergences.kl"), ("own", "my_pkg.losses.own")):
        folder = tmp_path / name
        card(folder / "checkpoints" / "best", [row(FAST)])
        options = {"objective": {"_target_": path}}
        (folder / "run.json").write_text(json.dumps({"options": options, "chosen": {}}))
    both = read([f"{name}={tmp_path / name}" for name in ("kl", "own")])
    assert column(both, Choice(), "objective") == {"kl": "kl", "own": "own"}
    assert "\nobjective: kl\n" in table(both[:1], Choice())
    assert "objective" not in table(read(runs), Choice())


def test_downloaded_scorecard_prints_no_control_characters(tmp_path):
    (one,) = read([card(tmp_path, [row(FAST)], "eagle\x1b[2J\r", hardware="a\x9b1m machine\u202e")])
    text = table([one], Choice())
    assert "eagle\ufffd[2J\ufffd" in text
    assert text.replace("\n", "").isprintable()


def test_runs_of_different_targets_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models/m").mkdir(parents=True)
    targets = ("models/m", str(tmp_path / "models" / "m"), "owner/name", "/elsewhere/m")
    a, same, other, namesake = read(
        [card(tmp_path / str(i), [row(FAST)], f"d{i}", target=target) for i, target in enumerate(targets)]
    )
    assert "target" not in comparison([a, same], Choice()).head
    assert column([a, other], Choice(), "target") == {"d0": "m", "d2": "owner/name"}
    assert column([a, namesake], Choice(), "target") == {"d0": targets[1], "d3": "/elsewhere/m"}
    for name in ("speedup vs best", "tau vs best, T=0"):
        assert set(column([a, other], Choice(), name).values()) == {"-", "other target"}

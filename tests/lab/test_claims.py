"""scripts/lab/claims.py: estimates from scorecards, verdicts, and the tables of a folder."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
import yaml
from cards import replay, row, scorecard

from claims.budgets import PLOT, best_within, budget_table, plot_budgets
from claims.cards import RESULTS, Line, Result, common_seeds, grouped, line_of, read_folder
from claims.estimates import difference, mean_over_seeds, seed_noise, tau
from claims.judged import Claim, Comparison, Folder, read_claims, rows_of, verdict
from claims.pages import noise_lines
from claims.tables import by_target, differences, other_plans, table
from decode.errors import UserError
from decode.evaluation.replay import Counts
from decode.evaluation.scorecard import Scorecard
from distill.utils.paths import CONF

PROMPTS = 12
TOKENS = [10 + prompt for prompt in range(PROMPTS)]


def counts(tau: float, spread: float = 0.2) -> Counts:
    """Rounds of answers whose tau varies by prompt."""
    rounds = [n / (tau + spread * (-1) ** i) for i, n in enumerate(TOKENS)]
    return Counts(TOKENS, rounds)


def result(
    arm: str, steps: int, seed: int, tau: float, plans: tuple[str, ...] = ("tree-16",), **more
) -> Result:
    rows = [
        row(t, tau=tau - t / 2, decode=plan, replay=replay(tau - t / 2, counts(tau - t / 2)))
        for plan in plans
        for t in (0.0, 1.0)
    ]
    values = {"drafter": arm, "commit": "a" * 12, "parameters": 1_000_000 * (steps > 0)}
    values |= {"train_cpu_seconds": 90.0 if steps else None}
    return Result(arm, steps, seed, Scorecard.from_json(scorecard(rows, **{**values, **more}), "here"))


def line(arm: str, steps: int, *taus: float, **more) -> Line:
    (found,) = grouped([result(arm, steps, seed, tau, **more) for seed, tau in enumerate(taus)])
    return found


# -- estimates ------------------------------------------------------------------------------------


def test_three_seeds_of_eagle3_and_eagle_give_the_interval_computed_by_hand():
    """Differences -0.229, -0.175, -0.164: -0.189 +- 0.086 (Student's t, two degrees of freedom)."""
    eagle, eagle3 = line("eagle", 8, 3.577, 3.553, 3.497), line("eagle3", 8, 3.348, 3.378, 3.333)
    found = difference(eagle3, eagle, 0.0, None)
    assert found.value == pytest.approx(-0.1893, abs=1e-4)
    assert found.high - found.value == pytest.approx(0.0865, abs=5e-4)
    assert found.unit == "3 seeds"


def test_a_mean_over_seeds_has_students_interval():
    found = mean_over_seeds([1.0, 2.0, 4.0])
    wide = 4.302653 * statistics.stdev([1.0, 2.0, 4.0]) / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx(
        (7 / 3, 7 / 3 - wide, 7 / 3 + wide), abs=1e-5
    )


def test_the_noise_of_seeds_is_pooled_over_trained_lines():
    lines = [line("a", 8, 2.0, 2.2), line("b", 8, 3.0, 3.1, 3.2), line("c", 8, 2.5), line("d", 0, 1.0, 2.0)]
    found = seed_noise(lines, 0.0)
    assert found.freedom == 3
    assert found.deviation == pytest.approx(math.sqrt((0.02 + 2 * 0.01) / 3))
    assert found.width(2) == pytest.approx(3.182446 * found.deviation * math.sqrt(2), rel=1e-6)
    assert seed_noise(lines[2:], 0.0) is None


def test_lines_that_are_left_out_do_not_lower_the_noise():
    lines = {"a": [line("one", 8, 2.0, 2.2), line("copy", 8, 2.0, 2.0)], "b": [line("weak", 8, 1.01, 1.02)]}
    with_all = {name: Folder(title="", target="") for name in lines}
    fewer = {
        "a": replace(with_all["a"], noise_without=["copy-*"]),
        "b": replace(with_all["b"], noise_without=["*"]),
    }
    assert [line.name for line in noise_lines(lines, with_all)] == ["one-8", "copy-8", "weak-8"]
    assert [line.name for line in noise_lines(lines, fewer)] == ["one-8"]


def test_one_seed_cannot_show_less_than_seeds_differ_by():
    """The interval over prompts excludes zero; with a seed's noise it does not."""
    first, second = line("hass", 8, 2.06), line("eagle", 8, 2.0)
    noise = seed_noise([line("other", 8, 2.0, 2.05, 1.96)], 0.0)
    found = difference(first, second, 0.0, noise)
    prompts = difference(line("recycle", 0, 2.06), line("bigram", 0, 2.0), 0.0, None)
    assert prompts.low > 0
    assert found.low < 0 < found.high
    assert found.value == pytest.approx(prompts.value)
    assert found.high - found.value == pytest.approx(math.hypot(prompts.high - prompts.value, noise.width(2)))
    assert (prompts.unit, found.unit) == ("12 prompts", "12 prompts, one seed")
    half = difference(first, line("suffix", 0, 2.0), 0.0, noise)
    assert half.high < found.high, "only one of the two is trained"


def test_lines_that_cannot_be_paired_have_no_difference():
    noise = seed_noise([line("other", 8, 2.0, 2.05)], 0.0)
    eagle = line("eagle", 8, 2.0)
    later = grouped([result("late", 8, 3, 2.0)])[0]
    assert difference(eagle, later, 0.0, noise) is None, "no common seed"
    assert difference(eagle, line("eagle3", 8, 2.5), 0.0, None) is None, "the noise of seeds is unknown"
    assert difference(eagle, line("eagle3", 8, 2.5), 0.0, noise, "chain-2") is None, "not scored so"
    rows = [row(replay=replay(2.0, Counts([5] * PROMPTS, [2.0] * PROMPTS)))]
    tuned = Result("medusa2", 8, 0, Scorecard.from_json(scorecard(rows, parameters=5), "here"))
    assert difference(grouped([tuned])[0], eagle, 0.0, noise) is None, "other answers"


def test_only_seeds_of_both_lines_are_compared():
    first, second = common_seeds(line("a", 8, 2.0, 2.1, 2.2), line("b", 8, 2.0, 2.1))
    assert [one.seed for one in first.results] == [one.seed for one in second.results] == [0, 1]
    assert tau(first, 0.0).value == pytest.approx(2.05)


# -- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taus", "expects", "regime", "said"),
    [
        ((3.0, 2.0), "longer", "", "same"),
        ((3.0, 2.0), "shorter", "", "opposite"),
        ((2.0, 3.0), "longer", "", "opposite"),
        ((2.0, 2.01), "longer", "", "not distinguished"),
        ((3.0, 2.0), "longer", "blocks of 16", "not in the regime"),
    ],
)
def test_verdicts(taus, expects, regime, said):
    noise = seed_noise([line("other", 8, 2.0, 2.05, 1.96)], 0.0)
    found = difference(line("a", 8, taus[0]), line("b", 8, taus[1]), 0.0, noise)
    tests = [Comparison(folder="f", arm="a-8", over="b-8")]
    assert verdict(Claim(says="more", tests=tests, expects=expects, regime=regime), found) == said


def test_a_claims_row_names_files_pairing_and_unit():
    lines = {"f": [line("a", 8, 2.0, 2.1), line("b", 8, 1.5, 1.7)]}
    claim = Claim(says="more", tests=[Comparison(folder="f", arm="a-8", over="b-8", temperatures=[0.0])])
    folders = {"f": Folder(title="t", target="a target")}
    ((where, first, second, change, unit, said),) = rows_of(claim, lines, folders, {0.0: None, 1.0: None})
    assert where == "a target, tree-16, T=0"
    assert first == "[a-8](../scripts/lab/results/f/a-8-0.json) 2.05"
    assert second.endswith(" 1.60")
    assert change.startswith("+0.45 (")
    assert (unit, said) == ("2 seeds", "not distinguished")
    with pytest.raises(UserError, match="f: no c-8; there are a-8, b-8"):
        rows_of(Claim(says="", tests=[Comparison(folder="f", arm="c-8", over="b-8")]), lines, folders, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("folders: {}\npapers: [{name: A, arxiv: '1', claim: []}]", "A: no key claim; there are"),
        ("folders: {f: {title: a}}\npapers: []", "f: .*target"),
        ("folders: {}\npapers: [{name: A, arxiv: '1', claims: [{says: b, tests: []}]}]", "b: needs tests"),
        (
            "folders: {}\npapers: [{name: A, arxiv: '1', claims: [{says: b, expects: more, "
            "tests: [{folder: f, arm: a, over: b}]}]}]",
            "b: needs tests, and expects: longer or shorter",
        ),
    ],
)
def test_wrong_claims_are_refused(tmp_path, text, said):
    file = tmp_path / "claims.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        read_claims(file)


# -- by training time -----------------------------------------------------------------------------


def timed(arm: str, steps: int, tau: float, minutes: float) -> Line:
    return line(arm, steps, tau, train_cpu_seconds=60 * minutes)


def lines_by_time() -> list[Line]:
    """`slow` is ahead in the end; `quick` falls again; `even` is level with `quick` in the beginning."""
    untrained = line("suffix", 0, 1.6)
    quick = [timed("quick", 8, 2.0, 0.5), timed("quick", 80, 1.9, 2.0)]
    return [untrained, *quick, timed("even", 8, 1.99, 0.9), timed("slow", 80, 3.0, 3.0)]


def test_the_best_within_a_time_is_the_longest_of_what_was_done_by_then():
    noise = seed_noise([line("other", 8, 2.0, 2.05, 1.96)], 0.0)
    lines = lines_by_time()
    names = {
        minutes: (best.name, [one.name for one in level])
        for minutes in (0, 0.5, 1, 2.5, 3)
        for best, level in [best_within(lines, minutes, 0.0, noise)]
    }
    assert names == {
        0: ("suffix-0", []),
        0.5: ("quick-8", []),
        1: ("quick-8", ["even-8"]),
        2.5: ("quick-8", ["even-8"]),
        3: ("slow-80", []),
    }


def test_what_cannot_be_paired_is_not_told_apart():
    lines = [timed("a", 8, 2.5, 1), timed("b", 8, 1.5, 1)]
    assert best_within(lines, 1, 0.0, None)[1] == [lines[1]]


def test_auto_trains_eagle_as_is_best_in_equal_time():
    """The prior of `drafter=auto`: about as many CPU minutes, and a longer acceptance."""
    priors = yaml.safe_load((CONF / "drafter" / "auto.yaml").read_text())["priors"]
    assert priors == {"eagle": {"depth": 1}}
    lines = read_folder(RESULTS / "budget")
    one, recipe = (line_of(lines, name, "budget") for name in ("eagle-one-depth-1600", "eagle-800"))
    assert one.minutes < 1.1 * recipe.minutes
    lead = difference(one, recipe, 0.0, seed_noise(read_folder(RESULTS / "h200/pocket"), 0.0))
    assert lead is not None
    assert lead.low > 0


def test_the_table_and_the_plot_of_training_times(tmp_path):
    lines, noise = lines_by_time(), dict.fromkeys((0.0, 1.0))
    rows = budget_table(lines, [0, 3], noise).splitlines()
    assert rows[0].startswith("| CPU minutes | longest, T=0 | tau | not distinguished | longest, T=1 |")
    assert rows[2].startswith("| 0 | suffix | 1.60 (")
    assert rows[3].startswith("| 3 | slow, 80 steps | 3.00 (")
    for name in (PLOT, "again.svg"):
        plot_budgets(lines, tmp_path / name)
    drawn = (tmp_path / PLOT).read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert all(f">{arm}<" in drawn for arm in ("suffix", "quick", "even", "slow"))


# -- tables ---------------------------------------------------------------------------------------


def test_seeds_are_averaged_with_an_interval():
    (cells,) = table([line("eagle", 8, 2.0, 2.1, 2.3)]).splitlines()[2:]
    assert cells.startswith("| eagle | 8 | 3 | 2.13 (1.75..2.51) | 1.63 (1.25..2.01) |")
    assert "| 1.5 | 1.00 M | aaaaaaaa |" in cells  # CPU minutes
    assert "CPU minutes" not in table([line("eagle", 8, 2.0, hardware="NVIDIA H200")])


def test_a_speedup_is_shown_where_every_row_was_timed_alone():
    alone = {"prompts": 24, "repeats": 3, "load_average": 1.2}
    quiet = line("eagle", 8, 2.0, **alone)
    assert "| speedup |" in table([quiet])
    for name, value in (("prompts", 4), ("repeats", 1), ("load_average", 3.04)):
        busy = line("mlp", 8, 2.0, **{**alone, name: value})
        assert "speedup" not in table([quiet, busy])


def test_lines_of_several_targets_are_told_apart():
    lines = by_target(
        {"one": [line("a", 8, 2.0), line("b", 0, 2.5)], "two": [line("a", 8, 1.5)]}
    ).splitlines()
    assert [cells.split(" | ")[:2] for cells in lines[2:]] == [["| one", "b"], ["| one", "a"], ["| two", "a"]]


def test_arms_are_compared_seed_by_seed():
    mine = line("streak", 8, 2.1, 2.3, 9.0)  # the third has no partner
    others = [line("nll", 8, 2.0, 2.2), mine, line("start", 16, 2.0)]
    (cells,) = differences(others, "nll").splitlines()[2:]
    assert cells.startswith("| streak | 8 | +0.100 (+0.100..+0.100) | +0.100 (+0.100..+0.100) | 2 seeds")
    assert differences(others[1:], "nll") == ""


def test_a_plan_without_a_score_is_a_dash():
    found = other_plans(
        [line("eagle", 8, 2.0, plans=("tree-16", "chain-3")), line("prompt", 8, 2.0, plans=("chain-2",))]
    )
    rows = [cells.strip("| ").split(" | ") for cells in found.splitlines()]
    plans = ("tree-16", "chain-3", "chain-2")
    assert rows[0] == ["drafter", "steps", *(f"{plan}, T={t}" for plan in plans for t in (0, 1))]
    values = {name: [cell[:4] for cell in cells] for name, _, *cells in rows[2:]}
    assert values["eagle"] == ["2.00", "1.50", "2.00", "1.50", "-", "-"]
    assert values["prompt"] == ["-", "-", "-", "-", "2.00", "1.50"]
    assert other_plans([line("eagle", 8, 2.0)]) == ""


def test_a_folder_is_read_by_names(tmp_path):
    with pytest.raises(UserError, match="no results there"):
        read_folder(tmp_path)
    values = scorecard([row(0.0), row(1.0)])
    for name in ("eagle-half-800-0", "eagle-half-800-1", "suffix-0-0"):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    assert [(one.name, len(one.results)) for one in read_folder(tmp_path)] == [
        ("eagle-half-800", 2),
        ("suffix-0", 1),
    ]
    (tmp_path / "score.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"score\.json: results are named <arm>-<steps>-<seed>\.json"):
        read_folder(tmp_path)


@pytest.mark.parametrize("place", ["commit", "versions"])
def test_results_of_uncommitted_changes_are_refused(tmp_path, place):
    """Also where only the scoring code had them."""
    dirty = "0123456789ab-dirty"
    more = {"commit": dirty} if place == "commit" else {"versions": {"foredraft": dirty}}
    (tmp_path / "eagle-8-0.json").write_text(json.dumps(scorecard([row()], **more)))
    with pytest.raises(UserError, match=rf"made by uncommitted changes \({dirty}\)"):
        read_folder(tmp_path)

"""drafter=auto without a model: who goes on, how long, by what clock, and what is said of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cards import row, scorecard
from workbench import options_of

from benchmarks.auto_regret import Runner, described, summary
from decode.errors import UserError
from decode.plan import Plan
from distill.options import SearchOptions
from distill.search import halving
from distill.search import trials as families
from distill.search.halving import FREE, LAST, SCORE, Row, Verdict
from distill.search.search import Search
from distill.search.trials import JobContext
from distill.training.time_budget import MAX_STEPS, Budget

PLAN = Plan(depth=2)
PLACE = {"hardware": "here", "load_average": [0.0, 0.1]}


def verdict(speedup: float, tau: float = 2.0) -> Verdict:
    return judged(PLAN.name, tau, tau / speedup)


def judged(plan: str, tau: float, cost: float, slow: float = 1.0) -> Verdict:
    """On a machine that is `slow` times as slow as another, with rounds of so many plain ones."""
    return Verdict(plan, tau, cost * slow, 8 * tau / cost / slow, 8 / slow)


def rows(**speedups: float | None) -> list[Row]:
    return [Row(1, name, 9.0, 5, s and verdict(s)) for name, s in speedups.items()]


# -- who goes on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("families", "count"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_there_are_as_many_rungs_as_it_takes_to_halve(families, count):
    assert halving.num_rungs(families) == count


def test_half_go_on_the_fastest_first_and_of_equals_the_one_named_first():
    some = rows(a=1.0, b=1.5, c=1.5, d=0.5, e=None)
    assert [r.family for r in halving.survivors(some)] == ["b", "c"]
    assert [r.family for r in halving.survivors(rows(a=1.0, b=1.0))] == ["a"]
    assert [r.family for r in halving.survivors(rows(a=None, b=0.1, c=None))] == ["b"]
    assert halving.survivors(rows(a=None, b=None)) == []


def test_a_rung_has_an_equal_part_of_the_time_less_what_comparing_takes():
    assert halving.seconds_per_family(60.0, 2, 3, 1, 2.0) == pytest.approx((30 - 6) / 3)
    assert halving.seconds_per_family(60.0, 1, 4, 2, 1.0) == pytest.approx(56 / 2), "two at a time"


@pytest.mark.parametrize(
    ("won", "lost", "said"),
    [
        (
            judged("x", 3.0, 1.5),
            judged("y", 2.0, 1.6),
            "accepts more (tau 3.00 against 2.00) and is",
        ),
        (judged("x", 3.0, 1.6), judged("y", 2.0, 1.5), "which outweighs its price"),
        (judged("x", 2.0, 1.0), judged("y", 3.0, 1.9), "which outweighs what it accepts"),
        # The machine had slowed down to a third when the loser was judged; plain decoding tells.
        (
            judged("x", 3.0, 1.5),
            judged("y", 3.0, 1.8, 3.0),
            "(a round costs 1.50 plain ones against 1.80)",
        ),
    ],
)
def test_the_sentence_says_what_the_winner_does_better(won, lost, said):
    first, other = Row(1, "a", 9.0, 5, won), Row(1, "b", 9.0, 5, lost)
    last = Row(LAST, "a", 50.0, 40, judged("z", 4.0, 1.5))
    text = halving.explain_winner(last, [other], [first, last], 8)
    assert text.startswith("a won: 2.67x plain decoding at batch 8 with z; beside b when both")
    assert said in text


def test_it_says_so_where_nothing_pays_and_where_nothing_had_to_be_trained():
    slow = Row(LAST, "a", 50.0, 40, verdict(0.9))
    assert "nothing pays at batch 8" in halving.explain_winner(slow, [], [slow], 8)
    free = Row(FREE, "ngram", 0.0, 0, verdict(1.4))
    assert "ngram won: needs no training" in halving.explain_winner(free, rows(b=1.1), [free], 1)


# -- the clock -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def trainer() -> SimpleNamespace:
    loop = SimpleNamespace(max_steps=6)
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), global_step=0)


def fit(budget: Budget, clock: Clock, run: SimpleNamespace, seconds: Sequence[float]) -> list[float]:
    """Steps until the budget ends them; the learning rate of each."""
    loop, module = run.fit_loop.epoch_loop, SimpleNamespace()
    budget.resume(run, run.global_step)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = budget.schedule(optimizer, 0.0, 0.1, [lambda done: 1.0])
    schedule.last_epoch = run.global_step
    budget.on_fit_start(run, module)
    budget.on_train_start(run, module)
    rates = []
    while run.global_step < loop.max_steps:
        rates.append(optimizer.param_groups[0]["lr"])
        clock.now += seconds[len(rates) % len(seconds)]
        run.global_step += 1
        optimizer.step()
        schedule.step()
        budget.on_train_batch_end(run, module, None, None, 0)
    return rates


@pytest.mark.parametrize("seconds", [[1.0], [0.5, 1.5], [3.0]])
def test_a_run_ends_when_its_seconds_do(seconds):
    clock, run = Clock(), trainer()
    rates = fit(Budget(60.0, 1, 0.3, clock), clock, run, seconds)
    assert abs(clock.now - 160.0) <= max(seconds)
    steady = [r for r in rates if r == 1.0]
    assert len(steady) == pytest.approx(0.7 * len(rates) - 10, abs=3), (
        "constant but for warm-up and cool-down"
    )
    assert rates[-1] < 0.1 + 0.9 / 5
    assert rates[0] == pytest.approx(0.1), "the first of ten steps of warm-up"


def test_the_next_stretch_begins_at_the_constant_rate_and_a_kill_costs_no_time_twice():
    clock, run = Clock(), trainer()
    first = Budget(20.0, 1, 0.3, clock)
    fit(first, clock, run, [1.0])
    then = Budget(10.0, 2, 0.3, clock)
    then.load_state_dict(first.state_dict())
    assert then.left == 10.0, "what another stretch used is not counted"
    clock.now += 500.0  # loading
    begun = clock.now
    assert fit(then, clock, run, [1.0])[1] == 1.0
    assert clock.now == begun + 10
    again = Budget(10.0, 2, 0.3, clock)
    state = then.state_dict()
    again.load_state_dict({"part": 2, "used": 6.0})
    assert again.left == 4.0
    again.load_state_dict(state)
    steps = run.global_step
    assert fit(again, clock, run, [1.0]) == [], "killed before it was scored: nothing is left to train"
    assert run.fit_loop.epoch_loop.max_steps == steps


def test_a_save_is_asked_for_once_a_minute():
    clock, run = Clock(), trainer()
    budget = Budget(500.0, 1, 0.3, clock)
    budget.resume(run, 0)
    assert run.fit_loop.epoch_loop.max_steps == MAX_STEPS
    budget.on_train_start(run, SimpleNamespace())
    asked = []
    for _ in range(150):
        clock.now += 1.0
        asked.append(budget.save_now())
    assert [i for i, due in enumerate(asked, 1) if due] == [60, 120]


# -- a search whose outcome is known -------------------------------------------------------------


class Made:
    """Jobs, judge and families in one: speedup is a function of seconds, and everything takes time.

    Args:
        worth: family -> seconds of training -> speedup.
        free: which of them need none.
        broken: family -> why it fails.
    """

    plan_seconds, search_plans, all_plans, parallel, before = 1.0, [PLAN], [PLAN, Plan(depth=3)], 1, 0.0

    def __init__(self, clock: Clock, worth: dict, free=(), broken=None) -> None:
        self.clock, self.worth, self.free, self.broken = clock, worth, free, broken or {}
        self.notes, self.ran = {}, []
        self.trained = dict.fromkeys(worth, 0.0)

    # as Jobs
    def __call__(self, overrides, time_slices):
        if isinstance(overrides, Path):
            return self._judge(overrides.parts[-3])
        for name, (rung, seconds, _) in time_slices.items():
            if (name, rung) in self.notes:
                continue
            self.ran.append((name, rung))
            self.clock.now += 2.0 + (seconds or 0.0)
            self.trained[name] += seconds or 0.0
            note = {"seconds": seconds or 0.0, "steps": int(self.trained[name]), "setup": 2.0}
            note["before"] = self.before if rung == 1 else 0.0
            self.notes[name, rung] = note | ({"failed": self.broken[name]} if name in self.broken else {})
            if rung == SCORE:
                folder = self.folder / families.FOLDER / name / "checkpoints" / "best"
                folder.mkdir(parents=True)
                (folder / "score.json").write_text(json.dumps(scorecard([row(tau=2.5)])))
                self.clock.now += 8.0
        return None

    def done(self, name, rung):
        return self.notes.get((name, rung))

    def checkpoint(self, name):
        return Path(name) / "checkpoints" / "7"

    def remove_trainer_state(self, name):
        self.trained[name] = float("nan")  # whoever trains it again would have lost something

    # as Judge
    def _judge(self, name):
        self.clock.now += 3.0
        return verdict(self.worth[name](self.trained[name])), PLAN

    def seconds(self, plans):
        return 2.0 + len(plans)

    def card_seconds(self):
        return 8.0

    def search(self, folder: Path, minutes: float = 5.0) -> Search:
        """Over these families, in a folder."""
        made, self.folder = self, folder

        class Known(Search):
            def _prepare(self) -> tuple[list[str], list[str]]:
                made.clock.now += 60.0 * (not self.ledger.took)
                self.judge = self.jobs = made
                self._save(rollouts=60.0)
                return [n for n in made.worth if n not in made.free], list(made.free)

        options = options_of("drafter=auto", "score.batch_sizes=[8]", cls=SearchOptions)
        auto = replace(options.drafter, minutes=minutes, search=0.4, cooldown=0.3)
        options, place = replace(options, drafter=auto), JobContext(folder, "config", [], [], folder)
        words, runs = {n: [] for n in self.worth}, dict.fromkeys(self.worth)
        return Known(options, place, words, runs, self.clock(), self.clock)  # pyright: ignore[reportArgumentType]


WORTH = {
    "slow": lambda s: 0.5 + s / 1000,
    "late": lambda s: 0.9 + s / 100,
    "early": lambda s: 1.1 + s / 10000,
    "fast": lambda s: 1.05 + s / 50,
}


def test_the_family_that_is_fastest_wins_and_has_most_of_the_time(tmp_path):
    clock = Clock()
    made = Made(clock, WORTH)
    assert made.search(tmp_path).run() == 2.5
    record = json.loads((tmp_path / "auto.json").read_text())
    assert record["result"]["winner"] == "fast"
    fates = {(r["family"], r["rung"]): r["fate"] for r in record["rows"]}
    assert fates[("slow", 1)] == "out at rung 1"
    assert fates[("fast", -1)] == "won"
    assert sum(fate == "goes on" for fate in fates.values()) == 3, "two, then one"
    rung = [v for k, v in record["given"].items() if k.startswith("1/")]
    assert len(rung) == 4
    assert len(set(rung)) == 1, "equal shares"
    assert record["given"]["-1/fast"] > sum(v for k, v in record["given"].items() if k[0] != "-")
    assert 295.0 < clock.now - 100.0 <= 300.0, "all of the budget is used, and no more"
    assert (tmp_path / "checkpoints").readlink() == Path("families/fast/checkpoints")
    page = (tmp_path / "auto.md").read_text()
    assert "fast won: " in page
    assert "| slow | 1 |" in page


def test_a_search_that_is_killed_goes_on_from_what_is_finished(tmp_path):
    class KilledError(Exception):
        pass

    clock = Clock()
    made = Made(clock, WORTH)
    straight = made.search(tmp_path / "straight")
    (tmp_path / "straight").mkdir()
    straight.run()
    for moment in range(1, 9, 2):
        folder = tmp_path / str(moment)
        folder.mkdir()
        again = Made(clock, WORTH)
        search, verdicts = again.search(folder), iter(range(99))
        judge = again._judge
        again._judge = lambda name, judge=judge, it=verdicts, at=moment: _or_die(
            next(it) == at, KilledError, judge, name
        )
        try:
            search.run()
        except KilledError:
            clock.now += 3600.0  # nobody is there
            again._judge = judge
            again.search(folder).run()
        assert again.ran == made.ran, "a finished job ran again, or another took its place"
        given, whole = (
            json.loads((f / "auto.json").read_text())["given"] for f in (folder, tmp_path / "straight")
        )
        assert given.keys() == whole.keys()
        assert sum(given.values()) == pytest.approx(sum(whole.values()), rel=0.05), "the hour was not counted"


def _or_die(dies: bool, error: type[Exception], call, *args):
    if dies:
        raise error
    return call(*args)


def test_what_was_spent_on_a_stretch_before_a_kill_is_spent(tmp_path):
    """Ten seconds on each of two families, that no ledger has: the last one trains so much less."""
    given, spent = [], []
    for before in (0.0, 10.0):
        (folder := tmp_path / str(before)).mkdir()
        made = Made(Clock(), {name: WORTH[name] for name in ("slow", "fast")})
        made.before = before
        made.search(folder).run()
        record = json.loads((folder / "auto.json").read_text())
        given.append(record["given"]["-1/fast"])
        spent.append(record["spent"])
    assert given[0] - given[1] == pytest.approx(20.0)
    assert spent[0] == pytest.approx(spent[1])


def test_who_has_won_stays_the_winner_when_the_scorecard_is_made_again(tmp_path):
    """Judged once more, by more plans, it came out slower: noise, and no reason to score another family."""
    made = Made(Clock(), {"free": lambda s: 1.5, "other": lambda s: 1.4}, free=["free", "other"])
    search, verdicts = made.search(tmp_path), iter([1.5, 1.4, 1.3])
    made._judge = lambda name: (verdict(next(verdicts)), PLAN)
    made.folder = tmp_path / "nowhere"  # the scorecard is lost with the process
    search._publish = lambda why: 0.0
    assert search.run() == 0.0
    made.notes = {key: note for key, note in made.notes.items() if key[1] != SCORE}
    again = made.search(tmp_path)
    made._judge = lambda name: pytest.fail("judged again")
    assert again.run() == 2.5
    assert [name for name, rung in made.ran if rung == SCORE] == ["free", "free"]
    page = (tmp_path / "auto.md").read_text()
    assert "free won: needs no training; 1.30x" in page
    assert "| won |" in page


def test_slow_comparing_leaves_the_budget_to_somebody(tmp_path):
    """It takes more than all that `search` gives to a rung, and far less than there is."""
    made = Made(Clock(), WORTH)
    made.seconds = lambda plans: 12.0
    made.search(tmp_path).run()
    record = json.loads((tmp_path / "auto.json").read_text())
    assert record["given"]["1/fast"] == 1.0
    assert any(key.startswith("-1/") and value > 20 for key, value in record["given"].items())


def test_a_family_that_fails_is_dropped_with_its_reason(tmp_path):
    made = Made(Clock(), WORTH, broken={"fast": "out of memory"})
    made.search(tmp_path).run()
    record = json.loads((tmp_path / "auto.json").read_text())
    assert record["result"]["winner"] in ("early", "late")
    assert "failed: out of memory" in [r["fate"] for r in record["rows"]]
    (tmp_path / "again").mkdir()
    none = Made(Clock(), {"all": WORTH["fast"]}, broken={"all": "broken"}).search(tmp_path / "again")
    with pytest.raises(UserError, match=r"no score .*all: failed: broken"):
        none.run()


def test_what_needs_no_training_may_win_and_nothing_may_pay(tmp_path):
    worth = {"fast": WORTH["fast"], "suffix": lambda s: 9.0}
    made = Made(Clock(), worth, free=["suffix"])
    made.search(tmp_path).run()
    assert "suffix won: needs no training" in (tmp_path / "auto.md").read_text()
    assert ("fast", LAST) in made.ran, "it might have passed"
    (tmp_path / "slow").mkdir()
    Made(Clock(), {"slow": lambda s: 0.4}).search(tmp_path / "slow").run()
    assert "nothing pays at batch 8" in (tmp_path / "slow" / "auto.md").read_text()


def test_a_budget_without_time_to_train_is_said_and_rollouts_are_refused_early(tmp_path):
    made = Made(Clock(), WORTH)
    with pytest.raises(UserError, match=r"no time was left.*raise drafter\.minutes"):
        made.search(tmp_path, minutes=1.1).run()
    clock = Clock()
    search = Made(clock, WORTH).search(tmp_path, minutes=5.0)
    clock.now += 20.0
    search._watch(100.0, 10, 10)  # nothing is made yet
    search._watch(100.0, 10, 9)
    clock.now += 20.0
    with pytest.raises(UserError, match=r"rollouts alone take about 7\.0; set it to 21"):
        search._watch(60.0, 10, 8)


# -- the benchmark of it -------------------------------------------------------------------------


def test_regret_is_against_the_fastest_family_by_itself():
    runners = [Runner(name, None, PLAN, 5.0, name) for name in ("auto", "a", "b")]
    card = summary(runners, [[10.0, 20.0, 30.0], [9.0, 18.0, 27.0], [10.6, 21.0, 31.2]])
    assert card["best"] == "b"
    assert card["regret"] == pytest.approx(0.05)
    low, high = card["regret_interval"]
    assert 0.04 - 1e-9 <= low <= 0.05 <= high <= 0.06 + 1e-9
    text = described(card | {"budget_minutes": 5.0, "batch_size": 8, "prompts": 16, "repeats": 3} | PLACE)
    assert "regret against b with all 5 min: 5.0%" in text

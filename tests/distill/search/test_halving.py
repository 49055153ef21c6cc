"""drafter=auto without a model: which families survive, how long they train, and what is said of it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cards import row, scorecard
from workbench import options_of

from benchmarks.auto_regret import Runner, described, summary
from decode.errors import UserError
from decode.plan import Plan
from distill.options.run import SearchOptions
from distill.search import halving, trials
from distill.search.halving import LAST, SCORE, Row, Verdict
from distill.search.search import Search
from distill.search.time_budget import MAX_STEPS, Budget, Deadline
from distill.search.trials import JobContext
from distill.training.checkpointing import ScoreCheckpoint
from distill.training.module import DistillModule
from distill.utils.phase_log import PhaseLog
from distill.utils.reports import NO_REPORTS
from drafters.base import ParamGroup

PLAN = Plan(depth=2)
PLACE = {"hardware": "here", "load_average": [0.0, 0.1]}


def verdict(speedup: float, plan: str = PLAN.name, tau: float = 2.0, slow: float = 1.0) -> Verdict:
    """On a machine that is `slow` times as slow as another."""
    return Verdict(plan, tau, tau / speedup * slow, 8 * speedup / slow, 8 / slow)


def rows(**speedups: float | None) -> list[Row]:
    return [Row(1, name, 9.0, 5, s and verdict(s)) for name, s in speedups.items()]


# -- which families survive ----------------------------------------------------------------------


def test_fastest_half_survive_and_of_equals_the_one_named_first():
    for speedups, survivors in (
        ({"a": 1.0, "b": 1.5, "c": 1.5, "d": 0.5, "e": None}, ["b", "c"]),
        ({"a": 1.0, "b": 1.0}, ["a"]),
        ({"a": None, "b": 0.1, "c": None}, ["b"]),
        ({"a": None, "b": None}, []),
    ):
        assert [r.family for r in halving.survivors(rows(**speedups))] == survivors
    assert [halving.num_rungs(count) for count in range(9)] == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert halving.seconds_per_family(60.0, 1, 4, 2, 1.0) == pytest.approx(56 / 2), "two at a time"


def test_winner_is_explained_by_plain_rounds():
    """The machine had slowed down to a third when the loser was judged; plain decoding tells."""
    won, lost = verdict(2.0, tau=3.0), verdict(3 / 1.8, tau=3.0, slow=3.0)
    first, other = Row(1, "a", 9.0, 5, won), Row(1, "b", 9.0, 5, lost)
    last = Row(LAST, "a", 50.0, 40, verdict(4 / 1.5, "z", tau=4.0))
    text = halving.explain_winner(last, [other], [first, last], 8)
    assert text.startswith("a won: 2.67x plain decoding at batch 8 with z")
    assert "1.50 plain ones against 1.80" in text


# -- the clock -----------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Weights(torch.nn.Module):
    """A drafter of one weight with a constant learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def param_groups(self) -> list[ParamGroup]:
        return [ParamGroup([self.weight])]


def trainer(folder: Path) -> SimpleNamespace:
    loop = SimpleNamespace(max_steps=6)
    saver = ScoreCheckpoint(PhaseLog(folder), 10**9, None, "target")
    fields = {"callbacks": [saver], "default_root_dir": str(folder), "global_step": 0}
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), **fields)


def begin(budget: Budget, run: SimpleNamespace) -> None:
    """Start a fit that resumes at the run's step, up to its first batch."""
    budget.attach(run, run.global_step)
    run.max_steps = MAX_STEPS
    module = DistillModule(None, Weights(), None, partial(torch.optim.SGD, lr=1.0), 0.0, 0.1)
    module.trainer = run
    made = module.configure_optimizers()
    run.optimizers, run.lr_scheduler_configs = [made["optimizer"]], [SimpleNamespace()]
    budget.on_fit_start(run, module)
    run.lr_scheduler_configs[0].scheduler.last_epoch = run.global_step
    budget.on_train_start(run, module)


def fit(budget: Budget, clock: Clock, run: SimpleNamespace, seconds: Sequence[float]) -> list[float]:
    """Steps until the budget ends them; the learning rate of each."""
    begin(budget, run)
    loop, optimizer = run.fit_loop.epoch_loop, run.optimizers[0]
    rates = []
    while run.global_step < loop.max_steps:
        rates.append(optimizer.param_groups[0]["lr"])
        clock.now += seconds[len(rates) % len(seconds)]
        run.global_step += 1
        optimizer.step()
        run.lr_scheduler_configs[0].scheduler.step()
        budget.on_train_batch_end(run, None, None, None, 0)
    return rates


@pytest.mark.parametrize("seconds", [[1.0], [0.5, 1.5], [3.0]])
def test_run_ends_when_its_seconds_do(seconds, tmp_path):
    clock, run = Clock(), trainer(tmp_path)
    rates = fit(Budget(60.0, 1, 0.3, clock), clock, run, seconds)
    assert abs(clock.now - 160.0) <= max(seconds)
    steady = sum(rate == 1.0 for rate in rates)
    assert steady == pytest.approx(0.7 * len(rates) - 10, abs=3), "constant but for warm-up and cool-down"
    assert rates[-1] < 0.1 + 0.9 / 5
    assert rates[0] == pytest.approx(0.1), "the first of ten steps of warm-up"


def test_next_part_begins_at_the_constant_rate_and_a_kill_costs_no_time_twice(tmp_path):
    clock, run = Clock(), trainer(tmp_path)
    first, then, again = Budget(20.0, 1, 0.3, clock), *(Budget(10.0, 2, 0.3, clock) for _ in range(2))
    fit(first, clock, run, [1.0])
    then.load_state_dict(first.state_dict())
    assert then.left == 10.0, "what another part used is not counted"
    clock.now += 500.0  # loading
    begun = clock.now
    assert fit(then, clock, run, [1.0])[1] == 1.0
    assert clock.now == begun + 10
    again.load_state_dict({"part": 2, "used": 6.0})
    assert again.left == 4.0
    again.load_state_dict(then.state_dict())
    steps = run.global_step
    assert fit(again, clock, run, [1.0]) == [], "killed before it was scored: nothing is left to train"
    assert run.fit_loop.epoch_loop.max_steps == steps


def test_save_is_asked_for_once_a_minute(tmp_path):
    clock, run = Clock(), trainer(tmp_path)
    budget, saver, asked = Budget(500.0, 1, 0.3, clock), run.callbacks[0], []
    begin(budget, run)
    for second in range(1, 151):
        clock.now, run.global_step = 100.0 + second, second
        budget.on_train_batch_end(run, None, None, None, 0)
        asked += [second] * saver.save_early
        saver.save_early = False
    assert asked == [60, 120]


def test_deadline_counts_what_comes_before_training_and_spreads_save_points(tmp_path):
    clock, run = Clock(), trainer(tmp_path)
    deadline, saver = Deadline(clock.now + 130.0, 10, 0.3, clock), run.callbacks[0]
    clock.now += 30.0  # loading
    fit(deadline, clock, run, [1.0])
    assert clock.now == 230.0, "the end that was given"
    assert saver.every == 10, "of 100 steps"
    again, other = Deadline(clock.now + 150.0, 10, 0.3, clock), trainer(tmp_path)
    again.load_state_dict(deadline.state_dict())
    begin(again, other)
    assert other.callbacks[0].every == 10, "a resumed run keeps its save points"
    assert again.left == 50.0, "100 of the 150 were used before"


@pytest.mark.parametrize("late", [0.0, 5.0])
def test_deadline_that_passes_while_the_run_is_set_up_leaves_one_step(tmp_path, late):
    clock, run = Clock(), trainer(tmp_path)
    deadline = Deadline(clock.now + 30.0, 10, 0.3, clock)
    clock.now += 30.0 + late
    assert len(fit(deadline, clock, run, [1.0])) == 1


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
                folder = self.folder / trials.FOLDER / name / "checkpoints" / "best"
                folder.mkdir(parents=True)
                (folder / "score.json").write_text(json.dumps(scorecard([row(tau=2.5, replay=None)])))
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
        run = words, runs, self.clock(), NO_REPORTS, self.clock
        return Known(options, place, *run)  # pyright: ignore[reportArgumentType]


WORTH = {
    "slow": lambda s: 0.5 + s / 1000,
    "late": lambda s: 0.9 + s / 100,
    "early": lambda s: 1.1 + s / 10000,
    "fast": lambda s: 1.05 + s / 50,
}


def record_of(folder: Path) -> dict:
    return json.loads((folder / "auto.json").read_text())


def test_fastest_family_wins_and_has_most_of_the_time(tmp_path):
    clock = Clock()
    assert Made(clock, WORTH).search(tmp_path).run() == 2.5
    record = record_of(tmp_path)
    given, fates = record["given"], {(r["family"], r["rung"]): r["fate"] for r in record["rows"]}
    assert (fates["slow", 1], fates["fast", -1]) == ("out at rung 1", "won")
    assert list(fates.values()).count("continues") == 3, "two, then one"
    assert len({given[f"1/{name}"] for name in WORTH}) == 1, "equal shares"
    assert given["-1/fast"] > sum(seconds for key, seconds in given.items() if key[0] != "-")
    assert 295.0 < clock.now - 100.0 <= 300.0, "all of the budget is used, and no more"
    assert (tmp_path / "checkpoints").readlink() == Path("families/fast/checkpoints")
    page = (tmp_path / "auto.md").read_text()
    assert all(text in page for text in ("fast won: ", "| slow | 1 |"))


def test_killed_search_repeats_no_finished_job(tmp_path):
    def search(made: Made, name: str) -> dict:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        made.search(folder).run()
        return record_of(folder)["given"]

    straight = Made(Clock(), WORTH)
    whole = search(straight, "straight")
    for moment in range(1, 9, 2):
        made = Made(Clock(), WORTH)
        judge, verdicts = made._judge, count()

        def killed(name, judge=judge, verdicts=verdicts, moment=moment):
            if next(verdicts) == moment:
                raise KeyboardInterrupt
            return judge(name)

        made._judge = killed
        with suppress(KeyboardInterrupt):
            search(made, str(moment))
        made.clock.now += 3600.0  # nobody is there
        made._judge = judge
        given = search(made, str(moment))
        assert made.ran == straight.ran, "a finished job ran again, or another took its place"
        assert given.keys() == whole.keys()
        assert sum(given.values()) == pytest.approx(sum(whole.values()), rel=0.05), "the hour was not counted"


def test_seconds_spent_before_a_kill_are_spent(tmp_path):
    """Ten seconds on each of two families, that no ledger has: the last one trains so much less."""
    records = []
    for before in (0.0, 10.0):
        (folder := tmp_path / str(before)).mkdir()
        made = Made(Clock(), {name: WORTH[name] for name in ("slow", "fast")})
        made.before = before
        made.search(folder).run()
        records.append(record_of(folder))
    first, second = records
    assert first["given"]["-1/fast"] - second["given"]["-1/fast"] == pytest.approx(20.0)
    assert first["spent"] == pytest.approx(second["spent"])


def test_winner_stays_when_the_scorecard_is_made_again(tmp_path):
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
    assert "free won: needs no training; 1.30x" in (tmp_path / "auto.md").read_text()


def test_slow_comparing_leaves_the_budget_to_a_family(tmp_path):
    """It takes more than all that `search` gives to a rung, and far less than there is."""
    made = Made(Clock(), WORTH)
    made.seconds = lambda plans: 12.0
    made.search(tmp_path).run()
    given = record_of(tmp_path)["given"]
    assert given["1/fast"] == 1.0
    assert any(key.startswith("-1/") and value > 20 for key, value in given.items())


def test_family_that_fails_is_dropped_with_its_reason(tmp_path):
    Made(Clock(), WORTH, broken={"fast": "out of memory"}).search(tmp_path).run()
    record = record_of(tmp_path)
    assert record["result"]["winner"] in ("early", "late")
    assert "failed: out of memory" in [r["fate"] for r in record["rows"]]
    (tmp_path / "again").mkdir()
    none = Made(Clock(), {"all": WORTH["fast"]}, broken={"all": "broken"}).search(tmp_path / "again")
    with pytest.raises(UserError, match=r"no score .*all: failed: broken"):
        none.run()


def test_family_without_training_may_win_and_nothing_may_pay(tmp_path):
    made = Made(Clock(), {"fast": WORTH["fast"], "suffix": lambda s: 9.0}, free=["suffix"])
    made.search(tmp_path).run()
    assert "suffix won: needs no training" in (tmp_path / "auto.md").read_text()
    assert ("fast", LAST) in made.ran, "it might have passed"
    (tmp_path / "slow").mkdir()
    Made(Clock(), {"slow": lambda s: 0.4}).search(tmp_path / "slow").run()
    assert "nothing pays at batch 8" in (tmp_path / "slow" / "auto.md").read_text()


def test_budget_without_time_to_train_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no time was left.*raise drafter\.minutes"):
        Made(Clock(), WORTH).search(tmp_path, minutes=1.1).run()
    clock = Clock()
    search = Made(clock, WORTH).search(tmp_path, minutes=5.0)
    clock.now += 20.0
    search._watch(100.0, 10, 10)  # nothing is made yet
    search._watch(100.0, 10, 9)
    clock.now += 20.0
    with pytest.raises(UserError, match=r"the rollouts take about 7\.0; set it to 21"):
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

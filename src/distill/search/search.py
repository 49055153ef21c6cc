"""`drafter=auto`: which family decodes fastest on this machine, found within a budget of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from decode.plan import Plan
from distill.config.build import build_drafter, build_target, quiet, read_run_inputs
from distill.config.validate import refused
from distill.options import SearchOptions, TrainOptions
from distill.report import html as html_report
from distill.report.search_panel import RECORD
from distill.rollouts.produce import fill, open_store, rollout_plan
from distill.search import halving
from distill.search import state as ledger
from distill.search import trials as families
from distill.search import validate as auto_checks
from distill.search.evaluate import Judge
from distill.search.halving import FREE, LAST, SCORE, Row
from distill.search.state import Ledger
from distill.search.trials import Jobs, Place, Stretch
from distill.train import Shared
from distill.utils.launcher import process_age
from distill.utils.progress import say, switch
from drafters.checkpoint.atomic import publish

MOST = 0.9  # of the budget, that rollouts may take
LEAST = 1.0  # seconds of training that are worth a job


def choose(options: SearchOptions, folder: Path) -> float:
    """Train several families, each a while; spend what is left on the winner, score it, say why.

    Args:
        options: of the search.
        folder: of the run.

    Returns:
        Tau of the winner's scorecard.

    Raises:
        UserError: bad input, found before any work; rollouts that leave no time; no family that works.
    """
    quiet()
    switch["on"] = options.trainer.enable_progress_bar
    place = Place.of(folder)
    begun = time.monotonic() - (0.0 if place.in_sweep else process_age())
    overrides, runs = auto_checks.jobs(options, place)
    return Search(options, place, overrides, runs, begun).run()


class Search:
    """One run of `drafter=auto`, which goes on from whatever is finished.

    Args:
        options: of the search.
        place: of the command.
        overrides: of every family's run.
        runs: options of every family's run.
        begun: when the budget began, by `clock`.
        clock: seconds.
    """

    def __init__(
        self,
        options: SearchOptions,
        place: Place,
        overrides: Mapping[str, list[str]],
        runs: Mapping[str, TrainOptions],
        begun: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.place, self.overrides, self.runs = options, place, overrides, runs
        self.ledger, self.clock = Ledger.open(place.folder / RECORD), clock
        self.begun = begun - self.ledger.spent
        self.total = 60.0 * options.drafter.minutes
        self.batch = options.score.batch_sizes[0]

    @property
    def spent(self) -> float:
        """Seconds of the budget; those in which nobody worked on it do not count."""
        return self.clock() - self.begun

    @property
    def left(self) -> float:
        """Likewise."""
        return self.total - self.spent

    def run(self) -> float:
        """All of it; returns tau of the winner's scorecard."""
        minutes = f"{self.options.drafter.minutes:g} min"
        say(f"drafter=auto: {minutes} for {', '.join(self.runs)}; batch {self.batch}")
        self._prepare()
        trained, free = self._sort()
        for name in free:
            self.jobs({name: self.overrides[name]}, {name: Stretch(FREE, None)})
            self._judge(FREE, [name], self.judge.few)
        if survivor := self._rungs(trained):
            self._spend(survivor)
        return self._finish()

    def _note(self, **took: float) -> None:
        self.ledger.took |= took
        self.ledger.spent = self.spent
        self.ledger.write()

    # -- what all families share ------------------------------------------------------------------

    def _prepare(self) -> None:
        """Target, rollouts, held-out answers."""
        given = self.place.overrides
        chosen = any(families.key_of(o).split(".")[0] == "decode" for o in given)
        base = [*given, f"drafter={next(iter(self.runs))}", *(["decode=auto"] * (not chosen))]
        run = families.composed(self.place, base)
        chat, train, held = read_run_inputs(run, self.place.folder)
        target = build_target(run.target, packing=run.packing)
        with refused():
            self.judge = Judge(run, self.options.drafter, target, chat, held, self.clock)
        self.shared = Shared(target)
        self.jobs = Jobs(self.place, self.shared)
        plan = rollout_plan(run, target, chat, train)
        store = open_store(run, Path(run.output_dir) / "rollouts", target, chat, plan, train)
        before = self.clock()
        watch = partial(self._watch, before, len(store.missing()))
        fill(run, target, chat, store, run.rollout.drafter, None, watch)
        self.judge.prepare()
        target.join()
        self._note(
            **self.ledger.took or {"before rollouts": before - self.begun, "rollouts": self.clock() - before}
        )

    def _watch(self, since: float, first: int, missing: int) -> None:
        """Refuse rollouts that would eat the budget, as soon as that can be told."""
        if not missing or missing >= first:
            return
        expected = (self.clock() - since) / (first - missing) * missing
        if self.spent + expected > MOST * self.total:
            need = (self.spent + expected) / 60
            raise UserError(
                f"drafter.minutes={self.options.drafter.minutes:g}: rollouts alone take about {need:.1f}; "
                f"set it to {3 * need:.0f}, or set prompts.limit and prompts.self; what is made is kept"
            )

    def _sort(self) -> tuple[list[str], list[str]]:
        """Families that train, and those that need not; one that cannot be built is out."""
        trained, free = [], []
        for name, run in self.runs.items():
            try:
                with refused():
                    trains = build_drafter(run.drafter, self.shared.target).trains
            except UserError as error:
                self._fail(FREE, name, str(error))
            else:
                (trained if trains else free).append(name)
        return trained, free

    # -- rungs ------------------------------------------------------------------------------------

    def _rungs(self, alive: list[str]) -> str | None:
        """Train and compare until one is left; None: there is none."""
        count = halving.rungs(len(alive))
        for rung in range(1, count + 1):
            if not self._give(rung, count, alive):
                return None if rung == 1 else alive[0]
            self._train(rung, alive)
            self._judge(rung, alive, self.judge.few)
            rows = [row for name in alive if (row := self.ledger.row(rung, name))]
            good = halving.going_on(rows)
            for row in rows:
                row.fate = (
                    row.fate if row.verdict is None else "goes on" if row in good else f"out at rung {rung}"
                )
                if row not in good:
                    self.jobs.forget(row.family)
            self._note()
            alive = [row.family for row in good]
            if len(alive) < 2:
                break
        return alive[0] if alive else None

    def _train(self, rung: int, names: Sequence[str]) -> None:
        """As many at the same time as the launcher takes; what one alone has spent is on file at once."""
        for group in [[name] for name in names] if self.jobs.parallel == 1 else [names]:
            stretches = {name: self._stretch(rung, name) for name in group}
            self._work({name: self.overrides[name] for name in group}, stretches)

    def _work(self, overrides: Mapping[str, Sequence[str]], stretches: Mapping[str, Stretch]) -> None:
        """Run jobs, several at the same time; what a killed process had spent on them counts as well."""
        due = [name for name, stretch in stretches.items() if not self.jobs.done(name, stretch.rung)]
        self.jobs(overrides, stretches)
        notes = [self.jobs.done(name, stretches[name].rung) or {} for name in due]
        self.begun -= max((note.get("before", 0.0) for note in notes), default=0.0)
        self._note()

    def _give(self, rung: int, count: int, alive: Sequence[str]) -> bool:
        """Settle how long each family of a rung trains; whether there is time."""
        keys = [f"{rung}/{name}" for name in alive]
        if keys[0] in self.ledger.given:
            return True
        room = self.left - self._reserve()
        if rung == 1:
            self.ledger.searched = self.options.drafter.search * room
        judging = self.judge.seconds(self.judge.few) + self.ledger.setup
        total = min(self.ledger.searched, count * room)  # a slow rung takes of the next
        each = halving.share(total, count, len(alive), self.jobs.parallel, judging)
        if (
            each < LEAST
        ):  # what comparing takes is most of a rung: a little of what is left for the winner, then
            each = min(LEAST, halving.share(room, 1, len(alive), self.jobs.parallel, judging))
        if each < LEAST:
            say(f"drafter=auto: {self.left:.0f} s are left, too few to train {len(alive)} families")
            return False
        self.ledger.given |= dict.fromkeys(keys, each)
        self._note()
        say(f"rung {rung}: {', '.join(alive)}, {each:.0f} s each")
        return True

    def _stretch(self, rung: int, name: str) -> Stretch:
        return Stretch(rung, self.ledger.given[f"{rung}/{name}"], self.options.drafter.cooldown)

    def _reserve(self) -> float:
        """Seconds that the end will need: the winner's plan chosen among all, its scorecard."""
        return self.judge.seconds(self.judge.all) + self.judge.card_seconds() + self.ledger.setup

    def _judge(self, rung: int, names: Sequence[str], plans: Sequence[Plan]) -> None:
        for name in names:
            if self.ledger.row(rung, name):
                continue
            note = self.jobs.done(name, rung)
            assert note
            if why := note.get("failed"):
                self._fail(rung, name, why, note["steps"])
                continue
            self.ledger.setup = note.get("setup", self.ledger.setup)  # the first has made what all share
            try:
                verdict, _ = self.judge(self.jobs.checkpoint(name), plans)
            except UserError as error:
                self._fail(rung, name, str(error), note["steps"])
                continue
            seconds = self.ledger.trained(name) + note["seconds"]
            row = Row(rung, name, seconds, note["steps"], verdict, "" if rung else "needs no training")
            self.ledger.rows.append(row)
            worth = f"tau {verdict.tau:.2f}, {verdict.speedup:.2f}x with {verdict.plan}"
            say(f"{name}: {row.steps} steps, {worth}")
            self._note()

    def _fail(self, rung: int, name: str, why: str, steps: int = 0) -> None:
        if self.ledger.row(rung, name):
            return
        say(f"{name}: out: {why}")
        self.ledger.rows.append(Row(rung, name, self.ledger.trained(name), steps, None, f"failed: {why}"))
        self._note()

    # -- the end ----------------------------------------------------------------------------------

    def _spend(self, name: str) -> None:
        """The rest of the budget, on one family."""
        key = f"{LAST}/{name}"
        if key not in self.ledger.given:
            seconds = self.left - self._reserve() - self.ledger.setup
            if seconds < LEAST:
                return
            self.ledger.given[key] = seconds
            self._note(reserved=self._reserve())
            say(f"{name}: trains on for {seconds:.0f} s")
        logged = families.at_last(self.place, self.overrides[name])
        self._work({name: logged}, {name: self._stretch(LAST, name)})
        self._judge(LAST, [name], self.judge.all)

    def _finish(self) -> float:
        """Score the winner, and say what it won by."""
        if "plan" not in self.ledger.result:
            self._settle()
        name, plan = self.ledger.result["winner"], Plan(**self.ledger.result["shape"])
        _link(self.place.folder, name)
        steps = int(self.jobs.checkpoint(name).name)
        logged = families.at_last(self.place, self.overrides[name])
        before = self.clock()
        self.jobs({name: families.scored(self.place, logged, plan, steps)}, {name: Stretch(SCORE, None)})
        note = self.jobs.done(name, SCORE) or {}
        if why := note.get("failed"):
            raise UserError(f"drafter=auto: the scorecard of {name}: {why}")
        own = [row for row in self.ledger.rows if row.family == name]
        others = [row for row in self.ledger.newest() if row.family != name]
        self.ledger.result |= {"why": halving.why(own[-1], others, own, self.batch)}
        self._note(scorecard=self.clock() - before)
        return self._publish(self.ledger.result["why"])

    def _settle(self) -> None:
        """Say on file who has won, and by which plan; from then on that stands."""
        found = halving.best(self.ledger.newest(), 1)
        if not found:
            reasons = "; ".join(f"{row.family}: {row.fate}" for row in self.ledger.rows) or "no time was left"
            raise UserError(f"drafter=auto: no score ({reasons}); raise drafter.minutes, rollouts are kept")
        winner, before = found[0], self.clock()
        assert winner.verdict
        name = winner.family
        plan = next(p for p in [*self.judge.all, *self.judge.few] if p.name == winner.verdict.plan)
        if winner.rung != LAST:  # the row of its rung stays what the others were compared with
            verdict, plan = self.judge(self.jobs.checkpoint(name), self.judge.all)
            winner = replace(winner, rung=LAST, verdict=verdict)
            self.ledger.rows.append(winner)
        winner.fate = "won"
        self.ledger.result = {"winner": name, "plan": plan.name, "shape": families.shape_of(plan)}
        self._note(choosing=self.clock() - before)

    def _publish(self, reason: str) -> float:
        rows, folder = self.ledger.rows, self.place.folder
        took = f"{self.spent / 60:.2f} of {self.options.drafter.minutes:g} min spent"
        say(f"\n{ledger.text(rows)}\n{took}\n{reason}")
        with publish(folder / ledger.PAGE) as temporary:
            temporary.write_text(ledger.markdown(rows, [took, "", reason]))
        html_report.attempt(folder)
        return read_scorecard(folder / "checkpoints" / "best" / "score.json").headline.tau


def _link(folder: Path, family: str) -> None:
    """Show a family's checkpoints and curves as the run's."""
    for name in ("checkpoints", "csv"):
        link, to = folder / name, Path(families.FOLDER) / family / name
        if not link.is_symlink():
            link.symlink_to(to)

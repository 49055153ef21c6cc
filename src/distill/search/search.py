"""`drafter=auto`: find the drafter family that decodes fastest on this machine within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from decode.errors import FollowUpError, UserError
from decode.evaluation.scorecard import read_scorecard
from decode.plan import Plan, plan_of
from distill.config.build import PromptReader, TargetSource, build_drafter, quiet
from distill.config.choices import used_packages
from distill.config.validate import refused
from distill.export import RunExport
from distill.options.run import SearchOptions, TrainOptions
from distill.rollouts.produce import fill, open_store, rollout_plan
from distill.rollouts.store import moment_of
from distill.search import halving, trials
from distill.search import state as search_state
from distill.search import validate as auto_checks
from distill.search.evaluate import Judge
from distill.search.halving import FREE, LAST, SCORE, Row
from distill.search.state import RECORD, Ledger
from distill.search.trials import JobContext, Jobs, TimeSlice
from distill.train import Shared
from distill.utils.launcher import process_age
from distill.utils.progress import counted, say, switch
from distill.utils.reports import Reports
from distill.utils.run_record import RunRecord
from drafters.checkpoint.atomic import publish

MAX_ROLLOUT_SHARE = 0.9  # share of the budget that rollouts may take
MIN_SECONDS = 1.0  # shortest training that is worth a job


def search_families(options: SearchOptions, folder: Path, reports: Reports) -> float:
    """Compare drafter families by successive halving, train the winner with the rest of the budget, score it.

    Raises:
        UserError: invalid options (before any work), no time left to train, or every family failed.
    """
    quiet()
    switch["on"] = options.trainer.enable_progress_bar
    context = JobContext.of(folder)
    start = time.monotonic() - (0.0 if context.in_sweep else process_age())
    overrides, runs = auto_checks.family_jobs(options, context)
    RunRecord(folder, options.config, used_packages(options.config.values)).begin()
    return Search(options, context, overrides, runs, start, reports).run()


class Search:
    """One run of `drafter=auto`; a restarted run continues from its finished jobs.

    The budget runs from `start`, by `clock`.
    """

    def __init__(
        self,
        options: SearchOptions,
        context: JobContext,
        overrides: Mapping[str, list[str]],
        runs: Mapping[str, TrainOptions],
        start: float,
        reports: Reports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reports = reports
        self.options, self.context, self.overrides, self.runs = options, context, overrides, runs
        self.ledger, self.clock = Ledger.open(context.folder / RECORD), clock
        self.start = start - self.ledger.spent
        self.total = 60.0 * options.drafter.minutes
        self.batch = options.score.batch_sizes[0]

    @property
    def spent(self) -> float:
        """Seconds of the budget that are used; time between restarts does not count."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.total - self.spent

    def run(self) -> float:
        """Run the search; returns tau of the winner's scorecard."""
        minutes = f"{self.options.drafter.minutes:g} min"
        say(f"drafter=auto: {minutes} for {', '.join(self.runs)}; batch {self.batch}")
        trained, free = self._prepare()
        for name in free:
            self.jobs({name: self.overrides[name]}, {name: TimeSlice(FREE, None)})
            self._judge(FREE, [name], self.judge.search_plans)
        if survivor := self._run_rungs(trained):
            self._train_winner(survivor)
        return self._finish()

    def _save(self, **took: float) -> None:
        self.ledger.took |= took
        self.ledger.spent = self.spent
        self.ledger.write()

    # -- shared by all families -------------------------------------------------------------------

    def _prepare(self) -> tuple[list[str], list[str]]:
        """Load the target, sort the families, and make rollouts and held-out answers for them."""
        overrides = self.context.overrides
        has_decode = any(trials.override_key(o).split(".")[0] == "decode" for o in overrides)
        base = [*overrides, f"drafter={next(iter(self.runs))}", *(["decode=auto"] * (not has_decode))]
        run = trials.family_options(self.context, base)
        reader, moment = PromptReader.of_run(run), moment_of(run.rollout.store)
        chat, train, held = reader.read_for_run(self.context.folder, moment)
        target = TargetSource(run.target).load(packing=run.packing, chat=chat)
        with refused():
            self.judge = Judge(run, self.options.drafter, target, chat, held, self.clock)
        self.shared = Shared(target)
        self.jobs = Jobs(self.context, self.shared, self.reports)
        trained, free = self._sort_families()
        plan = rollout_plan(run, target, chat, train)
        store = open_store(run, Path(run.output_dir) / "rollouts", target, chat, plan, train)
        before = self.clock()
        watch = partial(self._watch, before, len(store.missing()))
        fill(run, target, chat, store, run.rollout.drafter, None, watch)
        self.judge.prepare()
        target.join()
        self._save(
            **self.ledger.took or {"before rollouts": before - self.start, "rollouts": self.clock() - before}
        )
        return trained, free

    def _watch(self, since: float, first: int, missing: int) -> None:
        """Stop early if the rollouts would use up the budget."""
        if not missing or missing >= first:
            return
        expected = (self.clock() - since) / (first - missing) * missing
        if self.spent + expected > MAX_ROLLOUT_SHARE * self.total:
            need = (self.spent + expected) / 60
            raise UserError(
                f"drafter.minutes={self.options.drafter.minutes:g}: the rollouts take about {need:.1f}; "
                f"set it to {3 * need:.0f}, or set prompts.limit and prompts.self; finished rollouts are kept"
            )

    def _sort_families(self) -> tuple[list[str], list[str]]:
        """Families that train and families without training; one that cannot be built or exported fails.

        Raises:
            UserError: all of them fail.
        """
        trained, free = [], []
        for name, run in self.runs.items():
            try:
                with refused():
                    drafter = build_drafter(run.drafter, self.shared.target)
                    RunExport(self.options.export).check(drafter, self.shared.target)
            except UserError as error:
                self._fail(FREE, name, str(error))
            else:
                (trained if drafter.trains else free).append(name)
        if not (trained or free):
            raise UserError(f"drafter=auto: no family is left ({self._fates()})")
        return trained, free

    def _fates(self) -> str:
        return "; ".join(f"{row.family}: {row.fate}" for row in self.ledger.rows)

    # -- rungs ------------------------------------------------------------------------------------

    def _run_rungs(self, alive: list[str]) -> str | None:
        """Train and compare until one family is left; None if all failed."""
        count = halving.num_rungs(len(alive))
        for rung in range(1, count + 1):
            if not self._allot(rung, count, alive):
                return None if rung == 1 else alive[0]
            self._train(rung, alive)
            self._judge(rung, alive, self.judge.search_plans)
            rows = [row for name in alive if (row := self.ledger.row(rung, name))]
            good = halving.survivors(rows)
            for row in rows:
                row.fate = (
                    row.fate if row.verdict is None else "continues" if row in good else f"out at rung {rung}"
                )
                if row not in good:
                    self.jobs.remove_trainer_state(row.family)
            self._save()
            alive = [row.family for row in good]
            if len(alive) < 2:
                break
        return alive[0] if alive else None

    def _train(self, rung: int, names: Sequence[str]) -> None:
        """Train families, in parallel if the launcher allows; else the budget is saved after each."""
        for group in [[name] for name in names] if self.jobs.parallel == 1 else [names]:
            time_slices = {name: self._time_slice(rung, name) for name in group}
            self._run_jobs({name: self.overrides[name] for name in group}, time_slices)

    def _run_jobs(self, overrides: Mapping[str, Sequence[str]], time_slices: Mapping[str, TimeSlice]) -> None:
        """Run jobs in parallel; time that a killed process spent on them counts as well."""
        due = [name for name, time_slice in time_slices.items() if not self.jobs.done(name, time_slice.rung)]
        self.jobs(overrides, time_slices)
        notes = [self.jobs.done(name, time_slices[name].rung) or {} for name in due]
        self.start -= max((note.get("before", 0.0) for note in notes), default=0.0)
        self._save()

    def _allot(self, rung: int, count: int, alive: Sequence[str]) -> bool:
        """Set the training time of each family of a rung; False if there is too little time."""
        keys = [f"{rung}/{name}" for name in alive]
        if keys[0] in self.ledger.given:
            return True
        room = self.left - self._reserved_seconds()
        if rung == 1:
            self.ledger.searched = self.options.drafter.search * room
        judging = self.judge.seconds(self.judge.search_plans) + self.ledger.setup
        total = min(self.ledger.searched, count * room)  # a slow rung shortens the next
        seconds = halving.seconds_per_family(total, count, len(alive), self.jobs.parallel, judging)
        if seconds < MIN_SECONDS:  # evaluation takes most of a rung: use time that was left for the winner
            seconds = min(
                MIN_SECONDS, halving.seconds_per_family(room, 1, len(alive), self.jobs.parallel, judging)
            )
        if seconds < MIN_SECONDS:
            say(f"drafter=auto: {self.left:.0f} s are left, too few to train {len(alive)} families")
            return False
        self.ledger.given |= dict.fromkeys(keys, seconds)
        self._save()
        say(f"rung {rung}: {', '.join(alive)}, {seconds:.0f} s each")
        return True

    def _time_slice(self, rung: int, name: str) -> TimeSlice:
        return TimeSlice(rung, self.ledger.given[f"{rung}/{name}"], self.options.drafter.cooldown)

    def _reserved_seconds(self) -> float:
        """Seconds reserved for the end: choosing the winner's plan, and its scorecard."""
        return self.judge.seconds(self.judge.all_plans) + self.judge.card_seconds() + self.ledger.setup

    def _judge(self, rung: int, names: Sequence[str], plans: Sequence[Plan]) -> None:
        for name in names:
            if self.ledger.row(rung, name):
                continue
            note = self.jobs.done(name, rung)
            assert note
            if why := note.get("failed"):
                self._fail(rung, name, why, note["steps"])
                continue
            self.ledger.setup = note.get(
                "setup", self.ledger.setup
            )  # the first job also builds what all share
            try:
                verdict, _ = self.judge(self.jobs.checkpoint(name), plans)
            except UserError as error:
                self._fail(rung, name, str(error), note["steps"])
                continue
            seconds = self.ledger.trained(name) + note["seconds"]
            row = Row(rung, name, seconds, note["steps"], verdict, "" if rung else "needs no training")
            self.ledger.rows.append(row)
            result = f"tau {verdict.tau:.2f}, {verdict.speedup:.2f}x with {verdict.plan}"
            say(f"{name}: {counted(row.steps, 'step')}, {result}")
            self._save()

    def _fail(self, rung: int, name: str, why: str, steps: int = 0) -> None:
        if self.ledger.row(rung, name):
            return
        say(f"{name}: out: {why}")
        self.ledger.rows.append(Row(rung, name, self.ledger.trained(name), steps, None, f"failed: {why}"))
        self._save()

    # -- the end ----------------------------------------------------------------------------------

    def _train_winner(self, name: str) -> None:
        """Train one family for the rest of the budget."""
        key = f"{LAST}/{name}"
        if key not in self.ledger.given:
            seconds = self.left - self._reserved_seconds() - self.ledger.setup
            if seconds < MIN_SECONDS:
                return
            self.ledger.given[key] = seconds
            self._save(reserved=self._reserved_seconds())
            say(f"{name}: trains on for {seconds:.0f} s")
        logged = trials.with_user_loggers(self.context, self.overrides[name])
        self._run_jobs({name: logged}, {name: self._time_slice(LAST, name)})
        self._judge(LAST, [name], self.judge.all_plans)

    def _finish(self) -> float:
        """Score the winner, and explain why it won."""
        if "plan" not in self.ledger.result:
            self._choose_winner()
        name, plan = self.ledger.result["winner"], plan_of(self.ledger.result["shape"])
        _link(self.context.folder, name)
        steps = int(self.jobs.checkpoint(name).name)
        logged = trials.with_user_loggers(self.context, self.overrides[name])
        before = self.clock()
        self.jobs(
            {name: trials.scoring_overrides(self.context, logged, plan, steps)},
            {name: TimeSlice(SCORE, None)},
        )
        note = self.jobs.done(name, SCORE) or {}
        if why := note.get("failed"):
            raise UserError(f"drafter=auto: the scorecard of {name}: {why}")
        winner_rows = [row for row in self.ledger.rows if row.family == name]
        others = [row for row in self.ledger.newest() if row.family != name]
        self.ledger.result |= {
            "why": halving.explain_winner(winner_rows[-1], others, winner_rows, self.batch)
        }
        self._save(scorecard=self.clock() - before)
        tau = self._publish(self.ledger.result["why"])
        if why := note.get("follow up"):
            raise FollowUpError(why)
        return tau

    def _choose_winner(self) -> None:
        """Record the winner and its plan; a restarted run keeps them."""
        winners = halving.best(self.ledger.newest(), 1)
        if not winners:
            reasons = self._fates() or "no time was left"
            raise UserError(f"drafter=auto: no score ({reasons}); raise drafter.minutes; rollouts are kept")
        winner, before = winners[0], self.clock()
        assert winner.verdict
        name = winner.family
        plan = next(
            p for p in [*self.judge.all_plans, *self.judge.search_plans] if p.name == winner.verdict.plan
        )
        if winner.rung != LAST:  # its row of that rung stays, since the others were compared with it
            verdict, plan = self.judge(self.jobs.checkpoint(name), self.judge.all_plans)
            winner = replace(winner, rung=LAST, verdict=verdict)
            self.ledger.rows.append(winner)
        winner.fate = "won"
        self.ledger.result = {"winner": name, "plan": plan.name, "shape": plan.settings}
        self._save(choosing=self.clock() - before)

    def _publish(self, reason: str) -> float:
        rows, folder = self.ledger.rows, self.context.folder
        took = f"{self.spent / 60:.2f} of {self.options.drafter.minutes:g} min spent"
        say(f"\n{search_state.text(rows)}\n{took}\n{reason}")
        with publish(folder / search_state.PAGE) as temporary:
            temporary.write_text(search_state.markdown(rows, [took, "", reason]))
        self.reports.page(folder)
        return read_scorecard(folder / "checkpoints" / "best" / "score.json").headline.tau


def _link(folder: Path, family: str) -> None:
    """Link a family's checkpoints and curves into the run folder."""
    for name in ("checkpoints", "csv"):
        link, to = folder / name, Path(trials.FOLDER) / family / name
        if not link.is_symlink():
            link.symlink_to(to)

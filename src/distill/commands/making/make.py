"""foredraft make: the stages, and how the budget is divided among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from decode.errors import UserError
from distill.commands.making import answers, candidates, serve
from distill.commands.making.engines import Timing
from distill.commands.making.options import make_options, seconds_of, training_options
from distill.commands.making.record import EngineResult, MakeRecord
from distill.config.build import PromptReader, TargetSource, quiet
from distill.config.validate import processes
from distill.engine_costs.costs import PAYS
from distill.export import check_options
from distill.options.commands import MakeOptions
from distill.options.run import TrainOptions
from distill.report import html, terminal
from distill.search.time_budget import Deadline
from distill.search.trials import (
    NEVER,
    JobContext,
    drop_overrides,
    override_key,
    override_value,
    task_overrides,
)
from distill.train import train
from distill.utils.launcher import launch, process_age
from distill.utils.progress import say, switch
from distill.utils.reports import Reports
from distill.utils.run_folder import checkpoints
from drafters.export.formats import GGUF
from drafters.export.llama_cpp import file as gguf_file

POINTS = 12  # save points of the training
SAFETY = 1.5  # of the time that is kept for scores, engines and files at the end
FILES = 10.0  # seconds to write a format
LEAST = 5.0  # seconds of training below which there is no run
COMPILES = 3600.0  # seconds of training from which compilation saves time


def make(cfg: Any, folder: Path) -> float:
    """Time, answer, train, score and write a drafter within a budget.

    Args:
        cfg: composed from conf/make.yaml.
        folder: of the run.

    Returns:
        Largest measured speedup of an engine; 1 where no draft pays; 0 if nothing was timed.

    Raises:
        UserError: invalid options before any work, or too small a budget.
    """
    quiet()
    switch["on"] = bool(cfg.trainer.enable_progress_bar)
    options, context = make_options(cfg), JobContext.of(folder)
    started = time.monotonic() - (0.0 if context.in_sweep else process_age())
    given = [one for one in task_overrides() if override_key(one).partition(".")[0] == "drafter"]
    return Making(options, context.overrides, given, folder, started).run()


class Making:
    """One run of the command. Every stage is skipped if the record has its result.

    Args:
        options: of the command.
        words: overrides, without a drafter's.
        given: the drafter's.
        folder: of the run.
        started: time of the clock at which the process started.
        clock: seconds.
    """

    def __init__(
        self,
        options: MakeOptions,
        words: Sequence[str],
        given: Sequence[str],
        folder: Path,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.given, self.folder, self.clock = options, list(given), folder, clock
        self.record = MakeRecord.open(folder)
        self.total = seconds_of(options.budget)
        self.started = started - self.record.spent
        self.timing = Timing(options, folder / "costs")
        self.words = self._fixed(words)

    def _fixed(self, words: Sequence[str]) -> list[str]:
        """Overrides with those that the command sets by itself."""
        keys = {override_key(word) for word in words}
        for name in keys & {"trainer.max_steps", "score.every", "score.enabled"}:
            raise UserError(f"{name}: foredraft make decides it by its budget; leave it out")
        for name in [key for key in keys if key.partition(".")[0] == "decode"]:
            raise UserError(f"{name}: foredraft make drafts chains, and chooses their length; leave it out")
        longest = max(self.options.lengths)
        fixed = [f"score.every={NEVER}", "decode=chain", f"decode.depth={longest}"]
        if "prompts.moment" not in keys:  # a run that ends after midnight keeps its prompts
            self.record.moment = self.record.moment or date.today().isoformat()
            fixed.append(f"prompts.moment={self.record.moment}")
        return [*words, *fixed]

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.total - (self.clock() - self.started)

    def run(self) -> float:
        """Run all stages; see `make`."""
        record = self.record
        if not record.drafter:
            self._choose()
        if record.draft is False:
            say("=> do not draft: no shipped engine gains, even if all is accepted")
            return 1.0
        options = self._training()
        if not checkpoints(self.folder) or "train" not in record.took:
            options = self._train(options)
        self._end(options)
        return max((one.measured or 1.0 for one in record.engines.values()), default=0.0)

    def _stage(self, name: str, since: float) -> None:
        self.record.took[name] = self.record.took.get(name, 0.0) + self.clock() - since
        self.record.spent = self.clock() - self.started
        self.record.write()

    # -- the drafter ------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose the drafter, or find that none pays."""
        before, record, kinds = self.clock(), self.record, self.options.candidates
        first = training_options([*self.words, *candidates.with_kind(self.given, kinds[0])])
        check_options(first.export)
        trainer = first.trainer
        if processes(trainer.accelerator, trainer.devices, trainer.num_nodes) > 1 or launch():
            raise UserError("foredraft make: trains in one process; set trainer.devices=1")
        for line in self.timing.untimed():
            say(line)
        target = TargetSource(first.target).load(decodes=False)
        _, prompts, _ = PromptReader.of_run(first).read()
        if GGUF in first.export.programs:
            gguf_file.target_file(first.export.target_gguf, target)
        found, refusals = candidates.possible(
            self.words, self.given, kinds, target, first.export.programs, len(prompts)
        )
        del target
        for kind, why in refusals.items():
            record.decide(f"drafter={kind}", False, why)
        if self.timing.engines():
            chosen = self._by_times(found)
        else:
            chosen = found[0]
            record.decide("drafter", chosen.name, "the first candidate; no engine is here to time them")
        if chosen:
            record.drafter, record.words = chosen.name, chosen.words
            record.answers = chosen.needs_answers
            for option, change in chosen.changes.items():
                values = f"{option}={override_value(change.value)}, not {override_value(change.old)}"
                record.decide(option, change.value, change.because)
                say(f"{values}: {change.because}")
        self._stage("choice of the drafter", before)

    def _by_times(self, found: Sequence[candidates.Candidate]) -> candidates.Candidate | None:
        record = self.record
        timed, left_out = candidates.time_candidates(found, self.timing, self.total, self.clock)
        for name in left_out:
            record.decide(f"drafter={name}", "not timed", "the budget leaves no time for it")
        paying = [one for one in timed if one.paying()]
        record.draft = bool(paying)
        if not paying:
            ceiling = max(costs.ceiling()[1] for one in timed for costs in one.costs.values())
            record.decide("draft", False, f"the largest ceiling is {ceiling:.2f}x, and {PAYS}x pays")
            record.drafter = timed[0].candidate.name
            return None
        best = candidates.best(paying)
        forecasts = ", ".join(f"{one.candidate.name} {one.forecast():.2f}x" for one in timed)
        record.decide("drafter", best.candidate.name, f"forecast with the assumed acceptance: {forecasts}")
        record.took |= {f"timing {to}": seconds for to, seconds in best.seconds.items()}
        record.took |= {f"a plain round {to}": seconds for to, seconds in best.plain_seconds().items()}
        return best.candidate

    # -- training ---------------------------------------------------------------------------------

    def _training(self) -> TrainOptions:
        """Options of the training run, as far as they are decided."""
        limit = [] if self.record.limit is None else [f"prompts.limit={self.record.limit}"]
        words = [*drop_overrides(self.words, *(["prompts.limit"] * bool(limit))), *limit]
        return training_options([*words, *self.record.words])

    def _train(self, options: TrainOptions) -> TrainOptions:
        record = self.record
        self._check_time(options, "choosing the drafter")
        if record.answers and "answers" not in record.took and options.rollout.answers == "write":
            if not record.speed:
                before = self.clock()
                self._fit_prompts(options)
                self._stage("sample of answers", before)
            before, options = self.clock(), self._training()
            answers.roll_out_all(options)
            self._stage("answers", before)
        before, seconds = self.clock(), self._check_time(options, "the answers")
        options = self._training()
        if seconds < COMPILES and options.compile_objective == "auto":
            options = replace(options, compile_objective="never")
        options = replace(options, export=replace(options.export, to=None, push_to=None))
        deadline = Deadline(self.clock() + seconds, POINTS, clock=self.clock)
        say(f"training for up to {seconds / 60:.1f} min")
        train(options, self.folder, Reports(html.attempt, terminal.show), None, deadline.attach)
        self._stage("train", before)
        return options

    def _check_time(self, options: TrainOptions, after: str) -> float:
        """Seconds of the budget that are left to answer and train.

        Raises:
            UserError: they are too few.
        """
        kept = self._kept(options)
        if (seconds := self.left - kept) < LEAST:
            raise UserError(
                f"budget={self.options.budget}: after {after} {max(0.0, self.left):.0f} s are left, and the "
                f"scores and files at the end need about {kept:.0f}; a larger one continues here"
            )
        return seconds

    def _fit_prompts(self, options: TrainOptions) -> None:
        seconds = self.options.answers_share * max(0.0, self.left - self._kept(options))
        fitted = answers.fit_prompts(options, seconds, self.folder, self.clock)
        speed = fitted.speed
        why = (
            f"{fitted.seconds:.0f} s forecast for {fitted.answers:,} answers, of which {speed.start:.0f} to "
        )
        why += f"start; {speed.said(options.rollout.batch_size)}, by a sample of {speed.answers}"
        self.record.limit, self.record.speed = fitted.limit, speed
        self.record.decide("prompts.limit", fitted.limit or "all", why)
        say(f"prompts: {fitted.limit or 'all'}: {why}")

    def _kept(self, options: TrainOptions) -> float:
        """Seconds that the end of the run needs: two scorecards, the engines again, and files."""
        timings = sum(s for name, s in self.record.took.items() if name.startswith("timing "))
        starts = 2 / (1 + len(self.options.lengths))  # of an engine: plain and one length, in place of all
        score, plain = options.score, self._plain_seconds()
        cards = 2 * score.prompts * score.max_new_tokens * score.repeats * 2 * plain
        replays = 2 * score.replay_prompts * plain
        return SAFETY * (cards + replays + starts * timings) + FILES * len(self.options.ship)

    def _plain_seconds(self) -> float:
        """Seconds of a plain round, in the slowest of the timed engines."""
        return max(
            (s for name, s in self.record.took.items() if name.startswith("a plain round")), default=0.0
        )

    # -- the end ----------------------------------------------------------------------------------

    def _end(self, options: TrainOptions) -> None:
        record, before = self.record, self.clock()
        best = (self.folder / "checkpoints" / "best").resolve()
        for to in self.timing.engines():
            if to not in record.engines:
                say(f"\nstep {best.name}, to={to}:")
                costs = self.timing.candidate(record.drafter, options, to)
                self._decide_length(to, self.timing.trained(best, options, to, costs))
                self._stage("engines", before)
                before = self.clock()
        serve.ship(best, self._training(), record, self.folder)
        self._stage("files", before)
        say(self._summary())

    def _decide_length(self, to: str, found: EngineResult) -> None:
        why = f"{found.predicted:.2f}x predicted from the scored acceptance"
        if found.measured is not None:
            why += f", {found.measured:.2f}x measured"
            if found.measured < 1:
                found = replace(found, length=0)
        self.record.engines[to] = found
        self.record.decide(f"draft length, to={to}", found.length, f"{found.engine}: {why}")

    def _summary(self) -> str:
        record, lines = self.record, []
        for to, command in record.commands.items():
            found = record.engines.get(to)
            lines.append(f"{to}: {_said(found) if found else 'not timed'}")
            if command and (found is None or found.length):
                lines.append(f"  serve it: {command}")
        lines.append(f"{record.spent / 60:.1f} of {self.total / 60:g} min; decisions: {record.path}")
        return "\n".join(["", *lines])


def _said(found: EngineResult) -> str:
    measured = "" if found.measured is None else f"{found.measured:.2f}x measured, "
    gain = f"{measured}{found.predicted:.2f}x predicted (ceiling {found.ceiling:.2f}x)"
    if not found.length:
        return f"{found.engine}: do not draft: {gain}"
    return f"{found.engine}: {gain}, with drafts of {found.length}"

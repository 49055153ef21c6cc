"""Compare drafters of a search: predicted speedup from replayed acceptance and measured round times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.generation.generate import generate
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.planning.auto import Auto, refused_plans
from distill.options.run import AutoOptions, RunOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.scoring.scorer import Scorer, threads
from distill.search.halving import Verdict
from drafters.checkpoint import io as checkpoint_io

# Evaluating a plan is assumed to take this many plain rounds until one was timed; tokens of that timing.
PLAN_ROUNDS_GUESS, TIMED_TOKENS = 40.0, 16


class Judge:
    """Evaluates checkpoints on held-out answers other than those that their scorecards report.

    Attributes:
        plain_seconds: of a round of plain decoding.
        plan_seconds: that evaluating one plan takes: the maximum so far, or a guess.

    Raises:
        UserError: `decode` has no plans to choose from, or no prompts are replayed.
    """

    def __init__(
        self,
        options: RunOptions,
        auto: AutoOptions,
        target: Target,
        chat: Chat,
        held: Sequence[Prompt],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.auto, self.target, self.clock = options, auto, target, clock
        score, answers = options.score, Path(options.output_dir) / "heldout"
        keywords = {"seed": options.seed, "target_name": options.target.name}
        self.scorer = Scorer(score, options.decode, target, chat, held, answers, **keywords)
        self.sampler, self.batch = self.scorer.samplers[0], score.batch_sizes[0]
        headline = self.scorer.plans[0]
        if isinstance(headline, Auto):
            self.all_plans = [p for p in headline.plans if isinstance(p, Plan) and p.depth]
            self.search_plans = [plan_of(plan) for plan in auto.plans]
        elif isinstance(headline, Plan) and headline.depth:
            self.all_plans = self.search_plans = [headline]
        else:
            raise UserError("drafter=auto: set decode to a plan that drafts, or to decode=auto")
        if not self.sampler.temperature:  # at T=0 a sampled chain is the most likely chain
            self.all_plans = [p for p in self.all_plans if p.proposal != "sampled"] or self.all_plans
        if not self.scorer.replayed:
            raise UserError("drafter=auto compares families on replayed prompts; raise score.replay_prompts")
        self.tokens = min(auto.tokens, score.max_new_tokens)
        self.plain_seconds = self.plan_seconds = 0.0
        self._judged = False

    def prepare(self) -> None:
        """Generate the target's answers to the held-out prompts, and time plain decoding."""
        self.scorer.prepare()
        answers = self.scorer.rollouts[self.sampler]
        unseen = answers[len(self.scorer.prompts) :] or answers
        selected = [Rollout(r.prompt, r.answer[: self.tokens]) for r in unseen[: self.auto.answers]]
        # A batch larger than the number of answers repeats them.
        self.answers = [selected[i % len(selected)] for i in range(max(len(selected), self.batch))]
        part, tokens = [r.prompt for r in self.answers[: self.batch]], min(TIMED_TOKENS, self.tokens)
        for _ in range(2):  # the first is a warm-up
            start = self.clock()
            generate(
                self.target, None, part, sampler=self.sampler, seed=self.options.seed, max_new_tokens=tokens
            )
            self.plain_seconds = (self.clock() - start) / tokens
        self.plan_seconds = PLAN_ROUNDS_GUESS * self.plain_seconds

    def seconds(self, plans: Sequence[Plan]) -> float:
        """Expected time of an evaluation with these plans and plain decoding."""
        return self.plan_seconds * (len(plans) + 1)

    def __call__(self, checkpoint: Path, plans: Sequence[Plan]) -> tuple[Verdict, Plan]:
        """Evaluate a checkpoint with the plans that it supports, and return the fastest.

        Raises:
            UserError: it supports none of the plans.
        """
        start = self.clock()
        drafter = checkpoint_io.load(checkpoint, self.target)
        self.target.tap(drafter.taps)
        refused = refused_plans(drafter, plans)
        plans = [plan for plan in plans if plan not in refused]
        if refused and not plans:
            raise next(iter(refused.values()))
        with threads(self.options.score.threads):
            _, curve = Auto(plans, adapt=False).choose(
                self.target,
                drafter,
                self.answers,
                self.sampler,
                self.batch,
                max_new_tokens=self.tokens,
                stop=stop_tokens(self.target),
                seed=self.options.seed,
            )
        self.plan_seconds = max(self.plan_seconds * self._judged, (self.clock() - start) / len(curve))
        self._judged = True
        plain = next(row for row in curve if row["decode"] == Plan().name)
        plan_of = {plan.name: plan for plan in plans}
        best = max(
            (row for row in curve if row["decode"] in plan_of), key=lambda row: row["tokens_per_second"]
        )
        speeds = best["tokens_per_second"], plain["tokens_per_second"]
        verdict = Verdict(best["decode"], best["tau"], best["round_seconds"], *speeds)
        return verdict, plan_of[best["decode"]]

    def card_seconds(self) -> float:
        """Expected time of a scorecard, from the time of a plain round.

        Counts plain and speculative decoding of the scored prompts, the audit and the replay.
        """
        score = self.options.score
        batches = -(-score.prompts // self.batch)
        decoded = (2 * batches * score.repeats + 3) * score.max_new_tokens
        replayed = len(self.scorer.replayed) * score.max_new_tokens / (len(self.answers) * self.tokens)
        return len(self.scorer.samplers) * (1.5 * self.plain_seconds * decoded + self.plan_seconds * replayed)

"""What drafters are worth beside one another: replayed acceptance over the measured cost of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.generation.generate import generate
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import Auto
from distill.options import AutoOptions, RunOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.scoring.scorer import Scorer, threads
from distill.search.halving import Verdict
from drafters.base import Drafter
from drafters.checkpoint import io as hub

# Plain rounds that take as long as judging a plan, before one was judged; they are timed over so many tokens.
UNKNOWN, TIMED = 40.0, 16


class Judge:
    """Judges checkpoints on held-out answers that are not those their scorecards report.

    Args:
        options: of a run, for its scores.
        auto: of the search.
        target: that all of them draft for.
        chat: renders the prompts.
        held: prompts that are held out.
        clock: seconds.

    Attributes:
        plain: seconds of a round of plain decoding.
        each: seconds that judging one plan takes: the most so far, or a guess.

    Raises:
        UserError: a `decode` without plans to choose from, or nothing to replay.
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
        named = {"seed": options.seed, "target_name": options.target.name}
        self.scorer = Scorer(score, options.decode, target, chat, held, answers, **named)
        self.sampler, self.batch = self.scorer.samplers[0], score.batch_sizes[0]
        headline = self.scorer.plans[0]
        if isinstance(headline, Auto):
            self.all = [p for p in headline.plans if isinstance(p, Plan) and p.depth]
            self.few = [Plan(**plan) for plan in auto.plans]
        elif isinstance(headline, Plan) and headline.depth:
            self.all = self.few = [headline]
        else:
            raise UserError(
                "drafter=auto: decode is one plan that drafts, or decode=auto, which chooses among several"
            )
        if not self.sampler.temperature:  # a drawn chain is the likeliest one
            self.all = [p for p in self.all if p.proposal != "sampled"] or self.all
        if not self.scorer.replayed:
            raise UserError("drafter=auto compares families on replayed prompts; raise score.replay_prompts")
        self.tokens = min(auto.tokens, score.max_new_tokens)
        self.plain = self.each = 0.0
        self._judged = False

    def prepare(self) -> None:
        """Have the target answer the held-out prompts."""
        self.scorer.prepare()
        answers = self.scorer.rollouts[self.sampler]
        unseen = answers[len(self.scorer.prompts) :] or answers
        chosen = [Rollout(r.prompt, r.answer[: self.tokens]) for r in unseen[: self.auto.answers]]
        # A batch larger than that decodes them again.
        self.answers = [chosen[i % len(chosen)] for i in range(max(len(chosen), self.batch))]
        part, tokens = [r.prompt for r in self.answers[: self.batch]], min(TIMED, self.tokens)
        for _ in range(2):  # the first warms up
            begun = self.clock()
            generate(
                self.target, None, part, sampler=self.sampler, seed=self.options.seed, max_new_tokens=tokens
            )
            self.plain = (self.clock() - begun) / tokens
        self.each = UNKNOWN * self.plain

    def seconds(self, plans: Sequence[Plan]) -> float:
        """That a verdict by these takes."""
        return self.each * (len(plans) + 1)

    def __call__(self, checkpoint: Path, plans: Sequence[Plan]) -> tuple[Verdict, Plan]:
        """The worth of a checkpoint with the best of these plans, those that it cannot follow left out.

        Raises:
            UserError: it can follow none.
        """
        begun = self.clock()
        drafter = hub.load(checkpoint, self.target)
        self.target.tap(drafter.taps)
        plans = _followed(drafter, plans)
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
        self.each = max(self.each * self._judged, (self.clock() - begun) / len(curve))
        self._judged = True
        plain = next(row for row in curve if row["decode"] == Plan().name)
        named = {plan.name: plan for plan in plans}
        best = max((row for row in curve if row["decode"] in named), key=lambda row: row["tokens_per_second"])
        speeds = best["tokens_per_second"], plain["tokens_per_second"]
        verdict = Verdict(best["decode"], best["tau"], best["round_seconds"], *speeds)
        return verdict, named[best["decode"]]

    def card_seconds(self) -> float:
        """That a scorecard takes, from the seconds of a plain round.

        Plain decoding and the plan over what is decoded, the audit's texts, the replay of all answers.
        """
        score = self.options.score
        batches = -(-score.prompts // self.batch)
        decoded = (2 * batches * score.repeats + 3) * score.max_new_tokens
        replayed = len(self.scorer.replayed) * score.max_new_tokens / (len(self.answers) * self.tokens)
        return len(self.scorer.samplers) * (1.5 * self.plain * decoded + self.each * replayed)


def _followed(drafter: Drafter, plans: Sequence[Plan]) -> list[Plan]:
    """Plans that a drafter can follow.

    Raises:
        UserError: none; why not the first.
    """
    found, refused = [], None
    for plan in plans:
        try:
            drafter.check(plan)
        except UserError as error:
            refused = refused or error
        else:
            found.append(plan)
    if not found and refused:
        raise refused
    return found

"""Score a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from decode.errors import UserError
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting, check, check_replayable, score
from decode.evaluation.scorecard import Checkpoint, PlanChoice, Scorecard, TargetDrift
from decode.evaluation.served import Served
from decode.evaluation.teacher_forced import SettledCache, TargetResults
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.planning.auto import Auto, supported_plans
from decode.planning.calibrated_tree import Calibrated
from decode.sampling import Sampler
from distill.options.answers import DecodePlan
from distill.options.run import ScoringOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt, ids_digest
from distill.rollouts.heldout import held_out_answers
from distill.rollouts.manifest import versions
from distill.scoring.sample_texts import sample_texts
from distill.scoring.script_judge import ScriptJudge, judge_record
from distill.scoring.tap_control import ShuffledTaps
from distill.scoring.target_drift import target_drift
from distill.utils.progress import bar, say
from distill.utils.provenance import commit
from drafters import optional
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.registry import short_name

EngineMeasure = Callable[[Scorecard, Drafter, Target, Mapping[Sampler, Sequence[Rollout]]], list[Served]]


class Scorer:
    """Loads a checkpoint as a user would and scores it.

    Args:
        options: options of scoring.
        decode: the headline's plan, or a rule that chooses one.
        target: target to decode with, unless the checkpoint has a tuned one; its taps are set to the
            checkpoint's.
        chat: renders the prompts.
        prompts: held-out prompts: the first `score.prompts` are decoded, `score.replay_prompts` replayed.
        rollouts: folder of the target's answers to them.
        seed: seed of all draws.
        target_name: path or hub id, as recorded in the scorecard.
        control: none | shuffled_taps, a control experiment.
        full_audit: audit every scored prompt at every setting.
        served_plan: name of the plan that an engine decodes with, by which checkpoints are compared.
        engine: measures a scored checkpoint in an engine, given its card, drafter, original target and
            answers.

    Raises:
        UserError: a lossy headline, or a `decode` that is chosen by acceptance without prompts to measure;
            for a target that only an engine decodes, see `_check_replay`.
    """

    def __init__(
        self,
        options: ScoringOptions,
        decode: DecodePlan,
        target: Target,
        chat: Chat,
        prompts: Sequence[Prompt],
        rollouts: Path,
        *,
        seed: int,
        target_name: str,
        control: str = "none",
        full_audit: bool = False,
        served_plan: str = "",
        engine: EngineMeasure | None = None,
    ) -> None:
        self.options, self.target, self.chat, self.root = options, target, chat, rollouts
        self.seed, self.target_name, self.control, self.full_audit = seed, target_name, control, full_audit
        self.served_plan, self.engine = served_plan, engine
        self.replayed = list(prompts[: options.replay_prompts])
        self.prompts = list(prompts[: options.prompts])
        self.ids = [chat.encode(p.messages, p.tools) for p in self.prompts]
        self.plans: list[Plan | Auto | Calibrated] = [decode]
        self.plans += [plan_of(plan).for_tokenizer(chat.tokenizer) for plan in options.plans]
        self.alternatives = [plan_of(plan) for plan in options.alternatives]
        if not isinstance(self.plans[0], Plan) and not self.replayed:
            raise UserError(
                "decode=auto and decode=calibrated measure acceptance on replayed prompts; "
                "raise score.replay_prompts"
            )
        if isinstance(self.plans[0], Plan):
            check(self.ids, self.plans[0])
        self.samplers = options.samplers()
        if target.abilities.decode:
            self._check_replay()
        self.judge = None
        if options.judge:
            self.judge = ScriptJudge(
                options.judge, "score.judge", "score.judge_timeout", options.judge_timeout
            )
        if self.judge and not any(isinstance(plan, Plan) and plan.lossy for plan in self.plans):
            raise UserError("score.judge compares lossy plans with plain decoding; put one under score.plans")
        self.rollouts: dict[Sampler, list[Rollout]] = {}
        self._known = TargetResults(target)
        self._remarks = {""}  # printed once

    def _check_replay(self) -> None:
        """Reject options that need decoding; drop alternatives that need it.

        Raises:
            UserError: nothing to replay, a plan that cannot be replayed, or a full audit.
        """
        if reason := self.target.abilities.replay:
            raise UserError(f"score: this target cannot be replayed here ({reason}); set score.enabled=false")
        if not self.replayed:
            raise UserError("score: this target is scored only by replay; set score.replay_prompts above 0")
        if self.full_audit:
            raise UserError("audit=full: an engine decodes this target, so there is nothing to audit")
        for plan in self.plans:
            if not isinstance(plan, Plan):
                raise UserError(
                    "decode=auto and decode=calibrated time rounds, and this target is decoded by an engine; "
                    "use decode=chain"
                )
            for sampler in self.samplers:
                check_replayable(plan, sampler)
        self.alternatives = [plan for plan in self.alternatives if not plan.has_siblings]

    def check(self, drafter: Drafter) -> None:
        """Check that a drafter can be scored.

        Raises:
            UserError: an unsupported plan.
        """
        for candidate in self.candidates:
            drafter.check(candidate)

    @property
    def candidates(self) -> list[Plan]:
        """Plans that every checkpoint must support; plans of decode=auto are optional."""
        required = [plan for plan in self.plans if not isinstance(plan, Auto)]
        plans = [[plan] if isinstance(plan, Plan) else plan.plans for plan in required]
        return [plan for group in plans for plan in group]  # pyright: ignore[reportReturnType]

    def prepare(self) -> None:
        """Generate the target's answers to held-out prompts with each sampler; later runs read them."""
        if self.replayed and not self.rollouts:
            self.rollouts = self._answers(self.target)

    def _answers(self, target: Target) -> dict[Sampler, list[Rollout]]:
        """A target's answers to the replayed prompts, with each sampler."""
        if not self.replayed:
            return {}
        return {sampler: self._answer(target, self.replayed, sampler) for sampler in self.samplers}

    def _answer(self, target: Target, prompts: Sequence[Prompt], sampler: Sampler) -> list[Rollout]:
        new = self.options.max_new_tokens
        return held_out_answers(target, self.chat, prompts, sampler, new, self.seed, self.root)

    def _drift(self, tuned: Target) -> TargetDrift:
        """Distance of a tuned target from the original, on the original's answers with the first sampler."""
        sampler = self.samplers[0]
        rollouts = self.rollouts.get(sampler) or self._answer(self.target, self.prompts, sampler)
        return target_drift(self.target, tuned, rollouts)

    def __call__(self, folder: Path, step: int, early: bool = False) -> Scorecard:
        """Score one checkpoint: decoding with the drafter, against the verifying target without it.

        Args:
            folder: folder of the checkpoint.
            step: step of the checkpoint.
            early: neither the best nor the last checkpoint: only `score.early_prompts` are decoded, without
                `score.alternatives` and sample texts, and audited at the scored temperatures.
        """
        options = self.options
        count = min(options.early_prompts or len(self.ids), len(self.ids)) if early else len(self.ids)
        ids, prompts = self.ids[:count], self.prompts[:count]
        drafter = checkpoint_io.load(folder, self.target)
        if options.quantize == "int8":
            drafter.round_to_int8()
        target = drafter.verifier(self.target)
        target.tap(drafter.taps)
        if self.control == "shuffled_taps":
            ShuffledTaps(target, self.ids, self.seed)
        self.prepare()
        answers = self._answers(target) if drafter.traits.tunes_target else self.rollouts
        with ExitStack() as stack:
            stack.enter_context(threads(options.threads))
            progress_bar = stack.enter_context(bar(1, f"scoring step {step}", "batches", leave=False))

            def progress(done: int, total: int) -> None:
                progress_bar.total = total
                progress_bar.update(done - progress_bar.n)

            judge = stack.enter_context(self.judge) if self.judge else None
            settings, choices = self._settings(target, drafter, answers)
            if not early:
                settings = list(dict.fromkeys([*settings, *self._alternatives(drafter)]))
            for remark in (optional.remark(drafter, setting.plan) for setting in settings):
                if remark not in self._remarks:
                    say(remark)
                    self._remarks.add(remark)
            card = score(
                target,
                drafter,
                HeldOut(ids, [p.id for p in prompts], answers, reserved=len(self.ids)),
                settings,
                self._options(target, judge, early),
                progress,
                # A drafter with a verifier of its own may change it from checkpoint to checkpoint.
                self._known if target is self.target and not drafter.traits.tunes_target else None,
            )
        replayed = next(iter(answers.values()), [])
        conditions = replace(
            card.conditions,
            control=self.control,
            prompts_digest=ids_digest(ids),
            replayed_digest=ids_digest([one.prompt for one in replayed]) if replayed else "",
            served_plan=self.served_plan,
        )
        samples = []
        if not early and not target.abilities.decode:
            tokens = options.max_new_tokens
            samples = sample_texts(target, drafter, self.chat, prompts, settings, tokens, self.seed)
        card = replace(
            card,
            conditions=conditions,
            checkpoint=self._checkpoint(target, drafter, step),
            categories=[p.category for p in self.replayed],
            samples=samples,
            plan_choices=choices,
        )
        served = self.engine(card, drafter, self.target, answers) if self.engine else []
        return replace(card, served=served)

    def _checkpoint(self, target: Target, drafter: Drafter, step: int) -> Checkpoint:
        """What was scored."""
        tuned = drafter.traits.tunes_target
        return Checkpoint(
            drafter=short_name(drafter),
            step=step,
            commit=commit(),
            target=self.target_name,
            versions=versions(),
            parameters=checkpoint_io.count_parameters(drafter),
            drafter_kv_bytes_per_token=self._kv_bytes(target, drafter),
            quantize=self.options.quantize,
            lossless_to="tuned target" if tuned else "target",
            target_drift=self._drift(target) if tuned else None,
        )

    def _options(self, target: Target, judge: ScriptJudge | None, early: bool) -> ScoreOptions:
        options = self.options

        def score_answer(index: int, answer: Sequence[int]) -> float:
            assert judge is not None
            prompt = self.prompts[index]
            text = self.chat.tokenizer.decode(list(answer), skip_special_tokens=True)
            return judge(judge_record(prompt, str(text)))

        return ScoreOptions(
            max_new_tokens=options.max_new_tokens,
            stop=stop_tokens(target),
            seed=self.seed,
            repeats=options.repeats,
            audit_prompts=options.audit_prompts,
            audit_drawn=not early,
            full_audit=self.full_audit,
            judge=score_answer if judge else None,
        )

    @torch.inference_mode()
    def _kv_bytes(self, target: Target, drafter: Drafter) -> int:
        """Bytes of the drafter's cache per token of the first prompt; a window keeps only a part."""
        prompt = torch.tensor([self.ids[0]], device=target.device)  # (1, T)
        state, cache = drafter.new_state(1), SettledCache(target, drafter, *prompt.shape)
        cache.settle(prompt, [prompt.shape[1]])
        drafter.advance(state, target, prompt, target.read(prompt).taps, [prompt.shape[1]], prompt[:, -1])
        return optional.kv_bytes_per_token(drafter, state)

    def _alternatives(self, drafter: Drafter) -> list[Setting]:
        """Rows of every sampler and batch size, with other drafts that the drafter supports."""
        plans, proposals = supported_plans(drafter, self.alternatives), drafter.traits.proposals
        return [
            Setting(sampler, plan.resolved(sampler.temperature, proposals), batch)
            for sampler in self.samplers
            for batch in self.options.batch_sizes
            for plan in plans
        ]

    def _settings(
        self, target: Target, drafter: Drafter, rollouts: dict[Sampler, list[Rollout]]
    ) -> tuple[list[Setting], list[PlanChoice]]:
        """All rows of the scorecard; auto and calibrated plans are chosen per sampler and batch size."""
        settings, choices = [], []
        for sampler in self.samplers:
            for batch in self.options.batch_sizes:
                for plan in self.plans:
                    if not isinstance(plan, Plan):
                        options = {
                            "max_new_tokens": self.options.max_new_tokens,
                            "stop": stop_tokens(target),
                            "seed": self.seed,
                        }
                        answers = rollouts[sampler]
                        if isinstance(plan, Calibrated):  # calibrate on other prompts than reported
                            answers = answers[len(self.prompts) :] or answers
                        plan, curve = plan.choose(target, drafter, answers, sampler, batch, **options)
                        choices.append(
                            PlanChoice(
                                temperature=sampler.temperature,
                                batch_size=batch,
                                chosen=plan.name,
                                tree=[list(path) for path in plan.tree],
                                curve=curve,
                            )
                        )
                    plan = plan.resolved(sampler.temperature, drafter.traits.proposals)
                    settings.append(Setting(sampler, plan, batch))
        return list(dict.fromkeys(settings)), choices


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Limit torch to `count` CPU threads while timing; more threads slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

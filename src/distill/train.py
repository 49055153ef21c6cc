"""One training run: rollouts, training, scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import lightning as L
from torch.optim import Optimizer

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.sampling import Sampler
from distill.config.build import PromptReader, TargetSource, build_drafter, join_ends, quiet
from distill.config.choices import used_packages
from distill.config.engine import check_engine
from distill.config.run_choices import record_choices, record_drafter
from distill.config.target_size import with_length
from distill.config.validate import refused
from distill.data.datamodule import RolloutData, TapStorage
from distill.data.on_policy import OnPolicy
from distill.data.states_ahead import SideStream
from distill.data.taps_memory import TapMemory
from distill.distributed.graceful_shutdown import Stop
from distill.distributed.ranks import explain_lost_ranks
from distill.distributed.watchdog import Watchdog
from distill.engines.engine_target import load_engine_target
from distill.export import RunExport
from distill.loggers.base import begin, trackers
from distill.loggers.loggers import ending, loggers
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.options.run import TrainOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.rollouts.produce import produce
from distill.rollouts.store import RolloutStore, moment_of
from distill.rollouts.vllm_server import check_vllm
from distill.scoring.scorer import Scorer
from distill.serving import engine_scores
from distill.training import trainer_state
from distill.training.attention import compiled_attention
from distill.training.checkpointing import ScoreCheckpoint, TrainingBar
from distill.training.early_end import EarlyEnd
from distill.training.memory import MemoryWatch, Sizes, explain_out_of_memory
from distill.training.module import DistillModule
from distill.training.start import WarmStart, fit_counts
from distill.training.strategies import check_placement, check_strategy, join_processes
from distill.training.throughput import Throughput
from distill.training.trainer import build_optimizer, build_trainer, fit
from distill.utils.launcher import launch, started_by_rank_0
from distill.utils.phase_log import PhaseLog
from distill.utils.progress import say, switch
from distill.utils.reports import NO_REPORTS, Reports
from distill.utils.run_record import RunRecord
from drafters import optional
from drafters.base import Drafter
from drafters.registry import short_name

COMPILED_STEPS = 1200  # shortest run in which compilation saves time (docs/training_speed.md)


@dataclass(frozen=True)
class Shared:
    """Objects shared by several runs in one process.

    Attributes:
        target: the loaded target.
        taps: its stored hidden states; see `TapStorage`.
    """

    target: Target
    taps: dict[tuple, TapMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """Parts of a run that are built before its first long work, so that errors show at once."""

    drafter: Drafter
    objective: Objective
    on_policy: OnPolicy | None
    optimizer: Callable[..., Optimizer]
    scorer: Scorer | None


@ending()
def train(
    options: TrainOptions,
    folder: Path,
    reports: Reports = NO_REPORTS,
    shared: Shared | None = None,
    extend: Callable[[L.Trainer, int], None] | None = None,
) -> float:
    """Generate or read rollouts, train the drafter on them, and score its checkpoints.

    Args:
        options: settings.
        folder: run folder.
        reports: report writers.
        shared: objects shared with other runs of this process.
        extend: called with the new trainer and the step that it resumes from, to add callbacks.

    Returns:
        Acceptance length of the best checkpoint; 0 without a score, or on other ranks than 0.

    Raises:
        UserError: invalid options, before any work starts.
        FollowUpError: the export at the end failed; the run is whole.
    """
    with explain_lost_ranks(folder):
        return _train(options, folder, reports, shared, extend)


def _train(
    options: TrainOptions,
    folder: Path,
    reports: Reports,
    shared: Shared | None,
    extend: Callable[[L.Trainer, int], None] | None,
) -> float:
    chat, prompts, held = _inputs(options, folder, phases := PhaseLog(folder))
    options = with_length(options, len(prompts))
    state = trainer_state.newest(folder)
    begun = int(state.parents[1].name) if state else 0
    record = RunRecord(folder, options.config, used_packages(options.config.values))
    logging = loggers(options.logger, record, begun)
    trainer = build_trainer(options.trainer, logging, folder, state, callbacks=[TrainingBar()])
    if extend:
        extend(trainer, begun)
    check_placement(trainer, options.target.placement)
    _check_ahead(trainer, options)
    if options.target.placement == "sharded":
        join_processes(trainer)  # to load it
    target = shared.target if shared else _load(options, trainer, folder, chat)
    parts = _parts(options, trainer, target, chat, held, folder)
    drafter = parts.drafter
    stop, watchdog = Stop(), Watchdog(options.timeout_minutes, folder)
    saver = _saver(options, phases, parts.scorer, stop, watchdog, reports)
    memory = _watch(trainer, options, saver)
    record_choices(record, options, trainer, target, chat)
    compiled = "always" if parts.objective.kernels else "never"
    record.choose("the length of the run", {"compile_objective": compiled})
    record.begin()
    begin(trainer.loggers)
    has_counts = WarmStart(options.drafter.init_from).load(drafter, target)
    stores = cache(partial(produce, options, target, chat, prompts, drafter, folder))
    if drafter.trains or drafter.needs_fit:
        target.tap(drafter.taps)  # before `stores`: engines return taps with answers
        # A process that torchrun restarts loses no shard: it joins in the fit, unless all wait for one vLLM.
        if not launch() or started_by_rank_0() or options.rollout.engine == "vllm":
            join_processes(trainer)  # to share the rollouts
        fit_counts(drafter, stores(0), target, has_counts)
        record.choose("what decides the rows", {"rollout.store": str(stores(0).folder)})
    else:
        say(f"drafter={short_name(drafter)}: nothing is trained; checkpoints/0 is the drafter as it is")
    record_drafter(record, drafter, target)
    if not drafter.trains:
        _keep(trainer, saver, drafter, target)
        return _finish(trainer, options, folder, target, reports)

    if parts.scorer:
        parts.scorer.prepare()
        target.join()
    data = _data(options, trainer, target, stores, watchdog, phases, shared)
    _, kept = data.open(begun, trainer)
    record.choose("how often rows are read", {"taps": "memory" if kept else "online"})
    module = _module(options, target, parts, stop)
    if begun:
        say(f"resuming from step {begun}")
    with explain_out_of_memory(trainer, memory, module, _sizes(options)):
        fit(trainer, module, data, state, stop, watchdog)
    return _finish(trainer, options, folder, target, reports)


def _inputs(options: TrainOptions, folder: Path, phases: PhaseLog) -> tuple[Chat, list[Prompt], list[Prompt]]:
    """Check settings; read the chat template, the prompts and the held-out prompts."""
    check_engine(options)
    quiet()
    RunExport(options.export).check_kind(options.drafter.factory)
    check_vllm(options)
    engine_scores.check(options.score, training=True)
    switch["on"] = options.trainer.enable_progress_bar
    with phases.time("prompts") as part:
        reader, moment = PromptReader.of_run(options), moment_of(options.rollout.store)
        chat, prompts, held = reader.read_for_run(folder, moment)
        part["prompts"] = len(prompts)
    return chat, prompts, held


def _parts(
    options: TrainOptions, trainer: L.Trainer, target: Target, chat: Chat, held: list[Prompt], folder: Path
) -> Parts:
    with refused():
        # Initial weights depend only on the seed, not on how the target was loaded.
        L.seed_everything(options.seed, verbose=False)
        drafter = build_drafter(options.drafter, target)
        RunExport(options.export).check(drafter, target)
        if options.gradient_checkpointing:
            optional.checkpoint_gradients(drafter)
        kernels = _kernels(options, trainer)
        if kernels and trainer.strategy.root_device.type == "cuda":
            optional.attend_with(drafter, compiled_attention())
        objective = Objective(options.objective, options.weights, options.logits_rows, kernels)
        objective.check(drafter)
        on_policy = _on_policy(options, target, drafter)
        optimizer = build_optimizer(options.optimizer, trainer)
        check_strategy(trainer, drafter, on_policy is not None)
        scorer = _scorer(options, target, chat, held, drafter, folder) if options.score.enabled else None
    return Parts(drafter, objective, on_policy, optimizer, scorer)


def _check_ahead(trainer: L.Trainer, options: TrainOptions) -> None:
    """Refuse `taps_ahead` where a step has nothing to read ahead.

    Raises:
        UserError: no GPU, a target on several, or answers that the drafter writes in the step.
    """
    if not options.taps_ahead:
        return
    if trainer.strategy.root_device.type != "cuda":
        raise UserError("taps_ahead=true reads on a GPU's second stream; set trainer=gpu")
    if options.target.placement != "replicated":
        raise UserError(
            f"taps_ahead=true with target.placement={options.target.placement}: the processes would wait for "
            "each other in two orders; it needs target.placement=replicated"
        )
    if options.on_policy.share:
        raise UserError("taps_ahead=true with on_policy.share: the answers are made in the step itself")


def _data(
    options: TrainOptions,
    trainer: L.Trainer,
    target: Target,
    stores: Callable[[int], RolloutStore],
    watchdog: Watchdog,
    phases: PhaseLog,
    shared: Shared | None,
) -> RolloutData:
    kept = shared.taps if shared else None
    keep = TapStorage(target, options.taps, options.taps_gb, options.packing, options.taps_dtype, kept)
    again, longest = options.rollout.refresh_every, _longest(options, target)
    stream = SideStream(trainer.strategy.root_device) if options.taps_ahead else None
    return RolloutData(
        stores, again, keep, options.batch_size, longest, options.seed, watchdog, phases, stream
    )


def _module(options: TrainOptions, target: Target, parts: Parts, stop: Stop) -> DistillModule:
    rates = options.optimizer.warmup, options.optimizer.final_lr
    return DistillModule(
        target, parts.drafter, parts.objective, parts.optimizer, *rates, parts.on_policy, stop
    )


def _sizes(options: TrainOptions) -> Sizes:
    return Sizes(options.batch_size, options.drafter.depth or 1, options.gradient_checkpointing)


def _load(options: TrainOptions, trainer: L.Trainer, folder: Path, chat: Chat) -> Target:
    device = trainer.strategy.root_device
    if options.taps != "engine":
        return TargetSource(options.target).load(device, options.packing, decodes=False, chat=chat)
    target = load_engine_target(options.engine, options.target, device, folder / "engine", options.taps_gb)
    join_ends(target, chat)
    return target


def _saver(
    options: TrainOptions,
    phases: PhaseLog,
    scorer: Scorer | None,
    stop: Stop,
    watchdog: Watchdog,
    reports: Reports,
) -> ScoreCheckpoint:
    assert options.score.every  # filled in by `with_length`
    every, start, name = options.score.every, options.score.start, options.target.name
    return ScoreCheckpoint(phases, every, scorer, name, start, stop, watchdog, reports)


def _watch(trainer: L.Trainer, options: TrainOptions, saver: ScoreCheckpoint) -> MemoryWatch:
    """Add the callbacks that measure and save; order matters."""
    meter = Throughput(memory := MemoryWatch(options.try_largest), saver.phases)
    early = [EarlyEnd(saver, options.score.patience)] if options.score.patience and saver.scorer else []
    added = [memory, meter, saver, *early, meter.resume]
    trainer.callbacks += added  # pyright: ignore[reportAttributeAccessIssue]
    return memory


def _scorer(
    options: TrainOptions, target: Target, chat: Chat, held: list[Prompt], drafter: Drafter, folder: Path
) -> Scorer:
    """Build the checkpoint scorer; check that the drafter supports its plans."""
    answers = Path(options.output_dir) / "heldout"
    score, served_plan = engine_scores.as_served(
        options.score, next(iter(options.export.programs), None), drafter, target
    )
    scorer = Scorer(
        score,
        options.decode,
        target,
        chat,
        held,
        answers,
        seed=options.seed,
        target_name=options.target.name,
        served_plan=served_plan,
        engine=engine_scores.scorer(score, chat, held, options.seed, folder / "engine", training=True),
    )
    scorer.check(drafter)
    return scorer


def _kernels(options: TrainOptions, trainer: L.Trainer) -> Kernels | None:
    """Compiled passes of the objective, or None; `auto` compiles long runs."""
    pays = trainer.max_steps >= COMPILED_STEPS
    return Kernels() if {"auto": pays, "always": True, "never": False}[options.compile_objective] else None


def _longest(options: TrainOptions, target: Target) -> int:
    """Maximum tokens of a training row."""
    return min(options.max_tokens, target.max_positions or options.max_tokens)


def _on_policy(options: TrainOptions, target: Target, drafter: Drafter) -> OnPolicy | None:
    """On-policy answers, sampled like the rollouts; None if on_policy.share is 0."""
    rollout = options.rollout
    sampler = Sampler(rollout.temperature, rollout.top_k, rollout.top_p)
    stop = stop_tokens(target) if rollout.until == "answer" else []
    limits = (sampler, rollout.max_new_tokens, _longest(options, target), stop)
    on_policy = OnPolicy(options.on_policy.share, options.on_policy.cut, *limits)
    if not on_policy.share:
        return None
    optional.as_target(drafter, target)  # raises if the drafter cannot generate by itself
    return on_policy


def _keep(trainer: L.Trainer, saver: ScoreCheckpoint, drafter: Drafter, target: Target) -> None:
    """Save and score a drafter that does not train; finalize the loggers."""
    if (count := trainer.world_size) > 1:
        say(f"trainer.devices: {count - 1} of {count} processes have nothing to do")
    saver.save_untrained(trainer, drafter, target)
    for logger in trainer.loggers:
        logger.finalize("success")


def _finish(
    trainer: L.Trainer, options: TrainOptions, folder: Path, target: Target, reports: Reports
) -> float:
    if not trainer.is_global_zero:
        return 0.0
    reports.table(folder)
    reports.page(folder)
    try:
        RunExport(options.export).write(folder, target)
    finally:
        for tracker in trackers(trainer.loggers):
            tracker.ended(folder)
    best = folder / "checkpoints" / "best" / "score.json"
    return read_scorecard(best).headline.tau if best.exists() else 0.0

"""Options of a training run: conf/config.yaml and its groups, what is scored at save points included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import lightning as L
import torch

from decode.model.target import Target
from decode.sampling import Sampler
from distill.losses.divergences import Divergence
from distill.losses.mix import Mix
from distill.losses.weights import Weights
from distill.options.answers import INSTANCE, AnswerOptions
from distill.utils.run_record import ResolvedOptions
from drafters.base import Drafter


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs the target where `taps=engine`: one that the run starts, or one by its url."""

    python: str | None  # interpreter that has vLLM
    arguments: tuple[Any, ...]  # more of the engine's
    url: str | None
    folder: str | None  # with its hidden states, as this machine sees it
    layers: (
        tuple[int, ...] | None
    )  # that it was started with; None: those that the drafter reads, and the last
    model: str | None  # as the server calls it
    concurrency: int  # requests in flight
    timeout: float  # seconds for one row
    retries: int  # of one request
    patience: float  # seconds to wait for a server that is away or busy, or starts
    api_key_env: str  # name of the environment variable with the key


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Held-out prompts that a command reads."""

    enabled: bool
    prompts: int  # decoded
    replay_prompts: int  # whose answers are replayed
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class TimedOptions(HeldOutOptions):
    """The same, and with how many threads decoding is timed."""

    threads: int  # of the CPU; 0: as many as there are


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(TimedOptions):
    """conf/score: what is measured at a save point."""

    every: int | None  # optimizer steps between save points; None: see `with_length`
    temperatures: tuple[float, ...]  # the first is the headline's
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    batch_sizes: tuple[int, ...]  # the first is the headline's
    plans: tuple[Mapping[str, Any], ...]  # keyword arguments of `Plan`, for more rows
    alternatives: tuple[Mapping[str, Any], ...]  # likewise, of which the fastest is named
    patience: int | None  # save points in a row that are worse than the best, until the run ends
    early_prompts: int  # decoded at save points that are neither the best nor the last
    start: bool  # step 0 is a save point of training
    audit_prompts: int
    repeats: int  # timed runs
    quantize: str  # none | int8: weights that the drafter is scored with
    judge: str | None  # a script that scores answers of lossy plans
    judge_timeout: float = 600.0  # seconds for one score
    engine: str  # none | vllm
    engine_python: str | None  # interpreter that has it
    engine_url: str | None  # of one that runs
    engine_args: tuple[str, ...]  # more arguments of its server
    engine_patience: float  # seconds until it is ready

    def samplers(self) -> list[Sampler]:
        """One for each temperature."""
        warpers = (self.top_k, self.top_p, self.min_p, self.repetition_penalty)
        return [Sampler(temperature, *warpers) for temperature in self.temperatures]


@dataclass(frozen=True, kw_only=True)
class OnPolicyOptions:
    """Training on the drafter's own answers; see `OnPolicy`."""

    share: float  # of the rows
    cut: float  # probability


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What becomes of the best checkpoint at the end of a run."""

    to: str | tuple[str, ...] | None  # format, or several; the first is the one that scores are for
    push_to: str | None  # owner/name on the Hub
    private: bool
    dry_run: bool
    target_gguf: str | None  # of to=gguf: the GGUF file that is served as the target
    outtype: str | None  # of to=gguf: how matrices are stored

    @property
    def programs(self) -> tuple[str, ...]:
        """Formats that `to` names."""
        return (self.to,) if isinstance(self.to, str) else self.to or ()


@dataclass(frozen=True, kw_only=True)
class LoggerOptions:
    """conf/logger: trackers in addition to the CSV file."""

    wandb: bool
    tensorboard: bool
    project: str  # of W&B
    weights: str  # end | always | never: checkpoints that W&B keeps


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """conf/drafter/<name>.yaml: how to make a drafter for a target.

    Attributes:
        factory: dotted path of the classmethod that makes it, `drafters.models.eagle.Eagle.for_target`.
        build: calls that with the settings of the yaml file.
        depth: that it is trained to draft, in tokens; None where the file has no such setting.
        init_from: checkpoint's folder or hub id whose weights it begins with.
        confidence: add a head that predicts which tokens are accepted.
    """

    factory: str
    build: Callable[[Target], Drafter]
    depth: int | None = None
    init_from: str | None = None
    confidence: bool = False


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """conf/drafter/auto.yaml: a search over drafter families."""

    minutes: float  # of everything
    families: tuple[str, ...]  # names of conf/drafter
    options: Any  # family -> settings of its yaml, or None
    priors: Mapping[str, Mapping[str, Any]]  # likewise, which `options` replace
    search: float  # share of the time for training
    cooldown: float  # share of a stretch of training
    plans: tuple[Mapping[str, Any], ...]  # keyword arguments of `Plan`
    answers: int  # held-out answers that families are compared on
    tokens: int  # of each
    init_from: str | None
    confidence: bool


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """conf/optimizer.

    Attributes:
        build: makes the optimizer from groups of weights; imports it when it is called.
        fuses: whether it takes `fused=True`: torch's AdamW, also within Muon.
        warmup: share of the steps.
        final_lr: share of the learning rate.
    """

    build: Callable[..., torch.optim.Optimizer]
    fuses: bool
    warmup: float
    final_lr: float


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """conf/trainer, whose settings are arguments of Lightning's Trainer.

    Attributes:
        build: calls that with these settings and what else it is given.
        accelerator: cpu | gpu | auto.
        devices: a number, a list of numbers, or a text as Lightning reads it.
        num_nodes: machines.
        accumulate_grad_batches: micro-batches of an optimizer step.
        enable_progress_bar: for every bar of the process.
        max_steps: optimizer steps; None: see `with_length`.
    """

    build: Callable[..., L.Trainer]
    accelerator: str
    devices: Any
    num_nodes: int
    accumulate_grad_batches: int
    enable_progress_bar: bool
    max_steps: int | None


@dataclass(frozen=True, kw_only=True)
class RunOptions(AnswerOptions):
    """conf/config.yaml but for `drafter`.

    Attributes:
        config: the configuration without secrets, and what was chosen so far; no field of conf/.
    """

    objective: Annotated[Divergence | Mix, INSTANCE]
    weights: Annotated[Weights, INSTANCE]
    score: ScoringOptions
    optimizer: OptimizerOptions
    trainer: TrainerOptions
    logger: LoggerOptions
    seed: int
    resume: str  # auto | never | a run's folder
    output_dir: str
    batch_size: int  # rows of a micro-batch
    taps: str  # auto | online | memory | cache | engine
    taps_gb: float
    taps_dtype: str  # of vectors on disk: bfloat16 | int8
    taps_ahead: bool
    engine: EngineOptions
    packing: bool
    gradient_checkpointing: bool
    logits_rows: int  # 0: by the device and the vocabulary
    compile_objective: str  # auto | always | never
    try_largest: bool
    timeout_minutes: float  # without progress in training; 0: no limit
    max_tokens: int  # of a training row
    on_policy: OnPolicyOptions
    export: ExportOptions
    config: ResolvedOptions


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """conf/config.yaml: one run of one drafter."""

    drafter: DrafterOptions


@dataclass(frozen=True, kw_only=True)
class SearchOptions(RunOptions):
    """conf/config.yaml with drafter=auto."""

    drafter: AutoOptions

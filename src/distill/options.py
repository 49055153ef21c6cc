"""Options of every command as frozen dataclasses: what constructors and functions are given.

Names and defaults of the options are in conf/, where a comment says what each value means;
`distill.config.read` makes these objects of a composed configuration and refuses one whose names are
not those of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import lightning as L
import torch

from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import Auto
from decode.planning.calibrated_tree import Calibrated
from decode.sampling import Sampler
from distill.losses.divergences import Divergence
from distill.losses.weights import Weights
from distill.utils.run_record import ResolvedOptions
from drafters.base import Drafter

ANSWERS, MOST_SAMPLES = 1200, 4  # see `RolloutOptions.answers_each`
INSTANCE = "conf/ names the class or function in `_target_`; the field holds what it makes"
DecodePlan = Annotated[Plan | Auto | Calibrated, INSTANCE]


def answers_each(answers: str, samples: int | None, temperature: float, prompts: int) -> int:
    """Answers to each of so many prompts: `samples`, or up to MOST_SAMPLES that bring them to ANSWERS.

    A new answer teaches a drafter more than another pass over an old one; greedy ones are all alike.
    """
    if answers == "given" or not prompts:
        return 1
    if samples is not None:
        return samples
    return max(1, min(MOST_SAMPLES, ANSWERS // prompts)) if temperature > 0 else 1


# -- groups of conf/ ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """conf/target: the model that is to be sped up."""

    path: str | None  # folder or hub id; None: the command takes it from a checkpoint
    revision: str | None  # of a hub id
    dtype: str  # auto, or a name of torch's
    device: str
    trust_remote_code: bool
    rows_until: str  # default of rollout.until
    compile: bool
    capture: bool
    placement: str  # replicated | sharded | device_map
    max_memory: Mapping[Any, Any] | None  # device -> size such as 20GiB, for device_map
    offload_folder: str | None  # for device_map

    @property
    def name(self) -> str:
        """The path or hub id, which must be known by now."""
        assert self.path is not None
        return self.path


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How messages become text."""

    template: str  # chat | none
    template_options: Any  # mapping handed to the chat template, or None
    moment: str | None  # that the template is told; None: the present, or that of what is continued


@dataclass(frozen=True, kw_only=True)
class PromptOptions(ChatOptions):
    """conf/prompts; `Source` checks those that say where prompts are read from."""

    path: Any
    dataset: Any
    name: Any
    split: Any
    revision: Any
    files: Any
    columns: Any
    answers: str  # keep | drop
    sources: Any  # list of mappings with fields of `Source`, or None
    limit: int  # prompts; 0: all
    strict: bool
    max_bytes: int  # of a record
    max_tokens: int | None  # of a prompt
    max_left_out: float  # share of the prompts that may be left out, for any reason
    heldout: str | None  # file
    heldout_share: float  # of the prompts, without such a file
    self: int  # prompts that the target writes itself


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """conf/rollout: who answers the training prompts, and by which distribution."""

    engine: str  # hf | openai | ray | vllm
    answers: str  # write | given
    until: str  # answer | length
    temperature: float
    top_k: int
    top_p: float
    prompt_temperature: float  # of self-written prompts
    max_new_tokens: int
    samples: int | None  # answers to each prompt; None: see `answers_each`
    shard_size: int  # prompts
    batch_size: int  # answers decoded together
    drafter: str | None  # checkpoint's folder or hub id
    decode: str  # run | auto
    refresh_every: int  # optimizer steps; 0: never
    seed: int
    store: str | None  # folder or url

    def answers_each(self, prompts: int) -> int:
        """Answers to each of so many prompts."""
        return answers_each(self.answers, self.samples, self.sampler.temperature, prompts)

    @property
    def sampler(self) -> Sampler:
        """The distribution of the answers.

        Raises:
            UserError: a number out of range.
        """
        return Sampler(self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """An OpenAI-compatible server, and how long to try."""

    url: str
    model: str | None  # as the server calls it
    concurrency: int  # requests in flight
    timeout: float  # seconds for one answer
    retries: int  # of one request
    patience: float  # seconds to wait for a server that is away or busy
    api_key_env: str  # name of the environment variable with the key


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
class FleetOptions:
    """Ray workers."""

    workers: int
    address: str | None  # host:port of a cluster, or auto
    cpus_per_worker: float
    gpus_per_worker: float


@dataclass(frozen=True, kw_only=True)
class OpenAIRolloutOptions(RolloutOptions, ServerOptions):
    """conf/rollout/openai.yaml."""


@dataclass(frozen=True, kw_only=True)
class StartedEngineOptions:
    """A vLLM that is started for the answers."""

    engine_python: str | None  # interpreter that has it
    engine_arguments: tuple[str, ...]  # more of its server
    engine_patience: float  # seconds until it is ready
    engine_timeout: float  # seconds for one answer
    engine_retries: int  # of one request


@dataclass(frozen=True, kw_only=True)
class RayRolloutOptions(RolloutOptions, FleetOptions, StartedEngineOptions):
    """conf/rollout/ray.yaml; without `engine_python` workers load the target themselves."""


@dataclass(frozen=True, kw_only=True)
class VLLMRolloutOptions(RolloutOptions, StartedEngineOptions):
    """conf/rollout/vllm.yaml."""


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

    to: str | None  # format
    push_to: str | None  # owner/name on the Hub
    private: bool
    dry_run: bool
    llama_cpp: str | None  # source folder of llama.cpp, whose converter writes GGUF files


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
class PlanOptions:
    """conf/plan.yaml: a large run, of which `foredraft plan` estimates hours, disk and memory."""

    run: str | None  # folder of a small run; None: estimate from the target's shape
    prompts: int | None
    gpus: int | None  # 0: this machine's processor
    card: str | None
    samples: int | None
    steps: int | None
    saves: int | None
    prompt_tokens: int | None
    answer_tokens: int | None
    disk: float  # GiB
    network: float | None  # GB a second
    faster: float
    out: str | None


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
        warmup: share of the steps.
        final_lr: share of the learning rate.
    """

    build: Callable[..., torch.optim.Optimizer]
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
class AcceleratorOptions:
    """Where a command computes that does not train."""

    accelerator: str  # cpu | gpu


# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What decides the target's answers to the training prompts."""

    target: TargetOptions
    prompts: PromptOptions
    rollout: RolloutOptions
    decode: DecodePlan


@dataclass(frozen=True, kw_only=True)
class RunOptions(AnswerOptions):
    """conf/config.yaml but for `drafter`.

    Attributes:
        config: the configuration without secrets, and what was chosen so far; no field of conf/.
    """

    objective: Annotated[Divergence, INSTANCE]
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


@dataclass(frozen=True, kw_only=True)
class HeldOutInputs:
    """What names a target and its held-out prompts: shared by commands that score."""

    target: TargetOptions
    prompts: PromptOptions
    score: HeldOutOptions


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What every command except training has."""

    seed: int
    trainer: AcceleratorOptions


@dataclass(frozen=True, kw_only=True)
class ScoreCommandOptions(HeldOutInputs, CommandOptions):
    """conf/score_checkpoint.yaml."""

    score: ScoringOptions
    decode: DecodePlan
    checkpoint: str
    audit: str  # quick | full
    control: str  # none | shuffled_taps
    answers: str  # folder
    out: str | None  # file


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(HeldOutInputs, CommandOptions):
    """conf/advise.yaml."""

    score: TimedOptions
    drafter: DrafterOptions | None = None
    checkpoint: str | None
    checkpoints: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    top_k: int
    top_p: float
    min_p: float
    chains: int  # depth of the longest
    trees: tuple[int, ...]  # nodes
    widths: tuple[int, ...]
    confidences: tuple[float, ...]
    proposals: tuple[str, ...]
    adapt: bool
    repeats: int  # timed rounds of each plan
    answers: str  # folder
    out: str | None  # file


@dataclass(frozen=True, kw_only=True)
class LimitOptions(HeldOutInputs, CommandOptions):
    """conf/limit.yaml."""

    decode: DecodePlan
    checkpoint: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    nodes: tuple[int, ...]  # of a tree
    starts: int  # places where rounds begin
    answers: str  # folder
    out: str | None  # file


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Who decides which steps of a draft model stay."""

    script: str | None  # None: nobody, and decoding is lossless
    timeout: float  # seconds for one score
    least: float  # score of a step that stays
    step: str  # string that ends a step


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CommandOptions):
    """conf/generate.yaml."""

    target: TargetOptions
    prompts: ChatOptions
    decode: DecodePlan
    prompt: str
    checkpoint: str | None
    max_new_tokens: int
    sampling: Annotated[Sampler, INSTANCE]
    stop: tuple[str, ...]
    plain: bool
    judge: JudgeOptions
    color: str  # auto | always | never
    svg: str | None  # file
    threads: int  # of the CPU; 0: as many as there are


@dataclass(frozen=True, kw_only=True)
class RolloutCommandOptions(AnswerOptions, CommandOptions):
    """conf/rollout_alone.yaml."""

    stores: str  # folder
    max_tokens: int  # of a training row


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """`prompts` of a command to which a store or a tokenizer gives the template."""

    template_options: Any


@dataclass(frozen=True, kw_only=True)
class InspectTargetOptions(CommandOptions):
    """conf/inspect.yaml."""

    target: TargetOptions
    prompts: TemplateOptions
    out: str | None  # file


@dataclass(frozen=True, kw_only=True)
class InspectOptions(CommandOptions):
    """conf/inspect_data.yaml."""

    target: TargetOptions
    prompts: TemplateOptions
    store: str | None  # folder
    stores: str  # folder
    rows: int  # shown
    row: str | None  # id of one to show instead
    sample: int  # rows that the target reads
    max_tokens: int  # of a training row
    color: str  # auto | always | never
    threads: int  # of the CPU; 0: as many as there are


@dataclass(frozen=True, kw_only=True)
class ExportCommandOptions(ExportOptions):
    """conf/export.yaml."""

    target: TargetOptions
    trainer: AcceleratorOptions
    to: str
    checkpoint: str
    out: str | None  # folder


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ServerOptions):
    """conf/verify_served.yaml."""

    target: TargetOptions
    prompts: PromptOptions
    score: ScoringOptions
    trainer: AcceleratorOptions
    checkpoint: str
    send: bool
    count: int | None  # prompts
    seconds: float
    since_start: bool
    temperature: float | None
    depth: int | None
    decode: str | None  # name of a row of the scorecard
    tolerance: float  # of acceptance

"""Options of the other commands, one class for each of their files in conf/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from decode.plan import Plan
from decode.planning.auto import Auto
from decode.planning.calibrated_tree import Calibrated
from decode.sampling import Sampler
from distill.options.answers import (
    INSTANCE,
    AnswerOptions,
    ChatOptions,
    DecodePlan,
    PromptOptions,
    ServerOptions,
    TargetOptions,
)
from distill.options.run import DrafterOptions, ExportOptions, HeldOutOptions, ScoringOptions, TimedOptions
from drafters.checkpoint.fastest_plan import Fastest


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
class AcceleratorOptions:
    """Where a command computes that does not train."""

    accelerator: str  # cpu | gpu


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
class PassportOptions(ScoreCommandOptions):
    """conf/passport.yaml."""

    again: bool  # score again
    folder: str | None


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
class AdviseEngineOptions(HeldOutInputs, CommandOptions):
    """conf/advise_engine.yaml."""

    score: TimedOptions
    engine: str  # vllm | llama.cpp | transformers | foredraft
    engine_python: str | None
    engine_args: tuple[str, ...]
    engine_patience: float  # seconds
    target_gguf: str | None  # of llama.cpp
    outtype: str | None  # of llama.cpp: how matrices of the drafter are stored
    drafter: DrafterOptions | None = None
    checkpoint: str | None
    acceptance: Any  # a rate, shares by position, or a path
    temperature: float
    top_k: int
    top_p: float
    lengths: tuple[int, ...]  # tokens of a draft
    passes: tuple[int, ...]  # tokens of a pass
    batch_sizes: tuple[int, ...]
    traffic: str | None  # file
    logs: str  # folder
    out: str | None  # file


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """conf/make.yaml, without the options of training."""

    budget: str  # see `seconds_of`
    ship: tuple[str, ...]  # formats
    candidates: tuple[str, ...]  # kinds of drafters
    vllm_python: str | None
    llama_cpp_python: str | None
    lengths: tuple[int, ...]  # tokens of a draft
    answers_share: float  # of the budget


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
    decode: Annotated[Plan | Auto | Calibrated | Fastest, INSTANCE]
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
    row: str | None  # of the scorecard, by name
    tolerance: float  # of acceptance


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """conf/watch.yaml."""

    url: str
    checkpoint: str
    requests: int  # of a window
    interval: float  # seconds between readings
    windows: int | None  # None: without an end
    mix: dict[str, float] | None  # kind of prompt -> share
    temperature: float | None
    depth: int | None
    row: str | None  # of the scorecard, by name
    tolerance: float  # of tau
    model: str | None  # as the server calls it
    timeout: float  # seconds for a page
    patience: float  # seconds to wait for a server that is down
    api_key_env: str  # name of the environment variable with the key

"""Options of what decides a target's answers: the target, the prompts, and who answers them.

Names and defaults of all options are in conf/, where a comment says what each value means;
`distill.config.read` makes these objects of a composed configuration and refuses one whose names are
not those of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from decode.plan import Plan
from decode.planning.auto import Auto
from decode.planning.calibrated_tree import Calibrated
from decode.sampling import Sampler

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
class FleetOptions:
    """Ray workers."""

    workers: int
    address: str | None  # host:port of a cluster, or auto
    cpus_per_worker: float
    gpus_per_worker: float


@dataclass(frozen=True, kw_only=True)
class StartedEngineOptions:
    """A vLLM that is started for the answers."""

    engine_python: str | None  # interpreter that has it
    engine_arguments: tuple[str, ...]  # more of its server
    engine_patience: float  # seconds until it is ready
    engine_timeout: float  # seconds for one answer
    engine_retries: int  # of one request


@dataclass(frozen=True, kw_only=True)
class OpenAIRolloutOptions(RolloutOptions, ServerOptions):
    """conf/rollout/openai.yaml."""


@dataclass(frozen=True, kw_only=True)
class RayRolloutOptions(RolloutOptions, FleetOptions, StartedEngineOptions):
    """conf/rollout/ray.yaml; without `engine_python` workers load the target themselves."""


@dataclass(frozen=True, kw_only=True)
class VLLMRolloutOptions(RolloutOptions, StartedEngineOptions):
    """conf/rollout/vllm.yaml."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What decides the target's answers to the training prompts."""

    target: TargetOptions
    prompts: PromptOptions
    rollout: RolloutOptions
    decode: DecodePlan

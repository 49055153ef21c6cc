"""The run that a plan is for: its options in a line, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from distill.cli.checkpoint_defaults import PROMPTS
from distill.commands.planning.constants import GPUS_OF_MACHINE
from distill.config.plan_options import value_of
from distill.options.commands import PlanOptions

FILE = "prompts=/path/to/prompts.jsonl"
ENGINE = "vllm/bin/python"  # as in docs/your_gpus.md
SERVED = ("engine.url=http://host:8000/v1", "engine.folder=/path/to/states")
UNSCORED = ("score.enabled=false", "rollout.until=answer")  # taps=engine has no target to decode with
SHOWN = ("path", "depth", "anchors", "layers")  # settings of a drafter that decide its cost


class Job(NamedTuple):
    """The large run.

    Attributes:
        prompts: number of prompts.
        samples: answers per prompt; None: derived from the small run's options.
        steps: optimizer steps; None: the default of a run.
        processes: number of processes, with one device each.
        faster: speed of one device, relative to the small run's.
        network: gigabytes a second between processes; None: what is assumed of its kind.
        saves: number of scored checkpoints; None: the default of a run.
    """

    prompts: int
    samples: int | None
    steps: int | None
    processes: int
    faster: float
    network: float | None
    saves: int | None


class Chosen(NamedTuple):
    """What a plan chose that a run does not choose by itself.

    Attributes:
        steps, saves: of the run.
        way: taps=.
        gigabytes: GiB of hidden states that are stored.
        sharded: whether processes share the target.
        vllm: whether vLLM answers.
        trainer: conf/trainer of several processes.
    """

    steps: int
    saves: int
    way: str = ""
    gigabytes: float = 0.0
    sharded: bool = False
    vllm: bool = False
    trainer: str = "ddp"


def purpose(config: Mapping[str, Any], name: str, processes: int, taps: str) -> str:
    """Drafter, depth, anchors, rows and hidden states of the run, as options.

    Args:
        config: of the run.
        name: of the drafter in conf/drafter.
        processes: of the run.
        taps: where hidden states are from; "" for a drafter that is not trained.
    """
    drafter, trainer = config["drafter"], config["trainer"]
    shown = [f"drafter.{key}={drafter[key]}" for key in SHOWN if drafter.get(key) is not None]
    rows, micro = config["batch_size"], trainer["accumulate_grad_batches"]
    said = " ".join([f"drafter={name}", *shown, f"batch_size={rows}", *([f"taps={taps}"] if taps else [])])
    together = f", in {processes} processes" if processes > 1 else ""
    notes = [f"{rows * micro * processes} rows a step{together}"]
    if drafter.get("anchors") == 0:
        notes.append("anchors=0: all places of a text, at every depth")
    if "vocabulary" in drafter:  # a draft model
        notes.append(_draft_model(drafter))
    return f"{said}; {'; '.join(notes)}"


def _draft_model(drafter: Mapping[str, Any]) -> str:
    if path := drafter.get("path"):
        return f"the draft model is {path}"
    return (
        f"the draft model is {drafter['layers']} layers cut from the target (drafter.layers), with its "
        "embedding and head; drafter.path names another one"
    )


def before_any(options: PlanOptions, config: Any, training: Sequence[str], chosen: Chosen) -> str:
    """The command of a run that was planned from options of `foredraft train`."""
    words = [*training, *_prompts(options, config, training)]
    if options.samples is not None:
        words.append(f"rollout.samples={options.samples}")
    words += _length(options.steps, options.saves, chosen)
    gpus = 1 if options.gpus is None else options.gpus
    words += _devices(gpus, config["trainer"], words, chosen.trainer)
    if chosen.way == "engine":
        words = _from_engine(words, gpus)
    elif chosen.vllm and config["rollout"]["engine"] == "hf":
        words.append("rollout=vllm")
    if chosen.vllm and chosen.way != "engine" and not config["rollout"].get("engine_python"):
        words += [f"rollout.engine_python={ENGINE}"] * (config["rollout"]["engine"] in ("hf", "vllm"))
    if chosen.way:
        words += [f"taps={chosen.way}"] * (config["taps"] != chosen.way)
        if chosen.gigabytes > config["taps_gb"]:
            words.append(f"taps_gb={ceil(chosen.gigabytes)}")
        words += ["target.placement=sharded"] * (chosen.sharded and "target.placement=sharded" not in words)
    return _line(words, gpus)


def from_small(job: Job, config: Mapping[str, Any], overrides: Sequence[str], chosen: Chosen) -> str:
    """The command of a run that was planned from a small one.

    Args:
        job: the large run.
        config: configuration of the small run.
        overrides: with which it was started.
        chosen: by the plan.
    """
    sized = ("trainer.max_steps", "score.every", "prompts.limit", "prompts.self", "trainer.devices", "resume")
    words = [word for word in overrides if word.partition("=")[0] not in sized and word[:6] != "hydra."]
    given = not config["prompts"]["self"] or value_of("prompts.limit", overrides)
    words.append(f"prompts.{'limit' if given else 'self'}={job.prompts}")
    if job.samples is not None:
        words = [word for word in words if not word.startswith("rollout.samples=")]
        words.append(f"rollout.samples={job.samples}")
    words += _length(job.steps, job.saves, chosen)
    if job.processes > 1:
        words = [word for word in words if word not in ("trainer=cpu", "trainer=gpu")]
        words += ["trainer.accelerator=cpu"] * (config["trainer"]["accelerator"] == "cpu")
        words += _devices(job.processes, config["trainer"], words)
    return _line(words, job.processes)


def _prompts(options: PlanOptions, config: Any, training: Sequence[str]) -> list[str]:
    """Options of the prompts, of which a plan may know the number only."""
    if options.prompts is None:
        return []
    prompts = config["prompts"]
    named = {word.partition("=")[0] for word in training} & PROMPTS
    named = named or prompts.get("dataset") or prompts.get("sources")
    limit = [] if value_of("prompts.limit", training) else [f"prompts.limit={options.prompts}"]
    return limit if named else [FILE, *limit]


def _length(steps: int | None, saves: int | None, chosen: Chosen) -> list[str]:
    """Options of the length of a run and of its save points; None: as a run chooses."""
    words = [] if steps is None else [f"trainer.max_steps={steps}"]
    if saves:
        words.append(f"score.every={ceil(chosen.steps / saves)}")
    elif saves == 0:
        words.append("score.enabled=false")
    return words


def _devices(
    gpus: int, trainer: Mapping[str, Any], words: Sequence[str], several_by: str = "ddp"
) -> list[str]:
    """Options of so many devices; 0: the processor. `several_by`: conf/trainer of several."""
    if not gpus:
        return [] if trainer["accelerator"] == "cpu" else ["trainer=cpu"]
    several = trainer["strategy"] != "auto"
    found = []
    if not several and not value_of("trainer", words):
        found = [f"trainer={several_by}"] if gpus > 1 else ["trainer=gpu"] * (trainer["accelerator"] == "cpu")
    machines = ceil(gpus / GPUS_OF_MACHINE)
    if (gpus > 1 or several) and not value_of("trainer.devices", words):
        found.append(f"trainer.devices={ceil(gpus / machines)}")
    return [*found, *([f"trainer.num_nodes={machines}"] if machines > 1 else [])]


def _from_engine(words: Sequence[str], gpus: int) -> list[str]:
    """Options of a run whose target is only in an engine, which writes the answers as well."""
    python = value_of("rollout.engine_python", words) or ENGINE
    kept = [word for word in words if not word.startswith(("rollout=", "rollout.engine"))]
    return [*kept, "rollout=hf", *UNSCORED, *(SERVED if gpus > 1 else [f"engine.python={python}"])]


def _line(words: Sequence[str], gpus: int) -> str:
    """The command in a line; one for each machine where there are several."""
    options = " ".join(shlex.quote(word) for word in dict.fromkeys(words))
    if (machines := ceil(gpus / GPUS_OF_MACHINE)) < 2:
        return f"foredraft train {options}"
    return (
        f"torchrun --nnodes={machines} --nproc-per-node={ceil(gpus / machines)} --node-rank=0 "
        f"--master-addr=10.0.0.1 --master-port=29500 -m foredraft train {options} output_dir=/shared/outputs"
    )

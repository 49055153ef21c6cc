"""Public API: load a target and a drafter, generate text with them, score them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from hydra.utils import instantiate

from decode.errors import UserError
from decode.evaluation import score as scoring
from decode.evaluation.replay import Rollout
from decode.evaluation.score import HeldOut, ScoreOptions, Setting
from decode.evaluation.scorecard import Scorecard
from decode.generation.text import Detokenizer
from decode.generation.types import Output
from decode.integers import whole_number
from decode.model.load import stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.cli.main import rewrite
from distill.config.build import TargetSource, quiet
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.config.validate import refused
from distill.options import GenerateOptions
from distill.text_generation import Messages, Model, TextGenerator
from distill.utils.paths import CONF
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io

GREEDY = Sampler(0.0)


@dataclass(frozen=True)
class Answer:
    """An answer of the target.

    Attributes:
        text: without special tokens.
        tokens: ids, the end token included.
        tau: tokens a verification round, the target's own included; plain decoding has 1.
        tokens_per_second: the prompt's pass and the token that it gives excluded; of several prompts, each
            one's own tokens over the time of all.
    """

    text: str
    tokens: list[int]
    tau: float
    tokens_per_second: float


def load_target(target: str = "data/pocket", *options: str) -> Model:
    """Load a causal language model and its tokenizer.

    Args:
        target: a folder, a Hub id, or `data/pocket`, the bundled one.
        options: of `foredraft generate --help`, as in "target.dtype=float32", "trainer.accelerator=gpu".

    Raises:
        UserError: no such model, or an unknown option.
    """
    quiet()
    command = (
        ["prompt=-", f"target={target}", *options] if target != "data/pocket" else ["prompt=-", *options]
    )
    settings = checked_options(GenerateOptions, compose(rewrite(command, CONF), CONF, "generate"))
    prompts = settings.prompts
    source = TargetSource(settings.target)
    chat = source.chat(prompts.template, prompts.template_options, prompts.moment)
    return Model(source.load(chat=chat), chat)


def load_drafter(checkpoint: str, model: Model) -> Drafter:
    """Load a drafter that was trained for this target.

    Args:
        checkpoint: a run's checkpoint folder, or a Hub id; no code that comes with it is run.
        model: the target that it was trained for.

    Raises:
        UserError: no drafter there, or one of another target.
    """
    return checkpoint_io.load(checkpoint_io.fetch(checkpoint), model.target)


def default_plan(decode: str = "dynamic") -> Plan:
    """How much to draft, as a name of conf/decode says: dynamic (a tree), chain, static, hybrid, ..."""
    with refused():
        plan = instantiate(compose(["prompt=-", f"decode={decode}"], CONF, "generate").decode)
    assert isinstance(plan, Plan)
    return plan


@overload
def generate(  # pyright: ignore[reportOverlappingOverload]  a str is a Sequence[str], too
    model: Model,
    prompt: str | Messages,
    drafter: Drafter | None = None,
    *,
    plan: Plan | None = None,
    sampler: Sampler = GREEDY,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> Answer: ...
@overload
def generate(
    model: Model,
    prompt: Sequence[str | Messages],
    drafter: Drafter | None = None,
    *,
    plan: Plan | None = None,
    sampler: Sampler = GREEDY,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> list[Answer]: ...
def generate(
    model: Model,
    prompt: str | Sequence[Any],
    drafter: Drafter | None = None,
    *,
    plan: Plan | None = None,
    sampler: Sampler = GREEDY,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> Answer | list[Answer]:
    """Answer prompts; a drafter does not change the distribution of the answers.

    Args:
        model: from `load_target`.
        prompt: a user's message, or a conversation as [{"role": ..., "content": ...}]; or a list of these,
            which are decoded side by side.
        drafter: from `load_drafter`; None decodes plainly.
        plan: what is drafted in a round and how it is verified; default: a dynamic tree.
        sampler: temperature, top_k, top_p, min_p; default: greedy.
        max_new_tokens: of the answer.
        stop: string or strings that end it.
        seed: of all draws.

    Returns:
        One answer to one prompt, a list to a list.

    Raises:
        UserError: no prompts, one that is no conversation or leaves no room, or a plan that the drafter does
            not support.
    """
    prompts, single = _prompts(prompt)
    generator = _generator(model, drafter, plan, sampler, max_new_tokens, stop, seed)
    generation = generator.generate([model.encode(one) for one in prompts])
    seconds = generation.times.total
    answers = [
        Answer(_text(model, out), out.tokens, out.tau, sum(out.emitted) / seconds if seconds else 0.0)
        for out in generation.outputs
    ]
    return answers[0] if single else answers


def stream(
    model: Model,
    prompt: str | Messages,
    drafter: Drafter | None = None,
    *,
    plan: Plan | None = None,
    sampler: Sampler = GREEDY,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> Iterator[str]:
    """Answer a prompt as `generate` does; yields text as it comes, whole characters at a time.

    Raises:
        UserError: as `generate`, before the first of it.
    """
    generator = _generator(model, drafter, plan, sampler, max_new_tokens, stop, seed)
    return _texts(model, generator, model.encode(prompt))


def _texts(model: Model, generator: TextGenerator, ids: list[int]) -> Iterator[str]:
    detokenizer = Detokenizer(model.chat.tokenizer, skip_special_tokens=True)
    for piece in generator.stream(ids):
        yield "".join(map(detokenizer.add, piece.tokens))
    yield detokenizer.end()


def score(
    model: Model,
    drafter: Drafter,
    prompts: Sequence[str | Messages],
    *,
    plans: Sequence[Plan] = (),
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 1,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> Scorecard:
    """Measure a drafter on prompts: tau, speedup over plain decoding, where time goes, an audit of exactness.

    Args:
        model: from `load_target`.
        drafter: from `load_drafter`.
        prompts: as in `generate`; acceptance is replayed on the target's answers to them.
        plans: the first is the headline; default: a dynamic tree.
        temperatures: 0 is greedy.
        batch_size: prompts decoded side by side.
        max_new_tokens: of an answer.
        seed: of all draws.

    Returns:
        The scorecard; `headline` is its first row.

    Raises:
        UserError: no prompts or temperatures, a prompt that is no conversation, a number out of range, or a
            plan that the drafter does not support.
    """
    plans, seed = list(plans) or [default_plan()], whole_number(seed, "seed")
    for plan in plans:
        drafter.check(plan)
    batch_size = whole_number(batch_size, "batch_size", 1)
    max_new_tokens = whole_number(max_new_tokens, "max_new_tokens", 1)
    ids = [model.encode(prompt) for prompt in _prompts(prompts)[0]]
    samplers = [Sampler(temperature) for temperature in temperatures]
    if not samplers:
        raise UserError("no temperatures: give at least one, such as 0.0")
    with model.target.lock:  # of other threads; the whole score is of one state of the target
        target = TextGenerator(model, drafter, plans[0], GREEDY, max_new_tokens).tapped_target()
        rollouts = {}
        for sampler in samplers:
            plain = TextGenerator(Model(target, model.chat), None, Plan(), sampler, max_new_tokens, seed=seed)
            answers = plain.generate(ids).outputs if ids else []
            rollouts[sampler] = [Rollout(prompt, o.tokens) for prompt, o in zip(ids, answers, strict=True)]
        target.tap(drafter.taps)
        return scoring.score(
            target,
            drafter,
            HeldOut(ids, rollouts=rollouts),
            [
                Setting(sampler, plan.resolved(sampler.temperature, drafter.traits.proposals), batch_size)
                for sampler in samplers
                for plan in plans
            ],
            ScoreOptions(max_new_tokens, stop_tokens(target), seed),
        )


def _prompts(given: Any) -> tuple[list[Any], bool]:
    """Prompts, and whether it is a single one: a text, a message, or a list of messages."""
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    prompts = list(given) if listed else [given]
    if not prompts:
        raise UserError("no prompts: give a text, a conversation, or a list of these")
    single = not listed or isinstance(prompts[0], Mapping)
    return [prompts] if listed and single else prompts, single


def _generator(
    model: Model,
    drafter: Drafter | None,
    plan: Plan | None,
    sampler: Sampler,
    max_new_tokens: int,
    stop: str | Sequence[str],
    seed: int,
) -> TextGenerator:
    for name, value, kind in (
        ("plan", plan, Plan),
        ("sampler", sampler, Sampler),
        ("drafter", drafter, Drafter),
    ):
        if not isinstance(value, kind) and (value is not None or name == "sampler"):
            raise UserError(f"{name}: give a {kind.__name__}, not {value!r}"[:200])
    plan = plan or (default_plan() if drafter else Plan())
    if drafter:
        drafter.check(plan)
    return TextGenerator(model, drafter, plan, sampler, max_new_tokens, stop, seed)


def _text(model: Model, output: Output) -> str:
    detokenizer = Detokenizer(model.chat.tokenizer, skip_special_tokens=True)
    return "".join(map(detokenizer.add, output.tokens)) + detokenizer.end()

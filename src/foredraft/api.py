"""Public API: load a target and a drafter, generate text with them, score them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, overload

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
from distill.text_generation import Messages, Model, TextGenerator
from drafters.base import Drafter
from drafters.checkpoint import pretrained
from foredraft.arguments import Decoding, check_drafter, check_target, sampler
from foredraft.plans import fastest_plan, given_plan


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
    tokens: list[int] = field(repr=False)
    tau: float
    tokens_per_second: float


def load_drafter(checkpoint: str | PathLike[str], target: Model, *, revision: str | None = None) -> Drafter:
    """Load a drafter that was trained for this target.

    Args:
        checkpoint: a run's checkpoint folder, or a Hub id; no code that comes with it is run.
        target: from `load_target`, the model that it was trained for.
        revision: of a Hub id.

    Raises:
        UserError: no drafter there, or one of another target.
    """
    given: Any = checkpoint
    if not isinstance(given, str | PathLike):
        raise UserError(f"checkpoint: give a folder or a Hub id, not {type(given).__name__}")
    check_target(target)
    return pretrained.from_pretrained(str(given), target.target, revision)


def save_drafter(drafter: Drafter, folder: str | PathLike[str], target: Model | None = None) -> None:
    """Write a folder for `load_drafter`, with a model card, and the scorecard if there is one.

    Args:
        drafter: to save.
        folder: new or empty.
        target: of the drafter; None: the target that it was loaded with.

    Raises:
        UserError: the target is unknown, or the folder is not empty.
    """
    check_drafter(drafter, target and target.target, optional=False)
    pretrained.save_pretrained(drafter, Path(folder), target and target.target)


def push_drafter(drafter: Drafter, repo: str, target: Model | None = None, private: bool = True) -> str:
    """Upload the folder of `save_drafter` to the Hub, in one commit.

    Args:
        drafter: to upload.
        repo: owner/name; created if it does not exist.
        target: as in `save_drafter`.
        private: visibility of a new repository.

    Returns:
        URL of the commit.

    Raises:
        UserError: the target is unknown; no token, or a token without write access.
        RemoteError: the Hub is unreachable, or the upload failed; nothing is committed.
    """
    check_drafter(drafter, target and target.target, optional=False)
    return pretrained.push_to_hub(drafter, repo, target and target.target, private)


@overload
def generate(  # pyright: ignore[reportOverlappingOverload]  a str is a Sequence[str], too
    target: Model, prompt: str | Messages, drafter: Drafter | None = None, **options: Unpack[Decoding]
) -> Answer: ...
@overload
def generate(
    target: Model,
    prompt: Sequence[str | Messages],
    drafter: Drafter | None = None,
    **options: Unpack[Decoding],
) -> list[Answer]: ...
def generate(
    target: Model,
    prompt: str | Sequence[Any],
    drafter: Drafter | None = None,
    *,
    plan: Plan | str | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> Answer | list[Answer]:
    """Answer prompts; a drafter does not change the distribution of the answers.

    Args:
        target: from `load_target`.
        prompt: a user's message, or a conversation as [{"role": ..., "content": ...}]; or a list of these,
            which are decoded side by side.
        drafter: from `load_drafter`; None decodes plainly.
        plan: what is drafted in a round and how it is verified: a Plan, or a name as in "chain"; default: the
            fastest of the drafter's score on this machine (plain decoding, if that is), else a dynamic tree.
        do_sample: draw tokens, at temperature 1 if none is given; None: if a temperature is given.
        temperature: divides the logits; 0 or None is greedy.
        top_k: draw from the k most likely tokens; 0: from all.
        top_p: draw from the most likely tokens that have this mass.
        min_p: draw from tokens of at least this share of the largest probability.
        repetition_penalty: divides the logits of tokens that are in the text.
        max_new_tokens: of the answer.
        stop: string or strings that end it.
        seed: of all draws.

    Returns:
        One answer to one prompt, a list to a list.

    Raises:
        UserError: no prompts, one that is no conversation or leaves no room, an argument of another type, or
            a plan that the drafter does not support.
    """
    check_target(target)
    prompts, single = _prompts(prompt)
    drawn = sampler(do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
    generator = _generator(target, drafter, plan, drawn, max_new_tokens, stop, seed, len(prompts))
    generation = generator.generate([target.encode(one) for one in prompts])
    seconds = generation.times.total
    answers = [
        Answer(_text(target, out), out.tokens, out.tau, sum(out.emitted) / seconds if seconds else 0.0)
        for out in generation.outputs
    ]
    return answers[0] if single else answers


def stream(
    target: Model,
    prompt: str | Messages,
    drafter: Drafter | None = None,
    *,
    plan: Plan | str | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
) -> Iterator[str]:
    """Answer a prompt as `generate` does; yields text as it comes, whole characters at a time.

    Raises:
        UserError: as `generate`, before the first of it.
    """
    check_target(target)
    drawn = sampler(do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
    generator = _generator(target, drafter, plan, drawn, max_new_tokens, stop, seed)
    return _texts(target, generator, target.encode(prompt))


def _texts(target: Model, generator: TextGenerator, ids: list[int]) -> Iterator[str]:
    detokenizer = Detokenizer(target.chat.tokenizer, skip_special_tokens=True)
    for piece in generator.stream(ids):
        yield "".join(map(detokenizer.add, piece.tokens))
    yield detokenizer.end()


def score(
    target: Model,
    drafter: Drafter,
    prompts: Sequence[str | Messages],
    *,
    plans: Sequence[Plan | str] = (),
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 1,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> Scorecard:
    """Measure a drafter on prompts: tau, speedup over plain decoding, where time goes, an audit of exactness.

    Args:
        target: from `load_target`.
        drafter: from `load_drafter`.
        prompts: as in `generate`; acceptance is replayed on the target's answers to them.
        plans: a Plan or a name each; the first is the headline; default: a dynamic tree.
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
    check_target(target)
    check_drafter(drafter, target.target, optional=False)
    shapes = [given_plan(plan, drafter) for plan in plans or ["dynamic"]]
    seed = whole_number(seed, "seed")
    batch_size = whole_number(batch_size, "batch_size", 1)
    max_new_tokens = whole_number(max_new_tokens, "max_new_tokens", 1)
    ids = [target.encode(prompt) for prompt in _prompts(prompts)[0]]
    samplers = [Sampler(temperature) for temperature in temperatures]
    if not samplers:
        raise UserError("no temperatures: give at least one, such as 0.0")
    with target.target.lock:  # of other threads; the whole score is of one state of the target
        generator = TextGenerator(target, drafter, shapes[0], Sampler(0.0), max_new_tokens)
        verifier = generator.tapped_target()
        rollouts = {}
        for sampler in samplers:
            plain = TextGenerator(
                Model(verifier, target.chat), None, Plan(), sampler, max_new_tokens, seed=seed
            )
            answers = plain.generate(ids).outputs if ids else []
            rollouts[sampler] = [Rollout(prompt, o.tokens) for prompt, o in zip(ids, answers, strict=True)]
        verifier.tap(drafter.taps)
        return scoring.score(
            verifier,
            drafter,
            HeldOut(ids, rollouts=rollouts),
            [
                Setting(sampler, plan.resolved(sampler.temperature, drafter.traits.proposals), batch_size)
                for sampler in samplers
                for plan in shapes
            ],
            ScoreOptions(max_new_tokens, stop_tokens(verifier), seed),
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
    target: Model,
    drafter: Drafter | None,
    plan: Plan | str | None,
    drawn: Sampler,
    max_new_tokens: int,
    stop: str | Sequence[str],
    seed: int,
    batch: int = 1,
) -> TextGenerator:
    check_drafter(drafter, target.target)
    if plan is None:
        chosen = fastest_plan(drafter, target.target, drawn, batch)
    else:
        chosen = given_plan(plan, drafter)
    return TextGenerator(target, drafter, chosen, drawn, max_new_tokens, stop, seed)


def _text(target: Model, output: Output) -> str:
    detokenizer = Detokenizer(target.chat.tokenizer, skip_special_tokens=True)
    return "".join(map(detokenizer.add, output.tokens)) + detokenizer.end()

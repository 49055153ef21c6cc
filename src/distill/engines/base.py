"""Engines that answer prompts: requests and sampling parameters in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.prompt import Message
from drafters.base import Drafter


class Request(NamedTuple):
    """A prompt to answer.

    Attributes:
        id: of prompt and turn; together with `sample` it seeds the sampling.
        sample: number of the answer, where a prompt has several.
        tokens: of the rendered prompt, up to where the answer begins.
        messages: the same as a conversation; empty where the target begins from nothing.
        tools: schemas of functions that may be called.
    """

    id: str
    sample: int
    tokens: list[int]
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()


class SamplingParams(NamedTuple):
    """How answers are sampled.

    Attributes:
        sampler: keyword arguments of `Sampler`.
        max_new_tokens: of an answer.
        stop: end tokens.
    """

    sampler: dict[str, Any]
    max_new_tokens: int
    stop: Sequence[int]


class Answer(NamedTuple):
    """An answer.

    Attributes:
        tokens: with the end token; empty if a server gave nothing usable.
        stopped: it ended with an end token, not at the length limit.
        exact: the ids are those that were sampled; else the text was tokenized again.
    """

    tokens: list[int]
    stopped: bool
    exact: bool = True


class Engine(Protocol):
    """Answers requests.

    Attributes:
        context: limit on tokens of prompt and answer together; None: unknown.
        begins: it can write from an empty prompt, or from half a message.
    """

    context: int | None
    begins: bool

    def __call__(self, requests: Sequence[Request], params: SamplingParams) -> list[Answer]:
        """One answer for each request, in their order."""
        ...


class InProcess:
    """The target in this process, with or without a drafter: the distribution of answers is the same.

    Args:
        target: answers.
        batch_size: requests decoded together; those of similar length share a batch.
        seed: of the sampling.
        drafter: proposes tokens; None: plain decoding.
        plan: of its drafts.
    """

    begins = True

    def __init__(
        self,
        target: Target,
        batch_size: int,
        seed: int,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        self.drafter, self.plan = drafter, plan
        self.context = target.max_positions

    def __call__(self, requests: Sequence[Request], params: SamplingParams) -> list[Answer]:
        """Answers in the order of the requests; batches are sorted by length, for little padding."""
        answers: dict[int, Answer] = {}
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        before = self.target.taps
        self.target.tap(self.drafter.taps if self.drafter else ())
        try:
            for first in range(0, len(order), self.batch_size):
                indices = order[first : first + self.batch_size]
                chosen = [requests[i] for i in indices]
                out = generate(
                    self.target,
                    self.drafter,
                    [request.tokens for request in chosen],
                    max_new_tokens=params.max_new_tokens,
                    sampler=Sampler(**params.sampler),
                    plan=self.plan,
                    seed=self.seed,
                    requests=[request.id for request in chosen],
                    samples=[request.sample for request in chosen],
                    stop=params.stop,
                )
                for i, output in zip(indices, out.outputs, strict=True):
                    answers[i] = Answer(output.tokens, output.stopped)
        finally:
            self.target.tap(before)
        return [answers[i] for i in range(len(requests))]

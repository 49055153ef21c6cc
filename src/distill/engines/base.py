"""What answers prompts: an engine is given requests and a law, and gives answers."""

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
    """One answer that is wanted.

    Attributes:
        id: of prompt and turn; with `sample` it keys the draws.
        sample: which of the prompt's answers this is.
        tokens: rendered, up to where the answer begins.
        messages: the same as a conversation; empty where the target begins from nothing.
        tools: schemas of functions that may be called.
    """

    id: str
    sample: int
    tokens: list[int]
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()


class Law(NamedTuple):
    """How answers are drawn.

    Attributes:
        sampler: keyword arguments of `Sampler`.
        max_new_tokens: of an answer.
        stop: end tokens.
    """

    sampler: dict[str, Any]
    max_new_tokens: int
    stop: Sequence[int]


class Answer(NamedTuple):
    """What came back.

    Attributes:
        tokens: the end token included; none where a server gave nothing that can be used.
        stopped: it ended by itself.
        exact: these are the ids that were drawn; else they were read off the text.
    """

    tokens: list[int]
    stopped: bool
    exact: bool = True


class Engine(Protocol):
    """Answers requests.

    Attributes:
        context: tokens that prompt and answer have room for together; None: no bound is known.
        begins: it can write from nothing, or from half a message.
    """

    context: int | None
    begins: bool

    def __call__(self, requests: Sequence[Request], law: Law) -> list[Answer]:
        """One answer for each request, in their order."""
        ...


class InProcess:
    """The target in this process; a drafter may help it, which changes no law.

    Args:
        target: answers.
        batch_size: requests decoded side by side; those of similar length share a batch.
        seed: of all draws.
        drafter: proposes, or None.
        plan: how it does.
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

    def __call__(self, requests: Sequence[Request], law: Law) -> list[Answer]:
        """Shortest first, a batch at a time: little of a batch is padding."""
        answers: dict[int, Answer] = {}
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        before = self.target.taps
        if self.drafter:
            self.target.tap(self.drafter.taps)
        try:
            for first in range(0, len(order), self.batch_size):
                places = order[first : first + self.batch_size]
                chosen = [requests[i] for i in places]
                out = generate(
                    self.target,
                    self.drafter,
                    [request.tokens for request in chosen],
                    max_new_tokens=law.max_new_tokens,
                    sampler=Sampler(**law.sampler),
                    plan=self.plan,
                    seed=self.seed,
                    requests=[request.id for request in chosen],
                    samples=[request.sample for request in chosen],
                    stop=law.stop,
                )
                for i, output in zip(places, out.outputs, strict=True):
                    answers[i] = Answer(output.tokens, output.stopped)
        finally:
            self.target.tap(before)
        return [answers[i] for i in range(len(requests))]

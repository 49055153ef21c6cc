"""Engines that answer prompts: requests and sampling parameters in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from decode.evaluation.replay import Rollout
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.auto import Auto
from decode.sampling import Sampler
from distill.prompts.prompt import Message
from distill.utils.progress import say
from drafters.base import Drafter

TRIED, TRIED_TOKENS = 8, 64  # number and tokens of the answers that plans are compared on


class Request(NamedTuple):
    """A prompt to answer.

    Attributes:
        id: id of prompt and turn; seeds the sampling together with `sample`.
        sample: number of the answer, if a prompt has several.
        tokens: tokens of the rendered prompt, up to the start of the answer.
        messages: the same as a conversation; empty if the target begins from nothing.
        tools: schemas of functions that may be called.
    """

    id: str
    sample: int
    tokens: list[int]
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()


class SamplingParams(NamedTuple):
    """Sampling parameters of answers.

    Attributes:
        sampler: keyword arguments of `Sampler`.
        max_new_tokens: maximum length of an answer.
        stop: end tokens.
    """

    sampler: dict[str, Any]
    max_new_tokens: int
    stop: Sequence[int]


Ended = Callable[[float], None]  # called often, with the number of requests that have been answered


class Answer(NamedTuple):
    """An answer.

    Attributes:
        tokens: tokens with the end token; empty if a server returned nothing usable.
        stopped: whether it ended with an end token, not at the length limit.
        exact: whether these are the sampled ids, not tokenized text.
    """

    tokens: list[int]
    stopped: bool
    exact: bool = True


class Engine(Protocol):
    """Answers requests.

    Attributes:
        context: limit on tokens of prompt and answer together; None: unknown.
        begins: whether it can continue an empty prompt or an incomplete message.
    """

    context: int | None
    begins: bool

    def __call__(
        self, requests: Sequence[Request], params: SamplingParams, ended: Ended | None = None
    ) -> list[Answer]:
        """Return one answer per request, in their order."""
        ...


class InProcess:
    """Engine that runs the target in this process; a drafter does not change the distribution of answers.

    Args:
        target: model that answers.
        batch_size: requests decoded together; waiting ones join as others end, shortest first.
        seed: seed of the sampling.
        drafter: proposes tokens; None: plain decoding.
        plan: plan of its drafts; `Auto`: the fastest of its plans, measured before the first answers.
    """

    begins = True

    def __init__(
        self,
        target: Target,
        batch_size: int,
        seed: int,
        drafter: Drafter | None = None,
        plan: Plan | Auto | None = None,
    ) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        self.drafter, self.plan = drafter, plan
        self.context = target.max_positions

    def __call__(
        self, requests: Sequence[Request], params: SamplingParams, ended: Ended | None = None
    ) -> list[Answer]:
        """Return answers in the order of the requests."""
        # Sorted by length: less padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        chosen = [requests[i] for i in order]
        before = self.target.taps
        self.target.tap(self.drafter.taps if self.drafter else ())
        try:
            if isinstance(self.plan, Auto):
                self.plan = self._choose(self.plan, chosen, params)
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
                batch_size=self.batch_size,
                progress=ended,
            )
        finally:
            self.target.tap(before)
        answers = dict(zip(order, out.outputs, strict=True))
        return [Answer(answers[i].tokens, answers[i].stopped) for i in range(len(requests))]

    def _choose(self, auto: Auto, requests: Sequence[Request], params: SamplingParams) -> Plan:
        """Measure the fastest plan on the beginnings of some answers, decoded plainly."""
        assert self.drafter
        size, sampler = min(self.batch_size, len(requests)), Sampler(**params.sampler)
        say(f"rollouts: measuring drafts at {size} answers at a time")
        some = requests[:: max(1, len(requests) // TRIED)]
        prompts, names = [request.tokens for request in some], [request.id for request in some]
        most = min(params.max_new_tokens, TRIED_TOKENS)
        limits = {"max_new_tokens": most, "stop": params.stop, "seed": self.seed}
        answers = generate(
            self.target, None, prompts, sampler=sampler, requests=names, batch_size=size, **limits
        )
        rollouts = [Rollout(p, output.tokens) for p, output in zip(prompts, answers.outputs, strict=True)]
        plan, found = auto.choose(self.target, self.drafter, rollouts, sampler, size, **limits)
        if plan.depth:
            speedup = next(row["speedup"] for row in found if row["decode"] == plan.name)
            say(f"rollouts: {plan.name}, for {speedup:.2f} times the tokens a second of plain decoding")
        else:
            self.drafter = None
            say("rollouts: no drafts, since they cost more than they save here")
        return plan

"""Text generation: a target with its tokenizer, decoded with a drafter or without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.generation.text import StopStrings
from decode.generation.types import Generation, Piece
from decode.kernels.weight_state import WeightState, notice_changes, weight_state
from decode.model.load import stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message
from distill.prompts.records.messages import conversation
from distill.prompts.rendered import RenderedTexts
from drafters.base import Drafter

Messages = Sequence[Message]


@dataclass(frozen=True, repr=False)
class Model:
    """A target with its tokenizer and chat template."""

    target: Target
    chat: Chat
    _verifiers: WeakKeyDictionary[Drafter, tuple[list[WeightState], Target]] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    def __repr__(self) -> str:
        """Class, name, size, dtype and device, in a line."""
        target, model = self.target, self.target.model
        size = sum(weight.numel() for weight in model.parameters()) / 1e6
        name = f"{type(model).__name__} {model.name_or_path or '(unnamed)'!r}"
        return f"Model({name}, {size:,.1f} M parameters, {target.dtype}, {target.device})"

    def verifier(self, drafter: Drafter) -> Target:
        """Return the target that verifies: the tuned target, if the drafter has one.

        The tuned target is cached and rebuilt when weights of the target or drafter change.
        """
        made = self._verifiers.get(drafter)
        verifier = made[1] if made else drafter.verifier(self.target)
        if verifier is self.target:
            return verifier
        notice_changes()
        weights = chain(self.target.model.parameters(), drafter.parameters())
        state = [weight_state(weight) for weight in weights]
        if made and made[0] != state:  # merging a LoRA copies the decoder layers
            verifier = drafter.verifier(self.target)
        self._verifiers[drafter] = state, verifier
        return verifier

    def encode(self, prompt: str | Message | Messages) -> list[int]:
        """Token ids of a user's text, a message, or a conversation ({"role": ..., "content": ...}).

        Raises:
            UserError: none of these, nothing to answer, or text that is already rendered.
        """
        messages = conversation(prompt)
        if fault := self._rendered.fault_of(messages):
            raise UserError(f"prompt: {fault}")
        return self.chat.encode(messages)

    @cached_property
    def _rendered(self) -> RenderedTexts:
        return RenderedTexts(self.chat)


@dataclass(frozen=True)
class TextGenerator:
    """Decodes a model's prompts with a drafter, or plainly.

    Attributes:
        model: model that answers.
        drafter: the drafter; None decodes plainly.
        plan: shape of the draft of a round, and how it is verified.
        sampler: distribution that tokens are drawn from.
        max_new_tokens: maximum length of an answer.
        stop: string or strings that end an answer.
        seed: seed of all draws.
    """

    model: Model
    drafter: Drafter | None
    plan: Plan
    sampler: Sampler
    max_new_tokens: int
    stop: str | Sequence[str] = ()
    seed: int = 0

    def tapped_target(self) -> Target:
        """The verifying target, set to record the hidden states that the drafter reads."""
        target = self.model.target
        if self.drafter is None:
            target.tap(())  # plain decoding reads none
            return target
        target = self.model.verifier(self.drafter)
        target.tap(self.drafter.taps)
        return target

    def generate(self, prompts: Sequence[Sequence[int]]) -> Generation:
        """Decode prompts, given as token ids, in one batch."""
        with self.model.target.lock:  # another thread would set other taps
            target = self.tapped_target()
            return generate(target, self.drafter, prompts, plan=self.resolved_plan, **self._options(target))

    def stream(self, prompt: Sequence[int]) -> Iterator[Piece]:
        """Decode one prompt; yields the tokens of every round."""
        with self.model.target.lock:
            target = self.tapped_target()
            return stream(target, self.drafter, prompt, plan=self.resolved_plan, **self._options(target))

    @property
    def resolved_plan(self) -> Plan:
        """The plan that is run: plain without a drafter, and without `auto`."""
        if self.drafter is None:
            return Plan()
        plan = self.plan.for_tokenizer(self.model.chat.tokenizer)
        return plan.resolved(self.sampler.temperature, self.drafter.traits.proposals)

    def _options(self, target: Target) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "sampler": self.sampler,
            "seed": self.seed,
            "stop": stop_tokens(target),
            "until": StopStrings(self.model.chat.tokenizer, self.stop) if self.stop else None,
        }

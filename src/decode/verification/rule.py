"""Base classes of verification rules, verification of a round, and rules by name.

A rule is a file in `decode/verification/rules` or `decode/lossy/rules` with the rule's name, and a yaml
in `conf/decode/rule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Self

from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError
from decode.integers import finite_number, whole_number
from decode.rng import Coin
from decode.verification.descent import match
from decode.verification.result import VerificationResult
from decode.verification.shape import Shape
from decode.verification.target_probs import TargetProbs, TextState

PACKAGES = ("decode.verification.rules", "decode.lossy.rules")


@dataclass(frozen=True)
class Rule(ABC):
    """A rule with its parameters. All random numbers come from a `Coin`; never synchronises with the device.

    Attributes:
        name: of the rule and its file.
        accepts: drafts that it verifies, for messages.
        lossy: the output does not have the target's distribution; needs `Plan.lossy`.
        changes_greedy: also lossy at temperature 0.
        reads_probs: weighs sampled nodes by the q that they were drawn from.
        weighs_paths: acceptance of a token depends on the tokens after it.
        keeps_text: sampled text equals plain decoding's with the same seed.
        uses_drawn_child: in a dynamic tree, accepts a drawn child with more than the probability of a match.
    """

    name: ClassVar[str]
    accepts: ClassVar[str] = "any chain or tree whose sampled nodes carry their q"
    lossy: ClassVar[bool] = False
    changes_greedy: ClassVar[bool] = False
    reads_probs: ClassVar[bool] = True
    weighs_paths: ClassVar[bool] = False
    keeps_text: ClassVar[bool] = False
    uses_drawn_child: ClassVar[bool] = False

    @abstractmethod
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        """Accept nodes and draw the token after them; the function `verify` checks `unfit` first."""

    def check(self, plan: Shape) -> None:
        """Check that the rule suits the drafts of a plan.

        Raises:
            UserError: it would not be lossless on them, or has no effect there.
        """
        del plan

    def fits(self, draft: Draft) -> bool:
        """Whether a draft is one of `accepts`."""
        del draft
        return True

    def unfit(self, draft: Draft) -> str:
        """Reason why a draft cannot be verified, as a predicate ("would not be ..."); "" if it can."""
        if not self.fits(draft):
            return f"verifies {self.accepts}; this draft is not one: use rule=match"
        if self.reads_probs and draft.probs is not None and draft.probs.selected:
            return (
                "would not be lossless: nodes of this draft were kept or dropped after looking at the drawn "
                "tokens, so they are no longer distributed as q: use rule=match"
            )
        return ""

    def follow(self, tokens: Tensor) -> TextState | None:
        """State of texts that start with these (B, M) tokens, `PAD`-padded; None if the rule has none."""
        del tokens
        return None

    def for_tokenizer(self, tokenizer: Any) -> Self:
        """The rule with texts replaced by token ids."""
        del tokenizer
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Name and parameters, as `rule_of` reads them."""
        return {"name": self.name, **asdict(self)}

    @property
    def title(self) -> str:
        """Name and parameters, for tables."""
        numbers = [getattr(self, field.name) for field in fields(self)]
        return " ".join([self.name, *(f"{n:g}" for n in numbers if isinstance(n, int | float))])


@dataclass(frozen=True)
class LossyRule(Rule):
    """A rule with output that does NOT have the target's distribution, but a known other one."""

    accepts = "any chain or tree, lossily"
    lossy = True
    reads_probs = False

    @abstractmethod
    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        """(B, V) distribution of the token at a slot whose only child is drawn from q.

        Args:
            p: (B, V) the target's distributions, at a temperature above 0.
            q: (B, V) the drafter's.
        """

    def emitted_among(self, p: Tensor, children: Tensor) -> Tensor | None:
        """(B, V) distribution of the token at a slot with fixed children; None: only the draft decides.

        Args:
            p: (B, V) the target's distributions, at a temperature above 0.
            children: (B, C) tokens, `PAD` for none.
        """
        del p, children
        return None

    def applies(self, text: Tensor) -> bool:
        """Whether the rule accepts more than `match` after a (1, M) text."""
        del text
        return True


class Auto(Rule):
    """Placeholder rule of a plan that is not `resolved` yet."""

    name = "auto"
    uses_drawn_child = True

    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        """Never called."""
        del draft, target, coin
        raise AssertionError("call `Plan.resolved` first")


def verify(rule: Rule, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Verify one round.

    Raises:
        UserError: the rule would not be lossless on this draft.
    """
    if not draft.depth and draft.probs is None:
        return match(draft, target, coin)  # nothing to verify; every rule draws from p
    if reason := rule.unfit(draft):
        raise UserError(f"decode.rule={rule.name} {reason}")
    if draft.probs is None and not rule.lossy:
        # If all nodes are fixed, all rules give the same distribution; `match` is keyed like plain decoding.
        return match(draft, target, coin)
    return rule.verify(draft, target, coin)


# -- by name ------------------------------------------------------------------------------------------


def rule_of(value: Rule | str | Mapping[str, Any]) -> Rule:
    """A rule from its name, or from a mapping of its name and parameters.

    Raises:
        UserError: unknown rule or parameter, or a value of the wrong type.
    """
    if isinstance(value, Rule):
        return value
    named = {"name": value} if isinstance(value, str) else value
    if not (isinstance(named, Mapping) and isinstance(named.get("name"), str)):
        raise UserError(f"decode.rule={value}: give its name, as in {{name: match}}")
    numbers, cls = {key: n for key, n in named.items() if key != "name"}, rule_class(named["name"])
    known = [field.name for field in fields(cls)]
    if unknown := sorted(numbers.keys() - set(known)):
        raise UserError(f"decode.rule.{unknown[0]}: not a parameter of {cls.name}; it has {known or 'none'}")
    for key, number in numbers.items():
        default, name = getattr(cls, key), f"decode.rule.{key}"
        if isinstance(default, int):
            numbers[key] = whole_number(number, name)
        elif isinstance(default, float):
            finite_number(number, name)
        elif not isinstance(number, Sequence) or isinstance(number, str):
            raise UserError(f"{name}={number}: must be a list")
    return cls(**numbers)


def rule_class(name: str) -> type[Rule]:
    """The class of a rule.

    Raises:
        UserError: no such rule.
    """
    if name == Auto.name:
        return Auto
    if not (found := class_in_file(name)):
        raise UserError(f"decode.rule={name}: choose one of auto, {', '.join(rule_names())}")
    return found


def changes_greedy(name: str) -> bool:
    """Whether a rule also changes the text at temperature 0; False for unknown rules."""
    found = class_in_file(name)
    return found is not None and found.changes_greedy


@cache
def rule_names() -> tuple[str, ...]:
    """Names of all rules, lossless ones first."""
    return tuple(file.name for place in PACKAGES for file in iter_modules(import_module(place).__path__))


@cache
def class_in_file(name: str) -> type[Rule] | None:
    """The rule defined in the file with this name; None if there is no such file."""
    for place in PACKAGES:
        if name in [file.name for file in iter_modules(import_module(place).__path__)]:
            defined = vars(import_module(f"{place}.{name}")).values()
            return next(found for found in defined if getattr(found, "name", None) == name)
    return None

"""What this package can do with a target, and the reason where it cannot."""

from __future__ import annotations

from typing import Any, NamedTuple

from decode.errors import UserError

# Layers without a cache, or with one that can be rolled back and compacted
KINDS = {"full_attention", "sliding_attention", "mlp", "moe"}
STATES = {"linear_attention", "mamba", "conv", "hybrid", "recurrent"}
ELSEWHERE = "train, rollout, score and export take it, and an engine decodes it (docs/targets.md)"


class Abilities(NamedTuple):
    """What can be done with a model; each field is "" if it can, otherwise the reason why not.

    Attributes:
        train: hidden states of whole texts are correct, so a drafter can be trained.
        replay: plain decoding also works, so answers can be generated and acceptance replayed.
        decode: drafts can be verified losslessly.
        own_cache: plain decoding uses the model's own cache; see `OwnCache`.
    """

    train: str = ""
    replay: str = ""
    decode: str = ""
    own_cache: bool = False

    def check_decode(self, name: str) -> None:
        """Raise unless drafts can be verified.

        Args:
            name: model's name for the error.

        Raises:
            UserError: drafts cannot be verified.
        """
        if self.decode:
            raise UserError(f"{name} cannot be decoded losslessly here: {self.decode}; {self._elsewhere()}")

    def _elsewhere(self) -> str:
        if self.train:
            return "models with rotary or learned positions and full or sliding-window attention work"
        return ELSEWHERE


def quantisation(config: Any) -> str:
    """Name of a configuration's quantisation method; "" if the weights are not quantised."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method) or "an unnamed method")


def why_no_rollback(config: Any) -> str:
    """Reason why a decoder's state cannot be rolled back, by its text configuration; "" if none is known."""
    other = set(getattr(config, "layer_types", None) or ()) - KINDS
    if not other:
        return ""
    why = (
        "whose state cannot be rolled back after a rejection"
        if other & STATES
        else "not known to the decoder"
    )
    return f"it has {', '.join(sorted(other))} layers, {why}"


def why_elsewhere(config: Any) -> str:
    """Reason why the model loaded here differs from the served one; "" if it does not."""
    method = quantisation(config)
    if not method:
        return ""
    return f"it is quantised with {method}, and only the engine that serves it has its rows and its speed"


def why_undecodable(config: Any) -> str:
    """Reason why a model's drafts cannot be verified here, from its configuration; "" if none is known."""
    return why_no_rollback(config.get_text_config()) or why_elsewhere(config)

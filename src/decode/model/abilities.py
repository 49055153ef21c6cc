"""What can be done with a target here, and why not."""

from __future__ import annotations

from typing import Any, NamedTuple

from decode.errors import UserError

# Layers whose cache can be rolled back and compacted, or that have none
KINDS = {"full_attention", "sliding_attention", "mlp", "moe"}
STATES = {"linear_attention", "mamba", "conv", "hybrid", "recurrent"}
ELSEWHERE = "train, rollout, score and export take it, and an engine decodes it (docs/targets.md)"


class Abilities(NamedTuple):
    """What can be done with a model here; each is "" where it can, else the reason why not.

    Attributes:
        train: whole texts are read right, so that a drafter can be trained for it.
        replay: it also writes answers by plain decoding, so that acceptance on them can be replayed.
        decode: it verifies drafts losslessly.
        own_cache: plain decoding goes through the model's own cache, see `OwnCache`.
    """

    train: str = ""
    replay: str = ""
    decode: str = ""
    own_cache: bool = False

    def check_decode(self, name: str) -> None:
        """Refuse what needs drafts to be verified.

        Args:
            name: of the model, in the error.

        Raises:
            UserError: drafts for it cannot be verified here.
        """
        if self.decode:
            raise UserError(f"{name} cannot be decoded losslessly here: {self.decode}; {self._elsewhere()}")

    def _elsewhere(self) -> str:
        if self.train:
            return "models with rotary or learned positions and full or sliding-window attention work"
        return ELSEWHERE


def quantisation(config: Any) -> str:
    """Name of the method that a configuration's weights are quantised with; "" if they are not."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method) or "an unnamed method")


def why_no_rollback(config: Any) -> str:
    """Why a decoder's state cannot be rolled back, as its text configuration tells; "" if nothing does."""
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
    """Why a model is not the one that is served, though its class could be decoded; "" if it is."""
    method = quantisation(config)
    if not method:
        return ""
    return f"it is quantised with {method}, and only the engine that serves it has its rows and its speed"


def why_undecodable(config: Any) -> str:
    """Why drafts for a model cannot be verified here, as far as its configuration tells."""
    return why_no_rollback(config.get_text_config()) or why_elsewhere(config)

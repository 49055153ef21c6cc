"""Sizes of a target and of its drafter, from their configurations: no weights are read, no code is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import constants, get_session
from transformers import AutoConfig
from transformers.utils import logging

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from decode.model.load import auto_class, load_config
from decode.model.target import LAST, Target
from distill.commands.planning.known_models import known, known_names
from distill.config.read import read_options
from distill.options.run import DrafterOptions
from distill.utils.paths import bundled
from drafters.base import Drafter
from drafters.families.feature_heads import FeatureHeadsDrafter

HALF = 2  # bytes of a number in bf16
PATIENCE = 3.0  # seconds for a first answer of the Hub


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target.

    Attributes:
        name: as the user named it.
        source: where the configuration is from.
        parameters: of the whole model.
        active: weights that one token is multiplied with in the layers; fewer than there are with experts.
        hidden, layers, vocabulary: sizes.
        queries: width of all query heads of a layer.
        kv_bytes: bytes of a token's keys and values, all layers, in bf16.
        context: its maximum length in tokens; None: unlimited.
    """

    name: str
    source: str
    parameters: int
    active: int
    hidden: int
    layers: int
    vocabulary: int
    queries: int
    kv_bytes: int
    context: int | None

    @property
    def bytes(self) -> int:
        """Size of the weights in bf16."""
        return HALF * self.parameters

    def forward(self, length: float) -> float:
        """FLOP of a token's pass through the layers, in a text of this length; the head is not counted."""
        return 2 * self.active + 2 * self.layers * self.queries * length  # half of the keys, scores and sums

    @property
    def head(self) -> int:
        """FLOP of a token's logits."""
        return 2 * self.hidden * self.vocabulary


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter.

    Attributes:
        name: as in conf/drafter.
        parameters: that are trained.
        trains: whether any are.
        own: weights that a predicted token is multiplied with, at one depth.
        scored: rows of the head that training scores.
        own_head: whether the head is among the trained weights.
        depth: depths of its unroll.
        passes: of its layers in a step, one after another.
        anchors: places of a text trained at depth 2 and deeper; 0: all.
        states: hidden states of a token that training reads, the head's input included.
        layers: decoder layers.
    """

    name: str
    parameters: int
    trains: bool
    own: int
    scored: int
    own_head: bool
    depth: int
    passes: int
    anchors: int
    states: int
    layers: int


def target_config(name: str, revision: str | None, trusted: bool) -> tuple[Any, str]:
    """The configuration of a target, and where it is from: a folder, the Hub, or the table of known models.

    Raises:
        UserError: no such configuration, and the model is not known.
    """
    try:
        with _without_retries():
            config = load_config(str(bundled(name)), revision, trusted)
    except UserError as error:
        if not (settings := known(name)):
            if name.count("/") != 1 or name.startswith((".", "~", "/")):
                raise
            raise UserError(
                f"{error}; without it only known models have a plan ({', '.join(known_names()[:4])}, ...): "
                "give a folder with its config.json"
            ) from None
        with _quiet():
            return AutoConfig.for_model(**settings), "shapes of known models, in this package"
    return config.get_text_config(), "its config.json"


@contextmanager
def _without_retries() -> Iterator[None]:
    """Read from the cache at once where the Hub does not answer; five retries a file would take a minute."""
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # the classes of errors depend on the client
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which warns of sizes that do not matter here."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def empty_target(config: Any, name: str) -> Target:
    """The target without weights.

    Raises:
        UserError: a model that cannot be built of this configuration.
    """
    try:
        with _quiet(), torch.device("meta"):
            return Target(auto_class(config).from_config(config, dtype=torch.bfloat16))
    except UserError:
        raise
    except Exception as error:  # model classes may raise anything
        raise UserError(
            f"target={name}: no model can be built of its config.json ({type(error).__name__})"
        ) from None


def target_shape(target: Target, name: str, source: str) -> TargetShape:
    """Sizes of an empty target."""
    config = target.config.get_text_config()
    sizes = {key: weight.numel() for key, weight in target.model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or count
    embedding: Any = target.embed.weight
    tables = sum({id(table): table.numel() for table in (embedding, target.head.weight)}.values())
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    total, layers = sum(sizes.values()), len(target.layers)
    return TargetShape(
        name=name,
        source=source,
        parameters=total,
        active=round(total - tables - experts * (1 - chosen / count)),
        hidden=config.hidden_size,
        layers=layers,
        vocabulary=target.vocab_size,
        queries=heads * width,
        kv_bytes=2 * layers * shared * width * HALF,
        context=max_positions(config),
    )


def drafter_shape(cfg: Any, name: str, target: Target) -> DrafterShape:
    """Sizes of the drafter that these settings build for an empty target.

    Args:
        cfg: settings of conf/drafter.
        name: of the drafter, for messages.
        target: without weights.

    Raises:
        UserError: a drafter that is sized by weights, or settings that it refuses.
    """
    if option := next((key for key in ("path", "first") if cfg.get(key)), None):
        cut = ", or plan drafter=lm without a path, a model cut from the target" * (
            name in ("lm", "lm_given")
        )
        raise UserError(
            f"drafter={name} drafter.{option}={cfg[option]}: the size of this model is known only when it is "
            f"loaded; train a small run, and give its folder to foredraft plan{cut}"
        )
    try:
        with torch.device("meta"):
            drafter: Drafter = read_options(DrafterOptions, cfg, "drafter").build(target)
    except (RuntimeError, NotImplementedError):  # it reads values of the target's weights
        raise UserError(
            f"drafter={name}: its size follows from the target's weights; train a small run, and give its "
            "folder to foredraft plan"
        ) from None
    parameters = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
    depth, vocabulary = getattr(drafter, "depth", 1) or 1, len(drafter.d2t) if drafter.d2t is not None else 0
    scored, own = vocabulary or target.vocab_size, parameters
    heads = isinstance(drafter, FeatureHeadsDrafter)
    if heads:  # each depth has weights of its own
        own = parameters // depth
    return DrafterShape(
        name=name,
        parameters=parameters,
        trains=drafter.trains and parameters > 0,
        own=own,
        scored=scored,
        own_head=any(len(weight) == scored for weight in drafter.parameters() if weight.dim() > 1),
        depth=depth,
        passes=1 if heads else depth,
        anchors=int(getattr(drafter, "anchors", 0) or 0),
        states=len({*drafter.taps, LAST}),
        layers=max(1, len(getattr(drafter, "layers", ()))),
    )

"""EAGLE-1 (Li et al., arXiv:2401.15077): autoregression over the target's last features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import LAST, Target
from drafters.base import Batch, constructor_arguments
from drafters.families.recurrent import RecurrentDrafter, add_feature_noise
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, Rotary
from drafters.layers.unroll import FirstLayerInput

STARTS = {"default": None, "first": 0, "last": -1}  # index of the target's layer to copy
NORM = "input_layernorm.weight"  # of a target's layer
COPIED = {  # weight of the drafter's layer: weights of the target that it stacks
    "qkv_proj.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "post_attention_layernorm.weight": ("post_attention_layernorm.weight",),
}
SIZES = ("hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size")
OUTPUT_MAPS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # initialised to 0


class Eagle(RecurrentDrafter):
    """EAGLE: one decoder layer predicts f_{i+1} from pair i, (feature f_i, embedding of x_{i+1}).

    The target's frozen head maps the prediction to logits.

    Args:
        depth: depths unrolled in training. 1 is the paper's recipe; more feeds the drafter its own
            features, as in drafting (HASS, arXiv:2408.15766).
        detach: whether gradients stop at the features that are fed back (HASS).
        feature_noise: half-width of the uniform noise on training features, scaled by 512 / T.
        feature_weight: weight of the Smooth-L1 feature regression; the divergence has weight 1.
        bias: whether the fusion `fc` has a bias; vLLM's EAGLE has none.
        qkv_bias: see `DecoderLayer`; likewise `o_bias`.
        draft_vocab_size: see `Drafter`.
        **sizes: of `LayerShape`.
    """

    taps = (LAST,)

    def __init__(
        self,
        depth: int,
        feature_noise: float,
        feature_weight: float,
        detach: bool = False,
        bias: bool = True,
        qkv_bias: bool = False,
        o_bias: bool = False,
        draft_vocab_size: int | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        self.depth, self.detach, self.feature_noise = depth, detach, feature_noise
        self.aux_weights = {"feature": feature_weight}
        shape = LayerShape(**sizes)
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size, bias=bias)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope)
        self.layer = DecoderLayer(shape, input_norm=False, qkv_bias=qkv_bias, o_bias=o_bias)
        self._initialise(shape.hidden_size)

    @torch.no_grad()
    def _initialise(self, hidden_size: int) -> None:
        """Initialise to predict the current feature plus a little of the token; the layer is an identity."""
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()
        self.fc.weight.normal_(std=0.32 * hidden_size**-0.5)  # the same share at any hidden size
        self.fc.weight[:, hidden_size:] += torch.eye(hidden_size)
        if self.fc.bias is not None:
            self.fc.bias.zero_()

    @override
    @classmethod
    def for_target(cls, target: Target, *, start: str = "default", **options: Any) -> Self:
        """Build the drafter of a target, with the sizes of its layers.

        Args:
            target: see `Drafter`.
            start: key of `STARTS`: the layer of the target that initialises the drafter's layer (pruned
                initialisation: SPIRe, arXiv:2504.06419).
            **options: of the class.

        Raises:
            UserError: an unknown start, or a target layer of another form.
        """
        if start not in STARTS:
            raise UserError(f"drafter.start={start}: choose {' or '.join(STARTS)}")
        drafter = cls(**asdict(LayerShape.of(target)) | options)
        if (index := STARTS[start]) is not None:
            drafter._copy_maps(_fitting_weights(target, index, start, options))
        return drafter

    def _copy_maps(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the maps that read the input of a target's layer and of its MLP.

        This layer does not normalise its input, so the target's norm is multiplied into queries, keys and
        values. The output maps stay 0.
        """
        own = self.layer.state_dict()
        copied = {name: torch.cat([weights[part] for part in parts]) for name, parts in COPIED.items()}
        copied = {name: weight.to(own[name]) for name, weight in copied.items()}
        copied["qkv_proj.weight"] *= weights[NORM].to(own["qkv_proj.weight"])  # (n, D) by columns
        self.layer.load_state_dict(own | copied)

    @property
    @override
    def stack(self) -> Sequence[DecoderLayer]:
        return [self.layer]

    @override
    def fuse(self, taps: Tensor) -> Tensor:
        return taps[..., 0, :]

    @override
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, feature], -1))
        return x, self.layer.qkv_proj(x)

    @override
    def pair_by_lookup(self, target: Target) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        qkv, bias = self.layer.qkv_proj.weight, self.layer.qkv_proj.bias
        weights = [w for w in (self.fc.weight, self.fc.bias, qkv, bias) if w is not None]
        shares = self._shares.of(target, weights, len(self.fc.weight) + len(qkv), self._merged)
        if shares is None:
            return None

        def pair(tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            x = shares(tokens, feature)
            return x[..., : feature.shape[-1]], x[..., feature.shape[-1] :]

        return pair

    def _merged(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """`fc` and the q, k, v product as one, since no norm is between them: (V, D + P), (D + P, D)."""
        share, product = self.token_projection(embedded), self.layer.qkv_proj
        qkv, weight = product.weight, self.fc.weight[:, embedded.shape[-1] :]
        return torch.cat([share, F.linear(share, qkv, product.bias)], -1), torch.cat([weight, qkv @ weight])

    @override
    def token_projection(self, embedded: Tensor) -> Tensor:
        return F.linear(embedded, self.fc.weight[:, : embedded.shape[-1]], self.fc.bias)

    @override
    def first_input(self, share: Tensor, feature: Tensor) -> FirstLayerInput:
        x = torch.addmm(share, feature, self.fc.weight[:, -feature.shape[-1] :].mT)
        return FirstLayerInput(x, x, None)

    @override
    def first_weight(self) -> Tensor:
        return self.layer.qkv_proj.weight

    @override
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach() if self.detach else x

    @override
    def head(self, target: Target) -> Head:
        return self.output_head(target.head)

    @override
    def training_taps(self, batch: Batch) -> Tensor:
        return (
            add_feature_noise(batch, self.feature_noise)
            if self.training and self.feature_noise
            else batch.taps
        )

    @override
    def losses(self, hidden: Tensor, truth: Tensor) -> Mapping[str, Tensor]:
        regression = F.smooth_l1_loss(hidden, truth.to(hidden.dtype), reduction="none")
        return {"feature": regression.mean(-1)}


def _fitting_weights(target: Target, index: int, start: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of a target layer, checked to have the form of a drafter's layer with these `options`.

    Raises:
        UserError: it has another form.
    """
    weights, shape = target.weights(target.layers[index]), asdict(LayerShape.of(target))
    unlike = {*weights} ^ {NORM, *OUTPUT_MAPS, *chain.from_iterable(COPIED.values())}
    unlike |= {name for name in SIZES if options.get(name, shape[name]) != shape[name]}
    if getattr(target.config, "hidden_act", "silu") != "silu":
        unlike.add("hidden_act")
    if unlike:
        raise UserError(
            f"drafter.start={start}: layers of this {type(target.model).__name__} and the drafter's "
            f"differ in {', '.join(sorted(unlike))}; set it to default"
        )
    return weights

"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a target's own draft head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain, islice, product
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from decode.errors import UserError
from decode.kernels.packed_linear import Linear
from decode.model.head import Head
from decode.model.target import LAST, Target
from drafters.base import Batch, Progress, Text, constructor_arguments
from drafters.families.recurrent import RecurrentDrafter
from drafters.hf.mtp_weights import (
    FAMILIES,
    Arrangement,
    arrangement_of,
    final_norm,
    mimo_arrangement,
    read_file,
)
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rotary
from drafters.layers.fused_backward import rms_norm
from drafters.layers.unroll import FirstLayerInput

PROBE_TEXTS, PROBE_TOKENS = 2, 256  # to score an unknown arrangement


class ZeroCentredNorm(RMSNorm):
    """An RMS norm that multiplies by 1 + weight (Gemma, Qwen3-Next)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)
        torch.nn.init.zeros_(self.weight)

    @property
    def scale(self) -> Tensor:
        """(D,) factor."""
        return 1 + self.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.scale, self.eps)


class MtpLayer(DecoderLayer):
    """A decoder layer with the options of MTP layers that Llama's has not.

    Args:
        shape: sizes.
        qkv_bias: of the q, k, v product (MiMo, GLM).
        qk_norm: of queries and keys by head (GLM, Qwen3).
        gate: whether a sigmoid of the layer's input multiplies attention's output (Qwen3-Next).
        zero_centred: whether its norms multiply by 1 + weight.
    """

    def __init__(
        self, shape: LayerShape, qkv_bias: bool, qk_norm: bool, gate: bool, zero_centred: bool
    ) -> None:
        super().__init__(shape, qk_norm=qk_norm, qkv_bias=qkv_bias)
        self.gate_proj = Linear(shape.hidden_size, self.queries, bias=False) if gate else None
        if zero_centred:
            self.input_layernorm = ZeroCentredNorm(shape.hidden_size, shape.eps)
            self.post_attention_layernorm = ZeroCentredNorm(shape.hidden_size, shape.eps)
            if qk_norm:
                self.q_norm = ZeroCentredNorm(shape.head_dim, shape.eps)
                self.k_norm = ZeroCentredNorm(shape.head_dim, shape.eps)

    @override
    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        if self.gate_proj is not None:
            attended = attended * self.gate_proj(self.input_layernorm(x)).sigmoid()
        return super().finish(x, attended)


class Mtp(RecurrentDrafter):
    """MTP: h_j = Layer(fc [norm(e(x_{t+j})); norm(h_{j-1})]), with one module for all depths.

    h_0 is the target's state at t, and the target's frozen head maps norm(h_j) to logits: EAGLE with two
    norms before the fusion and one after the layer.

    Args:
        depth: depths unrolled in training.
        hidden_first: whether `fc` reads [hidden; token], not [token; hidden].
        before_norm: whether h_0 is taken before the target's final norm.
        norm_output: whether h_j has passed the norm when it is fed back.
        family: key of `mtp_weights.FAMILIES`, for the names in files; "": a new head.
        qkv_bias: see `MtpLayer`.
        qk_norm: see `MtpLayer`.
        gate: see `MtpLayer`.
        zero_centred: whether all norms multiply by 1 + weight.
        draft_vocab_size: see `Drafter`.
        **sizes: of `LayerShape`.

    Attributes:
        undecided: whether the arrangement is unknown, so that `fit` chooses it.

    Raises:
        UserError: a depth below 1, or an unknown family.
    """

    taps = (LAST,)
    target_scale: Tensor | None
    undecided = False

    def __init__(
        self,
        depth: int,
        hidden_first: bool,
        before_norm: bool,
        norm_output: bool,
        family: str = "",
        qkv_bias: bool = False,
        qk_norm: bool = False,
        gate: bool = False,
        zero_centred: bool = False,
        draft_vocab_size: int | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(draft_vocab_size)
        self.settings = constructor_arguments(locals())
        if depth < 1:
            raise UserError(f"drafter.depth={depth}: give at least 1")
        if family and family not in FAMILIES:
            raise UserError(f"settings.family={family!r}: known are {', '.join(FAMILIES)}")
        shape = LayerShape(**sizes)
        size, eps = shape.hidden_size, shape.eps
        norm: Any = ZeroCentredNorm if zero_centred else RMSNorm
        self.depth, self.hidden_first, self.norm_output = depth, hidden_first, norm_output
        # RMS(x) = RMSNorm(x) / scale: the state before the target's norm, up to a factor that norms ignore.
        self.register_buffer("target_scale", torch.ones(size) if before_norm else None)
        self.token_norm, self.hidden_norm = norm(size, eps=eps), norm(size, eps=eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope)
        self.layer = MtpLayer(shape, qkv_bias, qk_norm, gate, zero_centred)
        self.norm = norm(size, eps=eps)

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """Load the target's own head, or the one in `path`, or build a new head.

        Options of the arrangement that are None follow the family; `fit` chooses them if it is unknown.
        """
        head = read_file(target, options.pop("path"))
        asked = {name: options.pop(name) for name in Arrangement._fields}
        # A new head has the form that vLLM's `mtp` accepts for every target (see export/mtp.py).
        known, new = arrangement_of(target), mimo_arrangement(target)
        arrangement = (known if head and known else new)._asdict() | {
            k: v for k, v in asked.items() if v is not None
        }
        sizes = asdict(LayerShape.of(target)) | options
        if head is None:
            drafter = cls(**sizes, **arrangement)
            drafter._set_arrangement(target, Arrangement(**arrangement))
            drafter._initialise(target)
            return drafter
        normed = final_norm(target)
        centred = normed is not None and normed.zero_centred
        sizes |= head.settings
        drafter = cls(**sizes, **arrangement, family=head.family, zero_centred=centred)
        drafter._set_arrangement(target, Arrangement(**arrangement))
        scale = {} if drafter.target_scale is None else {"target_scale": drafter.target_scale}
        d2t = {} if drafter.d2t is None else {"d2t": drafter.d2t}
        drafter.load_state_dict(head.weights | scale | d2t)
        drafter.undecided = known is None and None in asked.values()
        return drafter

    def _set_arrangement(self, target: Target, arrangement: Arrangement) -> None:
        """Set the arrangement.

        Raises:
            UserError: `before_norm`, and the target's final norm is no RMS norm.
        """
        self.settings |= arrangement._asdict()
        self.hidden_first, self.norm_output = arrangement.hidden_first, arrangement.norm_output
        self.target_scale = None
        if not arrangement.before_norm:
            return
        if (norm := final_norm(target)) is None:
            raise UserError(
                "drafter.before_norm=true: the target's final norm is no RMS norm; set it to false"
            )
        # Where a scale is 0, the target's head ignores the state, too.
        self.target_scale = torch.where(norm.scale == 0, 1, norm.scale).to(self.fc.weight)

    @torch.no_grad()
    def _initialise(self, target: Target) -> None:
        """Initialise to predict the current hidden state plus a little of the token, as EAGLE does."""
        size = len(self.fc.weight)
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()
        self.fc.weight.normal_(std=0.32 * size**-0.5)
        self._hidden_half(self.fc.weight).add_(torch.eye(size))
        if (norm := final_norm(target)) is not None:
            scale = norm.scale.to(self.norm.weight)
            # A state before the final norm gets its scale; one after it, only the scale's mean size.
            self.norm.weight.copy_(
                scale if self.target_scale is not None else scale.square().mean().sqrt().expand(size)
            )

    def _hidden_half(self, weight: Tensor) -> Tensor:
        """(D, D) columns of `fc` that read the hidden state."""
        return weight.chunk(2, -1)[0 if self.hidden_first else 1]

    def _token_half(self, weight: Tensor) -> Tensor:
        return weight.chunk(2, -1)[1 if self.hidden_first else 0]

    # -- unknown arrangements ------------------------------------------------------------------

    @property
    @override
    def needs_fit(self) -> bool:
        return self.undecided or self.d2t is not None

    @override
    def fit(self, texts: Iterable[Text], target: Target, progress: Progress | None = None) -> str:
        """Choose the arrangement with the highest teacher-forced top-1 accuracy of the loaded head."""
        texts = iter(texts)
        lines = []
        if self.undecided:
            first = list(islice(texts, PROBE_TEXTS))
            texts = chain(first, texts)
            lines.append(self._choose_arrangement(first, target))
        if self.d2t is not None:
            lines.append(super().fit(texts, target, progress))
        return "; ".join(lines)

    @torch.no_grad()
    def _choose_arrangement(self, texts: Sequence[Text], target: Target) -> str:
        batch = _batch(texts, target)
        places = (False, True) if final_norm(target) else (False,)
        orders = [Arrangement(first, before, True) for first, before in product((True, False), places)]
        self.settings["before_norm"], found = False, {}
        for arrangement in orders:
            self._set_arrangement(target, arrangement)
            found[arrangement] = self._accuracy(batch, target, 1)
        best = max(orders, key=lambda order: found[order])
        deeper = {}
        for norm_output in (True, False):  # no effect at the first depth
            self._set_arrangement(target, best._replace(norm_output=norm_output))
            deeper[norm_output] = self._accuracy(batch, target, 2)
        chosen = best._replace(norm_output=deeper[True] >= deeper[False])
        self._set_arrangement(target, chosen)
        settings = ", ".join(f"{name}={str(value).lower()}" for name, value in chosen._asdict().items())
        shares = " ".join(f"{share:.3f}" for share in sorted(found.values(), reverse=True))
        return f"its arrangement is unknown, so all were scored: {settings} (top-1 {shares})"

    def _accuracy(self, batch: Batch, target: Target, depth: int) -> float:
        """Share of anchors at which the head and the target have the same top token, at a depth."""
        mine, self.depth = self.depth, depth
        training, scored = self.training, self.scored
        self.train()  # whole vocabulary, since none is chosen yet
        self.scored = None
        try:
            *_, step = self.unroll(batch, target)
            teacher = target.head(batch.last.flatten(0, 1)[step.anchor + depth]).argmax(-1)
            return float((step.head(step.hidden).argmax(-1) == teacher).float().mean())
        finally:
            self.depth, self.scored = mine, scored
            self.train(training)

    # -- layers ----------------------------------------------------------------------------------

    @property
    @override
    def stack(self) -> Sequence[DecoderLayer]:
        return [self.layer]

    @override
    def fuse(self, taps: Tensor) -> Tensor:
        feature = taps[..., 0, :]
        return feature if self.target_scale is None else feature / self.target_scale

    @override
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.hidden_norm(feature), self.token_norm(embedded)]
        x = self.fc(torch.cat(parts if self.hidden_first else parts[::-1], -1))
        return x, self.layer.qkv_proj(self.layer.input_layernorm(x))

    @override
    def pair_by_lookup(self, target: Target) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        weights, rows = [self.fc.weight, self.token_norm.weight], len(self.fc.weight)
        shares = self._shares.of(
            target,
            weights,
            rows,
            lambda embedded: (self.token_projection(embedded), self._hidden_half(self.fc.weight)),
        )
        if shares is None:
            return None

        def pair(tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            x = shares(tokens, self.hidden_norm(feature))
            return x, self.layer.qkv_proj(self.layer.input_layernorm(x))

        return pair

    @override
    def token_projection(self, embedded: Tensor) -> Tensor:
        # As in EAGLE-3: the norm's weight is multiplied into the projection.
        norm, size = self.token_norm, embedded.shape[-1]
        scale = norm.scale if isinstance(norm, ZeroCentredNorm) else norm.weight
        unit = F.rms_norm(embedded, (size,), eps=norm.eps)
        return F.linear(unit, self._token_half(self.fc.weight) * scale)

    @override
    def first_input(self, share: Tensor, feature: Tensor) -> FirstLayerInput:
        x = torch.addmm(share, self.hidden_norm(feature), self._hidden_half(self.fc.weight).mT)
        return FirstLayerInput(x, self.layer.input_layernorm(x), None)

    @override
    def first_weight(self) -> Tensor:
        return self.layer.qkv_proj.weight

    @override
    def emit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        return hidden, hidden if self.norm_output else x

    @override
    def head(self, target: Target) -> Head:
        return self.output_head(target.head)


def _batch(texts: Sequence[Text], target: Target) -> Batch:
    """The beginnings of a few texts, with the target's taps."""
    rows = [list(text.tokens[:PROBE_TOKENS]) for text in texts]
    width = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for row, (text, ids) in enumerate(zip(texts, rows, strict=True)):
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = torch.tensor(list(text.loss_mask[: len(ids)])).float()
    tokens, before = tokens.to(target.device), target.taps
    target.tap((LAST,))
    read = target.read(tokens)
    target.tap(before)
    return Batch(tokens, mask.bool().to(target.device), read.taps, read.last)

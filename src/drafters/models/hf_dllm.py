"""Masked diffusion language model as drafter: predicts all next tokens in parallel.

SpecDiff (Christopher et al., arXiv:2408.05636), with one denoising step as in SpecDiff-2 (Sandler et
al., arXiv:2511.00606).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.head import Head
from decode.model.load import is_masked, load_model
from decode.model.probe import probe
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin, to_device
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, DraftStep, sample_anchors, supervised_anchors
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.drafting.tree import expand
from drafters.families.feature_heads import check_positive
from drafters.families.hf_model import HFModelDrafter, checked_lora
from drafters.families.lookup import IndexedText, TextDrafter
from drafters.hf.build import build, portable_config
from drafters.hf.lora_files import locate_base
from drafters.hf.masked_lm import MaskedModel, Window, check_fills_masks, mask_id
from drafters.hf.masked_prefix import MaskedPrefix
from drafters.hf.vocabulary import OPTION, check_vocabulary, fit_vocabulary, share_vocabulary
from drafters.layers.anchor_rows import rows_by_depth


class Dllm(HFModelDrafter, TextDrafter):
    """Reads the text followed by K masks, and predicts the masked tokens.

    All predictions of a draft come from one pass and are independent given the text: a tree is the
    product of the depths' top tokens.

    With `prefix=none` attention is bidirectional, so there is no KV cache: a round reads the whole text, or
    as much of its end as fits into the model's context. With `prefix=causal` the text is causal and does not
    see the masks, and a round reads only new tokens.

    Args:
        config: of the model as transformers writes it, `model_type` included.
        mask_token: id of the mask.
        depth: number of masks K, the maximum draft length.
        shift: 1: the output at the position before a mask predicts its token, as in models adapted from
            causal ones (Dream, DiffuLLaMA); 0: the output at the mask itself.
        steps: denoising passes; after each the most confident masks are filled with their most likely
            tokens. More than 1 allows fixed nodes only.
        anchors: training windows per text, on average over a batch.
        prefix: `none`, or `causal` for a causal LM; see `MaskedPrefix`.
        model: of that configuration; None: random weights.
        lora: as in `lm.DraftLM`.
        base: as in `lm.DraftLM`.

    Raises:
        UserError: not the configuration of a language model, or an option out of range.
    """

    masked_lm = True

    def __init__(
        self,
        config: dict[str, Any],
        mask_token: int,
        depth: int,
        shift: int,
        steps: int,
        anchors: int,
        prefix: str = "none",
        model: PreTrainedModel | None = None,
        lora: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.settings = {
            "config": portable_config(config),
            "mask_token": mask_token,
            "depth": depth,
            "shift": shift,
            "prefix": prefix,
        }
        self.settings |= {"steps": steps, "anchors": anchors, "lora": lora, "base": base}
        check_positive(depth=depth, steps=steps, anchors=anchors)
        if shift not in (0, 1):
            raise UserError(f"drafter.shift={shift}: choose 0 or 1")
        if steps > depth:
            raise UserError(f"drafter.steps={steps}: at most one for each of drafter.depth={depth} masks")
        if prefix not in ("none", "causal"):
            raise UserError(f"drafter.prefix={prefix}: choose none or causal")
        self.depth, self.shift = depth, shift
        self.steps, self.anchors = steps, anchors
        if steps > 1:
            self.traits = replace(self.traits, proposals=("fixed",))
        self.keeps_prefix = prefix == "causal"
        self.model: Any = build(config, masked=True) if model is None else model
        self.model.eval()
        if self.keeps_prefix and is_masked(self.model.config):
            raise UserError(
                f"drafter.prefix=causal: in a {type(self.model).__name__} text sees the masks, so it has "
                "no KV cache; set drafter.prefix=none"
            )

    @property
    @override
    def max_depth(self) -> int:
        """Number of masks in training."""
        return self.depth

    @override
    @classmethod
    def for_target(
        cls,
        target: Target,
        path: str | None = None,
        revision: str | None = None,
        mask_token: int | str | None = None,
        train: bool = True,
        lora: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model.

        Args:
            target: has to have the same vocabulary.
            path: folder or hub id, remote code is never run.
            revision: of a hub id.
            mask_token: id or text; None: from the tokenizer or the configuration.
            train: train in fp32; a frozen model keeps its dtype.
            lora: keyword arguments of `add_lora`; None: train all weights.
            **options: of the constructor.

        Raises:
            UserError: not a usable model, another vocabulary, or no mask token.
        """
        if not path:
            raise UserError(f"{OPTION}: give the folder or hub id of a masked diffusion language model")
        lora = checked_lora(lora, train)
        model = load_model(path, revision=revision, what=OPTION, masked=True)
        check_vocabulary(model, target, path, revision)
        mask = mask_id(model, path, revision, mask_token)
        drafter = cls(json.loads(model.config.to_json_string()), mask, model=model, **options)
        if drafter.keeps_prefix:
            probe(CausalLM(model), OPTION)
        drafter = drafter.prepare(locate_base(model, path, revision), train, lora, model.dtype)
        check_fills_masks(drafter.masked, path)
        return drafter

    @property
    def masked(self) -> MaskedModel:
        """The model with its window and forward pass."""
        return MaskedModel(self.model, self.settings["mask_token"], self.depth, self.shift)

    @property
    def prefixed(self) -> MaskedPrefix:
        """The model with a KV cache of the text."""
        return MaskedPrefix(self.model, self.settings["mask_token"], self.depth, self.shift)

    @property
    @override
    def state_size(self) -> int | None:
        return self.masked.head.weight.shape[1] if self.steps == 1 else None

    # -- training ----------------------------------------------------------------------------

    @override
    def train(self, mode: bool = True) -> Self:
        """Keep the model in evaluation mode: dropout would not be a function of (seed, step)."""
        super().train(mode)
        self.model.eval()
        return self

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """Predict masks after the roots of sampled anchors; a cached prefix limits these to its context."""
        length, prefixed = batch.tokens.shape[1], self.prefixed if self.keeps_prefix else None
        anchors = supervised_anchors(batch.loss_mask.cpu(), 1)
        if prefixed:
            anchors[:, prefixed.reach(length) - 1 :] = False
        candidates = anchors.flatten().nonzero()[:, 0]  # (N,)
        if not len(candidates) and not prefixed:
            return
        count = len(batch.tokens) * self.anchors if self.training else len(candidates)
        anchor = sample_anchors(candidates, count, batch.seed)  # (M,) on the host
        supervised = rows_by_depth(batch.loss_mask, self.depth, batch.tokens.device, anchor)
        if prefixed:  # M may be 0: the layers run anyway, since other ranks wait for their collectives
            hidden = prefixed.read_packed(batch.tokens, anchor // length, anchor % length + 1)  # (M, K, D')
        else:  # with bidirectional attention each anchor needs its own window
            place = supervised[0].place
            lengths = RowInts((anchor % length + 2).tolist(), place % length + 2)
            hidden = self.masked.read(self.masked.window(batch.tokens[place // length], lengths))
        head = share_vocabulary(self.masked.head, target)
        weight = len(candidates) / max(1, len(anchor))  # sampled anchors represent all
        if not supervised:
            yield DraftStep(hidden[:, 0], anchor, 1, head, {}, weight)
        for depth, rows in enumerate(supervised, 1):
            states = hidden[rows.row, depth - 1]
            yield DraftStep(states, rows.anchor, depth, head, {}, weight, copied=rows.place)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def check(self, plan: Plan) -> None:
        if self.steps > 1 and plan.depth and plan.proposal not in ("auto", "fixed"):
            raise UserError(
                f"decode.proposal={plan.proposal}: with drafter.steps={self.steps} tokens depend on later "
                "ones, so sampling by their distributions would not be lossless; "
                "set decode.proposal=fixed or drafter.steps=1"
            )
        super().check(plan)

    @override
    def new_state(self, rows: int) -> Any:
        return self.prefixed.start(rows) if self.keeps_prefix else super().new_state(rows)

    @override
    def advance(
        self,
        state: list[IndexedText] | MaskedPrefix,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        if isinstance(state, MaskedPrefix):
            state.read(tokens, counts, root)
        else:
            super().advance(state, target, tokens, taps, counts, root)

    def kv_bytes_per_token(self, state: list[IndexedText] | MaskedPrefix) -> int:
        """See `optional.HasKeyCache`."""
        return state.lm.cache.store.bytes_per_token if isinstance(state, MaskedPrefix) else 0

    @override
    def propose(
        self,
        state: list[IndexedText] | MaskedPrefix,
        target: Target,
        sampler: Sampler,
        coin: KeyedCoin,
        plan: Plan,
    ) -> Draft:
        self.check(plan)
        masked = self.masked
        if isinstance(state, MaskedPrefix):
            assert state.states is not None
            states, read_block = state.states, state.read_block
        else:
            window = _window(masked, state, target, coin)
            states = masked.read(window)

            def read_block(tokens: Tensor) -> Tensor:
                filled = window.tokens.scatter(1, window.masks, tokens)
                return masked.read(window._replace(tokens=filled))

        if self.steps > 1:  # filled masks have no states, so logits are used instead
            logits = states = self._denoise(masked.head, states, read_block, target)[:, : plan.depth]
        else:
            states = states[:, : plan.depth]
            logits = fit_vocabulary(masked.head(states), target)
        levels = ParallelLogits(logits.unbind(1), states)
        confidence = self.confidence_of(lambda: levels.newest)
        return expand(levels.first, levels.step, sampler, coin, plan, confidence=confidence)

    def _denoise(
        self, head: Head, states: Tensor, read_block: Callable[[Tensor], Tensor], target: Target
    ) -> Tensor:
        """(B, K, V) logits of every mask, from the pass that filled it, or the last pass.

        Args:
            head: of the model.
            states: (B, K, D') of the first pass.
            read_block: a further pass: (B, K) tokens instead of the masks -> (B, K, D').
            target: defines the vocabulary.
        """
        mask_token = self.settings["mask_token"]
        block = torch.full(states.shape[:2], mask_token, device=states.device)  # (B, K)
        levels: Tensor | None = None
        unfilled = torch.ones_like(block, dtype=torch.bool)  # not filled yet
        remaining = self.depth  # of each row
        for passes_left in range(self.steps, 0, -1):  # this one included
            logits = fit_vocabulary(head(states), target)
            if mask_token < target.vocab_size:  # never predict the mask token
                logits[..., mask_token] = -torch.inf
            levels = logits if levels is None else torch.where(unfilled[..., None], logits, levels)
            if passes_left > 1:
                chance, token = levels.softmax(-1).max(-1)  # (B, K)
                count = -(-remaining // passes_left)
                remaining -= count
                chosen = chance.masked_fill(~unfilled, -1).topk(count).indices
                block = block.scatter(1, chosen, token.gather(1, chosen))
                unfilled = unfilled.scatter(1, chosen, False)
                states = read_block(block)
        assert levels is not None
        return levels


def _window(masked: MaskedModel, state: list[IndexedText], target: Target, coin: KeyedCoin) -> Window:
    """As much of each text's end as fits, and masks."""
    lengths = [len(history.tokens) for history in state]
    padded = [
        [n, *history.tokens, *[0] * (max(lengths) - n)] for n, history in zip(lengths, state, strict=True)
    ]
    table = to_device(padded, target.device, coin)  # (B, 1 + T) length and text
    return masked.window(table[:, 1:], RowInts(lengths, table[:, 0]))

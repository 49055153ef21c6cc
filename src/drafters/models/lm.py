"""An independent draft model (Leviathan et al., arXiv:2211.17192): any LM with the target's vocabulary.

Trained as in DistillSpec (arXiv:2310.08461) and Online Speculative Decoding (arXiv:2310.07177), or
used without training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from decode.draft import Draft
from decode.model.causal_lm import CausalLM
from decode.model.load import load_model
from decode.model.probe import probe
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters.base import Batch, DraftStep, supervised_anchors
from drafters.drafting.tree import expand
from drafters.families.hf_build import build, cut_target, portable_config
from drafters.families.hf_model import (
    OPTION,
    HFModelDrafter,
    check_vocabulary,
    checked_lora,
    fit_vocabulary,
    share_vocabulary,
)
from drafters.families.lora_files import LoraBase, locate_base
from drafters.layers.decoder_layer import tree_visibility


@dataclass(slots=True)
class LMState:
    """The draft model with its KV cache, root included, and its output at the root."""

    lm: CausalLM
    last: Tensor | None = None  # (B, D') input of the head at the root
    logits: Tensor | None = None  # (B, V) at the root


class DraftLM(HFModelDrafter):
    """A causal language model that drafts autoregressively.

    Beyond its context length it drafts at its last position: with low acceptance, but still losslessly.

    Args:
        config: of the model as transformers writes it, `model_type` included.
        model: of that configuration; None: random weights.
        lora: settings of adapters, see `HFModelDrafter`.
        base: fields of `LoraBase`, the base model of adapters.

    Raises:
        UserError: the configuration is not one of a causal LM.
    """

    depth_invariant = True  # a prediction depends on the previous text only, drafted or not

    def __init__(
        self,
        config: dict[str, Any],
        model: PreTrainedModel | None = None,
        lora: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.settings = {"config": portable_config(config), "lora": lora, "base": base}
        self.model: Any = build(config) if model is None else model

    @override
    @classmethod
    def for_target(
        cls,
        target: Target,
        path: str | None = None,
        revision: str | None = None,
        layers: int = 2,
        train: bool = True,
        lora: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, or build one from layers of the target.

        Args:
            target: the vocabulary has to be the same.
            path: folder or hub id, remote code is never run; None: use layers of the target.
            revision: of a hub id.
            layers: number of layers of the target; see `cut_target`.
            train: train in fp32; a frozen model keeps its dtype.
            lora: keyword arguments of `add_lora`; None trains all weights.
            **options: none.

        Raises:
            UserError: not a usable causal LM, another vocabulary, or a target that cannot be cut.
        """
        lora = checked_lora(lora, train)
        if path:
            model = load_model(path, revision=revision, what=OPTION)
            check_vocabulary(model, target, path, revision)
            probe(CausalLM(model), OPTION)
            base, dtype = locate_base(model, path, revision), model.dtype
        else:
            model = cut_target(target, layers)
            base, dtype = LoraBase(layers=layers), target.dtype
        drafter = cls(json.loads(model.config.to_json_string()), model, **options)
        return drafter.prepare(base, train, lora, dtype)

    @property
    @override
    def state_size(self) -> int:
        return CausalLM(self.model).hidden_size

    # -- training ----------------------------------------------------------------------------

    @override
    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: dropout would not be a function of (seed, step)."""
        del mode
        return super().train(False)

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """One causal pass; anchors beyond the model's context length are left out."""
        lm = CausalLM(self.model)
        length = batch.tokens.shape[1]
        reach = min(length, lm.max_positions or length)
        anchors = supervised_anchors(batch.loss_mask, 1)
        anchors[:, reach - 1 :] = False
        # M may be 0: the layers run anyway, since other ranks wait for their collectives.
        row, t = anchors.nonzero(as_tuple=True)  # (M,)
        tokens = batch.tokens[:, :reach].clamp_max(lm.vocab_size - 1)
        last = lm.base(input_ids=tokens, use_cache=False).last_hidden_state  # (B, reach, D')
        yield DraftStep(last[row, t + 1], row * length + t, 1, share_vocabulary(lm.head, target), {})

    @override
    def as_target(self, target: Target) -> Target:
        twin = copy.deepcopy(self).to(target.device, target.dtype)
        return Target(twin.model)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> LMState:
        lm = CausalLM(self.model)
        lm.start(rows, capacity=256)
        return LMState(lm)

    @override
    def advance(
        self,
        state: LMState,
        target: Target,
        tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
        root: Tensor,
    ) -> None:
        lm, read = state.lm, RowInts.of(counts)
        if lm.lengths[0]:  # tokens[:, 0] is the previous root, which is in the cache
            tokens, read = tokens[:, 1:], read.plus(-1)
        end = read.on(root.device)[:, None]  # (B, 1)
        text = torch.cat([tokens, root[:, None]], 1).scatter(1, end, root[:, None])
        last = lm.read_text(_known(lm, text))
        lm.keep(read.plus(1))
        state.last = last.gather(1, end[..., None].expand(-1, -1, last.shape[-1]))[:, 0]
        state.logits = fit_vocabulary(lm.head(state.last), target)

    @override
    def select(self, state: LMState, rows: Sequence[int]) -> None:
        state.lm.select(rows)
        if state.last is not None and state.logits is not None:
            index = RowInts.of(rows).on(state.last.device)
            state.last, state.logits = state.last[index], state.logits[index]

    @override
    def propose(self, state: LMState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        assert state.last is not None
        assert state.logits is not None
        last = state.last[:, None]  # (B, W, D') head input of the last level
        scratch = 0  # number of scratch slots in use; the next round overwrites them
        reach: Tensor | None = None  # (B, W, m) mask over scratch slots; None: causal

        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal last, scratch, reach
            rows, width = token.shape
            if reach is None and width > 1:
                reach = torch.ones(rows, 1, scratch, dtype=torch.bool, device=token.device)
            if reach is not None:
                reach = tree_visibility(reach, parent)
            last = state.lm.forward(_known(state.lm, token), reach, scratch)
            scratch += width
            return fit_vocabulary(state.lm.head(last), target)

        return expand(state.logits, step, sampler, coin, plan, confidence=self.confidence_of(lambda: last))

    @override
    def kv_bytes_per_token(self, state: LMState) -> int:
        return state.lm.cache.store.bytes_per_token


def _known(lm: CausalLM, tokens: Tensor) -> Tensor:
    """The tokens; ids beyond the draft model's vocabulary are read as its last id."""
    return tokens.clamp_max(lm.vocab_size - 1)

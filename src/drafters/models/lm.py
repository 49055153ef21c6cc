"""An independent draft model (Leviathan et al., arXiv:2211.17192): any language model.

Trained as in DistillSpec (arXiv:2310.08461) and Online Speculative Decoding (arXiv:2310.07177), or
used without training. With another tokenizer than the target's it drafts the shared tokens (TLI,
arXiv:2502.05202).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.types import Traits
from decode.model import gguf
from decode.model.causal_lm import CausalLM
from decode.model.head import Head
from decode.model.load import load_model
from decode.model.probe import probe
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from decode.transfer import RowInts, new_tokens, upload, upload_together
from drafters.base import Batch, DraftStep, supervised_anchors
from drafters.drafting.tree import expand
from drafters.families.hf_model import HFModelDrafter, checked_lora
from drafters.hf.build import build, cut_target, portable_config
from drafters.hf.lora_files import LoraBase, locate_base
from drafters.hf.tokenizer_map import (
    MappedText,
    TokenBytes,
    TokenizerMap,
    pack,
    target_tokens,
    tokenizer_of,
    unpack,
)
from drafters.hf.vocabulary import (
    OPTION,
    check_vocabulary,
    fit_vocabulary,
    known_tokens,
    share_vocabulary,
    unread_text,
)
from drafters.layers.decoder_layer import level_visibility
from drafters.vocabulary import TokenCounts, Vocabulary

VOCABULARIES = ("same", "map")
MIN_SHARED = 0.5  # minimum share of the answers' tokens that are shared


@dataclass(slots=True)
class LMState:
    """The draft model with its KV cache, root included, and its output at the root."""

    lm: CausalLM
    last: Tensor | None = None  # (B, D') input of the head at the root
    logits: Tensor | None = None  # (B, V) at the root; (B, V') with its own tokenizer
    texts: list[MappedText] = field(default_factory=list)  # of each row, with its own tokenizer


class DraftLM(HFModelDrafter):
    """A causal language model that drafts autoregressively.

    Beyond its context length it drafts at its last position: acceptance is low, decoding still lossless.

    With its own tokenizer it reads the target's text in its own tokens, encoded again in every round, and
    drafts only tokens that both have. Its distributions are normalised over these.

    Args:
        config: of the model as transformers writes it, `model_type` included.
        model: with this configuration; None: random weights.
        lora: settings of adapters, see `HFModelDrafter`.
        base: fields of `LoraBase`, the base model of adapters.
        tokenizer_bytes: size of its own tokenizer in the checkpoint; 0: the target's vocabulary.
        file: SHA-256 of the GGUF file that has exactly this model; "": none.

    Attributes:
        tokenizer: (tokenizer_bytes,) its own tokenizer, see `tokenizer_map.pack`.
        mapping: map of its own tokenizer to the target's.
        d2t: (V',) the target's id of each shared token, ascending.
        draft_ids: (V',) its own id of each.
        t2d: (V,) its own id of each token of the target; 0 where it is not shared.

    Raises:
        UserError: not the configuration of a causal LM.
    """

    traits = Traits(depth_invariant=True)  # a prediction depends on the previous text only, drafted or not
    tokenizer: Tensor | None
    draft_ids: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: dict[str, Any],
        model: PreTrainedModel | None = None,
        lora: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
        tokenizer_bytes: int = 0,
        file: str = "",
    ) -> None:
        super().__init__()
        self.settings = {"config": portable_config(config), "lora": lora, "base": base}
        if file:
            self.settings["file"] = file
        self.model: Any = build(config) if model is None else model
        self.mapping: TokenizerMap | None = None
        self.target_tokens: TokenBytes | None = None
        self.register_buffer("tokenizer", None)
        if tokenizer_bytes:
            self.settings["tokenizer_bytes"] = tokenizer_bytes
            self.register_buffer("tokenizer", torch.zeros(tokenizer_bytes, dtype=torch.uint8))
            self.register_load_state_dict_post_hook(_connect_loaded)

    @override
    @classmethod
    def for_target(
        cls,
        target: Target,
        path: str | None = None,
        revision: str | None = None,
        layers: int = 2,
        vocabulary: str = "same",
        train: bool = True,
        lora: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, or build one from layers of the target.

        Args:
            target: target of the drafter.
            path: folder or hub id, remote code is never run; None: use layers of the target.
            revision: of a hub id.
            layers: number of layers of the target; see `cut_target`.
            vocabulary: `same`: the target's; `map`: the model's own tokenizer is mapped to the target's.
            train: train in fp32; a frozen model keeps its dtype.
            lora: keyword arguments of `add_lora`; None: train all weights.
            **options: none.

        Raises:
            UserError: not a usable causal LM, another vocabulary, a target that cannot be cut, or tokenizers
                that cannot be mapped.
        """
        lora, tokenizer = checked_lora(lora, train), None
        _check_option(vocabulary, path)
        if path:
            model = load_model(path, revision=revision, what=OPTION)
            if vocabulary == "map":
                tokenizer = pack(tokenizer_of(path, revision, OPTION))
                options["tokenizer_bytes"] = len(tokenizer)
            else:
                check_vocabulary(model, target, path, revision, ", or set drafter.vocabulary=map")
            probe(CausalLM(model), OPTION)
            base, dtype = locate_base(model, path, revision), model.dtype
            if not train and gguf.find(path, OPTION):
                options["file"] = base.revision  # the file's SHA-256
        else:
            model = cut_target(target, layers)
            base, dtype = LoraBase(layers=layers), target.dtype
        drafter = cls(json.loads(model.config.to_json_string()), model, **options)
        if tokenizer is not None:
            drafter.tokenizer, drafter.target_tokens = tokenizer, target_tokens(target)
            drafter.connect()
        return drafter.prepare(base, train, lora, dtype)

    @override
    @classmethod
    def restore(cls, settings: dict[str, Any], target: Target) -> Self:
        drafter = super().restore(settings, target)
        if drafter.tokenizer is not None:
            drafter.target_tokens = target_tokens(target)
        return drafter

    def connect(self) -> None:
        """Map its own tokenizer to the target's.

        Raises:
            UserError: a damaged tokenizer; see also `TokenizerMap`.
        """
        assert self.tokenizer is not None
        assert self.target_tokens is not None
        size, device = CausalLM(self.model).vocab_size, self.tokenizer.device
        self.mapping = TokenizerMap(unpack(self.tokenizer), size, self.target_tokens)
        ids, own = self.mapping.target_ids.to(device), self.mapping.draft_ids.to(device)
        back = own.new_zeros(len(self.target_tokens.words)).index_copy_(0, ids, own)
        for name, value in {"d2t": ids, "draft_ids": own, "t2d": back}.items():
            self.register_buffer(name, value, persistent=False)  # derived from the tokenizers

    @property
    @override
    def state_size(self) -> int:
        return CausalLM(self.model).hidden_size

    @override
    def convert_weights(self, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `HFModelDrafter`; both need the same tokenizer."""
        theirs, own = weights.get("tokenizer"), self.tokenizer
        same = theirs is own if theirs is None or own is None else torch.equal(theirs, own.cpu())
        if not same:
            raise UserError("its draft model has another tokenizer; set drafter.path instead")
        return super().convert_weights(weights, settings)

    # -- training ----------------------------------------------------------------------------

    @override
    def choose_tokens(self, counts: TokenCounts, target: Target) -> str:
        """Check that enough tokens are shared; none are chosen."""
        assert self.d2t is not None
        assert self.mapping is not None
        ids = self.d2t.cpu()
        shared = f"shared tokens: {len(ids)} {counts.share(ids)}"
        if counts.covered(ids) < MIN_SHARED:
            raise UserError(
                f"drafter.vocabulary=map: {shared}, and at least {MIN_SHARED:.0%} are needed; set "
                "drafter.path to a model with a tokenizer more like the target's"
            )
        special = ", ".join(self.mapping.special) or "none"
        return f"{shared}; special tokens that both have: {special}"

    @override
    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: dropout would not be a function of (seed, step)."""
        del mode
        return super().train(False)

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        """One causal pass; anchors beyond the model's context length are skipped."""
        lm = CausalLM(self.model)
        tokens, places = self._own_tokens(batch)
        reach = min(tokens.shape[1], lm.max_positions or tokens.shape[1])
        after = places.roll(-1, 1)  # (B, T) place of x_{t+1}, at t; no anchor is last
        supervised = supervised_anchors(batch.loss_mask.cpu(), 1) & (after >= 0) & (after < reach)
        # M may be 0: the layers run anyway, since other ranks wait for their collectives.
        anchor, row = supervised.flatten().nonzero()[:, 0], supervised.nonzero()[:, 0]  # (M,)
        at = row * reach + after.flatten()[anchor]
        sent = upload_together({"anchor": anchor, "at": at}, batch.tokens.device)
        tokens, head = known_tokens(lm, tokens[:, :reach]), self._trained_head(lm.head, target)
        last = lm.base(input_ids=tokens, use_cache=False).last_hidden_state  # (B, reach, D')
        yield DraftStep(last.flatten(0, 1)[sent["at"]], anchor, 1, head, {}, copied=sent["anchor"])

    def _own_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T') texts in its own tokens, and on the host (B, T) places at which each target token ends.

        The place is -1 where no own token ends, so that nothing is predicted there, and after the last
        supervised token, where the text is not read.
        """
        tokens, mask = batch.tokens, batch.loss_mask.cpu()
        number = torch.arange(tokens.shape[1]).expand_as(mask)
        if self.mapping is None:
            return tokens, number
        lengths = ((number + 1) * mask).amax(1).tolist()
        texts = [text[:n] for text, n in zip(tokens.tolist(), lengths, strict=True)]
        own, places = zip(*map(self.mapping.align, texts), strict=True)
        return _padded(own, tokens.device), _padded(places, mask.device, -1, tokens.shape[1])

    def _trained_head(self, head: Head, target: Target) -> Head:
        """The head over the tokens that the target also has."""
        if self.d2t is None:
            return share_vocabulary(head, target)
        bias = None if head.bias is None else head.bias[self.draft_ids]
        return replace(head, weight=head.weight[self.draft_ids], bias=bias, d2t=self.d2t)

    def as_target(self, target: Target) -> Target:
        """See `optional.WritesText`."""
        if self.mapping is not None:
            raise UserError(
                "on_policy: this draft model writes tokens of another vocabulary; set on_policy.share=0"
            )
        twin = copy.deepcopy(self).to(target.device, target.dtype)
        return Target(twin.model)

    # -- decoding ----------------------------------------------------------------------------

    @override
    def new_state(self, rows: int) -> LMState:
        lm = CausalLM(self.model)
        lm.start(rows, capacity=256)
        return LMState(lm, texts=[] if self.mapping is None else [MappedText() for _ in range(rows)])

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
        lm = state.lm
        text, end = self.unread(state, tokens, counts, root)
        last = lm.read_text(text)
        lm.keep(end.plus(1))
        state.last = last[torch.arange(len(last), device=last.device), end.on(last.device)]
        state.logits = self.logits(lm, state.last, target)

    def unread(
        self, state: LMState, tokens: Tensor, counts: Sequence[int], root: Tensor
    ) -> tuple[Tensor, RowInts]:
        """(B, M) unread settled tokens with the root, right-padded, and the index of each row's root."""
        if self.mapping is None:
            return unread_text(state.lm, tokens, counts, root)
        return self._reencode(state, new_tokens(tokens, counts, root, first=not state.lm.lengths[0]))

    def _reencode(self, state: LMState, grown: Sequence[Sequence[int]]) -> tuple[Tensor, RowInts]:
        """(B, M) own tokens to read, right-padded, and the index of each row's last one.

        Tokens that the new text has changed are removed from the KV cache.
        """
        assert self.mapping is not None
        kept = [text.extend(new, self.mapping) for text, new in zip(state.texts, grown, strict=True)]
        state.lm.cut(kept)
        rest = [text.ids[n:] for text, n in zip(state.texts, kept, strict=True)]
        return known_tokens(state.lm, _padded(rest, state.lm.device)), RowInts([len(ids) - 1 for ids in rest])

    def logits(self, lm: CausalLM, last: Tensor, target: Target) -> Tensor:
        """(..., D') -> (..., V) logits, or (..., V') of the shared tokens."""
        if self.d2t is None:
            return fit_vocabulary(lm.head(last), target)
        return self._head_rows.of(lm.head, self.draft_ids)(last)

    @override
    def propose(self, state: LMState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        assert state.last is not None
        assert state.logits is not None
        last = state.last[:, None]  # (B, W, D') head input of the last level
        scratch = 0  # number of scratch slots in use; the next round overwrites them
        reach: Tensor | None = None  # (B, W, m) mask over scratch slots; None: causal

        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal last, scratch, reach
            reach = level_visibility(reach, parent, scratch)
            own = token if self.mapping is None else self.t2d[token]
            last = state.lm.forward(known_tokens(state.lm, own), reach, scratch)
            scratch += token.shape[1]
            return self.logits(state.lm, last, target)

        shared = None if self.d2t is None else Vocabulary(self.d2t, target.vocab_size)
        return expand(state.logits, step, sampler, coin, plan, shared, self.confidence_of(lambda: last))

    def kv_bytes_per_token(self, state: LMState) -> int:
        """See `optional.HasKeyCache`."""
        return state.lm.cache.store.bytes_per_token


def _padded(rows: Sequence[Sequence[int]], device: torch.device, fill: int = 0, width: int = 0) -> Tensor:
    """(B, M) right-padded rows, M at least `width`."""
    padded = np.full((len(rows), max(width, *map(len, rows))), fill, np.int64)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return upload(padded, device)


def _check_option(vocabulary: str, path: str | None) -> None:
    if vocabulary not in VOCABULARIES:
        raise UserError(f"drafter.vocabulary={vocabulary}: choose {' or '.join(VOCABULARIES)}")
    if vocabulary == "map" and not path:
        raise UserError(
            "drafter.vocabulary=map: a cut of the target has its vocabulary; set drafter.path, or "
            "drafter.vocabulary=same"
        )


def _connect_loaded(drafter: nn.Module, keys: object) -> None:
    """Map the tokenizer of a loaded checkpoint."""
    del keys
    assert isinstance(drafter, DraftLM)
    if drafter.target_tokens is not None:
        drafter.connect()

"""An independent draft model (Leviathan et al., arXiv:2211.17192): any LM of the target's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from decode.coin import KeyedCoin
from decode.draft import Draft
from decode.errors import UserError
from decode.lm import CausalLM
from decode.load import kernels, load_model, load_tokenizer
from decode.plan import Plan
from decode.probe import probe
from decode.sampling import Sampler
from decode.target import Target
from drafters.base import Drafter
from drafters.expand import expand
from drafters.layers import descend

OPTION = "drafter.path"
# Ids by which two heads, padded to round sizes, may differ where no tokenizers say more; llama.cpp's bound.
PADDING = 128
RENAMED = 0.01  # share of ids with other names that still is one vocabulary: siblings rename special tokens
# In a configuration these name code to fetch, or belong to the place it came from.
FOREIGN = {
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "_name_or_path",
    "transformers_version",
}


@dataclass(slots=True)
class LMState:
    """What the draft model has read, the root included, and what it says next."""

    lm: CausalLM
    logits: Tensor | None = None  # (B, V) below the root


class DraftLM(Drafter):
    """Reads the text as the target does, and says itself how it goes on.

    Past its own context it drafts on at its last position: badly, but the output stays the target's.

    Args:
        config: of the model as transformers writes it, `model_type` included.
        model: of that configuration; without one, random weights.

    Raises:
        UserError: a configuration that gives no causal LM.
    """

    def __init__(self, config: dict[str, Any], model: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.settings = {"config": _own(config)}
        self.model: Any = _build(_own(config)) if model is None else model

    @override
    @classmethod
    def for_target(cls, target: Target, path: str = "", revision: str | None = None, **options: Any) -> Self:
        """The model as it lies there, in its own dtype.

        Args:
            target: whose vocabulary it has to share.
            path: folder or hub id; code that comes with it is never run.
            revision: of a hub id.
            **options: none.

        Raises:
            UserError: no usable causal LM, or one of another vocabulary.
        """
        model = load_model(path, revision=revision, what=OPTION)
        check_vocabulary(model, target, path, revision)
        probe(CausalLM(model), OPTION)
        return cls(json.loads(model.config.to_json_string()), model, **options)

    # -- decoding face -----------------------------------------------------------------------

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
        lm = state.lm
        if lm.lengths[0]:  # tokens[:, 0] was the root last time, and was read then
            tokens, counts = tokens[:, 1:], [n - 1 for n in counts]
        end = torch.tensor(counts).to(root.device)[:, None]  # (B, 1)
        text = torch.cat([tokens, root[:, None]], 1).scatter(1, end, root[:, None])
        last = _read(lm, text)
        lm.keep([n + 1 for n in counts])
        last = last.gather(1, end[..., None].expand(-1, -1, last.shape[-1]))[:, 0]  # (B, D)
        state.logits = _fit(lm.head(last), target)

    @override
    def select(self, state: LMState, rows: Sequence[int]) -> None:
        state.lm.select(rows)
        if state.logits is not None:
            state.logits = state.logits[list(rows)]

    @override
    def propose(self, state: LMState, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        assert state.logits is not None
        read = 0  # scratch slots behind the settled ones; never kept, so the next round writes over them
        reach: Tensor | None = None  # (B, W, m) which of them the last entries see; None: all

        def step(token: Tensor, parent: Tensor) -> Tensor:
            nonlocal read, reach
            rows, width = token.shape
            if reach is None and width > 1:
                reach = torch.ones(rows, 1, read, dtype=torch.bool, device=token.device)
            if reach is not None:
                reach = descend(reach, parent)
            last = _read(state.lm, token, reach, read)
            read += width
            return _fit(state.lm.head(last), target)

        return expand(state.logits, step, sampler, coin, plan)

    @override
    def kv_bytes_per_token(self, state: LMState) -> int:
        return state.lm.cache.store.bytes_per_token

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Casts weights alone: rotary wavelengths rounded to bf16 would be other positions."""
        buffers = [(m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for module, name, exact in buffers:
            setattr(module, name, exact.to(getattr(module, name).device))
        return self


def _read(lm: CausalLM, tokens: Tensor, *where: Any) -> Tensor:
    """See `CausalLM.forward`; ids that only a target with a longer head has become the last one."""
    return lm.forward(tokens.clamp_max(lm.vocab_size - 1), *where)


def _fit(logits: Tensor, target: Target) -> Tensor:
    """(..., V') -> (..., V) of the target: cut, or nothing where the draft model has no token."""
    missing = target.vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _own(value: Any) -> Any:
    """A configuration without what is foreign to the model, however deep."""
    if isinstance(value, dict):
        return {k: _own(v) for k, v in value.items() if k not in FOREIGN}
    return [_own(v) for v in value] if isinstance(value, list) else value


def _build(config: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights, of a class in transformers' own table."""
    try:
        full = AutoConfig.for_model(**config)
        return AutoModelForCausalLM.from_config(full, trust_remote_code=False, **kernels(full))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"drafter: its config gives no causal language model ({_brief(error)})") from None


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def check_vocabulary(model: PreTrainedModel, target: Target, path: str, revision: str | None) -> None:
    """Refuse a draft model whose ids are not the target's.

    Raises:
        UserError: tokenizers that name the ids otherwise or, where either has none, heads whose
            sizes differ by more than padding.
    """
    wrong = ""
    names = _names(path, revision)
    theirs = _names(target.model.name_or_path or "", getattr(target.model.config, "_commit_hash", None))
    size = model.config.get_text_config().vocab_size
    if names and theirs:
        other = sum(theirs.get(i) != name for i, name in names.items())
        if other > RENAMED * len(names):
            wrong = f"{other} of its tokenizer's {len(names)} ids are other tokens to the target's"
    elif abs(size - target.vocab_size) > PADDING:
        wrong = f"its vocabulary has {size} ids, the target's {target.vocab_size}"
    if wrong:
        raise UserError(f"{OPTION}={path}: {wrong}; a draft model must share the target's vocabulary")


def _names(path: str, revision: str | None) -> dict[int, str]:
    """What a model's tokenizer calls each id; empty where there is none."""
    try:
        vocabulary = load_tokenizer(path, revision).get_vocab() if path else {}
    except UserError:
        vocabulary = {}
    return {i: token for token, i in vocabulary.items()}

"""Token ids of a draft model next to the target's: same names, padding, text that is not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.head import Head
from decode.model.load import load_tokenizer
from decode.model.target import Target
from decode.transfer import RowInts

OPTION = "drafter.path"
PADDING = 128  # maximum difference of vocabulary sizes without tokenizers; llama.cpp's bound
RENAMED = 0.01  # maximum share of ids with different names: related models rename special tokens


def known_tokens(lm: CausalLM, tokens: Tensor) -> Tensor:
    """The tokens, with ids beyond the draft model's vocabulary replaced by its last id."""
    return tokens.clamp_max(lm.vocab_size - 1)


def unread_text(lm: CausalLM, tokens: Tensor, counts: Sequence[int], root: Tensor) -> tuple[Tensor, RowInts]:
    """Tokens up to the root that a draft model with a KV cache has not read.

    Args:
        lm: the draft model.
        tokens: (B, M) as in `Drafter.advance`.
        counts: (B,) as in `Drafter.advance`.
        root: (B,) the new roots.

    Returns:
        (B, n) right-padded tokens, and the place of each root among them.
    """
    place = RowInts.of(counts)
    if lm.cache.store.begun:  # tokens[:, 0] is the previous root, already in the cache
        tokens, place = tokens[:, 1:], place.plus(-1)
    root = root[:, None]
    text = torch.cat([tokens, root], 1).scatter(1, place.on(root.device)[:, None], root)
    return known_tokens(lm, text), place


def fit_vocabulary(logits: Tensor, target: Target) -> Tensor:
    """(..., V') -> (..., V) logits of the target's size: cut, or padded with -inf."""
    missing = target.vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def share_vocabulary(head: Head, target: Target) -> Head:
    """The head over the ids that the target also has; further ids are padding."""
    target_size, size = target.vocab_size, len(head.weight)
    if size < target_size:
        return replace(head, d2t=torch.arange(size, device=head.weight.device))
    bias = None if head.bias is None else head.bias[:target_size]
    return head if size == target_size else replace(head, weight=head.weight[:target_size], bias=bias)


def check_vocabulary(
    model: PreTrainedModel, target: Target, path: str, revision: str | None, advice: str = ""
) -> None:
    """Check that a draft model has the target's vocabulary; `advice` ends the error message.

    Raises:
        UserError: the tokenizers differ or, without tokenizers, the sizes of the heads differ by more
            than padding.
    """
    problem = ""
    names = _vocab(path, revision)
    target_names = _vocab(target.model.name_or_path or "", getattr(target.model.config, "_commit_hash", None))
    size = model.config.get_text_config().vocab_size
    if names and target_names:
        differences = sum(target_names.get(i) != name for i, name in names.items())
        if differences > RENAMED * len(names):
            problem = f"{differences} of {len(names)} token ids differ from the target's tokenizer"
    elif abs(size - target.vocab_size) > PADDING:
        problem = f"its vocabulary has {size} ids, the target's {target.vocab_size}"
    if problem:
        raise UserError(
            f"{OPTION}={path}: {problem}; a draft model must share the target's vocabulary{advice}"
        )


def _vocab(path: str, revision: str | None) -> dict[int, str]:
    """Token of each id in a model's tokenizer; empty without one."""
    try:
        vocabulary = load_tokenizer(path, revision).get_vocab() if path else {}
    except UserError:
        vocabulary = {}
    return {i: token for token, i in vocabulary.items()}

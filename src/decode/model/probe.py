"""Checks what can be done with a model class: train for it, replay acceptance, decode it losslessly.

The probe builds a small random copy of the model (same class, few layers, short window, fp32). For decoding
it compares two rows of different lengths, a five-node tree, a cache compaction and the next token with plain
forward passes. A model that ignores masks or positions, or whose state cannot be rolled back, fails here. For
such a model it compares padded texts, and the model's own cache, with texts that are read alone.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from decode import draft as draft_module
from decode.draft import Draft
from decode.errors import UserError
from decode.hardware import cache_folder
from decode.model import cache as cache_module
from decode.model import causal_lm as lm_module
from decode.model import fused_forward as fused_module
from decode.model.abilities import Abilities, why_no_rollback
from decode.model.causal_lm import CausalLM, record_inputs
from decode.model.own_cache import OwnCache
from decode.model.target import Target

TOLERANCE = 1e-4  # relative, fp32


def probe(lm: CausalLM, what: str = "target") -> None:
    """Check that a model class can be decoded losslessly; see `find_abilities`.

    Args:
        lm: a target, or a draft model, whose cache is rolled back in the same way.
        what: name of the model in errors.

    Raises:
        UserError: it cannot; the text names the failed check.
    """
    find_abilities(lm, what).check_decode(f"{what}: {type(lm.model).__name__}")


def find_abilities(lm: CausalLM, what: str = "target") -> Abilities:
    """Find out what can be done with a model: its class on a small random copy, the head on its weights.

    Args:
        lm: a target or draft model; its `abilities` are set.
        what: name of the model in errors.

    Raises:
        UserError: its logits are not its head's, so that nothing can be done with it.
    """
    _check_head(lm, f"{what}: {type(lm.model).__name__}")
    failure = why_no_rollback(lm.config) or _why_undecodable(lm)
    lm.abilities = Abilities(*_forward_failures(lm), failure, own_cache=True) if failure else Abilities()
    return lm.abilities


def _why_undecodable(lm: CausalLM) -> str:
    """The first failure of decoding on a small copy; a class that passed is remembered."""
    marker = _marker(lm)
    if marker.exists():
        return ""
    if not (failure := _attempt(lambda: _compare(_small_copy(lm)))):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return failure


def _forward_failures(lm: CausalLM) -> tuple[str, str]:
    """What speaks against training for a model, and against replay; see `Abilities`."""
    train = _attempt(lambda: _compare_padded(_small_copy(lm)))
    return train, train or _attempt(lambda: _compare_own_cache(_small_copy(lm)))


def _attempt(check: Callable[[], str]) -> str:
    """The failure that a check returns or raises, as words of the probe."""
    try:
        failure = check()
    except Exception as error:  # third-party model code may raise anything
        first = (str(error).splitlines() or [""])[0][:120]
        failure = f"raised {type(error).__name__} ({first})"
        if isinstance(error, UserError):
            failure = f"found that {first.removeprefix('target: ').removesuffix('; not supported')}"
    return failure and f"the probe {failure}"


@torch.no_grad()
def _check_head(lm: CausalLM, name: str) -> None:
    """Compare the model's logits with those of `Head` from its last hidden state."""
    tokens = torch.arange(1, 9, device=lm.device)[None] % lm.vocab_size
    try:
        expected = lm.model(input_ids=tokens, use_cache=False).logits.float()
        logits = lm.head(lm.base(input_ids=tokens, use_cache=False).last_hidden_state).float()
    except Exception as error:  # third-party model code may raise anything
        first = (str(error).splitlines() or [""])[0][:120]
        raise UserError(
            f"{name} cannot read a text here: it raised {type(error).__name__} ({first})"
        ) from None
    if _relative_error(logits, expected) > (TOLERANCE if lm.dtype.itemsize >= 4 else 2e-2):
        raise UserError(
            f"{name}'s logits differ from its head applied to its last hidden state "
            f"(off by {_relative_error(logits, expected):.0e}); only scale, bias and soft cap are supported"
        )


def _small_copy(lm: CausalLM) -> CausalLM:
    """A random model of the same class with few layers, in fp32."""
    config = copy.deepcopy(lm.model.config)
    text = config.get_text_config()
    text.vocab_size = 128
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    kinds = getattr(text, "layer_types", None)
    # Enough layers for every layer type, and at least two, so that states pass between layers.
    count = 2 if not kinds else max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)
    text.num_hidden_layers = min(count, text.num_hidden_layers)
    if kinds:
        with suppress(AttributeError):  # some classes derive them from other settings
            text.layer_types = kinds[: text.num_hidden_layers]
    if getattr(text, "sliding_window", None):
        text.sliding_window = 4  # shorter than the probe's rows, so that the window has an effect
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        small = type(lm.model)(config).float().requires_grad_(False)
    finally:
        torch.random.set_rng_state(state)
    for weight in small.parameters():  # with the small default init, errors would be below the tolerance
        if weight.dim() > 1:
            weight.data.mul_(3)
    return CausalLM(small.eval())


@torch.inference_mode()
def _compare(lm: CausalLM) -> str:
    """Run the operations of decoding; returns the first failure, or an empty string."""
    prompts = [[5, 9, 2, 7, 3, 11, 8], [4, 6, 10]]
    tokens = torch.tensor([prompts[0], prompts[1] + [0] * 4])
    lm.start(2, 32)
    last = lm.forward(tokens)
    for row, prompt in enumerate(prompts):
        if _differs(lm, last[row, len(prompt) - 1], prompt):
            return "found wrong rows for a padded prompt"
    lm.keep([len(p) for p in prompts])
    nodes = torch.tensor([[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]])
    parents = torch.tensor([[-1, -1, 0, 1, 2], [-1, 0, 0, 1, 3]])
    slots = torch.cat([torch.tensor([[22], [23]]), nodes], 1)
    ancestors = Draft(nodes, parents, depth=4).ancestors()
    last = lm.forward(slots, ancestors)
    for row, prompt in enumerate(prompts):
        for slot in range(6):
            path = slots[row][ancestors[row, slot]].tolist()
            if _differs(lm, last[row, slot], prompt + path):
                return "found wrong rows inside a draft tree (masks or positions are not honoured)"
    lm.keep([4, 3], torch.tensor([[0, 1, 3, 5], [0, 1, 3, 0]]))
    last = lm.forward(torch.tensor([[24], [25]]))
    accepted = [[22, 12, 14, 16], [23, 17, 19]]
    for row, prompt in enumerate(prompts):
        if _differs(lm, last[row, 0], [*prompt, *accepted[row], 24 + row]):
            return "found wrong rows after a rejection (the cache cannot be compacted)"
    lm.select([0])
    lm.keep([1])
    text = [*prompts[0], *accepted[0], 24]
    for scratch, token in enumerate([26, 27]):  # these run without a mask
        last = lm.forward(torch.tensor([[token]]), scratch=scratch)
        text.append(token)
        if _differs(lm, last[0, 0], text):
            return "found wrong rows after unsettled tokens"
    return ""


@torch.inference_mode()
def _compare_padded(lm: CausalLM) -> str:
    """Read texts as training and replay do, padded on the right; the first failure, or an empty string."""
    prompts = [[5, 9, 2, 7, 3, 11, 8, 12, 13, 14, 15, 16], [4, 6, 10]]
    tokens = torch.tensor([prompts[0], prompts[1] + [0] * 9])
    inputs = dict.fromkeys(range(len(lm.layers)), tokens[:0])
    with record_inputs(lm.layers, inputs):
        last = lm.base(input_ids=tokens, use_cache=False).last_hidden_state
    for layer, entering in inputs.items():
        if entering.shape != last.shape:
            return f"found hidden states of shape {tuple(entering.shape)} entering layer {layer}"
    for row, prompt in enumerate(prompts):
        for length in range(1, len(prompt) + 1):
            if _differs(lm, last[row, length - 1], prompt[:length]):
                return "found rows that depend on later tokens or on padding"
    return ""


@torch.inference_mode()
def _compare_own_cache(lm: CausalLM) -> str:
    """Write as `decode.generation.forward_only` does; the first failure, or an empty string."""
    texts = [[5, 9, 2, 7, 3, 11, 8, 12, 13, 14], [4, 6, 10, 17, 18, 19, 20, 21, 22, 23]]
    cache, begin = OwnCache(lm.base, lm.head.weight), 3
    last = cache.read(torch.tensor([text[:begin] for text in texts]))[:, -1]
    for length in range(begin, len(texts[0])):
        for hidden, text in zip(last, texts, strict=True):
            if _differs(lm, hidden, text[:length]):
                return "found wrong rows through the model's own cache"
        if length == 7:
            cache.select([1])
            texts = texts[1:]
        last = cache.read(torch.tensor([text[length : length + 1] for text in texts]))[:, -1]
    return ""


def check_packing(target: Target) -> None:
    """Check that packed and padded rows give the same hidden states, on a small copy and on the model.

    Raises:
        UserError: they differ.
    """
    try:
        same = _packing_error(Target(_small_copy(target).model)) <= TOLERANCE
        same = same and _packing_error(target) <= (TOLERANCE if target.dtype.itemsize >= 4 else 5e-2)
    except Exception as error:  # third-party model code may raise anything
        failure = f"raises {type(error).__name__}"
    else:
        if same:
            return
        failure = "its outputs differ"
    name = type(target.model).__name__
    raise UserError(f"packing=true: {name} cannot read rows packed ({failure}); use packing=false")


def _packing_error(target: Target) -> float:
    """Largest relative error of two rows; the first is longer than the window of a small copy."""
    lengths = (13, 5)
    tokens = (torch.arange(2 * lengths[0], device=target.device) + 5).view(2, -1) % target.vocab_size
    padded, packed = (target.read(tokens, n).last.float() for n in (None, lengths))
    rows = [(padded[i, :n], packed[i, :n]) for i, n in enumerate(lengths)]
    return max(float((actual - expected).norm() / expected.norm()) for expected, actual in rows)


def _differs(lm: CausalLM, hidden: torch.Tensor, prefix: list[int]) -> bool:
    expected = lm.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
    return not _relative_error(lm.head(hidden), expected) <= TOLERANCE  # True for NaN


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _marker(lm: CausalLM) -> Path:
    """File that marks this class, configuration and code as probed, so that later runs skip the probe."""
    config: dict[str, Any] = lm.model.config.to_diff_dict()
    sources = [
        inspect.getsource(m)
        for m in (cache_module, draft_module, fused_module, lm_module, sys.modules[__name__])
    ]
    # private API: transformers has no public way to ask for the attention kernel.
    kernel = lm.config._attn_implementation  # not in the diff; kernels use different masks
    versions = (transformers.__version__, torch.__version__)
    facts = [type(lm.model).__qualname__, *versions, kernel, config, sources]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "probed" / key

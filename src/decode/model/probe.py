"""Checks of a model class: can it be used for training, replay and lossless decoding?

The probe builds a small random copy of the model (same class, one layer of each kind, fp32). Windows,
blocks and other sizes in tokens are shortened, so that the probe's texts exceed them three times. For
decoding it compares plain forward passes with two rows of different lengths, a five-node tree, a cache
compaction and the next token. A model that ignores masks or positions, or cannot roll back its state,
fails. The probe then compares single texts with padded texts and with the model's own cache.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from decode import draft as draft_module
from decode.draft import Draft
from decode.errors import UserError
from decode.hardware import cache_folder
from decode.model import cache as cache_module
from decode.model import causal_lm as lm_module
from decode.model import fused_forward as fused_module
from decode.model import own_cache as own_cache_module
from decode.model.abilities import Abilities, why_no_rollback
from decode.model.causal_lm import CausalLM, record_inputs
from decode.model.own_cache import OwnCache
from decode.model.target import Target

TOLERANCE = 1e-4  # relative, fp32
SHORT = 4  # tokens in a window, block or period of a small copy; texts of 13 tokens exceed it three times
LONGEST = 20  # tokens of the probe's texts; some test models have no longer context
# Names of configuration fields that count tokens, and exceptions that count something else.
IN_TOKENS = re.compile(
    "window|block|chunk|period|interval|stride|local|sparse|compress|dilat|span|segment|landmark|budget|every|recent"
    "|index.*top_?k"
)
NOT_IN_TOKENS = re.compile(
    "layer|expert|moe|mlp|ffn|feed_forward|head|vocab|hidden|dim|intermediate|multiple|types|prob|num_blocks"
    "|n_blocks|rope|sparse_step|pattern"
)
BEHIND = re.compile("mlp|moe|expert|ffn|feed_forward|router|gate")  # parts of a layer after attention


def probe(lm: CausalLM, what: str = "target") -> None:
    """Check that a model class can be decoded losslessly; see `find_abilities`.

    Args:
        lm: a target, or a draft model (its cache is rolled back in the same way).
        what: model's name in errors.

    Raises:
        UserError: it cannot; the message names the failed check.
    """
    find_abilities(lm, what).check_decode(f"{what}: {type(lm.model).__name__}")


def find_abilities(lm: CausalLM, what: str = "target") -> Abilities:
    """Probe what a model can be used for: its class on a small random copy, the head on its weights.

    Args:
        lm: a target or draft model; its `abilities` are set.
        what: model's name in errors.

    Raises:
        UserError: the head applied to its last hidden state does not give its logits.
    """
    _check_head(lm, f"{what}: {type(lm.model).__name__}")
    failure = why_no_rollback(lm.config) or _why_undecodable(lm)
    lm.abilities = Abilities(*_forward_failures(lm), failure, own_cache=True) if failure else Abilities()
    return lm.abilities


def _why_undecodable(lm: CausalLM) -> str:
    """First failed check of decoding on a small copy; classes that passed are cached."""
    marker = _marker(lm)
    if marker.exists():
        return ""
    if not (failure := _check_copy(lm, _compare)):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return failure


def _forward_failures(lm: CausalLM) -> tuple[str, str]:
    """Failed checks of training and of replay; see `Abilities`."""
    train = _check_copy(lm, _compare_padded)
    return train, train or _check_copy(lm, _compare_own_cache)


def _check_copy(lm: CausalLM, compare: Callable[[CausalLM], str]) -> str:
    """Failed check of a small copy; if a copy without shortened fields passes, also names these fields."""
    failure = _attempt(lambda: compare(_small_copy(lm)))
    fields = _shorten(copy.deepcopy(lm.config)) if failure else []
    if fields and not _attempt(lambda: compare(_small_copy(lm, shortened=False))):
        failure += f" past its {', '.join(fields)}"
    return failure


def _attempt(check: Callable[[], str]) -> str:
    """Failure that a check returns or raises, in the probe's words."""
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
    """Compare the model's logits with `Head`'s from its last hidden state."""
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


def _small_copy(lm: CausalLM, shortened: bool = True) -> CausalLM:
    """A random model of the same class with few layers, in fp32.

    Args:
        lm: the model.
        shortened: whether to shorten windows; see `_shorten`.
    """
    config = copy.deepcopy(lm.model.config)
    text = config.get_text_config()
    text.vocab_size = 128
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        _set(text, name, None, 0)
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = _enough_layers(lm)
    if kinds:
        with suppress(AttributeError):  # some classes derive them from other settings
            text.layer_types = kinds[: text.num_hidden_layers]
    if shortened:
        _shorten(text)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        small = type(lm.model)(config).float().requires_grad_(False)
    finally:
        torch.random.set_rng_state(state)
    for weight in small.parameters():  # the small default init would hide errors below the tolerance
        if weight.dim() > 1:
            weight.data.mul_(3)
    return CausalLM(small.eval())


def _set(config: Any, name: str, *values: Any) -> None:
    """Set a field to the first of these values that the configuration accepts."""
    for value in values:
        with suppress(StrictDataclassError):
            setattr(config, name, value)
            return


def _enough_layers(lm: CausalLM) -> int:
    """Number of leading layers that include every kind; at least two, so that states pass between layers."""
    kinds = getattr(lm.config, "layer_types", None) or [""] * len(lm.layers)
    kinds = [(kind, _kind(layer)) for kind, layer in zip(kinds, lm.layers, strict=False)]
    return min(max(2, *(kinds.index(kind) + 1 for kind in set(kinds))), len(lm.layers))


def _kind(layer: nn.Module) -> frozenset[tuple[str, str]]:
    """Facts that distinguish the kinds of layers: classes of submodules, and their flags and names.

    Parts after attention read one token at a time and are omitted, because a copy of experts is large.
    """
    found = set[tuple[str, str]]()
    for place, part in layer.named_modules():
        flags = {n: str(v) for n, v in vars(part).items() if v is None or isinstance(v, bool | str)}
        found |= {(f"{place}.{name}", value) for name, value in flags.items() if not re.search(r"\d", value)}
        found.add((place, type(part).__name__))
    return frozenset(fact for fact in found if not BEHIND.search(fact[0]))


def _shorten(config: Any) -> list[str]:
    """Limit the fields of a text configuration that count tokens to `SHORT`; returns their names."""
    fields = []
    for name, value in config.to_dict().items():
        short = _shortened(value)
        if IN_TOKENS.search(name) and not NOT_IN_TOKENS.search(name) and short != value:
            # Choose one block, because several could be all of them.
            setattr(config, name, 1 if name.endswith(("blocks", "chunks")) else short)
            fields.append(name)
    return fields


def _shortened(value: Any) -> Any:
    """A number of tokens, or one per layer or kind, limited to `SHORT`; other values unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(_shortened(one) for one in value)
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    return min(value, SHORT) if type(value) is int else value


@torch.inference_mode()
def _compare(lm: CausalLM) -> str:
    """Run the operations of decoding; returns the first failure, or an empty string."""
    prompts = _texts(lm, 13, 9, more=7)  # with the tokens added below, both exceed a window three times
    tokens = _padded(prompts)
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
    """Read texts as training and replay do, padded on the right; returns the first failure, or ""."""
    prompts = _texts(lm, LONGEST, 13)
    tokens = _padded(prompts)
    inputs = dict.fromkeys(range(len(lm.layers)), tokens[:0])
    with record_inputs(lm.layers, inputs):
        last = lm.base(input_ids=tokens, use_cache=False).last_hidden_state
    for layer, entering in inputs.items():
        if entering.shape != last.shape:
            return f"found hidden states of shape {tuple(entering.shape)} entering layer {layer}"
    for row, prompt in enumerate(prompts):
        # At every remainder of windows and blocks.
        for length in {*range(1, SHORT + 1), *range(SHORT, len(prompt), SHORT - 1), len(prompt)}:
            if _differs(lm, last[row, length - 1], prompt[:length]):
                return "found rows that depend on later tokens or on padding"
    return ""


@torch.inference_mode()
def _compare_own_cache(lm: CausalLM) -> str:
    """Decode as `generation.forward_only` does; returns the first failure, or ""."""
    texts = _texts(lm, 14, 14)
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


def _texts(lm: CausalLM, *lengths: int, more: int = 0) -> list[list[int]]:
    """Texts of these lengths, shortened if the model's context has no room for `more` tokens after them."""
    room = LONGEST if lm.max_positions is None else lm.max_positions
    starts = (5, 60)
    texts = [
        [(start + 7 * i) % 128 for i in range(max(3, min(length, room - more)))]
        for start, length in zip(starts, lengths, strict=True)
    ]
    return texts


def _padded(texts: list[list[int]]) -> torch.Tensor:
    """(B, T) texts, padded on the right."""
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


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
    """Largest relative error of two packed rows, longer than three windows of a small copy."""
    lengths = (LONGEST, 13)
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
    """File that marks this class, configuration and code as probed, so that later runs skip it."""
    config: dict[str, Any] = lm.model.config.to_diff_dict()
    sources = [
        inspect.getsource(m)
        for m in (
            cache_module,
            draft_module,
            fused_module,
            lm_module,
            own_cache_module,
            sys.modules[__name__],
        )
    ]
    # private API: transformers has no public way to ask for the attention kernel.
    kernel = lm.config._attn_implementation  # not in the diff; kernels use different masks
    versions = (transformers.__version__, torch.__version__)
    facts = [type(lm.model).__qualname__, *versions, kernel, config, sources]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "probed" / key

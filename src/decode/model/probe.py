"""What a model class must be able to do before its outputs may be called lossless.

The probe builds a small random twin of the model (same class, few layers, short window, fp32) and
compares two ragged rows, a five-node tree, a compaction and the next token with plain forwards.
A model that ignores masks or positions, or whose state cannot be rolled back, fails here with one
line instead of producing wrong text later.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from decode import draft as draft_module
from decode.draft import Draft
from decode.errors import UserError
from decode.model import cache as cache_module
from decode.model import causal_lm as lm_module
from decode.model import fused_forward as fused_module
from decode.model.causal_lm import CausalLM
from decode.model.target import Target

TOLERANCE = 1e-4  # relative, fp32
KINDS = {"full_attention", "sliding_attention"}


def probe(lm: CausalLM, what: str = "target") -> None:
    """Check a model's class on a random twin, and its head on its own weights.

    Args:
        lm: a target, or a draft model, whose cache is rolled back in the same way.
        what: its name in errors.

    Raises:
        UserError: naming what the class cannot do.
    """
    name = type(lm.model).__name__
    other = set(getattr(lm.config, "layer_types", None) or ()) - KINDS
    if other:
        raise UserError(
            f"{what}: {name} has {', '.join(sorted(other))} layers, whose state cannot be rolled back "
            "after a rejection; full and sliding-window attention work"
        )
    seen = _memory(lm)
    try:
        _check_head(lm, f"{what}: {name}")
        if seen.exists():
            return
        wrong = _compare(_twin(lm))
    except UserError:
        raise
    except Exception as error:  # whatever a foreign model's code may raise is the probe's finding
        wrong = f"raised {type(error).__name__} ({(str(error).splitlines() or [''])[0][:120]})"
    if wrong:
        raise UserError(
            f"{what}: {name} cannot be decoded losslessly here: the probe {wrong}; models with rotary "
            "or learned positions and full or sliding-window attention work"
        )
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.touch()


@torch.no_grad()
def _check_head(lm: CausalLM, name: str) -> None:
    tokens = torch.arange(1, 9, device=lm.device)[None] % lm.vocab_size
    want = lm.model(input_ids=tokens, use_cache=False).logits.float()
    got = lm.head(lm.base(input_ids=tokens, use_cache=False).last_hidden_state).float()
    if _relative(got, want) > (TOLERANCE if lm.dtype.itemsize >= 4 else 2e-2):
        raise UserError(
            f"{name}'s logits are not what its head makes of its last hidden state "
            f"(off by {_relative(got, want):.0e}); scale, bias and soft cap are known, this is none"
        )


def _twin(lm: CausalLM) -> CausalLM:
    config = copy.deepcopy(lm.model.config)
    text = config.get_text_config()
    text.vocab_size = 128
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    kinds = getattr(text, "layer_types", None)
    # Enough layers to meet every kind, and one more so that states pass between layers.
    count = 2 if not kinds else max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)
    text.num_hidden_layers = min(count, text.num_hidden_layers)
    if kinds:
        text.layer_types = kinds[: text.num_hidden_layers]
    if getattr(text, "sliding_window", None):
        text.sliding_window = 4  # shorter than the probe's rows, so that the window bites
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        twin = type(lm.model)(config).float().requires_grad_(False)
    finally:
        torch.random.set_rng_state(state)
    for weight in twin.parameters():  # default inits are so small that errors would hide
        if weight.dim() > 1:
            weight.data.mul_(3)
    return CausalLM(twin.eval())


@torch.inference_mode()
def _compare(twin: CausalLM) -> str:
    prompts = [[5, 9, 2, 7, 3, 11, 8], [4, 6, 10]]
    tokens = torch.tensor([prompts[0], prompts[1] + [0] * 4])
    twin.start(2, 32)
    last = twin.forward(tokens)
    for row, prompt in enumerate(prompts):
        if _differs(twin, last[row, len(prompt) - 1], prompt):
            return "found wrong rows for a padded prompt"
    twin.keep([len(p) for p in prompts])
    nodes = torch.tensor([[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]])
    parents = torch.tensor([[-1, -1, 0, 1, 2], [-1, 0, 0, 1, 3]])
    slots = torch.cat([torch.tensor([[22], [23]]), nodes], 1)
    reach = Draft(nodes, parents, depth=4).ancestors()
    last = twin.forward(slots, reach)
    for row, prompt in enumerate(prompts):
        for slot in range(6):
            path = slots[row][reach[row, slot]].tolist()
            if _differs(twin, last[row, slot], prompt + path):
                return "found wrong rows inside a draft tree (masks or positions are not honoured)"
    twin.keep([4, 3], torch.tensor([[0, 1, 3, 5], [0, 1, 3, 0]]))
    last = twin.forward(torch.tensor([[24], [25]]))
    kept = [[22, 12, 14, 16], [23, 17, 19]]
    for row, prompt in enumerate(prompts):
        if _differs(twin, last[row, 0], [*prompt, *kept[row], 24 + row]):
            return "found wrong rows after a rejection (the cache cannot be compacted)"
    twin.select([0])
    twin.keep([1])
    text = [*prompts[0], *kept[0], 24]
    for scratch, token in enumerate([26, 27]):  # these need no mask
        last = twin.forward(torch.tensor([[token]]), scratch=scratch)
        text.append(token)
        if _differs(twin, last[0, 0], text):
            return "found wrong rows behind unsettled tokens"
    return ""


def check_packing(target: Target) -> None:
    """Whether rows that are read packed are what they are padded, on a twin and on the model itself.

    Raises:
        UserError: they are not.
    """
    if target.compiled:
        raise UserError("packing=true: not with target.compile=true, which compiles for padded rows")
    try:
        same = _packed_off(Target(_twin(target).model)) <= TOLERANCE
        same = same and _packed_off(target) <= (TOLERANCE if target.dtype.itemsize >= 4 else 5e-2)
    except Exception as error:  # a foreign model's code may raise anything; that it does is the finding
        wrong = f"raises {type(error).__name__}"
    else:
        if same:
            return
        wrong = "says other things of them"
    name = type(target.model).__name__
    raise UserError(f"packing=true: {name} cannot read rows packed ({wrong}); use packing=false")


def _packed_off(target: Target) -> float:
    """Relative difference of two ragged rows, the larger one; the first is longer than a twin's window."""
    lengths = (13, 5)
    tokens = (torch.arange(2 * lengths[0], device=target.device) + 5).view(2, -1) % target.vocab_size
    padded, packed = (target.read(tokens, given).last.float() for given in (None, lengths))
    rows = [(padded[i, :n], packed[i, :n]) for i, n in enumerate(lengths)]
    return max(float((got - want).norm() / want.norm()) for want, got in rows)


def _differs(twin: CausalLM, got: torch.Tensor, prefix: list[int]) -> bool:
    want = twin.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
    return not _relative(twin.head(got), want) <= TOLERANCE  # NaN differs


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def _memory(lm: CausalLM) -> Path:
    """A marker for this class, configuration and code; the second run of a model skips the probe."""
    config: dict[str, Any] = lm.model.config.to_diff_dict()
    sources = [
        inspect.getsource(m)
        for m in (cache_module, draft_module, fused_module, lm_module, sys.modules[__name__])
    ]
    # private API: transformers has no public way to ask for the attention kernel.
    kernel = lm.config._attn_implementation  # not in the diff, and another kernel reads another mask
    versions = (transformers.__version__, torch.__version__)
    facts = [type(lm.model).__qualname__, *versions, kernel, config, sources]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "foredraft" / "probed" / key

"""Account of config.json: which keys its configuration class knows, and which values it took."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from decode.model.files.account import Account
from decode.model.files.generation import remark_on_ends

ROPE_LOG = "transformers.modeling_rope_utils"
SHARE = "partial_rotary_factor"
ROPE = {"rope_theta", "rope_scaling", "rope_parameters", SHARE}
# Keys that every model needs and that cannot be derived from the weights' shapes.
NOT_IN_SHAPES = re.compile(
    r"(_eps|_epsilon)$|^(hidden_act|hidden_activation|activation_function|num_attention_heads|n_head|"
    r"rope_parameters)$"
)
# Keys without an effect on any model's computation.
RECORDS = {
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation_autoset",
    "architectures",
    "auto_map",
    "model_type",
    "pretraining_tp",
    "use_cache",
    "unsloth_fixed",
    "unsloth_version",
    "model_max_length",
    "quantization_config",
    "task_specific_params",
    "gradient_checkpointing",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "initializer_range",
    "finetuning_task",
    "tokenizer_class",
    "transformers.js_config",
    "torchscript",
}
# How model code reads a key: config.key, getattr(config, "key").
READ_KEY = re.compile(r"""config\.(\w+)|getattr\(\s*[\w.]*config,\s*["'](\w+)["']""")
# Generation options that older versions of transformers wrote into config.json.
GENERATION_KEYS = {
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
}


def account_of_config(config: Any, raw: Mapping[str, Any], warnings: list[str]) -> Account:
    """Compare config.json with the configuration built from it.

    Args:
        config: configuration built from the file.
        raw: values of the file.
        warnings: transformers' warnings about rotary parameters; see `rope_warnings`.
    """
    account = Account("config.json")
    _add_keys(account, config, raw, "")
    _check_dtype(account, raw, "")
    _check_rope(account, config, raw)
    text = config.get_text_config()
    ends = getattr(text, "eos_token_id", None)
    if rows := getattr(text, "vocab_size", None):
        remark_on_ends(account, ends if isinstance(ends, list) else [] if ends is None else [ends], rows)
    for line in dict.fromkeys(" ".join(line.split())[:200] for line in warnings):
        account.remark(f"transformers says: {line}", ["rope_parameters"])
    if raw.get("transformers_weights"):
        account.refuse(
            "names another file of weights, which engines do not read; rename that file to "
            "model.safetensors and remove the key",
            ["transformers_weights"],
        )
    made = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = raw.get("architectures") or []
    others = [str(name) for name in named if name != made] if isinstance(named, list) else []
    if made and others and others[0].endswith("ForCausalLM") and not hasattr(config, "auto_map"):
        account.remark(
            f"architectures names another class than {made}, which model_type={config.model_type} makes; "
            "engines go by architectures",
            others[:1],
        )
    return account


def _add_keys(account: Account, config: PreTrainedConfig, raw: Mapping[str, Any], prefix: str) -> None:
    """Add the keys of a configuration and of nested configurations."""
    default = _default(config)
    inner = {key for key in raw if isinstance(getattr(config, key, None), PreTrainedConfig)}
    for key in inner:
        if isinstance(raw[key], dict):
            _add_keys(account, getattr(config, key), raw[key], f"{prefix}{key}.")
    aliases = set(getattr(config, "attribute_map", {}))
    rope = ROPE if hasattr(default, "rope_parameters") else set()
    known = [key for key in raw if hasattr(default, key) or key in aliases | rope | inner]
    unknown = [key for key in raw if key not in known]
    account.count("keys", len(known))
    account.remark(
        "not in the file; the class's own value is taken",
        [f"{prefix}{key}={getattr(default, key)}" for key in _absent(default, raw)],
    )
    diffs = {key for key in known if key not in rope | inner | RECORDS and not _equal(config, key, raw[key])}
    if raw.get("use_sliding_window") is False and "sliding_window" in diffs:
        account.ignore("not used, because use_sliding_window is false", [f"{prefix}sliding_window"])
        diffs.remove("sliding_window")
    account.remark(
        "the class replaced the value by another", [f"{prefix}{key}" for key in known if key in diffs]
    )
    reasons = {
        "a record of how the model was made, with which nothing is computed": (
            lambda key: key in RECORDS or key.startswith("_")
        ),
        "the id of a token that the tokenizer names": lambda key: key.endswith("_token_id"),
        "null": lambda key: raw[key] is None,
        "an option of generation, which is chosen by this program's options": (
            lambda key: key in GENERATION_KEYS
        ),
    }
    for reason, applies in reasons.items():
        account.ignore(reason, [f"{prefix}{key}" for key in unknown if applies(key)])
        unknown = [key for key in unknown if not applies(key)]
    if not _is_builtin(config):
        account.ignore("for the code that comes with the model", [f"{prefix}{key}" for key in unknown])
        return
    read = _keys_in_code(config.model_type)
    account.count("keys", sum(key in read for key in unknown))
    unknown = [key for key in unknown if key not in read]
    account.remark(
        f"not read by {type(config).__name__}; if the model needs them, it is computed without",
        [f"{prefix}{key}" for key in unknown],
    )


def _is_builtin(config: Any) -> bool:
    """Whether a configuration class is transformers' own, not the model's remote code."""
    return type(config).__module__.startswith("transformers.")


def _absent(default: Any, raw: Mapping[str, Any]) -> list[str]:
    """Keys missing from the file that the weights' shapes cannot tell."""
    aliases = getattr(default, "attribute_map", {})
    given = {*raw, *(aliases[key] for key in raw if key in aliases)}
    absent = [key for key in vars(default) if NOT_IN_SHAPES.search(key) and key not in given]
    return [key for key in absent if key != "rope_parameters" or not ROPE & given]


def _keys_in_code(kind: str) -> frozenset[str]:
    """Keys that the code of a model type reads, whether or not its configuration declares them."""
    return frozenset(key for keys in READ_KEY.findall(_code(kind)) for key in keys if key)


@lru_cache(maxsize=64)
def _code(kind: str) -> str:
    """Source code of a model type."""
    tables: Any = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    names = [table[kind] for table in tables if kind in table]
    made = [getattr(transformers, name if isinstance(name, str) else name[0]) for name in names]
    return "\n".join(inspect.getsource(sys.modules[module]) for module in {cls.__module__ for cls in made})


def _default(config: PreTrainedConfig) -> Any:
    """A configuration with default values only; the class itself if it needs some."""
    try:
        return type(config)()
    except Exception:  # remote classes may raise anything
        return type(config)


def _equal(config: Any, key: str, value: Any) -> bool:
    """Whether a plain value in the file equals the configuration's."""
    if value is None or not isinstance(value, bool | int | float | str):
        return True
    here = getattr(config, key, value)
    return not isinstance(here, bool | int | float | str | None) or here == value


def _check_dtype(account: Account, raw: Mapping[str, Any], prefix: str) -> None:
    """Refuse a dtype with different values under its two names, of which programs take one or the other."""
    values = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    kinds = [str(value).removeprefix("torch.") for value in values.values()]
    if len(set(kinds)) > 1:
        account.refuse(
            f"given twice with different values ({', '.join(kinds)}); keep the right one, in dtype",
            [" and ".join(f"{prefix}{name}" for name in values)],
        )
    for key, inner in raw.items():
        if isinstance(inner, dict):
            _check_dtype(account, inner, f"{prefix}{key}.")


def _check_rope(account: Account, config: Any, raw: Mapping[str, Any]) -> None:
    """Refuse rotary parameters that the class ignores or the file gives twice."""
    _check_rotated_share(account, config, raw)
    for values in (raw, raw.get("text_config")):
        if not isinstance(values, dict):
            continue
        first, second = values.get("rope_scaling"), values.get("rope_parameters")
        both = bool(first and second and first != second)
        theta = values.get("rope_theta")
        text = config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        read = rope.get("rope_theta")
        if both or (theta is not None and read is not None and theta != read):
            account.refuse(
                "given twice with different values; keep the right one, in rope_parameters",
                ["rope_scaling and rope_parameters" if both else "rope_theta"],
            )
        for scaling in (first, second):
            kinds = {scaling.get("type"), scaling.get("rope_type")} if isinstance(scaling, dict) else set()
            if len(kinds - {None}) > 1:
                account.refuse(
                    f"given twice with different values ({', '.join(sorted(map(str, kinds - {None})))}); "
                    "keep the right one",
                    ["type and rope_type of the scaling of positions"],
                )


def _check_rotated_share(account: Account, config: Any, raw: Mapping[str, Any]) -> None:
    """Refuse partial rotation of heads if the class rotates whole heads."""
    text = raw.get("text_config")
    places = [values for values in (raw, text) if isinstance(values, dict)]
    places += [
        values["rope_parameters"] for values in places if isinstance(values.get("rope_parameters"), dict)
    ]
    shares = {values[SHARE] for values in places if isinstance(values.get(SHARE), int | float)}
    if len(shares) > 1:
        account.refuse("given twice with different values; keep the right one, in rope_parameters", [SHARE])
    elif shares - {1} and _is_builtin(config) and SHARE not in _code(config.get_text_config().model_type):
        account.refuse(
            f"{type(config).__name__}'s model rotates whole heads; name another model_type", [SHARE]
        )


class _Lines(logging.Handler):
    """Collects warnings as lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


@contextmanager
def rope_warnings() -> Iterator[list[str]]:
    """Collect transformers' warnings about rotary parameters."""
    log, handler = logging.getLogger(ROPE_LOG), _Lines()
    level, propagate, disabled = log.level, log.propagate, log.disabled
    log.setLevel(logging.WARNING)
    # Hydra's logging configuration disables existing loggers.
    log.propagate, log.disabled = False, False
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate, log.disabled = propagate, disabled

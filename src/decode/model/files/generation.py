"""Account of generation_config.json: end tokens are read, options that engines would apply are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.model.files.account import Account

READ = ("eos_token_id", "bos_token_id", "pad_token_id")
# Option -> values that have no effect; None never has one.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (1, 1.0),
    "top_k": (0, -1),
    "top_p": (1, 1.0),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
}
PROCESSORS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([], ""),
    "watermarking_config": ({},),
    "dola_layers": (),
}
HARMLESS = [
    "transformers_version",
    "_from_model_config",
    "_commit_hash",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_legacy_cache",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "max_length",
    "max_new_tokens",
    "max_time",
    "do_sample",
    "num_return_sequences",
    "early_stopping",
    "length_penalty",
    "renormalize_logits",
    "remove_invalid_values",
    "trust_remote_code",
    "decoder_start_token_id",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "low_memory",
    "disable_compile",
    "compile_config",
    "token_healing",
    "chat_format",
    "max_window_size",
    "prefill_chunk_size",
    "use_mtp",
    "speculation_type",
]


def account_of_generation(raw: Mapping[str, Any], rows: int) -> Account:
    """Account of a model's generation_config.json.

    Args:
        raw: values of the file; empty if there is none.
        rows: of the head, V.
    """
    account = Account("generation_config.json")
    account.count("keys", sum(key in raw for key in READ))
    account.ignore("chosen by this program's options, or without an effect on a text", _set(raw, HARMLESS))
    account.remark(
        "engines apply it by default, and here only the options of this program are applied",
        changing(raw, SAMPLING),
    )
    account.remark(
        "changes what transformers writes and some engines do, and is not applied here",
        changing(raw, PROCESSORS),
    )
    known = {*READ, *SAMPLING, *PROCESSORS, *HARMLESS}
    account.remark("unknown, and not applied", [key for key in raw if key not in known and _given(raw[key])])
    ends = raw.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    wrong = [end for end in ends if not isinstance(end, int) or isinstance(end, bool)]
    account.refuse(
        "no token ids; give a number or a list of numbers", [f"eos_token_id {end!r}" for end in wrong]
    )
    remark_on_ends(account, [end for end in ends if end not in wrong], rows)
    return account


def remark_on_ends(account: Account, ends: Sequence[int], rows: int) -> None:
    """Remark on end tokens that are not in the model's vocabulary."""
    account.remark(
        f"no token of the {rows:,} that the model has, so it ends nothing",
        [f"eos_token_id {end}" for end in ends if not 0 <= end < rows],
    )


def changing(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Options with an effect, as `name=value`; `neutral` lists values without one."""
    return [
        f"{key}={raw[key]}"
        for key, same in neutral.items()
        if raw.get(key) is not None and raw[key] not in same
    ]


def _set(raw: Mapping[str, Any], keys: list[str]) -> list[str]:
    return [key for key in keys if key in raw]


def _given(value: Any) -> bool:
    return value is not None and value is not False

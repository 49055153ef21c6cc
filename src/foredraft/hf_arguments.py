"""Arguments of transformers' `generate`: which ones a drafter decodes with, and which ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from decode.errors import UserError
from decode.generation.types import Until

CACHE = "the decoder has a cache of its own"
OUTPUTS = "only the sequences are returned"
DRAFTED = "the plan says how much is drafted: foredraft.assist(drafter, plan=...)"
BEAMS = "a draft continues one text, and beam search keeps several"

# Fields of GenerationConfig with their effect in `generate`. All others must have their default.
SUPPORTED = {
    # length and ends
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings",
    # sampling
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff",
    # logits
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "watermarking_config",
    # tokens and outputs
    "pad_token_id", "bos_token_id", "eos_token_id", "num_return_sequences", "return_dict_in_generate",
}  # fmt: skip
# Fields without an effect in `generate`, of one text by a decoder: metadata, and numbers of beam search.
WITHOUT_EFFECT = {
    "transformers_version", "_from_model_config", "_original_object_hash", "_commit_hash",
    "decoder_start_token_id", "length_penalty", "early_stopping", "disable_compile",
}  # fmt: skip
WHY = {
    "num_beams": BEAMS,
    "num_beam_groups": BEAMS,
    "diversity_penalty": BEAMS,
    "constraints": BEAMS,
    "force_words_ids": BEAMS,
    "use_cache": CACHE,
    "cache_implementation": CACHE,
    "cache_config": CACHE,
    "max_cache_len": CACHE,
    "prefill_chunk_size": CACHE,
    "output_scores": OUTPUTS,
    "output_logits": OUTPUTS,
    "output_attentions": OUTPUTS,
    "output_hidden_states": OUTPUTS,
    "prompt_lookup_num_tokens": DRAFTED,
    "max_matching_ngram_size": DRAFTED,
    "num_assistant_tokens": DRAFTED,
    "num_assistant_tokens_schedule": DRAFTED,
    "assistant_confidence_threshold": DRAFTED,
    "use_mtp": DRAFTED,
    "speculation_type": DRAFTED,
    "guidance_scale": "it runs the model a second time for each token",
    "token_healing": "it changes the prompt; heal it before the call",
    "remove_invalid_values": "a model with logits that are not finite is refused",
    "compile_config": "passes of the decoder are not compiled",
}
# Arguments of the model that `generate` adds or that say the same as the prompt.
MODEL_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def check_config(config: GenerationConfig) -> None:
    """Check that no field asks for what is not done here.

    The fields are those of the installed transformers, so that a new field is refused until it is known.

    Raises:
        UserError: a field that is not supported has another value than its default.
    """
    # private API: transformers has no public table of the defaults that `generate` fills in.
    defaults = GenerationConfig._get_default_generation_params()
    for name in vars(GenerationConfig()):
        if name in SUPPORTED or name in WITHOUT_EFFECT:
            continue
        value, default = getattr(config, name, None), defaults.get(name)
        if (value is not None and value is not False and value != default) or (value is False and default):
            reason = WHY.get(name, "no drafter is known to be lossless with it; leave it out")
            raise UserError(
                f"generate: {name}={value!r} with custom_generate=foredraft.assist: {reason}"[:240]
            )


def check_call(arguments: Mapping[str, Any]) -> None:
    """Check arguments of `generate` that are in no configuration.

    Raises:
        UserError: an argument that is not supported.
    """
    if arguments.get("assistant_model") is not None:
        raise UserError("generate: assistant_model with custom_generate=foredraft.assist: give one of them")
    if arguments.get("synced_gpus"):
        raise UserError(
            "generate: synced_gpus=True: processes of foredraft's decoder do not wait for each other; "
            "decode with a model that each process has whole"
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts of a batch, padded on the left.

    Attributes:
        ids: (B, n), with padding.
        padding: (B,) padding tokens of each row.
        texts: (B,) the other tokens.
    """

    ids: Tensor
    padding: list[list[int]]
    texts: list[list[int]]


def read_prompts(input_ids: Tensor, arguments: Mapping[str, Any]) -> Prompts:
    """Prompts without their padding.

    Args:
        input_ids: (B, n).
        arguments: of the model, from `generate`.

    Raises:
        UserError: an argument of the model that is not the text, padding that is not on the left, a cache
            that is not empty.
    """
    for name, value in arguments.items():
        if value is not None and name not in MODEL_ARGUMENTS:
            raise UserError(f"generate: {name} is not read by foredraft's decoder; give only input_ids")
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise UserError(f"generate: past_key_values: {CACHE}; give the whole text as input_ids")
    if not input_ids.shape[1]:
        raise UserError("generate: there are no input_ids; inputs_embeds are not read by foredraft's decoder")
    mask = arguments.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    if not real[:, -1].all() or (real[:, 1:] < real[:, :-1]).any():
        raise UserError(
            "generate: attention_mask: pad prompts on the left: tokenizer(..., padding_side='left')"
        )
    _check_positions(arguments.get("position_ids"), real)
    pads = (~real).sum(1).tolist()
    rows = list(zip(input_ids.tolist(), pads, strict=True))
    return Prompts(input_ids, [row[:pad] for row, pad in rows], [row[pad:] for row, pad in rows])


def _check_positions(given: Tensor | None, real: Tensor) -> None:
    """Check that (B, n) positions count the tokens that are (B, n) real."""
    if given is None:
        return
    expected = (real.long().cumsum(1) - 1).clamp_min(0)
    if given.shape[-1] != real.shape[1] or not torch.equal(
        given.to(real.device).expand_as(expected).where(real, 0), expected.where(real, 0)
    ):
        raise UserError("generate: position_ids: the decoder counts tokens from 0; leave them out")


@dataclass(frozen=True)
class Ends:
    """When a text ends.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        stop: end tokens.
        rest: other criteria, asked after every token.
    """

    max_new_tokens: int
    stop: list[int]
    rest: StoppingCriteriaList

    def until(self, prompts: Prompts) -> Until | None:
        """Factory of the stop tests of these prompts, in order; None if end tokens and length are all."""
        if not self.rest:
            return None
        rows: Iterator[list[int]] = iter(prompts.ids.tolist())
        return lambda: self._test(next(rows), prompts.ids.device)

    def _test(self, text: list[int], device: torch.device) -> Callable[[int], bool]:
        def ends(token: int) -> bool:
            text.append(token)
            with torch.inference_mode(False):  # criteria may keep tensors
                found: Any = self.rest(torch.tensor([text], device=device), None)  # pyright: ignore[reportArgumentType]
            return bool(found.any())

        return ends


def read_ends(criteria: StoppingCriteriaList, prompts: Prompts, model: PreTrainedModel) -> Ends:
    """Divide criteria into a length, end tokens and the rest.

    Raises:
        UserError: a text would pass the end of the model's context; rows could end at different lengths, and
            there is no end token to pad them.
    """
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    stop = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
    rest = StoppingCriteriaList(
        one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
    )
    longest, width = max(map(len, prompts.texts)), prompts.ids.shape[1]
    if not lengths:
        raise UserError("generate: no max_new_tokens: give it")
    most = min(lengths) - width
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and longest + most > room:
        raise UserError(
            f"generate: {longest} tokens of prompt and {most} new ones are more than the model's context of "
            f"{room}: set max_new_tokens={max(room - longest, 0)} or less"
        )
    # `generate` lets rows that have ended grow on if it has no end token.
    if rest and not stop and len(prompts.texts) > 1:
        raise UserError("generate: stopping criteria of several rows need an end token: set eos_token_id")
    return Ends(most, [token for tokens in stop for token in tokens], rest)


def padded(tokens: Sequence[Sequence[int]], pad: int | None, like: Tensor) -> Tensor:
    """(B,) new tokens of rows -> (B, n), padded on the right as `generate` does, on the device of `like`."""
    width = max(map(len, tokens))
    rows = [[*row, *[pad or 0] * (width - len(row))] for row in tokens]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)

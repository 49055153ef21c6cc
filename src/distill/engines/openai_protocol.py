"""Request bodies for an OpenAI-compatible server, and parsing of its replies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distill.engines.base import Answer, Request, SamplingParams
from distill.prompts.chat_template import Chat

STOPPED = ("stop", "tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning")  # field names of servers
Fields = dict[str, Any]
Dialect = Callable[[SamplingParams], Fields]


class Reply(NamedTuple):
    """A parsed response.

    Attributes:
        text: text of the answer.
        finish: finish reason.
        separated: reasoning and tool calls that the server removed from the text.
        ids: ids of the answer, if the server returns them.
        prompt: ids of the prompt, if the server returns them.
        prompt_length: number of prompt tokens.
        rounds: number of decoding rounds that accepted 0, 1, ... draft tokens, if the server reports it
            (SGLang, pull request 33518; vLLM, 48915).
        states: file with the hidden states that vLLM wrote, if requested.
    """

    text: str
    finish: str
    separated: Fields
    ids: list[int] | None = None
    prompt: list[int] | None = None
    prompt_length: int | None = None
    rounds: list[int] | None = None
    states: str | None = None


def with_ids(params: SamplingParams) -> Fields:
    """Fields of vLLM and SGLang: return token ids, and override the model's default sampling parameters.

    vLLM: pull request 22587; SGLang: 30917. Both read top_k=-1 as no limit, and use only the end tokens in
    the model's files by default.
    """
    top_k = params.sampler.get("top_k") or -1
    fields: Fields = {"return_token_ids": True, "top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0}
    return fields | ({"stop_token_ids": list(params.stop)} if params.stop else {})


def with_config(params: SamplingParams) -> Fields:
    """Field of `transformers serve`, which otherwise samples greedily or from the top 50."""
    temperature = params.sampler.get("temperature", 1.0)
    config: Fields = {"do_sample": temperature > 0, "eos_token_id": list(params.stop)}
    if temperature > 0:
        config |= {"top_k": params.sampler.get("top_k", 0)}
    return {"generation_config": json.dumps(config)}


def with_nothing(params: SamplingParams) -> Fields:
    """OpenAI's own fields only, and top_k if it is set."""
    top_k = params.sampler.get("top_k")
    return {"top_k": top_k} if top_k else {}


# Tried in this order; the first that a server accepts is its dialect.
DIALECTS: tuple[Dialect, ...] = (with_ids, with_config, with_nothing)


def body(
    request: Request,
    params: SamplingParams,
    dialect: Dialect,
    chat: Chat,
    seed: int,
) -> Fields:
    """Build the fields of a request, without model name and length.

    Returns:
        Fields of a chat completion, or of a completion without a chat template.
    """
    fields: Fields = {
        "temperature": params.sampler.get("temperature", 1.0),
        "top_p": params.sampler.get("top_p", 1.0),
        "seed": seed_of(request, seed),
        "extra_body": dialect(params),
    }
    if chat.template == "none":
        # Token ids are unambiguous, but a server that returns none may not accept them.
        text = chat.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return fields | {"prompt": request.tokens if dialect is with_ids else text}
    messages = [_with_arguments(message, json.dumps) for message in request.messages]
    # The server needs no loss masks.
    fields["messages"] = [{k: v for k, v in message.items() if k != "train"} for message in messages]
    return fields | ({"tools": list(request.tools)} if request.tools else {})


def seed_of(request: Request, seed: int) -> int:
    """31-bit hash of (seed, id, sample), for servers that seed each request."""
    key = json.dumps([seed, request.id, request.sample])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1


def read_reply(text: str) -> Reply:
    """Parse the body of a response.

    Raises:
        ValueError: it is no completion.
    """
    try:
        payload = json.loads(text)
        choice = payload["choices"][0]
        message = choice.get("message") or {"content": choice["text"]}
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        separated = {"tool_calls": message.get("tool_calls"), "reasoning_content": reasoning}
        named = (payload.get("kv_transfer_params") or {}).get("hidden_states_path")
        prompt = choice.get("prompt_token_ids") or payload.get("prompt_token_ids")
        reply = Reply(
            message.get("content") or "",
            choice["finish_reason"],
            {name: part for name, part in separated.items() if part},
            choice.get("token_ids"),
            prompt if isinstance(prompt, list) else None,
            (payload.get("usage") or {}).get("prompt_tokens"),
            _rounds(payload),
            named if isinstance(named, str) else None,
        )
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"no reply: {error!r}") from None
    if not isinstance(reply.text, str) or reply.finish not in (*STOPPED, "length", "content_filter"):
        raise ValueError(f"finish_reason={reply.finish!r}")
    reply.text.encode()  # JSON can contain lone surrogates, which tokenizers reject
    return reply


def _rounds(payload: Fields) -> list[int] | None:
    sglang = (payload.get("sglext") or {}).get("spec_tokens_details") or {}
    vllm = (payload.get("metrics") or {}).get("speculative_decoding") or {}
    histogram = sglang.get("spec_correct_drafts_histogram") or vllm.get("acceptance_histogram")
    return (
        histogram
        if isinstance(histogram, list) and all(type(n) is int and n >= 0 for n in histogram)
        else None
    )


def same_prompt(reply: Reply, request: Request) -> bool:
    """Whether the server tokenized the prompt as we did, as far as it reports it."""
    if reply.prompt is not None:
        return reply.prompt == request.tokens
    return reply.prompt_length in (None, len(request.tokens))


def to_answer(reply: Reply, request: Request, params: SamplingParams, chat: Chat) -> Answer | str:
    """Token ids of an answer: exact if the server returned them together with our prompt's.

    Returns:
        The answer, or the reason why there is none.
    """
    stopped = reply.finish in STOPPED
    if reply.finish == "content_filter":
        return "removed by a content filter"
    if reply.prompt == request.tokens and _are_ids(reply.ids, len(chat.tokenizer)):
        ids = _up_to_end(reply.ids or [], params.stop)
        ended = ids[-1:] and ids[-1] in params.stop
        if stopped and not ended:  # the server omits the end token; exact if only one exists
            return Answer([*ids, _end(params, chat)], True, len(params.stop) == 1)
        return Answer(ids, bool(ended)) if ids else "empty"
    if reply.separated:
        ids = _rendered(reply, request, chat)
        if ids is None or (not stopped and not reply.text):
            return "split into reasoning or tool calls that cannot be joined again"
    else:
        ids = chat.tokenizer.encode(reply.text, add_special_tokens=False)
    ids = _up_to_end(ids, params.stop)
    ids = ids[:-1] if ids and ids[-1] in params.stop else ids
    if stopped:
        return Answer([*ids, _end(params, chat)], True, False)
    return Answer(ids, False, False) if ids else "empty"


def _are_ids(ids: Any, vocabulary: int) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)


def _up_to_end(ids: list[int], stop: Sequence[int]) -> list[int]:
    """Ids up to and including the first end token."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stop), ids)


def _end(params: SamplingParams, chat: Chat) -> int:
    eos = chat.tokenizer.eos_token_id
    return eos if eos in params.stop else params.stop[0]  # pyright: ignore[reportReturnType]


def _rendered(reply: Reply, request: Request, chat: Chat) -> list[int] | None:
    """Token ids of a reply with separated parts, through the chat template; None if rendering fails."""
    try:
        payload = {"role": "assistant", "content": reply.text, **reply.separated}
        message = _with_arguments(payload, json.loads)
        ids, _ = chat.encode_answered([*request.messages, message], request.tools)
    except (
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ):  # templates reject some outputs of models
        return None
    start = len(request.tokens)
    return ids[start:] if ids[:start] == request.tokens else None


def _with_arguments(message: Fields, convert: Callable[[Any], Any]) -> Fields:
    """A message with converted tool call arguments: templates use objects, servers JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) is (convert is json.loads):
            arguments = convert(arguments)
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls}

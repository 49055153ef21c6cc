"""What is sent to an OpenAI-compatible server, and what its replies say: bodies in, answers out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distill.engines.base import Answer, Law, Request
from distill.prompts.chat_template import Chat

STOPPED = ("stop", "tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning")  # what servers call it
Fields = dict[str, Any]


class Reply(NamedTuple):
    """What a server said.

    Attributes:
        text: of the answer.
        finish: why it ended.
        apart: reasoning and tool calls that the server took out of the text.
        ids: of the answer, where the server gives them.
        prompt: ids of the prompt, likewise.
        prompt_length: how many there were.
        rounds: how many kept 0, 1, ... drafted tokens, where the server was asked to say so (SGLang, pull
            request 33518) or started to (vLLM, 48915).
    """

    text: str
    finish: str
    apart: Fields
    ids: list[int] | None = None
    prompt: list[int] | None = None
    prompt_length: int | None = None
    rounds: list[int] | None = None


def with_ids(law: Law) -> Fields:
    """Fields of vLLM and SGLang: ids are returned, and no default of the model's stands in for the law.

    vLLM: pull request 22587; SGLang: 30917. Both read top_k=-1 as none.
    """
    top_k = law.sampler.get("top_k") or -1
    return {"return_token_ids": True, "top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0}


def with_config(law: Law) -> Fields:
    """A field of `transformers serve`, which draws nothing, or from 50 tokens, unless a config says so."""
    temperature = law.sampler.get("temperature", 1.0)
    config: Fields = {"do_sample": temperature > 0, "eos_token_id": list(law.stop)}
    if temperature > 0:
        config |= {"top_k": law.sampler.get("top_k", 0)}
    return {"generation_config": json.dumps(config)}


def with_nothing(law: Law) -> Fields:
    """What OpenAI's own interface has, and top_k where the law has one."""
    top_k = law.sampler.get("top_k")
    return {"top_k": top_k} if top_k else {}


# What to try, in this order. The first that a server does not refuse is its dialect.
DIALECTS: tuple[Callable[[Law], Fields], ...] = (with_ids, with_config, with_nothing)


def body(request: Request, law: Law, dialect: Callable[[Law], Fields], chat: Chat, seed: int) -> Fields:
    """A request as a server reads it, but for the model's name and the length.

    Returns:
        Fields of a chat completion, or of a completion where no chat template is used.
    """
    fields: Fields = {
        "temperature": law.sampler.get("temperature", 1.0),
        "top_p": law.sampler.get("top_p", 1.0),
        "seed": seed_of(request, seed),
        "extra_body": dialect(law),
    }
    if chat.template == "none":
        # Ids leave no doubt about the prompt; who gives none may not take them either.
        text = chat.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return fields | {"prompt": request.tokens if dialect is with_ids else text}
    fields["messages"] = [_with_arguments(message, json.dumps) for message in request.messages]
    return fields | ({"tools": list(request.tools)} if request.tools else {})


def seed_of(request: Request, seed: int) -> int:
    """31 bits of (seed, id, sample), for servers that draw as a function of a request's seed."""
    key = json.dumps([seed, request.id, request.sample])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1


def read_reply(text: str) -> Reply:
    """Read the body of a response.

    Raises:
        ValueError: it is no reply.
    """
    try:
        said = json.loads(text)
        choice = said["choices"][0]
        message = choice.get("message") or {"content": choice["text"]}
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        apart = {"tool_calls": message.get("tool_calls"), "reasoning_content": reasoning}
        prompt = choice.get("prompt_token_ids") or said.get("prompt_token_ids")
        reply = Reply(
            message.get("content") or "",
            choice["finish_reason"],
            {name: part for name, part in apart.items() if part},
            choice.get("token_ids"),
            prompt if isinstance(prompt, list) else None,
            (said.get("usage") or {}).get("prompt_tokens"),
            _rounds(said),
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"no reply: {error!r}") from None
    if not isinstance(reply.text, str) or reply.finish not in (*STOPPED, "length", "content_filter"):
        raise ValueError(f"finish_reason={reply.finish!r}")
    return reply


def _rounds(said: Fields) -> list[int] | None:
    sglang = (said.get("sglext") or {}).get("spec_tokens_details") or {}
    vllm = (said.get("metrics") or {}).get("speculative_decoding") or {}
    found = sglang.get("spec_correct_drafts_histogram") or vllm.get("acceptance_histogram")
    return found if isinstance(found, list) and all(type(n) is int and n >= 0 for n in found) else None


def same_prompt(reply: Reply, request: Request) -> bool:
    """Whether the server read the prompt that we mean, as far as it tells."""
    if reply.prompt is not None:
        return reply.prompt == request.tokens
    return reply.prompt_length in (None, len(request.tokens))


def to_answer(reply: Reply, request: Request, law: Law, chat: Chat) -> Answer | str:
    """The ids of an answer, exact where the server gave them with our own prompt's.

    Returns:
        The answer, or why there is none.
    """
    stopped = reply.finish in STOPPED
    if reply.finish == "content_filter":
        return "kept back by a content filter"
    if reply.prompt == request.tokens and _are_ids(reply.ids, len(chat.tokenizer)):
        ids = _up_to_end(reply.ids or [], law.stop)
        ended = ids[-1:] and ids[-1] in law.stop
        if stopped and not ended:  # a server that leaves it out; which of several it was, is not known
            return Answer([*ids, _end(law, chat)], True, len(law.stop) == 1)
        return Answer(ids, bool(ended)) if ids else "empty"
    if reply.apart:
        ids = _rendered(reply, request, chat)
        if ids is None or (not stopped and not reply.text):
            return "taken apart into reasoning or tool calls, which cannot be put together again"
    else:
        ids = chat.tokenizer.encode(reply.text, add_special_tokens=False)
    ids = _up_to_end(ids, law.stop)
    ids = ids[:-1] if ids and ids[-1] in law.stop else ids
    if stopped:
        return Answer([*ids, _end(law, chat)], True, False)
    return Answer(ids, False, False) if ids else "empty"


def _are_ids(ids: Any, vocabulary: int) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)


def _up_to_end(ids: list[int], stop: Sequence[int]) -> list[int]:
    """Ids up to the first end token, which stays."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stop), ids)


def _end(law: Law, chat: Chat) -> int:
    own = chat.tokenizer.eos_token_id
    return own if own in law.stop else law.stop[0]  # pyright: ignore[reportReturnType]


def _rendered(reply: Reply, request: Request, chat: Chat) -> list[int] | None:
    """An answer put together by the chat template, as the target would have written it."""
    try:
        said = {"role": "assistant", "content": reply.text, **reply.apart}
        message = _with_arguments(said, json.loads)
        ids, _ = chat.encode_answered([*request.messages, message], request.tools)
    except (KeyError, TypeError, ValueError):  # what models write is not always what templates can read
        return None
    start = len(request.tokens)
    return ids[start:] if ids[:start] == request.tokens else None


def _with_arguments(message: Fields, convert: Callable[[Any], Any]) -> Fields:
    """A message whose tool calls are as a reader wants them: templates read objects, servers JSON."""
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

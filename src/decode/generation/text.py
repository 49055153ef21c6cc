"""Streaming detokenizer and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError

REPLACEMENT = "\ufffd"  # decoded from bytes that are not (yet) a character
MAX_PENDING = 3  # replacement characters that may still become a character: UTF-8 has up to 4 bytes
WINDOW = 16  # tokens of context; more than MAX_PENDING characters need


class Detokenizer:
    """Incremental detokenizer: turns a stream of tokens into text and never revises it.

    The concatenated parts equal the text of all tokens decoded at once, except that a byte-fallback
    decoder with invalid UTF-8 replaces a whole run of bytes afterwards. A call decodes at most
    `2 * WINDOW` tokens: those since the last complete text, and the previous part as context, because
    decoders strip the leading space of the first token.

    Args:
        tokenizer: decodes without cleaning up spaces.
        skip_special_tokens: omit end tokens and other special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._context = 0  # number of these tokens up to the last complete text
        self._returned = ""  # text of these tokens returned so far

    def add(self, token: int) -> str:
        """Add a token; return the characters that it completes."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        pending = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_PENDING)
        full = len(self._tokens) >= 2 * WINDOW
        if pending and not full and not text.startswith(self._returned):
            return ""  # byte fallback replaces a whole run of bytes while its last character is incomplete
        part = text[len(self._returned) : len(text) - pending]
        self._returned += part
        if full or not pending:
            self._trim(pending)
        return part

    def end(self) -> str:
        """Return the rest: bytes that will not become a character."""
        text = self._decode(self._tokens)[len(self._returned) :]
        self._tokens, self._context, self._returned = [], 0, ""
        return text

    def _trim(self, pending: int) -> None:
        """Drop tokens that are no longer needed as context."""
        start = len(self._tokens) - WINDOW if pending else self._context
        text = self._decode(self._tokens[start:])
        if len(text) > pending:  # a context that decodes to nothing is too short
            self._tokens, self._returned = self._tokens[start:], text[: len(text) - pending]
            self._context = 0 if pending else len(self._tokens)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopStrings:
    """Stop strings: end a request with the token that completes one of the strings in its text.

    For `until` of `generate` and `stream`. A string may start or end within a token, span rounds, or be
    in the middle of an accepted draft; the tokens after it are cut. The end of a text depends only on its
    own tokens, so decoding stays lossless (docs/lossless.md).

    Args:
        tokenizer: of the target; special tokens are part of the text.
        strings: one or several stop strings.

    Raises:
        UserError: an empty string, or not strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.tokenizer = tokenizer
        given: Any = strings
        several = not isinstance(given, str | bytes) and isinstance(given, Iterable)
        given = tuple(given) if several else (given,)
        if wrong := [string for string in given if not isinstance(string, str)]:
            raise UserError(f"stop: give a text or a list of texts, not {wrong[0]!r}")
        self.strings: tuple[str, ...] = given
        if not all(self.strings):
            raise UserError("stop: an empty stop string would end every text")

    def __call__(self) -> Callable[[int], bool]:
        """Return the stop test of one request; called with each token in order, True ends the request."""
        text = Detokenizer(self.tokenizer)
        keep = (
            max(map(len, self.strings), default=1) - 1
        )  # number of last characters that a match may begin in
        tail = ""

        def ends(token: int) -> bool:
            nonlocal tail
            recent = tail + text.add(token)
            tail = recent[len(recent) - min(keep, len(recent)) :]
            return any(string in recent for string in self.strings)

        return ends

"""The text of tokens as they come, a whole character at a time, and strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError

HALF = "\ufffd"  # what a tokenizer makes of bytes that are no character, or not yet
LONGEST = 3  # such marks that may wait for the last byte of their character
WINDOW = 16  # tokens: more than LONGEST marks are made of


class Detokenizer:
    """Turns a growing list of tokens into text that is never taken back.

    The parts joined are what decoding all tokens at once gives, but for a byte-fallback decoder
    and bytes that never become UTF-8: it spoils their whole run in hindsight. A call decodes at
    most `2 * WINDOW` tokens: those since the text was whole, and behind them those of the part
    before, because decoders strip the first token of a text.

    Args:
        tokenizer: decodes, without tidying up spaces.
        skip_special_tokens: leave out end tokens and their like.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._before = 0  # of these tokens, the ones up to where the text was whole last
        self._out = ""  # what is out of these tokens' text

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        waiting = min(len(text) - len(text.rstrip(HALF)), LONGEST)
        full = len(self._tokens) >= 2 * WINDOW
        if waiting and not full and not text.startswith(self._out):
            return ""  # byte fallback shows marks for a whole run while its last character is cut
        part = text[len(self._out) : len(text) - waiting]
        self._out += part
        if full or not waiting:
            self._forget(waiting)
        return part

    def end(self) -> str:
        """What still waits: bytes that will not become a character any more."""
        text = self._decode(self._tokens)[len(self._out) :]
        self._tokens, self._before, self._out = [], 0, ""
        return text

    def _forget(self, waiting: int) -> None:
        start = len(self._tokens) - WINDOW if waiting else self._before
        left = self._decode(self._tokens[start:])
        if len(left) > waiting:  # what is stripped to nothing needs more before it
            self._tokens, self._out = self._tokens[start:], left[: len(left) - waiting]
            self._before = 0 if waiting else len(self._tokens)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopStrings:
    """Ends a request with the token that completes one of some strings in its generated text.

    For `until` of `generate` and `stream`. A string may begin or end within a token, span rounds
    and lie in the middle of an accepted draft; tokens behind it are cut, as behind an end token.
    When a text ends is a function of its own tokens, so its law is the target's (docs/lossless.md).

    Args:
        tokenizer: the target's; the text includes its special tokens.
        strings: one, or several of which any ends the text.

    Raises:
        UserError: an empty string, which every text holds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(self.strings):
            raise UserError("stop: an empty string would end every text")

    def __call__(self) -> Callable[[int], bool]:
        """A test of one request: told each of its tokens in order, True ends it."""
        text = Detokenizer(self.tokenizer)
        keep = max(map(len, self.strings), default=1) - 1  # characters that a match may begin in
        tail = ""

        def ends(token: int) -> bool:
            nonlocal tail
            seen = tail + text.add(token)
            tail = seen[len(seen) - min(keep, len(seen)) :]
            return any(string in seen for string in self.strings)

        return ends

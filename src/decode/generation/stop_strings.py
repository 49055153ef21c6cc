"""Stop strings: a rule that ends a text by what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.generation.text import Detokenizer


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

"""Small tokenizers whose tokens are not whole letters, and when a text first says something."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def pieces(*words: str) -> PreTrainedTokenizerFast:
    """Byte-level tokens of these byte strings, written in Latin-1, and an end token of many letters."""
    letters = {bytes([b]).decode("latin-1"): c for b, c in byte_letters().items()}
    vocab = {"".join(letters[c] for c in word): i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the rest follow from 256."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(rest)}


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: words with a mark for the space, and all bytes; a first space is cut."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "b", "▁ab", "é"]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made)


FALLBACK = byte_fallback()
# Parts of é = C3 A9 and of 中 = E4 B8 AD among whole letters.
MIXED = pieces("a", "b", "ab", "ba", "aba", " ", "\xc3", "\xa9", "b\xc3", "\xa9a", "\xe4", "\xb8", "\xad\xc3")


def whole(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], skip: bool = False) -> str:
    """The text of all of these tokens at once."""
    return tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def ended(tokenizer: PreTrainedTokenizerFast, strings: Sequence[str], tokens: Sequence[int]) -> int | None:
    """How many tokens there are when the whole text first holds one of the strings, or None."""
    for n in range(1, len(tokens) + 1):
        if any(string in whole(tokenizer, tokens[:n]) for string in strings):
            return n
    return None

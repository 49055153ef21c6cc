"""Map between a draft model's tokenizer and the target's: shared tokens, and texts in both.

Token-level intersection (TLI, arXiv:2502.05202): the draft model may propose the byte strings that are
tokens of both; the settled text is encoded again for it. transformers' `AssistantToTargetTranslator`
compares names of tokens instead, but kinds of tokenizers name the same bytes differently.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from decode.errors import UserError
from decode.model.load import load_tokenizer
from decode.model.target import Target

OPTION = "drafter.vocabulary=map"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of a byte
SPACE = "\u2581"  # SentencePiece's mark of a space
SENTENCE_PIECE = {"Metaspace", "Replace", "ByteFallback"}  # types of its decoders
MAX_BYTES = 2**28  # bytes of an unpacked tokenizer.json; the largest known have 33 MB


class TokenBytes(NamedTuple):
    """The byte strings of a tokenizer's tokens.

    Attributes:
        words: (V,) byte string of every id, special tokens as their text; empty where there is no token.
        ids: (is special, byte string) -> id; of tokens with the same bytes, the one that encoding produces.
        strips: whether decoding removes a leading space that encoding adds.
    """

    words: list[bytes]
    ids: dict[tuple[bool, bytes], int]
    strips: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, what: str) -> Self:
        """Read the tokens of a byte-level BPE or a SentencePiece tokenizer.

        Args:
            tokenizer: of the model.
            size: V, ids that the model's head has.
            what: the option that names the model, for errors.

        Raises:
            UserError: a tokenizer of another kind.
        """
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
        kinds = set(re.findall(r'"type": "(\w+)"', decoder))
        if not kinds & {"ByteLevel", *SENTENCE_PIECE}:
            raise UserError(
                f"{what}: its tokenizer is neither byte-level BPE nor SentencePiece; {OPTION} maps no other"
            )
        letters = _byte_letters() if "ByteLevel" in kinds else {SPACE: b" "}

        def spell(token: str) -> bytes:
            if "ByteFallback" in kinds and (byte := BYTE.fullmatch(token)):
                return bytes.fromhex(byte[1])
            return b"".join(letters.get(letter) or letter.encode() for letter in token)

        added = tokenizer.get_added_tokens_decoder()
        pieces = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
        # The last of tokens with the same bytes wins: `a` over `<0x61>`, a smaller id over a larger.
        order = sorted(pieces.keys() - added, key=lambda i: (BYTE.fullmatch(pieces[i]) is None, -i))
        tokens = [(i, False, spell(pieces[i])) for i in order]
        tokens += [(i, token.special, token.content.encode()) for i, token in added.items()]
        words = [b""] * size
        for i, _, word in (known := [token for token in tokens if token[0] < size]):
            words[i] = word
        marked = next((i for i, token in pieces.items() if token.startswith(SPACE) and len(token) > 1), None)
        strips = marked is not None and not tokenizer.decode([marked]).startswith(" ")
        return cls(words, {(special, word): i for i, special, word in known if word}, strips)

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens."""
        return b"".join(map(self.words.__getitem__, tokens))


def _byte_letters() -> dict[str, bytes]:
    """The byte of each letter of byte-level BPE: Latin-1 letters are their own, the rest follow in order."""
    alphabet = sorted(ByteLevel.alphabet())
    own = [ord(letter) for letter in alphabet if ord(letter) < 256]
    rest = sorted(set(range(256)) - set(own))
    return {letter: bytes([byte]) for letter, byte in zip(alphabet, [*own, *rest], strict=True)}


class TokenizerMap:
    """The tokens that a draft model and its target share, and encoding of the target's texts.

    A special token is shared with a special token of the same text, any other token with one of the same
    bytes.

    Args:
        tokenizer: of the draft model; changed in place.
        size: ids that the draft model's head has.
        target: of the target.

    Attributes:
        target_ids: (V',) target's ids of the shared tokens, ascending.
        draft_ids: (V',) draft model's ids of the same tokens.
        special: texts of the special tokens among them.

    Raises:
        UserError: a tokenizer of another kind, or no token is shared.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, target: TokenBytes) -> None:
        draft = TokenBytes.of(tokenizer, size, "drafter.path")
        both = draft.ids.keys() & target.ids.keys()
        shared = sorted((target.ids[key], draft.ids[key]) for key in both)
        if not shared:
            raise UserError(f"{OPTION}: the tokenizers of draft model and target share no token")
        self.target_ids, self.draft_ids = torch.tensor(shared).unbind(1)
        self.special = sorted(word.decode() for special, word in both if special)
        self.target = target
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._prefix = _prefix_tokens(tokenizer)
        self._prefix_text = draft.spell([i for i in self._prefix if i < size])
        tokenizer.post_processor = None  # it adds `_prefix`, and trims spaces from offsets
        self._tokenizer = tokenizer
        self._bytes = {word[0]: i for (_, word), i in draft.ids.items() if len(word) == 1}

    def encode(self, text: bytes, ends: dict[int, int] | None = None) -> list[int]:
        """Draft ids of a text, at least one.

        Bytes that are not UTF-8, such as an incomplete character's, become tokens of single bytes,
        or are omitted if the draft model has none.

        Args:
            text: of the target.
            ends: filled with a number of bytes -> index of the draft token that ends there.
        """
        start = int(self.target.strips and text.startswith(b" "))
        ids = [] if self._prefix_text and text.startswith(self._prefix_text, start) else list(self._prefix)
        for run, stray in _utf8_runs(text[start:]):
            encoded: Any = self._tokenizer.encode(run, add_special_tokens=False)
            if ends is not None:
                places = list(accumulate((len(letter.encode()) for letter in run), initial=start))
                spans = [*encoded.offsets, (len(run), len(run))]
                for i, ((_, end), (begin, _)) in enumerate(pairwise(spans), len(ids)):
                    if 0 < end <= begin:  # else the next token has bytes of the same character
                        ends[places[end]] = i
            ids += encoded.ids
            start += len(run.encode())
            for byte in stray:
                start += 1
                if byte in self._bytes:
                    ids.append(self._bytes[byte])
                    if ends is not None:
                        ends[start] = len(ids) - 1
        return ids or [0]  # a model reads one token at least

    def align(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Encode a text, and find where tokens of both end together.

        Args:
            tokens: (T,) of the target.

        Returns:
            Draft ids; and (T,) for each token of the target the index of the draft token that ends with
            it, -1 if none does.
        """
        ends: dict[int, int] = {}
        ids = self.encode(self.target.spell(tokens), ends)
        return ids, [ends.get(end, -1) for end in accumulate(len(self.target.words[i]) for i in tokens)]


def _utf8_runs(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Pairs of the longest valid UTF-8 and the invalid bytes after it."""
    while text:
        try:
            run, stray = text.decode(), b""
        except UnicodeDecodeError as error:
            run, stray = text[: error.start].decode(), text[error.start : error.end]
        yield run, stray
        text = text[len(run.encode()) + len(stray) :]


def _prefix_tokens(tokenizer: Tokenizer) -> list[int]:
    """Special tokens that a tokenizer puts before a text, such as Llama's."""
    bare, full = (tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
    places = range(len(full) - len(bare) + 1)
    return full[: next((i for i in places if full[i : i + len(bare)] == bare), 0)]


@dataclass(slots=True)
class MappedText:
    """A settled text of the target, and the draft ids that the draft model has read of it."""

    text: bytearray = field(default_factory=bytearray)
    ids: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], tokenizers: TokenizerMap) -> int:
        """Append tokens of the target, and encode the whole text again.

        Returns:
            Number of unchanged draft ids; at most all but the last, which is always read.
        """
        self.text += tokenizers.target.spell(tokens)
        old, self.ids = self.ids, tokenizers.encode(bytes(self.text))
        pairs = enumerate(zip(old, self.ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(old))
        return min(same, len(self.ids) - 1)


# -- tokenizers of models, and on file ---------------------------------------------------------------


def tokenizer_of(name: str, revision: str | None, what: str) -> Tokenizer:
    """The tokenizer of a model; remote code is never run.

    Args:
        name: folder or hub id.
        revision: of a hub id.
        what: the option that names the model, for errors.

    Raises:
        UserError: it has no `tokenizer.json`.
    """
    tokenizer: Any = load_tokenizer(name, revision, what=what)
    if not tokenizer.is_fast:
        raise UserError(f"{what}={name}: its tokenizer is no tokenizer.json; {OPTION} maps no other")
    return tokenizer.backend_tokenizer


def target_tokens(target: Target) -> TokenBytes:
    """The byte strings of the target's tokens.

    Raises:
        UserError: see `tokenizer_of` and `TokenBytes.of`; or the target has no path.
    """
    name, revision = target.model.name_or_path, getattr(target.model.config, "_commit_hash", None)
    if not name:
        raise UserError(f"{OPTION}: the target was built in memory, without a tokenizer; give it a path")
    return _named_tokens(name, revision, target.vocab_size)


@lru_cache(maxsize=8)
def _named_tokens(name: str, revision: str | None, size: int) -> TokenBytes:
    return TokenBytes.of(tokenizer_of(name, revision, "target"), size, f"target={name}")


def pack(tokenizer: Tokenizer) -> Tensor:
    """(N,) uint8: a tokenizer as a tensor among a checkpoint's weights."""
    return torch.frombuffer(bytearray(zlib.compress(tokenizer.to_str().encode())), dtype=torch.uint8)


def unpack(packed: Tensor) -> Tokenizer:
    """The tokenizer of `pack`.

    Raises:
        UserError: it is damaged.
    """
    try:
        text = zlib.decompressobj().decompress(packed.cpu().numpy().tobytes(), MAX_BYTES)
        return Tokenizer.from_str(text.decode())
    except Exception as error:  # all that tokenizers raises is an Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"damaged checkpoint (its tokenizer cannot be read: {reason})") from None

"""The tokenizer in a GGUF file: built by transformers, corrected for keys it ignores, and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence

from decode.errors import UserError
from decode.model.files.account import Account
from decode.model.files.gguf.header import Header

BYTES, PIECES = "gpt2", "llama"  # `tokenizer.ggml.model`: merges of bytes; SentencePiece
CONTROL, USER_DEFINED = 3, 4  # token types that are never split
BLANK = "▁"
# Names in `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp) for which transformers splits as GPT-2 does:
# splits that also separate digits, and splits equal to GPT-2's.
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
AS_GPT2 = {
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "jina-v2-es",
    "jina-v2-de",
    "mpt",
    "olmo",
    "jais",
    "trillion",
}
# Splits with `ignore_merges` (a word that is a token is not built by merges) that also add a BOS token
# by default.
WHOLE_WORDS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
}
ONLY_WHOLE_WORDS = {"youtu", "minicpm5", "granite-embed-multi-97m"}  # without BOS
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}  # defaults of SentencePiece files
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
OTHER = re.compile(r"tokenizer\.ggml\.(seperator|mask|cls|prefix|suffix|middle|fim_\w+)_token_id$")
READ = {f"tokenizer.{name}" for name in ("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type")}


def prepare(header: Header, tokenizer: Any) -> None:
    """Make a tokenizer split text and add special tokens as the file says.

    Args:
        header: of the file.
        tokenizer: of transformers; changed in place.

    Raises:
        UserError: the split is unknown, so text would be encoded differently than in training.
    """
    kind, split = header.keys["tokenizer.ggml.model"], header.keys.get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if kind == BYTES:
        if split in SINGLE_DIGITS:
            backend.pre_tokenizer = Sequence(
                [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            )
        elif isinstance(backend.pre_tokenizer, ByteLevel) and split not in AS_GPT2:
            raise UserError(
                f"its text is split by {split or 'an unnamed rule'!r}, which this version of transformers "
                "does not know; give the folder or hub id of the model that the file was made from"
            )
        backend.model.ignore_merges = split in WHOLE_WORDS | ONLY_WHOLE_WORDS
    elif isinstance(backend.pre_tokenizer, Metaspace):
        scheme = "first" if header.keys.get("tokenizer.ggml.add_space_prefix", True) else "never"
        backend.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=backend.pre_tokenizer.split)
        if isinstance(backend.decoder, MetaspaceDecoder):
            backend.decoder = MetaspaceDecoder(prepend_scheme=scheme)
    for name, short in SPECIAL.items():
        number = _number(header, name)
        if getattr(tokenizer, f"{short}_token_id") != number:  # also if the file names none
            text = None if number is None else header.keys["tokenizer.ggml.tokens"][number]
            setattr(tokenizer, f"{short}_token", text)
    for name in ("bos", "eos"):
        setattr(tokenizer, f"add_{name}_token", _adds(header, name))


def _adds(header: Header, name: str) -> bool:
    """Whether texts get a BOS or EOS token."""
    keys = header.keys
    default = name == "bos" and (
        keys["tokenizer.ggml.model"] == PIECES or keys.get("tokenizer.ggml.pre") in WHOLE_WORDS
    )
    return keys.get(f"tokenizer.ggml.add_{name}_token", default) and _number(header, name) is not None


def _number(header: Header, name: str) -> int | None:
    """Id of a special token."""
    pieces = header.keys["tokenizer.ggml.model"] == PIECES
    return header.keys.get(f"tokenizer.ggml.{name}_token_id", SENTENCEPIECE.get(name) if pieces else None)


def set_special(header: Header, config: Any) -> None:
    """Set the special tokens of a configuration; None if the file names none.

    Args:
        header: of the file.
        config: changed in place.
    """
    for name, short in SPECIAL.items():
        if short != "unk":
            setattr(config, f"{short}_token_id", _number(header, name))


def set_ends(header: Header, model: Any, account: Account) -> None:
    """Set the end tokens of a model's answers.

    Args:
        header: of the file.
        model: its generation configuration is changed in place.
        account: of the file.
    """
    set_special(header, model.generation_config)
    ends: list[int] = list(dict.fromkeys(end for name in ENDS if (end := _number(header, name)) is not None))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    if not ends:
        account.remark("the file names no token that ends an answer", ["tokenizer.ggml.eos_token_id"])


def respell(header: Header, folder: Path) -> None:
    """Correct the text of unsplit tokens with characters outside the byte alphabet in a saved tokenizer.

    transformers spells such tokens in bytes, like text, and therefore splits them (for example DeepSeek's
    end-of-turn tokens).

    Args:
        header: of the file.
        folder: with `tokenizer.json`, which is changed.
    """
    if header.keys["tokenizer.ggml.model"] != BYTES:
        return
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    tokens, vocabulary = header.keys["tokenizer.ggml.tokens"], saved["model"]["vocab"]
    spelled = {number: token for token, number in vocabulary.items()}
    wrong = {number: kind for number, kind in _unsplit(header).items() if spelled[number] != tokens[number]}
    if not wrong:
        return
    for number in wrong:
        del vocabulary[spelled[number]]
        vocabulary[tokens[number]] = number
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [token for token in saved["added_tokens"] if token["id"] < len(tokens)]
    added += [
        {"id": number, "content": tokens[number], **flags, "special": kind == CONTROL}
        for number, kind in wrong.items()
    ]
    saved["added_tokens"] = sorted(added, key=lambda token: token["id"])
    for token in saved["post_processor"].get("special_tokens", {}).values():
        token["ids"] = [vocabulary[text] for text in token["tokens"]]
    path.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")


def _unsplit(header: Header) -> dict[int, int]:
    """Types of the tokens that are never split, by id."""
    kinds = header.keys.get("tokenizer.ggml.token_type", ())
    return {number: int(kind) for number, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)}


def check_tokenizer(header: Header, tokenizer: Any, account: Account) -> None:
    """Account for the tokenizer's keys, comparing each with the tokenizer.

    Args:
        header: of the file.
        tokenizer: transformers' tokenizer, as saved.
        account: of the file.
    """
    checks = _checks(header, tokenizer)
    for key, value in header.keys.items():
        if not key.startswith("tokenizer."):
            continue
        if key in checks:
            differs = checks[key](value)
            account.refuse(f"tokenizer: {differs}", [key] if differs else [])
            account.count("keys", not differs)
        elif key in READ:
            account.count("keys", 1)
        elif OTHER.match(key):
            account.ignore("tokens for uses that a causal model's answers do not have", [key])
        elif key.startswith(("tokenizer.chat_template", "tokenizer.huggingface.json")):
            account.remark("not read; the tokenizer's own keys and tokenizer.chat_template are", [key])
        else:
            account.refuse("settings of the tokenizer that are not read", [key])


def _checks(header: Header, tokenizer: Any) -> dict[str, Callable[[Any], str]]:
    """Check by key: returns how the tokenizer differs from the key's value, or ""."""
    texts = header.keys["tokenizer.ggml.tokens"]

    def special(short: str) -> Callable[[Any], str]:
        other = "another token has that use"
        return lambda value: "" if getattr(tokenizer, f"{short}_token_id") == value else other

    def adds(name: str) -> Callable[[Any], str]:
        found = tokenizer("a")["input_ids"][0 if name == "bos" else -1]
        same = (found == _number(header, name)) == _adds(header, name)
        return lambda _: "" if same else "the tokenizer adds it differently"

    def nothing(_: Any) -> str:
        return ""

    ours: dict[str, Callable[[Any], str]] = {
        "ggml.tokens": lambda _: _same_texts(header, tokenizer),
        "ggml.token_type": lambda _: _never_split(header, tokenizer),
        "ggml.merges": lambda value: _same_merges(value, tokenizer),
        "ggml.scores": lambda value: "" if len(value) == len(texts) else "not one for each token",
        "ggml.add_bos_token": adds("bos"),
        "ggml.add_eos_token": adds("eos"),
        "ggml.add_sep_token": lambda value: "a separator is not added" if value else "",
        "ggml.add_space_prefix": lambda value: _same_prefix(header, tokenizer, value),
        "ggml.remove_extra_whitespaces": nothing,  # llama.cpp applies it to Unigram models only
        "ggml.token_type_count": nothing,  # for encoders
        "ggml.eot_token_id": nothing,  # see `set_ends`
        "ggml.eom_token_id": nothing,
        "chat_template": lambda value: "" if tokenizer.chat_template == value else "the template differs",
        **{f"ggml.{name}_token_id": special(short) for name, short in SPECIAL.items()},
    }
    return {f"tokenizer.{name}": check for name, check in ours.items()}


def _same_texts(header: Header, tokenizer: Any) -> str:
    texts = header.keys["tokenizer.ggml.tokens"]
    found = tokenizer.convert_ids_to_tokens(list(range(len(texts))))
    bytes_of = _byte_spelling()
    for number, (text, own) in enumerate(zip(texts, found, strict=True)):
        blanks = BLANK * len(text) if not text.strip() else text
        if own not in (text, blanks) and own != "".join(bytes_of[byte] for byte in text.encode()):
            return f"token {number:,} differs"
    return "" if len(tokenizer) == len(texts) else f"it has {len(tokenizer):,} tokens, of {len(texts):,}"


def _byte_spelling() -> dict[int, str]:
    """The character that stands for each byte in a byte vocabulary (GPT-2)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + at) for at, byte in enumerate(rest)}


def _never_split(header: Header, tokenizer: Any) -> str:
    kinds = header.keys.get("tokenizer.ggml.token_type", ())
    texts = header.keys["tokenizer.ggml.tokens"]
    if len(kinds) != len(texts):
        return "not one for each token"
    whole = _unsplit(header)
    found = (
        tokenizer([texts[number] for number in whole], add_special_tokens=False)["input_ids"] if whole else []
    )
    split = [number for number, ids in zip(whole, found, strict=True) if ids != [number]]
    added = tokenizer.added_tokens_decoder
    shown = [n for n, kind in whole.items() if kind == CONTROL and not (n in added and added[n].special)]
    if split:
        return f"{len(split):,} tokens are split in text, {texts[split[0]]!r} first"
    return f"{len(shown):,} tokens are not special, {texts[shown[0]]!r} first" if shown else ""


def _same_merges(value: list[str], tokenizer: Any) -> str:
    saved = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges", [])
    own = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved]
    return "" if own == value else f"{len(own):,} merges, or different ones, instead of {len(value):,}"


def _same_prefix(header: Header, tokenizer: Any, value: bool) -> str:
    if header.keys["tokenizer.ggml.model"] != PIECES:
        return ""  # llama.cpp adds a blank only for this kind
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[0]
    return "" if first.startswith(BLANK) == value else "the blank before texts differs"

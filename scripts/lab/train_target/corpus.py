"""Turn a folder of text into token sequences: documents, tokenizer, packing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decode.errors import UserError
from decode.model.load import load_tokenizer
from distill.prompts.records.forms import parse_prompt
from distill.utils.provenance import digest

PAD, USER, ASSISTANT, END, MASK = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"
SPECIAL = [PAD, USER, ASSISTANT, END, MASK, *(f"<|reserved_{i}|>" for i in range(3))]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORE_INDEX = -100  # fills the last sequence; cross-entropy ignores it
SECTION = 4000  # characters; a longer .txt counts as several documents, cut at blank lines


class Document(NamedTuple):
    """A plain text, or a conversation.

    Attributes:
        source: name of its file.
        text: of a plain text.
        messages: of a conversation.
        key: hash of the content; decides order and split.
    """

    source: str
    text: str
    messages: tuple[dict[str, str], ...]
    key: str


def read_corpus(folder: Path) -> list[Document]:
    """Documents of a folder's *.txt and *.jsonl files, in the order of their hashes.

    A jsonl line is `{"messages": [...]}` or `{"text": ...}`. Turns after the last answer are dropped.

    Raises:
        UserError: no such folder, no documents in it, or a malformed line (with file and line number).
    """
    if not folder.is_dir():
        raise UserError(f"data={folder}: no such folder; give one with *.txt or *.jsonl files")
    documents = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jsonl":
            documents += _read_jsonl(path)
        elif path.suffix == ".txt":
            documents += _read_text(path)
    if not documents:
        raise UserError(f"data={folder}: no text in it; put *.txt or *.jsonl files there")
    return sorted(documents, key=lambda d: (d.key, d.source))


def _read_text(path: Path) -> Iterator[Document]:
    try:
        whole = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    section = ""
    for paragraph in whole.split("\n\n"):
        section = f"{section}\n\n{paragraph}" if section else paragraph
        if len(section) >= SECTION:
            yield Document(path.name, section, (), digest(section))
            section = ""
    if section.strip():
        yield Document(path.name, section, (), digest(section))


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, path.name, f"{path}:{number}")


def _parse(line: bytes, source: str, where: str) -> Document:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError:
        record = None  # `parse_prompt` reports the error
    if isinstance(record, dict) and "messages" not in record and "turns" not in record:
        text = record.get("text")
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: needs 'messages', or a 'text' that is not empty")
        return Document(source, text, (), digest(text))
    messages = parse_prompt(line, where, "").messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise UserError(f"{where}: the assistant says nothing in it, so there is no answer to learn")
    if any(message.get("train") is False for message in messages):
        raise UserError(f"{where}: an answer is not to be learned, and here all are; leave the record out")
    messages = messages[: answers[-1] + 1]
    return Document(source, "", messages, digest(json.dumps(messages)))


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Train and held-out part, by hash: copies of a document are on the same side.

    Raises:
        UserError: one of the parts is empty (with share > 0).
    """
    train: list[Document] = []
    held: list[Document] = []
    for document in documents:
        (held if int(document.key, 16) < share * 16 ** len(document.key) else train).append(document)
    if not train or (share > 0 and not held):
        part = "held out" if train else "trained on"
        raise UserError(f"val_share={share}: of {len(documents)} documents none would be {part}")
    return train, held


def train_tokenizer(documents: Iterable[Document], vocab_size: int, context: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with the pocket target's special tokens and template.

    Raises:
        UserError: vocab_size is too small for bytes and special tokens, or too large for the text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(SPECIAL) + len(alphabet)
    if vocab_size < least:
        raise UserError(f"vocab_size={vocab_size}: bytes and special tokens alone are {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_contents(documents), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size={vocab_size}: the text supports {tokenizer.get_vocab_size()}; lower it or add text"
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK, model_max_length=context
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _contents(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        yield from [message["content"] for message in document.messages] or [document.text]


def given_tokenizer(folder: Path, option: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of another model, to share its vocabulary; `option` named its folder.

    Raises:
        UserError: no tokenizer there, or it has no end token or chat template.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{option}={folder}: no tokenizer.json in it; give a model's folder")
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.eos_token_id is None or not tokenizer.chat_template:
        raise UserError(f"{option}={folder}: it needs an end token and a chat template")
    return tokenizer


def pack(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    """Concatenate documents, each ended by its end token, and cut them into rows.

    Returns:
        (N, length); the last row is filled up with IGNORE_INDEX. A last token alone in its row is
        dropped, since there is nothing to predict.
    """
    end: Any = tokenizer.eos_token_id

    def encode(texts: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = tokenizer(texts["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"ids": [row if row[-1:] == [end] else [*row, end] for row in rows]}

    texts = [
        str(tokenizer.apply_chat_template(list(d.messages), tokenize=False)) if d.messages else d.text
        for d in documents
    ]
    rows = datasets.Dataset.from_dict({"text": texts}).map(encode, batched=True, remove_columns="text")
    table: Any = rows.with_format("arrow")[:]
    ids = table["ids"].combine_chunks().flatten().to_numpy()
    ids = ids[: len(ids) - (len(ids) % length == 1)]
    packed = np.full((-(-len(ids) // length), length), IGNORE_INDEX, dtype=np.int32)
    packed.reshape(-1)[: len(ids)] = ids
    return packed

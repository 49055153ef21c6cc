"""Tokenizers of a target and of a draft model that differ, and models that have them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters

import torch
from draft_models import draft_model
from drafter_checks import V
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.model.target import Target
from drafters.models.lm import DraftLM

LETTERS = ascii_letters[:V]
TEXTS = [
    "der Bäcker bäckt süße Brötchen, und die Bäckerin süßt sie",
    "the theatre of the north — these are the things that they thought",
    "中文和日本語の文字、中文字。 naïve café 🙂🙃 100 101 1000",
]


def byte_level(model: models.Model) -> PreTrainedTokenizerFast:
    """Byte-level BPE around a model."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def spelled(*words: str) -> PreTrainedTokenizerFast:
    """These ASCII words as tokens 0, 1, ...; those of several letters are merged from their first ones."""
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    return byte_level(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))


def trained(size: int, special: Sequence[str] = ("<end>",)) -> PreTrainedTokenizerFast:
    """All bytes and the most frequent pieces of `TEXTS`, characters of several bytes cut in any way."""
    fast = byte_level(models.BPE())
    made = fast.backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def mapped(target: Target, theirs, own, folder: Path, more: int = 0, **options) -> DraftLM:
    """A random draft model with its own tokenizer for a target, which is given the other.

    `more` ids of the draft model are not in its tokenizer.
    """
    theirs.save_pretrained(folder / "target")
    target.model.name_or_path = str(folder / "target")
    path = draft_model(folder / "draft", vocab=len(own) + more)
    own.save_pretrained(path)
    return DraftLM.for_target(target, path=path, vocabulary="map", **options).to(target.dtype).eval()


def renamed(target: Target, folder: Path, **options) -> DraftLM:
    """All `V` letters are tokens of both, under other ids, and the draft model has 20 tokens besides."""
    words = [*LETTERS, *(ascii_letters + "0123456789")[V : V + 20]]
    random.Random(0).shuffle(words)
    return mapped(target, spelled(*LETTERS), spelled(*words), folder, more=3, **options)


def random_tokens(tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> list[int]:
    """Tokens of a target that mostly write `TEXTS`, and now and then anything."""
    dice, tokens = random.Random(seed), []
    while len(tokens) < length:
        if dice.random() < 0.7:
            text = dice.choice(TEXTS)
            begin = dice.randrange(len(text))
            tokens += tokenizer(text[begin : begin + dice.randrange(1, 12)])["input_ids"]
        else:
            tokens.append(dice.randrange(len(tokenizer)))
    return tokens[:length]


def fresh_logits(drafter: DraftLM, ids: Sequence[int]) -> torch.Tensor:
    """(V') logits of the shared tokens after draft ids, by transformers' own pass without a cache."""
    with torch.no_grad():
        rows = drafter.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return rows[0, -1, drafter.draft_ids]

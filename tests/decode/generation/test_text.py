"""Text of a stream: no half characters, nothing lost or taken back, and where a stop string ends it."""

import random

import pytest
from letters import FALLBACK, MIXED, byte_fallback, ended, whole
from workbench import make_tokenizer

from decode.errors import UserError
from decode.generation.text import REPLACEMENT, WINDOW, Detokenizer, StopStrings

TOKENIZERS = {"bytes": make_tokenizer(), "mixed": MIXED, "fallback": FALLBACK}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def some_tokens(kind: str, dice: random.Random) -> list[int]:
    """Any tokens at all; for byte fallback, bytes of characters and words between them."""
    tokenizer = TOKENIZERS[kind]
    if kind != "fallback":
        return [dice.randrange(len(tokenizer)) for _ in range(dice.randint(0, 40))]
    words = [[i] for i in range(257, len(tokenizer))] + [[1 + b for b in c.encode()] for c in "aé中🙂\n"]
    return [token for _ in range(dice.randint(0, 20)) for token in dice.choice(words)]


@pytest.mark.parametrize("skip", [False, True])
@KINDS
def test_parts_joined_are_the_whole_text(kind, skip):
    dice, tokenizer = random.Random(0), TOKENIZERS[kind]
    for _ in range(300):
        tokens = some_tokens(kind, dice)
        text = Detokenizer(tokenizer, skip)
        parts = [text.add(token) for token in tokens]
        assert "".join([*parts, text.end()]) == whole(tokenizer, tokens, skip)


@KINDS
def test_character_comes_with_its_last_byte(kind):
    sample = "naïve 中文 🙂é"
    tokenizer = TOKENIZERS[kind]
    if kind == "mixed":
        tokens, want = [10, 11, 12, 7, 0, 8, 9], ["", "", "中", "é", "a", "b", "éa"]
    else:
        first = 1 if kind == "fallback" else None
        tokens = [first + b for b in sample.encode()] if first else tokenizer.encode(sample)
        want = [part for c in sample for part in [""] * (len(c.encode()) - 1) + [c]]
    text = Detokenizer(tokenizer)
    assert [text.add(token) for token in tokens] == want
    assert text.end() == ""


def test_bytes_of_no_character_become_replacements():
    text = Detokenizer(MIXED)
    assert [*map(text.add, (0, 10, 11)), text.end()] == ["a", "", "", REPLACEMENT]
    text = Detokenizer(MIXED)
    assert [*map(text.add, (10, 0))] == ["", f"{REPLACEMENT}a"]


@pytest.mark.parametrize("kind", ["bytes", "mixed"])
def test_call_decodes_few_tokens_however_long_the_text(kind, monkeypatch):
    """Even where no token ends with its character."""
    tokenizer, widths = TOKENIZERS[kind], []
    halves = [i for i in range(len(tokenizer)) if whole(tokenizer, [i]).endswith(REPLACEMENT)]
    decode, dice = tokenizer.decode, random.Random(1)

    def watched(tokens, **options):
        widths.append(len(tokens))
        return decode(tokens, **options)

    for choice in (halves, range(len(tokenizer))):
        tokens = [dice.choice(choice) for _ in range(300)]
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "decode", watched)
            text = Detokenizer(tokenizer)
            parts = [*map(text.add, tokens), text.end()]
        assert "".join(parts) == whole(tokenizer, tokens)
    assert WINDOW < max(widths) <= 2 * WINDOW


def test_spaces_are_not_tidied_up():
    tokenizer = byte_fallback()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode([258, 257, 1 + ord("!")]) == "a!"
    text = Detokenizer(tokenizer)
    assert "".join(text.add(t) for t in [258, 257, 1 + ord("!")]) == "a !"


# -- stop strings --------------------------------------------------------------------------------


def found(tokenizer, strings, tokens):
    ends = StopStrings(tokenizer, strings)()
    return next((n for n, token in enumerate(tokens, 1) if ends(token)), None)


@KINDS
def test_text_ends_where_it_first_holds_a_stop_string(kind):
    """Strings cut out of the text itself, so that they begin and end anywhere in its tokens."""
    dice, tokenizer = random.Random(2), TOKENIZERS[kind]
    inside = 0
    for _ in range(400):
        tokens = some_tokens(kind, dice)
        text = whole(tokenizer, tokens).replace(REPLACEMENT, "?") or "a"
        strings = []
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(text))
            strings.append(text[start : start + dice.randint(1, 9)])
        want = ended(tokenizer, strings, tokens)
        assert found(tokenizer, strings, tokens) == want, (strings, tokens)
        inside += want is not None and want < len(tokens)
    assert inside > 100


@pytest.mark.parametrize(
    ("strings", "tokens", "want"),
    [
        (["é"], [0, 6, 7, 0], 3),  # whose bytes are two tokens
        (["é"], [8, 9, 0], 2),  # which ends and begins within tokens
        (["ba"], [0, 1, 0, 0], 3),
        (["ba"], [4, 0], 1),  # inside one token
        (["bb"], [4, 2, 1], 3),
        (["abaab a"], [0, 1, 0, 0, 1, 5, 0, 0], 7),
        (["a", "ab"], [1, 2], 2),
        (["ab"], [1, 1, 0], None),
        ("ab", [1, 0, 1], 3),  # one string is not its letters
        (["a<end>"], [1, 0, 13, 0], 3),  # special tokens are text
        (["<end>b"], [1, 0, 13, 0, 2, 13, 1], 7),
        ([], [0, 1, 2], None),
    ],
)
def test_stop_strings_by_hand(strings, tokens, want):
    assert found(MIXED, strings, tokens) == want


def test_every_text_has_a_test_of_its_own():
    make = StopStrings(MIXED, ["ab"])
    first, second = make(), make()
    assert [first(0), second(1), first(1)] == [False, False, True]


@pytest.mark.parametrize("strings", ["", ["a", ""]])
def test_empty_stop_string_is_refused(strings):
    with pytest.raises(UserError, match="empty stop string"):
        StopStrings(MIXED, strings)

"""Tokens that two tokenizers share, and the target's text in draft ids."""

from __future__ import annotations

import pytest
import torch
from letters import FALLBACK, MIXED
from tokenizer_pairs import TEXTS, random_tokens, spelled, trained
from tokenizers import Tokenizer, decoders, models, processors

from decode.errors import UserError
from drafters.hf.tokenizer_map import MappedText, TokenBytes, TokenizerMap, pack, unpack

SMALL, LARGE = trained(300, ["<end>", "<user>"]), trained(340, ["<pad>", "<end>"])


def tokens_of(tokenizer) -> TokenBytes:
    return TokenBytes.of(tokenizer.backend_tokenizer, len(tokenizer), "target")


def copied(tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def mapping(draft, target) -> TokenizerMap:
    return TokenizerMap(copied(draft), len(draft), tokens_of(target))


def shared(found: TokenizerMap) -> set[tuple[int, int]]:
    return set(zip(found.draft_ids.tolist(), found.target_ids.tolist(), strict=True))


@pytest.mark.parametrize("tokenizer", [SMALL, LARGE, MIXED], ids=["small", "large", "parts of letters"])
def test_tokens_spell_the_text_that_the_tokenizer_decodes(tokenizer):
    tokens = [*range(len(tokenizer)), *reversed(range(len(tokenizer)))]
    text = tokens_of(tokenizer).spell(tokens).decode(errors="replace")
    assert text == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_marks_of_sentence_piece_are_undone():
    ids, words = FALLBACK.get_vocab(), tokens_of(FALLBACK)
    assert words.words[ids["▁ab"]] == b" ab"
    assert words.words[ids["é"]] == "é".encode()
    assert words.words[ids["<0xE4>"]] == b"\xe4"
    assert words.ids[False, b"a"] == ids["a"]  # and not the byte that stands in for a missing letter
    assert words.strips
    assert not tokens_of(SMALL).strips


def test_a_tokenizer_of_another_kind_is_refused():
    other = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    other.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"^target=x: its tokenizer is neither"):
        TokenBytes.of(other, 3, "target=x")


def test_tokens_of_the_same_bytes_are_shared_and_no_others():
    found = mapping(LARGE, SMALL)
    ours, theirs = tokens_of(LARGE).words, tokens_of(SMALL).words
    want = {(a, b) for a, x in enumerate(ours) for b, y in enumerate(theirs) if x == y}
    assert shared(found) == want
    assert 256 < len(want) < 300
    assert found.target_ids.tolist() == sorted(found.target_ids.tolist())
    assert found.special == ["<end>"]


def test_kinds_of_tokenizers_share_what_both_can_say():
    found, ids = mapping(FALLBACK, MIXED), FALLBACK.get_vocab()
    words = tokens_of(MIXED).words
    want = {(ids[name], words.index(word)) for name, word in [("a", b"a"), ("b", b"b"), ("▁", b" ")]}
    want |= {(ids[f"<0x{b:02X}>"], words.index(bytes([b]))) for b in (0xC3, 0xA9, 0xE4, 0xB8)}
    assert shared(found) == want


def test_a_special_token_is_not_the_same_letters():
    plain = spelled("<", "e", "n", "d", ">", "<e", "<en", "<end", "<end>")
    assert tokens_of(plain).words[8] == b"<end>"
    target = TokenBytes([b"<end>"], {(True, b"<end>"): 0}, False)
    with pytest.raises(UserError, match="share no token"):
        TokenizerMap(copied(plain), 9, target)


def test_ids_that_a_model_has_not_are_left_out():
    target = TokenBytes.of(SMALL.backend_tokenizer, 280, "target")
    found = TokenizerMap(copied(LARGE), 290, target)
    assert found.target_ids.max() < len(target.words) == 280
    assert found.draft_ids.max() < 290


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_as_the_draft_tokenizer_does(text):
    for words in (text, f"a<end>{text}"):
        assert mapping(LARGE, SMALL).encode(words.encode()) == LARGE(words)["input_ids"]


def test_bytes_that_are_no_letter_yet_are_tokens_of_their_own():
    found, ids = mapping(LARGE, SMALL), {word: i for i, word in enumerate(tokens_of(LARGE).words)}
    text = "é中".encode()
    for end in range(1, len(text) + 1):
        whole = text[:end].decode(errors="ignore")
        rest = text[len(whole.encode()) : end]
        assert found.encode(text[:end]) == [*LARGE(whole)["input_ids"], *(ids[bytes([b])] for b in rest)]
    assert mapping(spelled("a", "b"), SMALL).encode(b"a\xe4b") == [0, 1]  # it has no such token
    assert mapping(spelled("a", "b"), SMALL).encode(b"") == [0]


def test_special_tokens_that_begin_a_text_come_first_and_once():
    begun = copied(LARGE)
    end = begun.token_to_id("<end>")
    begun.post_processor = processors.TemplateProcessing(
        single="<end> $A <pad>", special_tokens=[("<end>", end), ("<pad>", begun.token_to_id("<pad>"))]
    )
    begun.enable_truncation(3)
    begun.enable_padding(length=30)
    found = TokenizerMap(begun, len(LARGE), tokens_of(SMALL))
    plain = LARGE("these things")["input_ids"]
    assert found.encode(b"these things") == found.encode(b"<end>these things") == [end, *plain]
    _, places = found.align(SMALL("these things")["input_ids"])
    assert max(places) == len(plain)


def test_a_space_that_the_targets_tokenizer_has_put_there_is_taken_off():
    found = mapping(LARGE, FALLBACK)
    ids = FALLBACK.get_vocab()
    assert found.encode(found.target.spell([ids["▁ab"], ids["▁a"]])) == LARGE("ab a")["input_ids"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pair", [(LARGE, SMALL), (SMALL, LARGE), (FALLBACK, SMALL)], ids=["l", "s", "f"])
def test_a_text_in_pieces_is_encoded_as_the_whole_text(pair, seed):
    found, tokens = mapping(*pair), random_tokens(pair[1], 60, seed)
    text, cuts = MappedText(), sorted({*torch.randint(1, 60, (20,)).tolist(), 60})
    for begin, end in zip([0, *cuts], cuts, strict=False):
        before = list(text.ids)
        same = text.extend(tokens[begin:end], found)
        assert text.ids == found.encode(found.target.spell(tokens[:end]))
        assert text.ids[:same] == before[:same]
        assert same == len(text.ids) - 1 or same == len(before) or text.ids[same] != before[same]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pair", [(LARGE, SMALL), (SMALL, LARGE)], ids=["l", "s"])
def test_tokens_of_both_end_together_where_the_text_between_is_the_same(pair, seed):
    found, tokens = mapping(*pair), random_tokens(pair[1], 80, seed)
    ids, places = found.align(tokens)
    words = tokens_of(pair[0])
    assert len(places) == 80
    ends = {len(words.spell(ids[: i + 1])): i for i in range(len(ids))}
    for end, place in enumerate(places):
        text = found.target.spell(tokens[: end + 1])
        if place >= 0:
            assert words.spell(ids[: place + 1]) == text
        else:  # or the letter is not complete
            assert len(text) not in ends or text.decode(errors="replace").endswith("\ufffd")
    assert sum(place >= 0 for place in places) > 20


def test_a_packed_tokenizer_comes_back():
    packed = pack(LARGE.backend_tokenizer)
    assert packed.dtype == torch.uint8
    assert unpack(packed).to_str() == LARGE.backend_tokenizer.to_str()


@pytest.mark.parametrize("change", [lambda p: p[:-9], lambda p: p * 0, lambda p: p.flip(0)])
def test_a_damaged_tokenizer_is_refused_in_one_line(change):
    with pytest.raises(UserError, match=r"^damaged checkpoint \(its tokenizer cannot be read") as error:
        unpack(change(pack(LARGE.backend_tokenizer)))
    assert "\n" not in str(error.value)

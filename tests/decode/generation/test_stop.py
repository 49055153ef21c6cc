"""Stop strings in the loop: the text is that of plain decoding, cut where one of them first ends."""

import random
from collections import defaultdict

import pytest
from exact import (
    EnumeratingCoin,
    FixedTrees,
    SampledChains,
    Script,
    assert_same_probs,
    exact_probs,
    target_probs,
)
from letters import FALLBACK, MIXED, byte_fallback, ended, pieces, whole
from scripted import Oracle, Watch
from workbench import make_tokenizer

from decode.errors import UserError
from decode.generation.generate import generate, stream
from decode.generation.text import REPLACEMENT, WINDOW, Detokenizer, StopStrings
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

VOCAB, LENGTH = len(MIXED), 24
PROMPTS = [[0, 9, 2], [4], [8, 9, 1, 3, 0, 6], [12, 7]]
PLANS = {"chain": Plan(depth=5), "tree": Plan(depth=5, width=3, nodes=10)}
SHAPES = pytest.mark.parametrize("shape", PLANS)
SAMPLER, SEED = Sampler(2.0), 5  # the match rule's samples are plain sampling's, token for token


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return tiny_target(vocab=VOCAB, hidden=16)


@pytest.fixture(scope="module")
def answers(target):
    run = generate(target, None, PROMPTS, max_new_tokens=LENGTH, sampler=SAMPLER, seed=SEED)
    return [output.tokens for output in run.outputs]


def oracle(answers, shape, right=0.9, prompts=PROMPTS):
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    return Oracle(texts, VOCAB, right, branches=4 if shape == "tree" else 0)


def cut(tokens, strings, tokenizer=MIXED):
    """The reference: decodes the whole text after every token."""
    return list(tokens)[: ended(tokenizer, strings, tokens)]


def said(tokens, start):
    letters = max(whole(MIXED, tokens[start:]).split(REPLACEMENT), key=len)
    assert len(letters) > 3
    return letters[1:4]


def run(target, drafter, strings, prompts=PROMPTS, **options):
    options = {"max_new_tokens": LENGTH, "until": StopStrings(MIXED, strings)} | options
    return generate(target, drafter, prompts, sampler=SAMPLER, seed=SEED, **options).outputs


@SHAPES
def test_text_ends_at_its_first_stop_string(target, answers, shape):
    """At any string that an answer holds: within drafts, across rounds, between halves of letters."""
    dice = random.Random(0)
    inside = across = 0
    for _ in range(30):
        text = whole(MIXED, dice.choice(answers)).replace(REPLACEMENT, "")
        start = dice.randrange(len(text))
        strings = [text[start : start + dice.randint(1, 6)], "never"]
        outputs = run(target, oracle(answers, shape), strings, plan=PLANS[shape])
        for output, answer in zip(outputs, answers, strict=True):
            assert output.tokens == cut(answer, strings), strings
            assert output.stopped == any(s in whole(MIXED, output.tokens) for s in strings)
            assert 1 + sum(output.emitted) == len(output.tokens)
            if output.stopped and output.emitted:
                inside += output.emitted[-1] <= output.accepted[-1]
                last = whole(MIXED, output.tokens[-output.emitted[-1] :])
                across += not any(s in last for s in strings)
    assert inside > 5, "ends in the middle of accepted drafts"
    assert across > 5, "strings that began in an earlier round"


def test_first_of_several_ends_counts(target, answers):
    """An end token, a stop string or the length."""
    answer = answers[0]
    string = said(answer, 4)
    until = ended(MIXED, [string], answer)
    for end in (until - 2, until - 1, until):
        first = answer.index(answer[end])
        want = answer[: min(first + 1, until)]
        output = run(target, oracle(answers, "tree"), [string], plan=PLANS["tree"], stop=[answer[end]])[0]
        assert output.tokens == want
        assert output.stopped
    (short,) = run(target, None, [string], PROMPTS[:1], max_new_tokens=until - 1)
    assert (len(short.tokens), short.stopped) == (until - 1, False)


def test_prompt_is_not_searched(target, answers):
    """Neither for a string that it holds, nor for the beginning of one."""
    first = whole(MIXED, answers[0]).strip(REPLACEMENT)[0]
    assert whole(MIXED, PROMPTS[0]).endswith("aab")
    for string in ("aab", "aab" + first):
        (output,) = run(target, None, [string], PROMPTS[:1])
        assert output.tokens == cut(answers[0], [string])
        assert len(output.tokens) > 1


@SHAPES
def test_all_rows_end_at_the_prefill(target, answers, shape):
    """By end tokens or by strings: nobody drafts, and one pass is all there was."""

    class Unasked(Oracle):
        def advance(self, *args):
            raise AssertionError("there is nothing to draft for")

    for options in ({"stop": [a[0] for a in answers]}, {"until": lambda: lambda token: True}):
        watch = Watch(4)
        outputs = run(target, Unasked([], VOCAB), [], plan=PLANS[shape], on_round=watch, **options)
        assert [o.tokens for o in outputs] == [a[:1] for a in answers]
        assert all(o.stopped and o.emitted == [] for o in outputs)
        assert len(watch.rounds) == 1


def test_each_emitted_token_is_tested_once(target, answers):
    """In order, by one test a request, and nothing of what is cut."""
    told = []

    def make():
        mine = []
        told.append(mine)
        return lambda token: mine.append(token) or len(mine) == 9

    outputs = run(target, oracle(answers, "tree"), [], plan=PLANS["tree"], until=make)
    assert told == [o.tokens for o in outputs] == [a[:9] for a in answers]


def test_stream_stops_as_generate_does(target, answers):
    string = said(answers[2], 4)
    options = {"max_new_tokens": LENGTH, "sampler": SAMPLER, "plan": PLANS["tree"], "seed": SEED}
    options |= {"until": StopStrings(MIXED, [string]), "request": 2}
    for _ in range(2):  # the strings keep nothing of a text
        parts = list(stream(target, oracle(answers, "tree"), PROMPTS[2], **options))
        assert [t for piece in parts for t in piece.tokens] == cut(answers[2], [string])
        assert parts[-1].output.stopped


SMALL = pieces("a", "ba", "b\xc3", "\xa9a")


@pytest.mark.parametrize("strings", [["ab"], ["é"], ["aba", "aa"]])
@pytest.mark.parametrize(
    ("drafter", "plan"),
    [
        (FixedTrees(4), Plan(depth=2, width=2, nodes=5)),
        (SampledChains(4), Plan(depth=2, proposal="sampled")),
    ],
    ids=["match", "token"],
)
@pytest.mark.covering
def test_stopped_texts_have_the_targets_exact_distribution(tiny_target, drafter, plan, strings):
    """That of whole texts, each cut where it stops."""
    target, length, prompts = tiny_target(vocab=4), 3, [[1, 2, 0], [3]]
    options = {"max_new_tokens": length, "sampler": Sampler(0.5), "plan": plan}

    def play(tapes):
        coin, until = EnumeratingCoin([*tapes, Script(0)]), StopStrings(SMALL, strings)
        batch = [prompts[0]] * len(tapes) + prompts[1:]
        outputs = generate(target, drafter, batch, coin=coin, until=until, **options).outputs
        return [tuple(output.tokens) for output in outputs[:-1]]

    want = defaultdict(float)
    for text, mass in target_probs(target.model, prompts[0], length, Sampler(0.5)).items():
        want[tuple(cut(text, strings, SMALL))] += mass
    assert {len(text) for text in want} > {length}, "some texts stop early"
    assert_same_probs(exact_probs(play, abreast=48), want)


# -- text of a stream --------------------------------------------------------------------------------


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


def test_one_stop_string_is_not_its_letters_and_no_string_ends_nothing():
    assert found(MIXED, "ab", [1, 0, 1]) == 3
    assert found(MIXED, [], [0, 1, 2]) is None
    assert found(MIXED, ["a<end>"], [1, 0, 13, 0]) == 3, "special tokens are text"


@pytest.mark.parametrize("strings", ["", ["a", ""]])
def test_empty_stop_string_is_refused(strings):
    with pytest.raises(UserError, match="empty stop string"):
        StopStrings(MIXED, strings)

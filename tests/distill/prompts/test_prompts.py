"""Prompts: their split, what of a conversation is asked, plain text, and how many tokens they have."""

import json
import random
import re

import numpy as np
import pytest
from chats import say, tokenizer_of
from workbench import TEMPLATE, make_tokenizer

from decode.errors import UserError
from distill.prompts import token_counts as module
from distill.prompts.chat_template import Chat
from distill.prompts.length import LeftOut, Limit, Measured
from distill.prompts.prompt import Prompt, held_out, opening, question, split, turns
from distill.prompts.token_counts import count_tokens

DIALOGUE = say("one", "two", "three", "four")


def texts(count: int) -> list[Prompt]:
    return [Prompt.of(str(i), ({"role": "user", "content": f"question {i}"},)) for i in range(count)]


def by_id(prompt: Prompt) -> str:
    return prompt.id


def test_split_is_by_text():
    prompts = texts(400)
    train, held = split(prompts, 0.1)
    assert 20 < len(held) < 60
    assert sorted(train + held, key=by_id) == sorted(prompts, key=by_id)
    shuffled = [Prompt.of(f"other-{i}", p.messages) for i, p in enumerate(prompts)]
    random.Random(0).shuffle(shuffled)
    again = split(shuffled + texts(50), 0.1)[1]
    assert {p.packed for p in again} == {p.packed for p in held}
    assert {p.id for p in held} < {p.id for p in split(prompts, 0.3)[1]}, "a larger share includes a smaller"
    assert split(prompts, 0.0) == (prompts, [])


def test_held_out_prompts_are_not_trained_on():
    held = texts(5)
    train = [*texts(12), Prompt.of("same text, other id", held[3].messages)]
    kept, mixed = held_out(train, held)
    asked = [p.messages for p in held]
    assert [p.id for p in kept] == [str(i) for i in range(5, 12)]
    assert sorted(mixed, key=by_id) == sorted(held, key=by_id)
    assert not [p for p in kept if p.messages in asked]
    many = texts(40)
    assert held_out([], many)[1] == held_out([], many[::-1])[1] != many, "an order of their own"


def speak(text: str) -> tuple[dict[str, str], ...]:
    """Messages by their speakers' first letters: s, d, u, a, t."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return tuple({"role": roles[c], "content": f"{c}{i}"} for i, c in enumerate(text))


@pytest.mark.parametrize(
    ("speakers", "places", "first"),
    [
        ("u", [1], 1),
        ("su", [2], 2),
        ("du", [2], 2),
        ("udu", [1, 3], 1),
        ("uu", [1, 2], 1),
        ("suuu", [2, 3, 4], 2),
        ("ua", [], 1),
        ("uaua", [], 3),
        ("uauu", [3, 4], 3),
        ("uuaa", [1], 1),
        ("uat", [3], 3),
        ("uatt", [4], 4),
        ("uatau", [5], 5),
    ],
)
def test_opening_ends_at_the_first_place_to_be_answered(speakers, places, first):
    messages = speak(speakers)
    assert turns(messages) == places
    assert opening(messages) == messages[:first]


def test_conversations_with_one_question_are_not_split():
    asked = texts(200)
    answered = [Prompt.of(p.id, (*p.messages, *speak("aua"))) for p in asked]
    train, held = split([*asked, *answered], 0.2)
    assert 20 < len(held) < 120
    sides = [{json.dumps(question(p)) for p in part} for part in (train, held)]
    assert len(sides[0]) + len(sides[1]) == 200
    assert not sides[0] & sides[1]
    kept, _ = held_out([*asked, *answered], answered[:50])
    assert len(kept) == 300
    greeted = Prompt.of("g", (*speak("a"), *asked[0].messages))
    assert held_out([greeted], asked[:1])[0] == [], "a greeting before it makes no other question"
    system = Prompt.of("s", ({"role": "system", "content": "s"}, *asked[0].messages))
    assert held_out([system], asked[:1])[0] == [system], "another system text makes another question"
    instructed = [Prompt.of("d", speak(f"du{more}")) for more in ("", "au")]
    assert held_out(instructed, instructed[:1])[0] == [], "instructions are no question"
    other = Prompt.of("d", (*speak("d"), *asked[0].messages))
    assert held_out([other], instructed)[0] == [other]


def test_plain_text_masks_the_last_message():
    chat = Chat(make_tokenizer(None), "none")
    assert chat.tokenizer.decode(chat.encode(DIALOGUE[:1])) == "one"
    ids, mask = chat.encode_answered(DIALOGUE[:2])
    assert mask == sorted(mask)
    assert chat.tokenizer.decode(ids[mask.index(1) :]) == "\ntwo"


def test_mask_that_cannot_be_right_is_refused():
    for template, messages, said in (
        (TEMPLATE.replace("{{ m['content'] }}<|end|>", ""), DIALOGUE, "mask is all 0"),
        (TEMPLATE, DIALOGUE[:3], "does not end with an answer"),
        (None, DIALOGUE[1:2], "mask is all 1"),
    ):
        with pytest.raises(UserError, match=said):
            Chat(make_tokenizer(template), "chat" if template else "none").encode_answered(messages)


def test_user_turn_surrounds_the_text():
    chat = Chat(make_tokenizer())
    before, after = chat.user_turn()
    text = chat.tokenizer.encode("hello", add_special_tokens=False)
    assert before + text + after == chat.encode([{"role": "user", "content": "hello"}])
    plain = Chat(make_tokenizer(None), "none")
    assert plain.user_turn() == ([plain.tokenizer.bos_token_id], [])


def test_base_model_names_the_option_that_helps():
    with pytest.raises(UserError, match=r"prompts\.template=none"):
        Chat(make_tokenizer(None))
    with pytest.raises(UserError, match="chat or none"):
        Chat(make_tokenizer(), "jinja")


@pytest.mark.parametrize("count", [50, 100])
def test_advised_share_is_enough(count):
    limit = Limit(4, "prompts.max_tokens")
    for long in range(2, count):
        measured = Measured()
        for i, prompt in enumerate(texts(count)):
            measured.add(prompt, 9 if i < long else 1, limit)
        left = LeftOut("prompts", measured, limit=limit)
        with pytest.raises(UserError, match=r"raise prompts\.max_tokens to 9") as caught:
            left.check((long - 1) / count)
        advised = re.search(r"max_left_out=(\S+)", str(caught.value))
        left.check(float(advised[1]))


# -- how many tokens they have -------------------------------------------------------------------


@pytest.fixture
def prompts(folder) -> list[Prompt]:
    """One in five has a system message, which Gemma's template refuses."""
    texts = ["word " * (i % 7) + f"word{i}" for i in range(40)]
    return [
        Prompt.of(str(i), say(text, "Yes", system="Be brief." * (i % 5 == 3))) for i, text in enumerate(texts)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where their counts are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "FEW", 10)
    monkeypatch.setattr(module, "CHUNK", 4)
    return tmp_path / "foredraft" / "prompts"


@pytest.fixture
def counted(monkeypatch) -> list[Prompt]:
    """The prompts that are counted in this process."""
    seen, count = [], module._count_chunk
    monkeypatch.setattr(module, "_count_chunk", lambda part, given: seen.extend(part) or count(part, given))
    return seen


@pytest.mark.parametrize("given", [False, True])
def test_prompts_are_counted_once(prompts, folder, counted, given):
    chat = Chat(tokenizer_of("gemma"))
    tokens, refusals = count_tokens(prompts, chat, given)
    assert sorted(refusals) == np.flatnonzero(tokens < 0).tolist() == list(range(3, 40, 5))
    assert all("no system role" in reason for reason in refusals.values())
    for prompt, count in zip(prompts, tokens, strict=True):
        if count >= 0:
            assert count == len(chat.encode(opening(prompt.messages)))
    counted.clear()
    again = count_tokens([*reversed(prompts)], chat, given)
    assert [int(p.id) for p in counted] == [*range(38, 0, -5)], "refused ones are not remembered"
    assert again.tokens[::-1].tolist() == tokens.tolist()
    counted.clear()
    count_tokens(prompts, Chat(tokenizer_of("gemma"), options={"other": 1}), given)
    count_tokens(prompts, chat, not given)
    assert len(counted) == 80, "another template, and another question"
    assert len(list(folder.glob("*.npy"))) == 3
    assert b"word" not in b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.proof
def test_several_processes_count_the_same(prompts, folder, monkeypatch):
    chat = Chat(tokenizer_of("gemma"))
    whole = count_tokens(prompts, chat, False)
    for path in folder.glob("*.npy"):
        path.unlink()
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1})
    tokens, refusals = count_tokens(prompts, chat, False)
    assert tokens.tolist() == whole.tokens.tolist()
    assert refusals == whole.refusals


def test_counts_before_a_stop_are_kept(prompts, counted, monkeypatch):
    chat = Chat(tokenizer_of("chatml"))
    count = module._count_chunk

    def stopped(part, given):
        if len(counted) >= 12:
            raise KeyboardInterrupt
        return count(part, given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_count_chunk", stopped)
        with pytest.raises(KeyboardInterrupt):
            count_tokens(prompts, chat, False)
    counted.clear()
    assert (count_tokens(prompts, chat, False).tokens > 0).all()
    assert len(counted) == 28


@pytest.mark.parametrize("damage", ["nothing", "half", "text", "another array"])
def test_damaged_file_is_counted_again(prompts, folder, counted, damage):
    chat = Chat(tokenizer_of("chatml"))
    tokens, _ = count_tokens(prompts, chat, False)
    (path,) = folder.glob("*.npy")
    data = path.read_bytes()
    if damage == "another array":
        np.save(path, np.arange(3))
    else:
        path.write_bytes({"nothing": b"", "half": data[: len(data) // 2], "text": b"1"}[damage])
    counted.clear()
    assert count_tokens(prompts, chat, False).tokens.tolist() == tokens.tolist()
    assert len(counted) == 40
    assert path.read_bytes() == data


def test_counts_without_a_file(prompts, folder, tmp_path, monkeypatch):
    chat = Chat(tokenizer_of("chatml"))
    few = count_tokens(prompts[:10], chat, False)
    assert not folder.exists(), "few are not worth a file"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # which cannot be written to
    assert count_tokens(prompts, chat, False).tokens[:10].tolist() == few.tokens.tolist()

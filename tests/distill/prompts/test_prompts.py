"""Prompts, chat templates and loss masks."""

import json
import random
import re

import pytest
from workbench import SPECIAL, TEMPLATE, make_tokenizer

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.length import LeftOut, Limit, Measured
from distill.prompts.prompt import Prompt, held_out, opening, question, split, turns

USER, ASSISTANT, END = SPECIAL[1:]
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
DIALOGUE = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def texts(count: int) -> list[Prompt]:
    return [Prompt.of(str(i), ({"role": "user", "content": f"question {i}"},)) for i in range(count)]


def masked(chat: Chat, messages) -> str:
    """The supervised text, token by token."""
    ids, mask = chat.encode_answered(messages)
    assert len(ids) == len(mask)
    return "".join(chat.tokenizer.decode([i]) for i, m in zip(ids, mask, strict=True) if m)


def by_id(prompt: Prompt) -> str:
    return prompt.id


def test_the_split_is_by_text_alone():
    prompts = texts(400)
    train, held = split(prompts, 0.1)
    assert 20 < len(held) < 60
    assert sorted(train + held, key=by_id) == sorted(prompts, key=by_id)
    shuffled = [Prompt.of(f"other-{i}", p.messages) for i, p in enumerate(prompts)]
    random.Random(0).shuffle(shuffled)
    again = split(shuffled + texts(50), 0.1)[1]
    assert {p.packed for p in again} == {p.packed for p in held}


def test_a_larger_share_holds_out_the_smaller_ones_prompts_too():
    prompts = texts(300)
    small, large = (split(prompts, share)[1] for share in (0.1, 0.3))
    assert {p.id for p in small} < {p.id for p in large}
    assert split(prompts, 0.0) == (prompts, [])


def test_what_is_held_out_is_never_trained_on():
    held = texts(5)
    train = [*texts(12), Prompt.of("same text, other id", held[3].messages)]
    kept, mixed = held_out(train, held)
    asked = [p.messages for p in held]
    assert [p.id for p in kept] == [str(i) for i in range(5, 12)]
    assert sorted(mixed, key=by_id) == sorted(held, key=by_id)
    assert not [p for p in kept if p.messages in asked]


def test_held_out_prompts_are_mixed_whatever_their_order():
    held = texts(40)
    assert held_out([], held)[1] == held_out([], held[::-1])[1] != held


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
    ],
)
def test_an_opening_ends_at_the_first_place_to_be_answered(speakers, places, first):
    messages = speak(speakers)
    assert turns(messages) == places
    assert opening(messages) == messages[:first]


def test_one_question_falls_on_one_side_however_it_goes_on():
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


def test_a_prompt_ends_where_the_answer_begins():
    chat = Chat(make_tokenizer())
    ids = chat.encode(DIALOGUE[:3])
    assert chat.tokenizer.decode(ids) == f"{USER}one{ASSISTANT}two{END}{USER}three{ASSISTANT}"
    assert chat.encode(DIALOGUE) == ids, "the answer that is to be written was given away"


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{% gen", "{%- gen"), UNMARKED])
def test_masks_cover_what_the_assistant_wrote_and_its_end(template):
    chat = Chat(make_tokenizer(template))
    assert masked(chat, DIALOGUE[:2]) == f"two{END}"


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED])
def test_every_answer_is_covered_marked_or_not(template):
    assert masked(Chat(make_tokenizer(template)), DIALOGUE) == f"two{END}four{END}"


def test_plain_text_masks_the_last_message():
    chat = Chat(make_tokenizer(None), "none")
    assert chat.tokenizer.decode(chat.encode(DIALOGUE[:1])) == "one"
    assert masked(chat, DIALOGUE[:2]) == "\ntwo"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (TEMPLATE.replace("{{ m['content'] }}<|end|>", ""), DIALOGUE, "mask is all 0"),
        ("{% generation %}" + UNMARKED + "{% endgeneration %}", DIALOGUE, "or marks it as an answer"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}!",
            DIALOGUE[:2],
            "renders an answer differently",
        ),
        (TEMPLATE, DIALOGUE[:3], "does not end with an answer"),
        ("{{ raise_exception('no system role') }}", DIALOGUE, "refuses the prompt 'one': no system role"),
        ("{% generation %}{{ raise_exception('odd') }}{% endgeneration %}", DIALOGUE, "odd"),
    ],
)
def test_a_mask_that_cannot_be_right_raises(template, messages, said):
    with pytest.raises(UserError, match=said):
        Chat(make_tokenizer(template)).encode_answered(messages)


def test_nothing_but_an_answer_cannot_be_masked():
    with pytest.raises(UserError, match="mask is all 1"):
        Chat(make_tokenizer(None), "none").encode_answered(DIALOGUE[1:2])


def test_a_user_turn_is_what_surrounds_the_users_text():
    chat = Chat(make_tokenizer())
    before, after = chat.user_turn()
    text = chat.tokenizer.encode("hello", add_special_tokens=False)
    assert before + text + after == chat.encode([{"role": "user", "content": "hello"}])
    plain = Chat(make_tokenizer(None), "none")
    assert plain.user_turn() == ([plain.tokenizer.bos_token_id], [])


def test_a_base_model_is_told_which_option_helps():
    with pytest.raises(UserError, match=r"prompts\.template=none"):
        Chat(make_tokenizer(None))
    with pytest.raises(UserError, match="chat or none"):
        Chat(make_tokenizer(), "jinja")


@pytest.mark.parametrize("count", [50, 100])
def test_the_share_that_is_advised_is_enough(count):
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

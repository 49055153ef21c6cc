"""Prompts, chat templates and loss masks."""

import json
import random

import pytest
from workbench import SPECIAL, TEMPLATE, make_tokenizer, write_prompts

from decode.errors import UserError
from distill.chat import Chat
from distill.prompts import Prompt, held_out, read_prompts, split

USER, ASSISTANT, END = SPECIAL[1:]
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
DIALOGUE = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def texts(count: int) -> list[Prompt]:
    return [Prompt(str(i), ({"role": "user", "content": f"question {i}"},)) for i in range(count)]


def masked(chat: Chat, messages) -> str:
    """The supervised text, token by token."""
    ids, mask = chat.encode_answered(messages)
    assert len(ids) == len(mask)
    return "".join(chat.tokenizer.decode([i]) for i, m in zip(ids, mask, strict=True) if m)


def test_both_record_forms_are_read(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        "\n"
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n'
        '{"id": null, "messages": [{"role": "user", "content": "ü", "extra": 1}]}\n'
    )
    first, second, third = read_prompts(file)
    assert first == Prompt("a", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    assert second == Prompt("81", ({"role": "user", "content": "first"},))
    assert third == Prompt("4", ({"role": "user", "content": "ü"},))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", 2)
    plain = read_prompts(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_prompts(file) == plain


def test_the_split_is_by_text_alone():
    prompts = texts(400)
    train, held = split(prompts, 0.1)
    assert 20 < len(held) < 60
    assert sorted(train + held) == sorted(prompts)
    shuffled = [Prompt(f"other-{i}", p.messages) for i, p in enumerate(prompts)]
    random.Random(0).shuffle(shuffled)
    again = split(shuffled + texts(50), 0.1)[1]
    assert {p.messages for p in map(_frozen, again)} == {p.messages for p in map(_frozen, held)}


def _frozen(prompt: Prompt) -> Prompt:
    return Prompt(prompt.id, json.dumps(prompt.messages))  # type: ignore[arg-type]


def test_a_larger_share_holds_out_the_smaller_ones_prompts_too():
    prompts = texts(300)
    small, large = (split(prompts, share)[1] for share in (0.1, 0.3))
    assert {p.id for p in small} < {p.id for p in large}
    assert split(prompts, 0.0) == (prompts, [])


def test_what_is_held_out_is_never_trained_on():
    held = texts(5)
    train = [*texts(12), Prompt("same text, other id", held[3].messages)]
    kept, mixed = held_out(train, held)
    asked = [p.messages for p in held]
    assert [p.id for p in kept] == [str(i) for i in range(5, 12)]
    assert sorted(mixed) == sorted(held)
    assert not [p for p in kept if p.messages in asked]


def test_held_out_prompts_are_mixed_whatever_their_order():
    held = texts(40)
    assert held_out([], held)[1] == held_out([], held[::-1])[1] != held


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
        ("{% generation %}" + UNMARKED + "{% endgeneration %}", DIALOGUE, "mask is all 1"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}!",
            DIALOGUE[:2],
            "renders an answer differently",
        ),
        (TEMPLATE, DIALOGUE[:3], "must be the answer"),
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

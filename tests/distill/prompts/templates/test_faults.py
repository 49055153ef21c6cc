"""A text that a template leaves out or changes is refused in one line."""

import re
from typing import Any

import pytest
from chats import FAMILIES, Family, build, say, tokenizer_of

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.prompts.templates.faults import fault_in_answer, fault_in_prompt
from distill.prompts.token_counts import count_tokens

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chat_of(template: str, *tokens: str, name: str = "chatml", **options: Any) -> Chat:
    """A family's tokenizer with another template."""
    family = FAMILIES[name]
    tokenizer = build(Family(template, (*family.special, *tokens), family.end, family.bos), merges=())
    return Chat(tokenizer, options=options)


def runs(chat: Chat, messages: list[dict[str, Any]], tools: Any = ()) -> list[str]:
    """The text of each run of supervised tokens."""
    ids, mask = chat.encode_answered(messages, tools)
    found = re.finditer("1+", "".join(map(str, mask)))
    return [str(chat.tokenizer.decode(ids[run.start() : run.end()])) for run in found]


HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
END = "{{ '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def turns(body: str, head: str = "") -> str:
    """ChatML with another body of messages."""
    return head + "{% for m in messages %}" + HEAD + body + END + "{% endfor %}" + PROMPT


PLAIN = "{{ m.content }}"
# As R1-Distill's, which keeps what stands behind the reasoning.
CUT = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"


def test_reasoning_cut_from_the_content_is_refused():
    chat, thought = chat_of(turns(CUT)), "<think>Two and two.</think>\n\n4"
    for messages in (say("2+2?", thought, "Sure?", "Yes"), say("a", "b", "2+2?", thought)):
        with pytest.raises(UserError, match=r"leaves out the content 'Two and two\.'"):
            chat.encode_answered(messages)
    assert runs(chat, say("2+2?", "4", "Sure?", "Yes")) == ["4<|im_end|>", "Yes<|im_end|>"]


def test_reasoning_that_only_the_last_turn_keeps():
    late = "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}"
    marked = "{% if m.role == 'user' %}" + PLAIN + "{% else %}{% generation %}" + late + "{% endgeneration %}"
    messages = say("2+2?", "<think>Two.</think>4", "Sure?", "<think>I am.</think>Yes")
    for body in (late, marked + "{% endif %}"):
        assert runs(chat_of(turns(body)), messages) == ["<think>I am.</think>Yes<|im_end|>"]


@pytest.mark.parametrize("arguments", [{"city": "Ulm"}, {}])
def test_call_named_only_in_the_list_of_tools_is_refused(arguments):
    chat = chat_of(turns(PLAIN, "{{ tools | tojson }}"))
    asked = [*say("Rain?"), answer(tool_calls=[call(arguments)])]
    with pytest.raises(UserError, match="leaves out the tool call 'weather'"):
        chat.encode_answered(asked, [WEATHER])
    with pytest.raises(UserError, match=r"leaves out the (tool call|argument)"):
        chat_of(turns(PLAIN)).encode([*asked, {"role": "tool", "content": "19"}])


CALLS = "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + ' ' }}{{ ARGUMENTS }}{% endfor %}"


@pytest.mark.parametrize("arguments", [{"city": "Ulm", "n": [1, None]}, '{"city": "Ulm", "n": [1, null]}'])
@pytest.mark.parametrize(
    "written", ["'' + c.function.arguments", "c.function.arguments", "c.function.arguments | tojson"]
)
def test_arguments_are_json_in_every_form_of_template(written, arguments):
    """Text (DeepSeek-V3), whatever it is given (which prints an object as Python does), an object."""
    chat = chat_of(turns(CALLS.replace("ARGUMENTS", written)))
    asked = [*say("Rain?"), answer(tool_calls=[call(arguments)])]
    assert runs(chat, asked) == ['weather {"city": "Ulm", "n": [1, null]}<|im_end|>']
    assert '{"city": "Ulm", "n": [1, null]}' in chat.tokenizer.decode(chat.encode([*asked, *say("So?")]))


@pytest.mark.parametrize("body", ["{{ m.content }}", "{{ m.content | tojson }}"])
def test_contents_are_never_printed_as_objects(body):
    chat = chat_of(turns(f"{{% if m.role == 'user' %}}{body}{{% endif %}}"))
    with pytest.raises(UserError, match="leaves out the content 'one'"):
        chat.encode_answered(say("a?", "one"))


def test_text_said_twice_is_written_twice():
    once = "{% if loop.index0 == 0 or m.role == 'assistant' %}{{ m.content }}{% endif %}"
    chat = chat_of(turns(once))
    with pytest.raises(UserError, match="leaves out the text 'again' of the user"):
        chat.encode(say("again", "fine", "again"))


def test_end_token_inside_an_answer_is_refused():
    chat = Chat(tokenizer_of("chatml"))
    for messages in (say("a", "one<|im_end|>"), say("a", "one<|im_end|>two", "b", "three")):
        with pytest.raises(UserError, match=r"the content 'one<\|im_end\|>.*' has '<\|im_end\|>' in it"):
            chat.encode_answered(messages)
    assert runs(chat, say("is <|im_end|> a token?", "Yes.")) == ["Yes.<|im_end|>"]


def test_answers_that_are_not_to_be_trained_on_are_context():
    chat, messages = Chat(tokenizer_of("chatml")), say("a", "one", "b", "two", "c", "three")
    whole = chat.encode_answered(messages)[0]
    for left_out, wanted in (([1], ["two", "three"]), ([3], ["one", "three"]), ([5], ["one", "two"])):
        marked = [m | ({"train": False} if i in left_out else {}) for i, m in enumerate(messages)]
        assert runs(chat, marked) == [f"{text}<|im_end|>" for text in wanted]
        assert chat.encode_answered(marked)[0] == whole
    assert runs(chat, [m | {"train": True} for m in messages])[0] == "one<|im_end|>"
    with pytest.raises(UserError, match="no answer of the record is to be trained on"):
        chat.encode_answered([m | {"train": False} for m in messages])


def test_developer_is_the_system_where_the_template_knows_none(capsys):
    messages = [{"role": "developer", "content": "Brief."}, *say("Hi", "Yes.")]
    chat = Chat(tokenizer_of("chatml"))
    assert chat.encode(messages) == chat.encode([{**messages[0], "role": "system"}, *messages[1:]])
    assert chat.encode_answered(messages)
    assert capsys.readouterr().out.count("the chat template has no developer role") == 1
    known = chat_of(turns(PLAIN, "{# developer #}"))
    assert "<|im_start|>developer\nBrief." in known.tokenizer.decode(known.encode(messages))
    assert not capsys.readouterr().out


def test_marked_answer_to_another_prompt_is_context():
    """Here prompts begin the reasoning, and an earlier answer has none."""
    first = "{{ '<think>' + m.reasoning_content + '. ' if m.reasoning_content else 'So: ' }}"
    blocks = "".join("{% generation %}" + part + "{% endgeneration %}" for part in (first, PLAIN))
    template = turns("{% if m.role == 'assistant' %}" + blocks + "{% else %}" + PLAIN + "{% endif %}")
    template = template.replace("assistant\n", "assistant\n<think>")
    messages = [*say("a?", "one", "b?"), answer("two", reasoning_content="b")]
    assert runs(chat_of(template), messages) == ["b. two<|im_end|>"]
    messages[1]["reasoning_content"] = "a"
    assert runs(chat_of(template), messages) == ["a. one<|im_end|>", "b. two<|im_end|>"]


def test_marks_on_what_the_user_said_are_refused():
    template = turns("{% generation %}" + PLAIN + "{% endgeneration %}")
    with pytest.raises(UserError, match="leaves out the text 'Good day' of the user or marks it as"):
        chat_of(template).encode_answered(say("Good day", "one"))


# -- the checker -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "span", "fault"),
    [
        (answer(" one \n"), "one", None),
        (answer("<think>\nwhy\n</think>\n\none"), "<think>why</think>one", None),
        (answer('say "x"\n'), r"say \"x\"", None),
        (answer("Grüße"), r"Gr\u00fc\u00dfe", None),
        (answer("4", reasoning_content="is 4"), "is 4", "leaves out the content '4'"),
        (answer("4", reasoning="is 4"), "4", "leaves out the reasoning 'is 4'"),
        (answer("4", thinking="5"), "4", "leaves out the reasoning '5'"),
        (answer(tool_calls=[call({"on": True, "x": 1.5})]), "weather(on=True, x=1.5)", None),
        (answer(tool_calls=[call({"on": True})]), "weather(on=1)", "leaves out the argument 'true'"),
        (answer(tool_calls=[call({"x": None})]), "weather x", None),
        (answer(tool_calls=[call({"x": {"y": ["z"]}})]), "weather x y", "leaves out the argument 'z'"),
        (answer(tool_calls=[call({"x": 1, "y": 2})]), "weather x 1", "leaves out the argument 'y'"),
        (answer(tool_calls=[call({})] * 2), "weather", "leaves out the tool call 'weather'"),
        (answer(tool_calls=[call({"x": "y"})]), "weather {'x': 'y'}", "prints arguments of a tool call as"),
        (answer("x" * 60), "", f"leaves out the content '{'x' * 40}...'"),
    ],
)
def test_parts_of_an_answer_in_its_span(message, span, fault):
    found = fault_in_answer(message, span, "")
    assert found is None if fault is None else str(found).startswith(fault)


def test_reasoning_after_a_closed_block_of_the_prompt():
    message = answer("<think>a</think>b")
    refused = "puts reasoning before the </think>"
    assert str(fault_in_answer(message, "</think><think>a</think>b", "")).startswith(refused)
    assert str(fault_in_answer(message, "<think>a</think>b", "<think>\n\n</think>\n\n")).startswith(refused)
    assert fault_in_answer(message, "<think>a</think>b", "<think>\n") is None


def test_results_of_tools_stand_as_they_are_or_as_json():
    result = {"role": "tool", "content": '{"temperature":  19}'}
    spellings = [result["content"], '{"temperature": 19}', "{'temperature': 19}", r"{\"temperature\":  19}"]
    assert not any(fault_in_prompt([result], f"x {text}") for text in spellings)
    assert fault_in_prompt([result], "x") == "leaves out the text '{\"temperature\":  19}' of the tool"


def test_later_turns_are_checked_before_the_first_answer():
    """Here the template writes only the first question of a conversation."""
    chat = chat_of(turns("{% if loop.first or m.role == 'assistant' %}{{ m.content }}{% endif %}"))
    asked = [Prompt.of("one", say("a?")), Prompt.of("two", [*say("a?"), *say("b, please?")])]
    counts = count_tokens(asked, chat, given=False)
    assert counts.tokens[0] > 0 > counts.tokens[1]
    assert counts.refusals == {1: "target: its chat template leaves out the text 'b, please?' of the user"}

"""Which tokens are supervised, for every family of chat templates."""

import copy
from typing import Any

import pytest
from chats import FAMILIES, MERGES, build, say, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from workbench import options_of

from decode.errors import UserError
from distill.config.build import read_chat
from distill.options import GenerateOptions, InspectOptions, ScoreCommandOptions, TrainOptions
from distill.prompts.chat_template import Chat
from distill.prompts.templates.clock import now
from distill.prompts.templates.loss_mask import Tokens
from distill.prompts.templates.renderer import TemplateRenderer
from distill.prompts.templates.rendering import Rendering

ALL = [*FAMILIES, "pocket"]
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "qwen3": "<|im_end|>",
    "pocket": "<|end|>",
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
ASKED = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "19"},
    {"role": "assistant", "content": "No."},
]
TOOL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def runs(chat: Chat, messages, tools=()) -> list[str]:
    """The text of each run of supervised tokens."""
    ids, mask = chat.encode_answered(messages, tools)
    assert len(ids) == len(mask)
    found: list[list[int]] = []
    for i, token in enumerate(ids):
        if mask[i] and (not i or not mask[i - 1]):
            found.append([])
        if mask[i]:
            found[-1].append(token)
    return [str(chat.tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in found]


def written(name: str, text: str) -> str:
    """What the target writes of an answer."""
    text = text.strip() if name in ("llama3", "gemma") else text
    return {"mistral": " "}.get(name, "") + text + ENDS[name]


# -- golden: the exact text of what is supervised -------------------------------------------------


def think(why: str, text: str) -> str:
    return f"<think>\n{why}\n</think>\n\n{text}<|im_end|>"


@pytest.mark.parametrize("name", ALL)
def test_a_single_turn(name):
    chat = Chat(tokenizer_of(name))
    messages = say("Hi", "Hello you")
    whole = "<think>\n\n</think>\n\nHello you<|im_end|>" if name == "qwen3" else written(name, "Hello you")
    assert runs(chat, messages) == [whole]
    ids, mask = chat.encode_answered(messages)
    prompt = chat.encode(messages)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + 1] == [0] * len(prompt) + [1]
    assert chat.tokenizer.decode(ids[len(prompt) :][: sum(mask)]) == whole
    left = str(chat.tokenizer.decode(ids[len(prompt) + sum(mask) :]))
    assert left == ("\n" if name in ("chatml", "gemma", "qwen3") else "")


@pytest.mark.parametrize("name", ALL)
def test_three_turns(name):
    chat = Chat(tokenizer_of(name))
    messages = say("a?", "one", "b?", "two", "c?", "three")
    if name == "qwen3":  # the first two were written with an (empty) reasoning block, which is gone
        assert runs(chat, messages) == ["<think>\n\n</think>\n\nthree<|im_end|>"]
    else:
        assert runs(chat, messages) == [written(name, text) for text in ("one", "two", "three")]


@pytest.mark.parametrize("name", ALL)
def test_a_system_message(name):
    chat, messages = Chat(tokenizer_of(name)), say("Hi", "Yes.", "So?", "No.", system="Be brief.")
    if name == "gemma":
        with pytest.raises(UserError, match=r"refuses the prompt 'Be brief\.': there is no system role"):
            chat.encode_answered(messages)
        with pytest.raises(UserError, match="no system role"):
            chat.encode(messages[:2])
        return
    last = think("", "No.") if name == "qwen3" else written(name, "No.")
    assert runs(chat, messages) == ([last] if name == "qwen3" else [written(name, "Yes."), last])
    assert "Be brief." in str(chat.tokenizer.decode(chat.encode(messages)))


TOOL_RUNS = {
    "chatml": [f"{TOOL_TEXT}<|im_end|>", "No.<|im_end|>"],
    "llama3": ['{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>', "No.<|eot_id|>"],
    "mistral": ['[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]</s>', " No.</s>"],
    "qwen3": [think("", "No.")],
}


@pytest.mark.parametrize("name", TOOL_RUNS)
def test_a_call_of_a_tool_and_its_result(name):
    """Qwen3 drops the empty reasoning block that stood before the call, which a non-empty one does not."""
    chat = Chat(tokenizer_of(name))
    assert runs(chat, ASKED, [WEATHER]) == TOOL_RUNS[name]
    assert '"type": "object"' in str(chat.tokenizer.decode(chat.encode(ASKED[:1], [WEATHER])))
    assert '"type": "object"' not in str(chat.tokenizer.decode(chat.encode(ASKED[:1])))
    call = f"<think>\n\n</think>\n\n{TOOL_TEXT}<|im_end|>" if name == "qwen3" else TOOL_RUNS[name][0]
    assert runs(chat, ASKED[:2], [WEATHER]) == [call]


def test_reasoning_before_a_call_stays_with_it():
    reasoned = [ASKED[0], {**ASKED[1], "reasoning_content": "Ask."}, *ASKED[2:]]
    wanted = [f"<think>\nAsk.\n</think>\n\n{TOOL_TEXT}<|im_end|>", think("", "No.")]
    assert runs(Chat(tokenizer_of("qwen3")), reasoned, [WEATHER]) == wanted


@pytest.mark.parametrize(
    ("name", "said"), [("gemma", "no tool role"), ("pocket", "leaves out the tool call 'weather'")]
)
def test_families_without_tools_say_so(name, said):
    with pytest.raises(UserError, match=said):
        Chat(tokenizer_of(name)).encode_answered(ASKED, [WEATHER])


def test_a_call_that_is_only_spoken_of_is_left_out():
    with pytest.raises(UserError, match="leaves out the tool call 'weather'"):
        Chat(tokenizer_of("pocket")).encode_answered([*say("How is the weather?"), ASKED[1]])


def test_mistrals_tools_move_so_earlier_answers_were_given_another_prompt():
    chat = Chat(tokenizer_of("mistral"))
    assert runs(chat, say("a", "one", "b", "two"), [WEATHER]) == [" two</s>"]
    assert runs(chat, say("a", "one", "b", "two")) == [" one</s>", " two</s>"]


@pytest.mark.parametrize("inline", [True, False])
def test_a_reasoning_block_is_the_targets_own(inline):
    chat = Chat(tokenizer_of("qwen3"))
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    if inline:
        answer = {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\n4"}
    assert runs(chat, [*say("2+2?"), answer]) == [think("2 and 2", "4")]
    # A later turn drops it, and the answer as it stands there is not what the target wrote.
    assert runs(chat, [*say("2+2?"), answer, *say("Sure?", "Yes")]) == [think("", "Yes")]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "pocket"])
def test_reasoning_in_the_text_is_supervised_anywhere(name):
    text = "<think>\n2 and 2\n</think>\n\n4"
    wanted = [written(name, text), written(name, "Yes")]
    assert runs(Chat(tokenizer_of(name)), say("2+2?", text, "Sure?", "Yes")) == wanted


def test_a_reasoning_block_that_the_prompt_holds_is_not_the_targets():
    chat = Chat(tokenizer_of("qwen3"), options={"enable_thinking": False})
    prompt = str(chat.tokenizer.decode(chat.encode(say("Hi"))))
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert runs(chat, say("Hi", "Hello")) == ["Hello<|im_end|>"]


def test_reasoning_that_a_template_leaves_out_is_refused():
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    with pytest.raises(UserError, match="leaves out the reasoning"):
        Chat(tokenizer_of("chatml")).encode_answered([*say("2+2?"), answer])


# -- marked templates -----------------------------------------------------------------------------

MARKED = {
    "end and new line": "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}",
    "end": "{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "neither": "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
}


@pytest.mark.parametrize("where", MARKED)
def test_marks_give_the_same_wherever_they_end(where):
    """The end token is the target's, what the template puts behind it is not."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
        + MARKED[where]
        + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
        + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = build(FAMILIES["chatml"])
    tokenizer.chat_template = template
    messages = say("a?", "one\n", "b?", "two", "c?", "three\n")
    assert runs(Chat(tokenizer), messages) == runs(Chat(tokenizer_of("chatml")), messages)
    assert (
        Chat(tokenizer).encode_answered(messages)[0]
        == tokenizer_of("chatml")(
            str(tokenizer.apply_chat_template(messages, tokenize=False)), add_special_tokens=False
        )["input_ids"]
    )


def test_marks_around_a_reasoning_block_that_the_prompt_holds():
    tokenizer = build(FAMILIES["qwen3"])
    plain = str(tokenizer.chat_template)
    head = "{{- '<|im_start|>assistant\\n' }}\n{%- if loop"
    marked = plain.replace(head, head.replace("{%- if", "{%- generation -%}\n{%- if"))
    tail = "{{- '<|im_end|>\\n' }}\n{%- else"
    marked = marked.replace(tail, "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n{%- else")
    tokenizer.chat_template = marked
    assert marked.count("generation") - plain.count("generation") == 2
    for options, wanted in (({}, think("", "Hello")), ({"enable_thinking": False}, "Hello<|im_end|>")):
        assert runs(Chat(tokenizer, options=options), say("Hi", "Hello")) == [wanted]
    # What the marks say of earlier answers holds.
    assert runs(Chat(tokenizer), say("Hi", "one", "So", "two")) == ["one<|im_end|>", think("", "two")]


# -- borders --------------------------------------------------------------------------------------


def test_a_token_over_the_border_of_the_last_answer_is_taken_apart():
    """Joined, prompt and answer hold one token of two new lines, which the target could not write."""
    chat = Chat(tokenizer_of("chatml"))
    messages = say("Hi", "\nHello")
    text = str(chat.tokenizer.apply_chat_template(messages, tokenize=False))
    joined = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids, mask = chat.encode_answered(messages)
    prompt = chat.encode(messages)
    assert joined[: len(prompt)] != prompt == ids[: len(prompt)]
    assert runs(chat, messages) == ["\nHello<|im_end|>"]
    assert mask.index(1) == len(prompt)
    assert chat.tokenizer.decode(ids) == text
    # In an earlier turn it stays joined, as the target will be given it, and nobody wrote it so.
    assert runs(chat, [*messages, *say("a?", "one")]) == ["one<|im_end|>"]


def test_a_template_that_adds_more_than_a_new_line():
    """Phi-3's ends whole conversations with the tokenizer's end token; the target stops before it."""
    tokenizer = build(FAMILIES["chatml"])
    tokenizer.add_special_tokens({"eos_token": "</tool_call>"})
    tokenizer.chat_template = (
        str(tokenizer.chat_template) + "{% if not add_generation_prompt %}</tool_call>{% endif %}"
    )
    assert runs(Chat(tokenizer), say("a", "one", "b", "two")) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_new_line_that_is_a_token_added_ends_no_answer():
    tokenizer = build(FAMILIES["gemma"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "'<end_of_turn>\\n'", "'\\n<end_of_turn>\\n'"
    )
    assert runs(Chat(tokenizer), say("a", "one", "b", "two")) == ["one\n<end_of_turn>", "two\n<end_of_turn>"]


def test_marks_inside_a_token_of_the_last_answer_are_refused():
    tokenizer = build(FAMILIES["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ m.role + ':' }}{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    assert runs(Chat(tokenizer), say("a", "one")) == ["one"]
    with pytest.raises(UserError, match="renders an answer differently"):
        Chat(tokenizer).encode_answered(say("a", " one"))  # ": " is one token


def test_a_template_whose_answers_have_no_end_token():
    tokenizer = build(FAMILIES["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert runs(Chat(tokenizer), say("a", "one", "b", "two")) == ["one\n", "two\n"]


def test_an_earlier_answer_that_does_not_extend_its_prompt():
    """Here prompts begin the reasoning, and the first answer has none."""
    tokenizer = build(FAMILIES["qwen3"])
    tokenizer.chat_template = (
        str(tokenizer_of("chatml").chat_template) + "{% if add_generation_prompt %}<think>{% endif %}"
    )
    messages = say("a", "one, and one more and another one", "b", "<think>b</think>two")
    assert runs(Chat(tokenizer), messages) == ["b</think>two<|im_end|>"]


def test_a_system_message_that_goes_with_the_answer_is_refused():
    """Some templates show it only where the user speaks last."""
    tokenizer = build(FAMILIES["mistral"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last and m.role == 'user' %}Be brief. {% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UserError, match="renders an answer differently from its prompt"):
        Chat(tokenizer).encode_answered(say("Hi", "Hello"))


def sentencepiece(template: str, first: str) -> PreTrainedTokenizerFast:
    """Spaces are ▁, and one is put before the first word (`first`) or every piece (`always`)."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzHI?.!:", "\n", "▁o", "<unk>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(letters)}, merges=[("▁", "o")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=first)
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t in ("<s>", "</s>", "[INST]", "[/INST]")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    made.chat_template = template
    return made


def test_spaces_that_sentencepiece_adds_are_nobodys():
    chat = Chat(sentencepiece(str(tokenizer_of("mistral").chat_template), "first"))
    ids, mask = chat.encode_answered(say("a", "one", "b", "two"))
    tokens = chat.tokenizer.convert_ids_to_tokens([i for i, m in zip(ids, mask, strict=True) if m])
    assert tokens == ["▁o", "n", "e", "</s>", "▁", "t", "w", "o", "</s>"]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
    joined = plain.replace("{{ m.content }}", "{{ (': ' if m.role == 'assistant' else '') + m.content }}")
    with pytest.raises(UserError, match="joins a prompt and its answer"):
        Chat(sentencepiece(joined, "first")).encode_answered(say("a", "one"))


def test_an_answer_to_nothing_is_context():
    """A greeting that opens the conversation was asked for by nobody."""
    chat = Chat(tokenizer_of("chatml"))
    greeting = {"role": "assistant", "content": "Welcome"}
    assert runs(chat, [greeting, *say("a", "one")]) == ["one<|im_end|>"]
    with pytest.raises(UserError, match="no prompt"):
        chat.encode_answered([greeting])


def test_options_reach_the_template_and_tell_stores_apart():
    tokenizer = tokenizer_of("qwen3")
    off, on = (Chat(tokenizer, options={"enable_thinking": value}) for value in (False, True))
    assert Chat(tokenizer).fingerprint() == Chat(tokenizer, options={}).fingerprint()
    assert len({chat.fingerprint() for chat in (Chat(tokenizer), off, on)}) == 3
    assert off.encode(say("Hi")) != on.encode(say("Hi")) == Chat(tokenizer).encode(say("Hi"))
    assert off.user_turn()[1] != on.user_turn()[1]
    with pytest.raises(UserError, match="template_options"):
        Chat(tokenizer, "none", {"enable_thinking": False})


def test_rules_of_a_tokenizer_beside_its_vocabulary_tell_stores_apart():
    chats = [Chat(copy.deepcopy(tokenizer_of("qwen3"))) for _ in range(5)]
    before = chats[0].fingerprint()
    chats[0].tokenizer(["a", "b c"], truncation=True, max_length=2)  # leaves its state behind
    assert chats[0].fingerprint() == before
    chats[1].tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    chats[2].tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    chats[3].tokenizer.eos_token = chats[3].tokenizer.convert_ids_to_tokens(7)
    chats[4].tokenizer.chat_template += "{# another #}"
    assert len({before, *(chat.fingerprint() for chat in chats)}) == 5


COMMANDS = {
    "config": TrainOptions,
    "generate": GenerateOptions,
    "score_checkpoint": ScoreCommandOptions,
    "inspect_data": InspectOptions,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_set_on_the_command_line(command):
    given = {"generate": ["prompt=x"], "score_checkpoint": ["checkpoint=x"]}.get(command, [])
    words = ["prompts.template_options={enable_thinking: false}", *given]
    options: Any = options_of(*words, cls=COMMANDS[command], name=command)
    target, template_options = options.target, options.prompts.template_options
    assert read_chat(target, "chat", template_options).options == {"enable_thinking": False}
    with pytest.raises(UserError, match=r"prompts\.template_options=3: write it as"):
        read_chat(target, "chat", 3)
    assert read_chat(target, "chat").options == {}


def test_plain_text_cannot_write_a_call():
    with pytest.raises(UserError, match="assistant has tool_calls"):
        Chat(tokenizer_of("chatml"), "none").encode(ASKED[:3])


# -- random conversations --------------------------------------------------------------------------

TEXT = st.text(alphabet="a thb:é中🙂\n.", min_size=1, max_size=12).filter(lambda text: text.strip() != "")
TURNS = st.lists(st.tuples(TEXT, TEXT, st.none() | TEXT), min_size=1, max_size=4)


def expected(name: str, turns) -> list[str]:
    """What is supervised of turns of (question, answer, reasoning)."""
    answers = [answer for _, answer, _ in turns]
    if name == "qwen3":  # the last turn's alone still has its reasoning block
        _, answer, why = turns[-1]
        return [think(why.strip("\n"), answer.lstrip("\n")) if why else think("", answer)]
    found = [written(name, answer) for answer in answers[:-1]]
    if name == "chatml":  # its prompt ends with a new line, which these first letters are joined to
        joined = tuple(right.replace("Ċ", "\n") for left, right in MERGES if left == "Ċ")
        found = [text for text in found if not text.startswith(joined)]
    return [*found, written(name, answers[-1])]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60)
@given(turns=TURNS)
def test_any_conversation_is_supervised_where_the_assistant_wrote(name, turns):
    chat = Chat(tokenizer_of(name))
    messages = []
    for question, answer, why in turns:
        text = f"<think>\n{why}\n</think>\n\n{answer}" if name == "qwen3" and why else answer
        messages += say(question, text)
    assert runs(chat, messages) == expected(name, turns)
    ids, _ = chat.encode_answered(messages)
    prompt = chat.encode(messages)
    assert ids[: len(prompt)] == prompt
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == whole


class WholePrefixes(Tokens):
    """Counts by encoding everything from the start, as borders are defined."""

    def count(self, characters: int) -> int | None:
        head = self._head if not self._prefix_matches and characters > self._prompt else []
        part = head + self._render.ids(self._text[self._prompt * bool(head) : characters])
        return len(part) if self.ids[: len(part)] == part else None


@pytest.mark.parametrize("name", [*ALL, "sentencepiece"])
@settings(max_examples=60)
@given(turns=TURNS, places=st.lists(st.integers(0, 400), max_size=6))
def test_borders_are_counted_from_the_nearest_special_token_as_from_the_start(name, turns, places):
    tokenizer = tokenizer_of(name if name in ALL else "mistral")
    if name not in ALL:
        tokenizer = sentencepiece(str(tokenizer.chat_template), "first")
    chat = Chat(tokenizer)
    render = TemplateRenderer(Rendering(tokenizer, {}, now()))
    messages = [part for question, answer, _ in turns for part in say(question, answer)]
    text, prompt = render.text(messages), render.text(messages[:-1], prompt=True)
    tokens, whole = Tokens(render, text, len(prompt)), WholePrefixes(render, text, len(prompt))
    ends = [match.start() for match in chat.added.splits.finditer(text)]
    for place in [*sorted(places), *ends, *places]:  # growing ones, then any
        assert tokens.count(min(place, len(text))) == whole.count(min(place, len(text)))


def test_each_character_is_encoded_about_once_however_many_turns(monkeypatch):
    chat = Chat(tokenizer_of("pocket"))
    encoded = []
    ids = TemplateRenderer.ids
    monkeypatch.setattr(
        TemplateRenderer, "ids", lambda self, text: encoded.append(len(text)) or ids(self, text)
    )
    for turns in (4, 32):
        encoded.clear()
        messages = say(*["a question", "an answer of some words"] * turns)
        chat.encode_answered(messages)
        whole = len(chat.text(messages))
        assert whole < sum(encoded) <= 5 * whole


# -- templates that refuse, or change with the record ----------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_of(template):
    tokenizer = build(FAMILIES["qwen3"])
    tokenizer.chat_template = template
    return Chat(tokenizer)


@pytest.mark.parametrize("condition", ["messages[0].role != 'system'", "messages[-2].content|length < 9"])
def test_a_template_that_refuses_short_questions_has_its_ends(condition):
    asked = [{"role": "system", "content": "Be brief and kind."}, *say("What is a river?", "Water.")]
    picky = chat_of(
        "{% if " + condition + " and messages|length > 1 %}{{ raise_exception('no') }}{% endif %}" + CHATML
    )
    assert runs(picky, asked) == runs(chat_of(CHATML), asked) == ["Water.<|im_end|>"]
    assert picky.ends([], 10**6).template == chat_of(CHATML).ends([], 10**6).template != ()


def test_a_template_that_refuses_every_probe_is_read_off_the_record():
    template = "{% if messages[0].content != 'Be kind.' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    asked = [{"role": "system", "content": "Be kind."}, *say("What?", "Water.")]
    assert runs(chat_of(template), asked) == ["Water.<|im_end|>"]


@pytest.mark.parametrize("tools_first", [False, True])
def test_ends_that_change_with_tools_are_those_of_each_record(tools_first):
    listed = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    chat = chat_of(listed + CHATML.replace("<|im_end|>", "{{ '</tool_call>' if tools else '<|im_end|>' }}"))
    wanted = {False: ["b<|im_end|>"], True: ["b</tool_call>"]}
    for tools in (tools_first, not tools_first):
        assert runs(chat, say("a", "b"), [WEATHER] * tools) == wanted[tools]


def test_tools_that_a_template_does_not_write_are_refused():
    chat = chat_of(CHATML)
    for work in (chat.encode_answered, chat.encode):
        with pytest.raises(UserError, match="leaves out the tool 'weather'"):
            work(say("a", "b"), [WEATHER])


def test_templates_without_a_default_are_one_line():
    with pytest.raises(UserError, match=r"of its chat templates \(rag, tool_use\) none is the default"):
        chat_of({"tool_use": CHATML, "rag": CHATML}).encode(say("a", "b"))


BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATE = BLOCKS.replace(
    "{% endgeneration %}\n", "\n{% if not loop.last %}<|im_start|>user{% endif %}{% endgeneration %}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (BLOCKS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %} <|im_end|>"), "end before"),
        (
            LATE.replace("{% else %}<|im_start|>", "{% else %}{% if loop.first %}<|im_start|>{% endif %}"),
            "reach beyond",
        ),
    ],
)
def test_blocks_that_do_not_end_with_the_end_token_are_refused(template, said):
    talk = say("a", "bb", "c", "dd")
    assert runs(chat_of(BLOCKS), talk) == ["bb<|im_end|>", "dd<|im_end|>"]
    with pytest.raises(UserError, match=f"generation %}} blocks {said} the token that ends an answer"):
        chat_of(template).encode_answered(talk)


def test_an_answer_that_speaks_of_the_end_of_thoughts_is_not_rewritten():
    chat = Chat(tokenizer_of("qwen3"))
    with pytest.raises(UserError, match="takes what stands before </think> in the content for reasoning"):
        chat.encode_answered(say("How do I end it?", "use `</think>` to close"))


def test_a_conversation_of_thousands_of_answers_is_one_line():
    talk = say(*["a", "b"] * 5000)
    with pytest.raises(UserError, match="5,000 answers in a record; split it, at 500 at most"):
        chat_of(CHATML).encode_answered(talk)
    assert len(runs(chat_of(CHATML), talk[:100])) == 50


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_short_text_that_the_markup_has_too_is_found_missing(role):
    drops = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != '" + role + "' %}")
    asked = [{"role": "system", "content": "be kind and"}, *say("a", "b"), *say("c", "d")]
    asked[0 if role == "system" else 1]["content"] = role  # stands in the template's source
    with pytest.raises(UserError, match=f"leaves out the text '{role}' of the {role}"):
        chat_of(drops).encode_answered(asked if role == "system" else asked[:3])
    with pytest.raises(UserError, match=f"leaves out the text '{role}' of the {role}"):
        chat_of(drops).encode(asked if role == "system" else asked[:2])
    assert runs(chat_of(CHATML), asked) == ["b<|im_end|>", "d<|im_end|>"]

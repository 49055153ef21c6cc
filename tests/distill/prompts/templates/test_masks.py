"""Which tokens are supervised, for every family of chat templates."""

import copy
import re
from typing import Any

import pytest
from chats import FAMILIES, MERGES, build, say, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from workbench import options_of

from decode.errors import UserError
from distill.config.build import TargetSource
from distill.options.commands import GenerateOptions, InspectOptions, ScoreCommandOptions
from distill.options.run import TrainOptions
from distill.prompts.chat_template import Chat
from distill.prompts.templates.clock import now
from distill.prompts.templates.loss_mask import Tokens
from distill.prompts.templates.renderer import TemplateRenderer
from distill.prompts.templates.rendering import Rendering

ALL = [*FAMILIES, "pocket"]
ENDS = dict.fromkeys(("chatml", "qwen3"), "<|im_end|>")
ENDS |= {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "pocket": "<|end|>"}
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
    found = re.finditer("1+", "".join(map(str, mask)))
    tokens = (ids[run.start() : run.end()] for run in found)
    return [str(chat.tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in tokens]


def written(name: str, text: str) -> str:
    """What the target writes of an answer."""
    text = text.strip() if name in ("llama3", "gemma") else text
    return {"mistral": " "}.get(name, "") + text + ENDS[name]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_of(template, family: str = "qwen3", **options: Any) -> Chat:
    """A family's tokenizer with another template."""
    tokenizer = build(FAMILIES[family])
    tokenizer.chat_template = template
    return Chat(tokenizer, options=options)


# -- golden: the exact text of what is supervised -------------------------------------------------


def think(why: str, text: str) -> str:
    return f"<think>\n{why}\n</think>\n\n{text}<|im_end|>"


TOOL_RUNS = {
    "chatml": [f"{TOOL_TEXT}<|im_end|>", "No.<|im_end|>"],
    "llama3": ['{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>', "No.<|eot_id|>"],
    "mistral": ['[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]</s>', " No.</s>"],
    "qwen3": [think("", "No.")],
}


@pytest.mark.parametrize("name", TOOL_RUNS)
def test_tool_call_and_its_result(name):
    """Qwen3 drops the empty reasoning block that stood before the call, which a non-empty one does not."""
    chat = Chat(tokenizer_of(name))
    assert runs(chat, ASKED, [WEATHER]) == TOOL_RUNS[name]
    assert '"type": "object"' in str(chat.tokenizer.decode(chat.encode(ASKED[:1], [WEATHER])))
    assert '"type": "object"' not in str(chat.tokenizer.decode(chat.encode(ASKED[:1])))
    call = f"<think>\n\n</think>\n\n{TOOL_TEXT}<|im_end|>" if name == "qwen3" else TOOL_RUNS[name][0]
    assert runs(chat, ASKED[:2], [WEATHER]) == [call]


def test_answers_to_another_prompt_than_shown_are_context():
    chat = Chat(tokenizer_of("mistral"))
    assert runs(chat, say("a", "one", "b", "two"), [WEATHER]) == [" two</s>"]
    assert runs(chat, say("a", "one", "b", "two")) == [" one</s>", " two</s>"]


def test_reasoning_block_of_the_prompt_is_context():
    chat = Chat(tokenizer_of("qwen3"), options={"enable_thinking": False})
    prompt = str(chat.tokenizer.decode(chat.encode(say("Hi"))))
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert runs(chat, say("Hi", "Hello")) == ["Hello<|im_end|>"]


# -- marked templates -----------------------------------------------------------------------------

MARKED = {
    "end and new line": "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}",
    "end": "{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "neither": "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
}


@pytest.mark.parametrize("where", MARKED)
def test_marked_answer_ends_with_its_end_token(where):
    """What the template writes after that is not the target's."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
        + MARKED[where]
        + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat, plain = chat_of(template, "chatml"), Chat(tokenizer_of("chatml"))
    messages = say("a?", "one\n", "b?", "two", "c?", "three\n")
    assert runs(chat, messages) == runs(plain, messages)
    whole = str(chat.tokenizer.apply_chat_template(messages, tokenize=False))
    assert chat.encode_answered(messages)[0] == plain.tokenizer.encode(whole, add_special_tokens=False)


# -- borders --------------------------------------------------------------------------------------


def test_token_over_the_border_of_the_last_answer_is_taken_apart():
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


def test_newline_that_is_an_added_token_ends_no_answer():
    template = FAMILIES["gemma"].template.replace("'<end_of_turn>\\n'", "'\\n<end_of_turn>\\n'")
    spoken = runs(chat_of(template, "gemma"), say("a", "one", "b", "two"))
    assert spoken == ["one\n<end_of_turn>", "two\n<end_of_turn>"]


def test_marks_inside_a_token_of_the_last_answer_are_refused():
    chat = chat_of(
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    assert runs(chat, say("a", "one")) == ["one"]
    with pytest.raises(UserError, match="renders an answer differently"):
        chat.encode_answered(say("a", " one"))  # ": " is one token


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


def test_spaces_that_sentencepiece_adds_are_not_supervised():
    chat = Chat(sentencepiece(str(tokenizer_of("mistral").chat_template), "first"))
    ids, mask = chat.encode_answered(say("a", "one", "b", "two"))
    tokens = chat.tokenizer.convert_ids_to_tokens([i for i, m in zip(ids, mask, strict=True) if m])
    assert tokens == ["▁o", "n", "e", "</s>", "▁", "t", "w", "o", "</s>"]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
    joined = plain.replace("{{ m.content }}", "{{ (': ' if m.role == 'assistant' else '') + m.content }}")
    with pytest.raises(UserError, match="joins a prompt and its answer"):
        Chat(sentencepiece(joined, "first")).encode_answered(say("a", "one"))


def test_answer_to_nothing_is_context():
    chat = Chat(tokenizer_of("chatml"))
    greeting = {"role": "assistant", "content": "Welcome"}
    assert runs(chat, [greeting, *say("a", "one")]) == ["one<|im_end|>"]
    with pytest.raises(UserError, match="no prompt"):
        chat.encode_answered([greeting])


def test_template_options_are_in_prompts_and_the_fingerprint():
    tokenizer = tokenizer_of("qwen3")
    off, on = (Chat(tokenizer, options={"enable_thinking": value}) for value in (False, True))
    assert Chat(tokenizer).fingerprint() == Chat(tokenizer, options={}).fingerprint()
    assert len({chat.fingerprint() for chat in (Chat(tokenizer), off, on)}) == 3
    assert off.encode(say("Hi")) != on.encode(say("Hi")) == Chat(tokenizer).encode(say("Hi"))
    assert off.user_turn()[1] != on.user_turn()[1]
    with pytest.raises(UserError, match="template_options"):
        Chat(tokenizer, "none", {"enable_thinking": False})


def test_rules_of_a_tokenizer_are_in_the_fingerprint():
    chats = [Chat(copy.deepcopy(tokenizer_of("qwen3"))) for _ in range(5)]
    before = chats[0].fingerprint()
    chats[0].tokenizer(["a", "b c"], truncation=True, max_length=2)  # leaves its state behind
    assert chats[0].fingerprint() == before
    chats[1].tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    chats[2].tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    chats[3].tokenizer.eos_token = chats[3].tokenizer.convert_ids_to_tokens(7)
    chats[4].tokenizer.chat_template += "{# another #}"
    assert len({before, *(chat.fingerprint() for chat in chats)}) == 5


def test_every_command_has_template_options():
    for command, options, more in (
        ("config", TrainOptions, []),
        ("generate", GenerateOptions, ["prompt=x"]),
        ("score_checkpoint", ScoreCommandOptions, ["checkpoint=x"]),
        ("inspect_data", InspectOptions, []),
    ):
        words = ["prompts.template_options={enable_thinking: false}", *more]
        read: Any = options_of(*words, cls=options, name=command)
        chat = TargetSource(read.target).chat("chat", read.prompts.template_options)
        assert chat.options == {"enable_thinking": False}
    with pytest.raises(UserError, match=r"prompts\.template_options=3: write it as"):
        TargetSource(read.target).chat("chat", 3)


# -- random conversations --------------------------------------------------------------------------

TEXT = st.text(alphabet="a thb:é中🙂\n.", min_size=1, max_size=12).filter(lambda text: text.strip() != "")
TURNS = st.lists(st.tuples(TEXT, TEXT, st.none() | TEXT), min_size=1, max_size=4)


def expected(name: str, turns) -> list[str]:
    """What is supervised of turns of (question, answer, reasoning)."""
    answers = [answer for _, answer, _ in turns]
    if name == "qwen3":  # only the last turn still has its reasoning block
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
def test_random_conversation(name, turns):
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
def test_borders_are_counted_as_from_the_start(name, turns, places):
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


@pytest.mark.parametrize("condition", ["messages[0].role != 'system'", "messages[-2].content|length < 9"])
def test_template_that_refuses_short_questions_has_its_ends(condition):
    asked = [{"role": "system", "content": "Be brief and kind."}, *say("What is a river?", "Water.")]
    picky = chat_of(
        "{% if " + condition + " and messages|length > 1 %}{{ raise_exception('no') }}{% endif %}" + CHATML
    )
    assert runs(picky, asked) == runs(chat_of(CHATML), asked) == ["Water.<|im_end|>"]
    assert picky.ends([], 10**6).template == chat_of(CHATML).ends([], 10**6).template != ()


def test_template_that_refuses_every_probe_is_read_off_the_record():
    template = "{% if messages[0].content != 'Be kind.' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    asked = [{"role": "system", "content": "Be kind."}, *say("What?", "Water.")]
    assert runs(chat_of(template), asked) == ["Water.<|im_end|>"]


@pytest.mark.parametrize("tools_first", [False, True])
def test_end_tokens_are_read_for_each_record(tools_first):
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
FIRST = "{% else %}{% if loop.first %}<|im_start|>{% endif %}"
LATE = BLOCKS.replace(
    "{% endgeneration %}\n", "\n{% if not loop.last %}<|im_start|>user{% endif %}{% endgeneration %}"
)


def test_blocks_that_do_not_end_with_the_end_token_are_refused():
    talk = say("a", "bb", "c", "dd")
    assert runs(chat_of(BLOCKS), talk) == ["bb<|im_end|>", "dd<|im_end|>"]
    for template, said in (
        (BLOCKS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %} <|im_end|>"), "end before"),
        (LATE.replace("{% else %}<|im_start|>", FIRST), "reach beyond"),
    ):
        with pytest.raises(UserError, match=f"generation %}} blocks {said} the token that ends an answer"):
            chat_of(template).encode_answered(talk)


def test_answer_that_speaks_of_the_end_of_thoughts_is_not_rewritten():
    chat = Chat(tokenizer_of("qwen3"))
    with pytest.raises(UserError, match="takes the content before </think> for reasoning"):
        chat.encode_answered(say("How do I end it?", "use `</think>` to close"))


def test_conversation_of_thousands_of_answers_is_one_line():
    talk = say(*["a", "b"] * 5000)
    with pytest.raises(UserError, match="5,000 answers in a record; split it, at 500 at most"):
        chat_of(CHATML).encode_answered(talk)
    assert len(runs(chat_of(CHATML), talk[:100])) == 50


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_text_of_a_prompt_that_is_left_out_is_found_missing(role):
    """Though it is short, and the markup has it too."""
    chat = chat_of(CHATML.replace("in messages %}", f"in messages if m.role != '{role}' %}}"))
    roles = ("system", "user", "assistant", "tool", "assistant")
    asked = [{"role": r, "content": "yes" if r == "assistant" else r} for r in roles]
    for work, messages in ((chat.encode_answered, asked), (chat.encode, asked[:-1])):
        with pytest.raises(UserError, match=f"leaves out the text '{role}' of the {role}"):
            work(messages)
    assert runs(chat_of(CHATML), asked) == ["yes<|im_end|>"] * 2

"""Chat templates that fail, never end or take too much memory are refused in one line."""

import json
import time

import pytest
from chats import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3
from transformers.utils.chat_template_utils import render_jinja_template
from workbench import TEMPLATE, make_tokenizer, options_of, write_prompts

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.length import Limit
from distill.prompts.split import read
from distill.prompts.templates import rendering
from distill.prompts.templates.limits import TooMuchWork, render_within_limits

HI = [{"role": "user", "content": "hi"}]
NS = "{% set ns = namespace(s='xx', l=[1], n=7) %}"
LOOP = NS + "{% for i in range(90) %}"
BIG, END = "{% set x = 'a' * 60000 %}", "{% endfor %}"
A, B = "{% for a in range(99999) %}", "{% for b in range(99999) %}"
FAILS = {  # whatever a template of the sandbox can raise
    "index": "{{ messages[0]['content'].index('x') }}",
    "zero": "{{ 1 / 0 }}",
    "undefined": "{{ nothing.at.all }}",
    "absent": "{{ messages[99].content }}",
    "unpacked": "{% for a, b in [1] %}{% endfor %}",
    "no function": "{{ 'x'() }}",
    "added": "{{ 1 + 'a' }}",
    "raised": "{{ raise_exception('no\nmore') }}",
    "secret": "{{ ''.__class__.__mro__ }}",
    "no template": "{% for %}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "itself in a loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "by chance": "{{ [1, 2, 3]|random }}",
    "lorem ipsum": "{{ lipsum() }}",
    "range": "{{ range(9999999999)|list }}",
}
ENDLESS = {  # past a limit
    "nested": A + B + END + END,
    "doubled": LOOP + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "added up": LOOP + "{% set ns.s = ns.s + ns.s %}" + END,
    "written twice": LOOP + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}" + END,
    "lists": LOOP + "{% set ns.l = ns.l + ns.l %}" + END,
    "squares": LOOP + "{% set ns.n = ns.n * ns.n %}" + END,
    "times": NS + "{{ ns.s * 10000000000 }}",
    "times a list": NS + "{{ (ns.l * 9999999999)|length }}",
    "power": NS + "{{ ns.n ** (9 ** 9) }}",
    "center": NS + "{{ ns.s|center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "percent": NS + "{{ '%9999999999d' % ns.n }}",
    "percent star": NS + "{{ '%*d' % (9999999999, ns.n) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format argument": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "replace": BIG + "{{ x.replace('a', x) }}",
    "replace filter": BIG + "{{ x|replace('a', x) }}",
    "join": BIG + "{{ ([x] * 60000)|join }}",
    "map": "{{ range(99999)|map('center', 99999)|join }}",
    "batch": NS + "{{ ns.l|batch(9999999999, 'x')|list }}",
    "slice": NS + "{{ ns.l|slice(9999999999)|list }}",
    "indent": NS + "{{ ns.l|tojson(indent=9999999999) }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "tested": "{% for i in range(99999) if range(99999)|sum > 3 %}{{ i }}" + END,
    "long lines": A + B + "x" * 2000 + END + END,
    "searched": BIG + "{% set y = x.replace('a', x[:200]) %}" + A + "{% if y + 'c' in y %}{% endif %}" + END,
}
CONSTANT = {  # which Jinja computes while it compiles
    "times": "{{ 'x' * 10000000000 }}",
    "chosen": "{{ ('x' * 60000 if true else '') * 60000 }}",
    "list": "{{ ([1] * 9999999999)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "center": "{{ 'x'|center(9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "indent": "{{ [1]|tojson(indent=9999999999) }}",
}


def guarded(body, text="bad"):
    """A template that does it to one conversation."""
    return "{% if messages[0].content == '" + text + "' %}" + body + "{% endif %}" + TEMPLATE


@pytest.mark.parametrize("name", FAILS)
def test_error_of_a_template_refuses_the_record(name):
    with pytest.raises(UserError, match=r"^target: its chat template refuses the prompt 'hi': [^\n]*$"):
        Chat(make_tokenizer(FAILS[name] + TEMPLATE)).encode(HI)


@pytest.mark.parametrize("name", ENDLESS)
def test_work_and_size_have_a_limit(name):
    chat, begun = Chat(make_tokenizer(guarded(ENDLESS[name]))), time.monotonic()
    with pytest.raises(UserError, match=r"^[^\n]*refuses the prompt 'bad': it [^\n]*$"):
        chat.encode([{"role": "user", "content": "bad"}])
    assert time.monotonic() - begun < 10
    assert chat.encode(HI) == Chat(make_tokenizer(TEMPLATE)).encode(HI), "another prompt is rendered"


@pytest.mark.parametrize("template", [ENDLESS["nested"], *map(guarded, CONSTANT.values())])
def test_template_that_renders_nothing_is_refused_before_any_prompt(template):
    with pytest.raises(UserError, match=r"^target: its chat template cannot be used: it [^\n]*$"):
        Chat(make_tokenizer(template))


def test_refused_prompt_is_set_aside_and_a_run_without_prompts_is_refused(tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", 5)
    with prompts.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "bad"}]}) + "\n")
    options = options_of(f"prompts={prompts}", "prompts.heldout_share=0").prompts
    result = read(options, Chat(make_tokenizer(guarded(FAILS["index"]))), Limit(), "write")
    assert len(result.train) == 5
    (refused,) = result.refused
    assert "ValueError: substring not found" in refused.reason
    assert "\n" not in str(refused)
    fails = FAILS["index"].replace("'x'", "'#'") + TEMPLATE
    with pytest.raises(UserError, match=r"^[^\n]*substring not found[^\n]*$"):
        read(options, Chat(make_tokenizer(fails)), Limit(), "write")


CONVERSATIONS = [
    HI,
    [{"role": "system", "content": "s"}, *HI, {"role": "assistant", "content": "a ~ b"}, *HI],
    [*HI, {"role": "assistant", "content": "x", "reasoning_content": "why"}],
]


@pytest.mark.parametrize("template", [CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, TEMPLATE])
def test_rendering_within_limits_is_the_same(template):
    for messages in CONVERSATIONS:
        seen = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>"}
        try:
            (text,), _ = render_jinja_template([messages], chat_template=template, **seen)
        except Exception as error:
            with pytest.raises(type(error)):
                render_within_limits(template, seen | {"messages": messages}, str)
        else:
            named = [rendering._normalized(message) for message in messages]
            assert render_within_limits(template, seen | {"messages": named}, str) == text


def test_steps_do_not_depend_on_the_machine(monkeypatch):
    """The limit of time stands behind them, for what a step cannot say."""
    monkeypatch.setattr("distill.prompts.templates.limits.SECONDS", -1.0)
    with pytest.raises(TooMuchWork, match="seconds"):
        render_within_limits(TEMPLATE, {"messages": HI}, str)


def test_template_that_differs_each_time_is_refused(monkeypatch):
    chat, count = Chat(make_tokenizer()), iter(range(99))
    real = chat.tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat.tokenizer, "apply_chat_template", lambda *a, **o: f"{real(*a, **o)}{next(count)}"
    )
    with pytest.raises(UserError, match="renders the same conversation differently each time"):
        chat.encode(HI)

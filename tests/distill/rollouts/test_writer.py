"""Rows of a shard: turns, samples, batches by length, and drafters that help."""

from dataclasses import replace

import pytest
import torch
from stores import PLAN, make_writer
from workbench import TEMPLATE, make_tokenizer

from decode.plan import Plan
from decode.planning import auto as planning
from decode.planning.auto import Auto
from decode.planning.cost_model import PLAIN, MeasuredCosts, RoundTiming
from distill.engines import base as engines
from distill.engines.base import Answer, InProcess, Request, SamplingParams
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant, weighted
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.rollouts.writer import Writer
from drafters.base import Batch
from drafters.models.lm import DraftLM

END = 3
TALK = replace(PLAN, self_prompts=0, max_prompt_tokens=60)
TURN = (  # of which ANSWER is what an earlier or the last answer shows
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>ANSWER<|end|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CUT = TURN.replace("ANSWER", "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}")
WHY = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
REASONS = TURN.replace("ANSWER", WHY + "{{ m['content'] }}")


class Parrot:
    """Says what it was told to, whoever asks."""

    context = None
    begins = True

    def __init__(self, chat, *says: str, cut: bool = False, exact: bool = True) -> None:
        self.chat, self.says, self.cut, self.exact = chat, list(says), cut, exact
        self.asked, self.params = [], []

    def __call__(self, requests, params, ended=None):
        self.asked.append(list(requests))
        self.params.append(params)
        ids = self.chat.tokenizer.encode(self.says[len(self.asked) - 1])
        return [Answer(ids if self.cut else [*ids, END], not self.cut, self.exact) for _ in requests]


def user(*texts: str) -> tuple[dict, ...]:
    return tuple({"role": "user", "content": text} for text in texts)


def answers(row) -> list[str]:
    own = zip(row["tokens"], row["loss_mask"], strict=True)
    text = make_tokenizer().decode([token if mask else 0 for token, mask in own])
    return [part for part in text.split("<|pad|>") if part]


def text_of(row) -> str:
    return make_tokenizer().decode(row["tokens"])


def test_every_turn_is_answered_in_one_row():
    chat = Chat(make_tokenizer())
    parrot = Parrot(chat, "one", "two")
    (row,) = Writer(parrot, chat, TALK)(0, [Prompt.of("p", user("a", "b"), weight=0.5)], 0)
    assert text_of(row) == "<|user|>a<|assistant|>one<|end|><|user|>b<|assistant|>two<|end|>"
    assert answers(row) == ["one<|end|>", "two<|end|>"]
    assert (row["id"], row["finish_reason"], row["ids"], row["weight"]) == ("p", "stop", "exact", 0.5)
    first, second = (requests[0] for requests in parrot.asked)
    assert (first.id, second.id) == ("p", "p@1")
    assert [m["content"] for m in second.messages] == ["a", "one", "b"]
    assert row["tokens"][: len(second.tokens)] == second.tokens


@pytest.mark.parametrize(
    ("template", "said", "read"),
    [
        (CUT, "hm|yes", {"content": "hm|yes"}),
        (REASONS, "<think>hm</think>yes", {"content": "yes", "reasoning_content": "hm"}),
    ],
)
def test_turns_have_rows_where_the_template_rewrites_earlier_answers(template, said, read):
    chat = Chat(make_tokenizer(template))
    parrot = Parrot(chat, said, "no")
    one, two = Writer(parrot, chat, TALK)(0, [Prompt.of("p", user("a", "b"))], 0)
    assert (one["id"], two["id"]) == ("p", "p@1")
    assert parrot.asked[1][0].messages[1] == {"role": "assistant"} | read
    assert text_of(one) == f"<|user|>a<|assistant|>{said}<|end|>"
    assert text_of(two) == "<|user|>a<|assistant|>yes<|end|><|user|>b<|assistant|>no<|end|>"
    assert (answers(one), answers(two)) == ([f"{said}<|end|>"], ["no<|end|>"])


def test_unreadable_answer_ends_its_conversation_and_is_counted(capsys):
    chat = Chat(make_tokenizer(REASONS))
    parrot = Parrot(chat, "yes</think>no</think>")
    rows = Writer(parrot, chat, TALK)(0, [Prompt.of("p", user("a", "b")), Prompt.of("q", user("c"))], 0)
    assert [row["finish_reason"] for row in rows] == ["unread", "stop"]
    assert answers(rows[0]) == ["yes</think>no</think><|end|>"]
    assert "rollouts: 1 of 2 conversations of shard 0 end early" in capsys.readouterr().out


def test_answer_that_was_cut_is_the_last_one():
    chat = Chat(make_tokenizer())
    (row,) = Writer(Parrot(chat, "one", cut=True), chat, TALK)(0, [Prompt.of("p", user("a", "b"))], 0)
    assert (answers(row), row["finish_reason"]) == (["one"], "length")


def test_every_turn_has_the_tools_and_encoded_text_is_marked():
    listed = "{% if tools %}tools {{ tools[0].name }}{% endif %}"
    chat, tools = Chat(make_tokenizer(listed + TEMPLATE)), ({"name": "f"},)
    parrot = Parrot(chat, "one", "two", exact=False)
    (row,) = Writer(parrot, chat, TALK)(0, [Prompt.of("p", user("a", "b"), tools=tools)], 0)
    assert text_of(row).startswith("tools f<|user|>a<|assistant|>one<|end|><|user|>b")
    assert [request.tools for (request,) in parrot.asked] == [tools, tools]
    assert row["ids"] == "reencoded"


@pytest.mark.parametrize(("longest", "context"), [(8, None), (60, 9)])
def test_self_written_prompt_has_its_own_sampler_and_room(longest, context):
    chat = Chat(make_tokenizer())
    before, after = chat.user_turn()
    plan = replace(PLAN, max_prompt_tokens=longest, max_new_tokens=50, prompt_sampler={"temperature": 0.7})
    parrot = Parrot(chat, "why", "so")
    parrot.context = context
    one, two = Writer(parrot, chat, plan)(3, [], 2)
    assert text_of(one) == "<|user|>why<|assistant|>so<|end|>"
    assert (one["id"], two["id"], answers(two)) == ("self-3-0", "self-3-1", ["so<|end|>"])
    room = 8 - len(before) - len(after)
    assert parrot.params == [
        SamplingParams({"temperature": 0.7}, room, [*PLAN.stop, after[0]]),
        SamplingParams(PLAN.sampler, 50, PLAN.stop),
    ]


def test_empty_self_written_prompt_is_left_out():
    chat = Chat(make_tokenizer())
    assert Writer(Parrot(chat, ""), chat, PLAN)(0, [], 2) == []


def test_turn_without_room_is_left_out():
    chat = Chat(make_tokenizer())
    short = replace(TALK, max_prompt_tokens=5, max_new_tokens=4)  # later turns: 14, 23, ...
    one, two = "one<|end|>", "two<|end|>"
    for second, context, said in (("b" * 9, None, [one]), ("bbb", None, [one, two]), ("bbb", 8, [one])):
        parrot = Parrot(chat, "one", "two")
        parrot.context = context
        (row,) = Writer(parrot, chat, short)(0, [Prompt.of("p", user("a", second))], 0)
        assert answers(row) == said


def test_samples_of_a_prompt_differ(parts):
    target, chat, prompts = parts
    first = make_writer(target, chat, TALK)(0, prompts[:3], 0)
    rows = make_writer(target, chat, replace(TALK, samples=3))(0, prompts[:3], 0)
    assert [row["id"] for row in rows] == [f"p{i}{s}" for i in range(3) for s in ("", "#1", "#2")]
    assert rows[::3] == first
    assert len({tuple(row["tokens"]) for row in rows}) == 9


def test_batches_by_length_change_no_row(parts, monkeypatch):
    target, chat, _ = parts
    prompts = [Prompt.of(str(n), user("x" * n)) for n in (9, 1, 7, 3, 5)]
    seen, call = [], engines.generate

    def generate(target, drafter, rows, **options):
        seen.append([len(row) - 2 for row in rows])
        return call(target, drafter, rows, **options)

    monkeypatch.setattr(engines, "generate", generate)
    rows = {size: make_writer(target, chat, replace(TALK, batch_size=size))(0, prompts, 0) for size in (2, 5)}
    assert seen == [[1, 3, 5, 7, 9]] * 2
    assert [row["id"] for row in rows[2]] == ["9", "1", "7", "3", "5"]
    assert rows[2] == rows[5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafter_that_helps_changes_no_row(temperature, parts, make_drafter):
    target, chat, prompts = parts
    drafter = make_drafter("eagle", target)
    target.tap(())
    requests = [Request(p.id, 0, chat.encode(p.messages)) for p in prompts[:5]]
    params = SamplingParams({"temperature": temperature}, 12, [END])
    plain = InProcess(target, 3, seed=0)(requests, params)
    helped = InProcess(target, 3, 0, drafter, Plan(3, 2, 5))(requests, params)
    assert helped == plain
    assert target.taps == (), "the drafter's taps were left behind"


@pytest.mark.parametrize(("speed", "name"), [(0.0, "chain"), (100.0, "plain")])
def test_plan_is_chosen_once_and_changes_no_row(speed, name, parts, monkeypatch, capfd):
    """The target drafts for itself, by a clock that says what that costs."""
    target, chat, prompts = parts
    drafter = DraftLM(target.model.config.to_dict(), target.model)
    auto, asked = Auto([{"depth": 1}, {"depth": 3}], repeats=1), []

    def costs(target, drafter, prompts, plans, sampler, sizes, **options):
        del target, drafter, prompts, sampler, options
        asked.append(sizes)
        every = [PLAIN, *plans]
        return MeasuredCosts(
            [RoundTiming(p, size, 1 + p.nodes, speed * p.depth, 1.0, 0.0) for p in every for size in (1, 3)]
        )

    monkeypatch.setattr(planning, "measure", costs)
    requests = [Request(p.id, 0, chat.encode(p.messages)) for p in prompts[:5]]
    params = SamplingParams({"temperature": 0.0}, 12, [END])
    engine = InProcess(target, 3, 0, drafter, auto)
    want = InProcess(target, 3, seed=0)(requests, params)
    assert [engine(requests, params), engine(requests, params)] == [want, want]
    assert asked == [[3]]
    assert target.taps == ()
    said = capfd.readouterr().out
    assert said.count("measuring drafts at 3 answers") == 1
    assert ("no drafts" in said) == (name == "plain")
    assert (engine.drafter is None) == (name == "plain")


def test_given_answer_at_the_end_is_replaced():
    chat = Chat(make_tokenizer())
    given = ({"role": "assistant", "content": "gold"},)
    parrot = Parrot(chat, "one", "two")
    (row,) = Writer(parrot, chat, TALK)(0, [Prompt.of("p", user("a", "b") + given)], 0)
    assert answers(row) == ["one<|end|>", "two<|end|>"]
    for (request,) in parrot.asked:
        assert request.messages[-1]["role"] == "user"
        assert "gold" not in str(request.messages)


def test_weight_of_a_row_scales_its_loss(parts, make_drafter):
    target, _, _ = parts
    drafter = make_drafter("eagle", target)
    tokens = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, :2] = False
    read = target.read(tokens)
    objective, ratios = Objective(kl, constant), drafter.aux_weights_at(1.0)

    def total(rows: list[int], weight=None) -> float:
        kept = mask.clone()
        kept[[row for row in (0, 1) if row not in rows]] = False
        steps = drafter.unroll(Batch(tokens, kept, read.taps, read.last), target)
        steps = weighted(steps, torch.tensor(weight), 9) if weight else steps
        return objective(steps, read.last, target.head, ratios, 1.0, tokens, None)[0].item()

    both = total([0, 1], [2.0, 0.5])
    assert both == pytest.approx(2 * total([0]) + total([1]) / 2, rel=1e-5)

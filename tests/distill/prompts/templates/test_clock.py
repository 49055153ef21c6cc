"""Templates that write the date: one moment for a run and its store, and another store for another day."""

import json
from datetime import datetime
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from workbench import TEMPLATE, make_tokenizer, options_of

from decode.errors import UserError
from distill.config.build import read_run_inputs
from distill.options import RolloutCommandOptions
from distill.prompts.chat_template import Chat
from distill.prompts.templates import clock
from distill.rollouts.store import moment_of

DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
HI = [{"role": "user", "content": "hi"}]
NEW_YEAR = datetime(2026, 12, 31, 23, 59, 59, 5)
NEXT_DAY = datetime(2027, 1, 1, 0, 0, 1)


@pytest.fixture
def at(monkeypatch):
    """Sets the clock that transformers reads."""

    def set_clock(moment):
        real = SimpleNamespace(now=lambda: moment)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", real)

    set_clock(NEW_YEAR)
    return set_clock


def test_all_renderings_of_a_chat_are_told_one_moment(at):
    chat = Chat(make_tokenizer(DATED))
    before = chat.encode(HI)
    at(NEXT_DAY)
    assert chat.encode(HI) == before
    ids, mask = chat.encode_answered([*HI, {"role": "assistant", "content": "yes"}])
    assert ids[: len(before)] == before, "a valid record across midnight"
    assert sum(mask) == len("yes") + 1
    assert chat.text(HI).startswith("31 Dec 2026")
    assert Chat(make_tokenizer(DATED)).text(HI).startswith("01 Jan 2027")


def test_transformers_own_clock_is_left_as_it_is():
    tokenizer = make_tokenizer(DATED)
    Chat(tokenizer, moment="2001-02-03").encode(HI)
    text = tokenizer.apply_chat_template(HI, tokenize=False)
    assert text.startswith(datetime.now().strftime("%d %b"))


@pytest.mark.parametrize(
    ("form", "moment"),
    [
        ("%Y", "2026-01-01T00:00:00"),
        ("%B %Y", "2026-12-01T00:00:00"),
        ("%Y-%m-%d", "2026-12-31T00:00:00"),
        ("%H", "2026-12-31T23:00:00"),
        ("%d.%m. %H:%M", "2026-12-31T23:59:00"),
        ("%c", "2026-12-31T23:59:59"),
        ("%f", "2026-12-31T23:59:59.000005"),
    ],
)
def test_a_moment_has_the_parts_that_are_shown(form, moment, at):
    chat = Chat(make_tokenizer("{{ strftime_now('" + form + "') }}" + TEMPLATE))
    assert chat.moment == moment
    again = Chat(make_tokenizer(chat.tokenizer.chat_template), moment=moment)
    assert again.moment == moment
    assert again.encode(HI) == chat.encode(HI)


def test_another_day_is_another_store_only_where_the_date_is_written(at):
    optional = "{% if not date %}{{ strftime_now('%d %b') }}{% endif %}" + TEMPLATE
    first = [Chat(make_tokenizer(t)).fingerprint() for t in (DATED, TEMPLATE, optional)]
    given = Chat(make_tokenizer(optional), options={"date": "today"})
    at(NEXT_DAY)
    second = [Chat(make_tokenizer(t)).fingerprint() for t in (DATED, TEMPLATE, optional)]
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True, False]
    assert given.moment == ""
    assert given.fingerprint() == Chat(make_tokenizer(optional), options={"date": "today"}).fingerprint()


def test_a_template_that_asks_for_the_time_now_and_then_is_told_so(at):
    sometimes = "{% if messages|length > 3 %}{{ strftime_now('%M') }}{% endif %}" + DATED
    chat = Chat(make_tokenizer(sometimes))
    chat.encode(HI)
    with pytest.raises(UserError, match=r"asks for the time \('%M'\) in this conversation.*template_options"):
        chat.encode([*HI, {"role": "assistant", "content": "b"}, *HI, *HI])


def test_a_moment_that_is_none(at):
    with pytest.raises(UserError, match=r"prompts\.moment=yesterday: write it as in 2026-11-28"):
        Chat(make_tokenizer(DATED), moment="yesterday")


# -- runs and stores -------------------------------------------------------------------------


@pytest.fixture
def dated(bench):
    """The bench's target, with a template that writes the date."""
    tokenizer = AutoTokenizer.from_pretrained(bench.target)
    plain, tokenizer.chat_template = tokenizer.chat_template, DATED
    tokenizer.save_pretrained(bench.target)
    yield bench
    tokenizer.chat_template = plain
    tokenizer.save_pretrained(bench.target)


def stored(folder):
    return {p.parent.name: json.loads(p.read_text())["plan"]["moment"] for p in folder.glob("*/plan.json")}


def test_a_store_keeps_its_moment_and_is_gone_on_with(at, dated, tmp_path):
    from distill.commands.rollout import roll_out

    def run(*more):
        options = options_of(
            f"target={dated.target}",
            f"prompts={dated.prompts}",
            f"stores={tmp_path}",
            "prompts.self=0",
            "rollout.max_new_tokens=4",
            "rollout.shard_size=2",
            *more,
            cls=RolloutCommandOptions,
            name="rollout_alone",
        )
        return roll_out(options)

    run()
    (first,) = stored(tmp_path)
    assert stored(tmp_path)[first] == "2026-12-31T00:00:00"
    rows = {p.name: p.read_bytes() for p in (tmp_path / first).glob("*.parquet")}
    at(NEXT_DAY)
    lost = min((tmp_path / first).glob("*.parquet"))
    lost.unlink()
    (tmp_path / first / "manifest.json").unlink()
    run()  # as it began
    assert [*stored(tmp_path)] == [first]
    assert {p.name: p.read_bytes() for p in (tmp_path / first).glob("*.parquet")} == rows
    run()  # finished: the date is another
    assert sorted(stored(tmp_path).values()) == ["2026-12-31T00:00:00", "2027-01-01T00:00:00"]
    run("prompts.moment=2026-12-31")
    run(f"rollout.store={tmp_path / first}")
    assert moment_of(str(tmp_path / first)) == "2026-12-31T00:00:00"
    assert len(stored(tmp_path)) == 2
    with pytest.raises(UserError, match=r"another moment that the chat template is told.*2026-12-31"):
        run(f"rollout.store={tmp_path / first}", "prompts.moment=2027-01-01")


def test_a_run_that_is_resumed_renders_as_it_began(at, dated, tmp_path):
    options = options_of(f"target={dated.target}", f"prompts={dated.prompts}", "score.enabled=false")
    chat, prompts, _ = read_run_inputs(options, tmp_path)
    at(NEXT_DAY)
    again, _, _ = read_run_inputs(options, tmp_path)
    assert again.moment == chat.moment == "2026-12-31T00:00:00"
    assert again.encode(prompts[0].messages) == chat.encode(prompts[0].messages)
    assert clock.of_run(tmp_path / "checkpoints" / "3") == chat.moment
    (tmp_path / "other").mkdir()
    assert read_run_inputs(options, tmp_path / "other")[0].moment == "2027-01-01T00:00:00"

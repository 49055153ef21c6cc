"""Templates that write the date are told one moment for a run and its store."""

import json
from datetime import datetime
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from workbench import TEMPLATE, make_tokenizer, options_of

from decode.errors import UserError
from distill.commands.rollout import roll_out
from distill.config.build import PromptReader
from distill.options.commands import RolloutCommandOptions
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


def test_renderings_of_a_chat_share_a_moment(at):
    chat = Chat(make_tokenizer(DATED))
    before = chat.encode(HI)
    at(NEXT_DAY)
    assert chat.encode(HI) == before
    ids, mask = chat.encode_answered([*HI, {"role": "assistant", "content": "yes"}])
    assert ids[: len(before)] == before, "a valid record across midnight"
    assert sum(mask) == len("yes") + 1
    assert chat.text(HI).startswith("31 Dec 2026")
    assert Chat(make_tokenizer(DATED)).text(HI).startswith("01 Jan 2027")


def test_clock_of_transformers_is_unchanged():
    tokenizer = make_tokenizer(DATED)
    Chat(tokenizer, moment="2001-02-03").encode(HI)
    text = tokenizer.apply_chat_template(HI, tokenize=False)
    assert text.startswith(datetime.now().strftime("%d %b"))


def test_moment_is_rounded_to_what_is_written(at):
    for form, moment in {
        "%Y": "2026-01-01T00:00:00",
        "%B %Y": "2026-12-01T00:00:00",
        "%Y-%m-%d": "2026-12-31T00:00:00",
        "%H": "2026-12-31T23:00:00",
        "%d.%m. %H:%M": "2026-12-31T23:59:00",
        "%c": "2026-12-31T23:59:59",
        "%f": "2026-12-31T23:59:59.000005",
    }.items():
        chat = Chat(make_tokenizer("{{ strftime_now('" + form + "') }}" + TEMPLATE))
        again = Chat(make_tokenizer(chat.tokenizer.chat_template), moment=moment)
        assert chat.moment == again.moment == moment
        assert again.encode(HI) == chat.encode(HI)


def test_another_day_is_another_store_where_the_date_is_written(at):
    optional = "{% if not date %}{{ strftime_now('%d %b') }}{% endif %}" + TEMPLATE
    templates = (DATED, TEMPLATE, optional)
    first = [Chat(make_tokenizer(t)).fingerprint() for t in templates]
    given = Chat(make_tokenizer(optional), options={"date": "today"})
    at(NEXT_DAY)
    assert [Chat(make_tokenizer(t)).fingerprint() for t in templates if t == TEMPLATE] == first[1:2]
    assert not set(first[::2]) & {Chat(make_tokenizer(t)).fingerprint() for t in templates}
    assert given.moment == ""
    assert given.fingerprint() == Chat(make_tokenizer(optional), options={"date": "today"}).fingerprint()


def test_time_that_only_some_conversations_ask_for_is_refused(at):
    sometimes = "{% if messages|length > 3 %}{{ strftime_now('%M') }}{% endif %}" + DATED
    chat = Chat(make_tokenizer(sometimes))
    chat.encode(HI)
    with pytest.raises(UserError, match=r"asks for the time \('%M'\) in this conversation"):
        chat.encode([*HI, {"role": "assistant", "content": "b"}, *HI, *HI])


def test_malformed_moment_is_refused(at):
    with pytest.raises(UserError, match=r"prompts\.moment=yesterday"):
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


def test_store_keeps_its_moment_when_it_is_continued(at, dated, tmp_path):
    words = [f"target={dated.target}", f"prompts={dated.prompts}", f"stores={tmp_path}", "prompts.self=0"]
    words += ["rollout.max_new_tokens=4", "rollout.shard_size=2"]

    def run(*more):
        return roll_out(options_of(*words, *more, cls=RolloutCommandOptions, name="rollout_alone"))

    def rows():
        return {p.name: p.read_bytes() for p in (tmp_path / first).glob("*.parquet")}

    run()
    (first,) = stored(tmp_path)
    assert stored(tmp_path)[first] == "2026-12-31T00:00:00"
    made = rows()
    at(NEXT_DAY)
    min((tmp_path / first).glob("*.parquet")).unlink()
    (tmp_path / first / "manifest.json").unlink()
    run()  # as it began
    assert [*stored(tmp_path)] == [first]
    assert rows() == made
    run()  # finished: the date is another
    assert sorted(stored(tmp_path).values()) == ["2026-12-31T00:00:00", "2027-01-01T00:00:00"]
    run("prompts.moment=2026-12-31")
    run(f"rollout.store={tmp_path / first}")
    assert moment_of(str(tmp_path / first)) == "2026-12-31T00:00:00"
    assert len(stored(tmp_path)) == 2
    with pytest.raises(UserError, match=r"another moment of the chat template.*2026-12-31"):
        run(f"rollout.store={tmp_path / first}", "prompts.moment=2027-01-01")


def test_resumed_run_renders_as_it_began(at, dated, tmp_path):
    options = options_of(f"target={dated.target}", f"prompts={dated.prompts}", "score.enabled=false")
    chat, prompts, _ = PromptReader.of_run(options).read_for_run(tmp_path)
    at(NEXT_DAY)
    again, _, _ = PromptReader.of_run(options).read_for_run(tmp_path)
    assert again.moment == chat.moment == "2026-12-31T00:00:00"
    assert again.encode(prompts[0].messages) == chat.encode(prompts[0].messages)
    assert clock.moment_of_checkpoint(tmp_path / "checkpoints" / "3") == chat.moment
    (tmp_path / "other").mkdir()
    assert PromptReader.of_run(options).read_for_run(tmp_path / "other")[0].moment == "2027-01-01T00:00:00"

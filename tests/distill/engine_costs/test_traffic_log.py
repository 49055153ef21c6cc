"""Logs of a server's requests: lengths, concurrency, and the share that gains."""

import json
import random

import pytest

from decode.errors import UserError
from distill.engine_costs.costs import EngineCosts, TimedLength
from distill.engine_costs.traffic_log import LoggedRequest, forecast, read_log


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def costs_at(batch: int, plain: float, ratio: float) -> EngineCosts:
    """Drafts of two tokens, by the price of their rounds."""
    timed = TimedLength(length=2, drafted=2.0, seconds=ratio * plain, tau=1.0, measured=1.0)
    return EngineCosts(batch_size=batch, plain=plain, lengths=(timed,), prefill=0.001, drafted_prefill=0.0012)


def test_lengths_are_read_in_each_spelling(tmp_path):
    lines = [
        {"prompt_tokens": 5, "completion_tokens": 7},
        {"usage": {"prompt_tokens": 6, "completion_tokens": 8}, "concurrency": 3},
        "",
    ]
    assert read_log(write(tmp_path / "log.jsonl", lines)) == [(5, 7, 1.0), (6, 8, 3.0)]


def test_concurrency_is_the_mean_number_of_running_requests(tmp_path):
    draw = random.Random(0)
    spans = [(s := draw.uniform(0, 20), s + draw.uniform(0.1, 5)) for _ in range(40)]
    lines = [{"prompt_tokens": 1, "completion_tokens": 1, "start": s, "end": e} for s, e in spans]
    found = read_log(write(tmp_path / "log.jsonl", lines))
    for (start, end), one in zip(spans, found, strict=True):
        overlap = sum(max(0.0, min(end, e) - max(start, s)) for s, e in spans)
        assert one.concurrency == pytest.approx(overlap / (end - start), rel=1e-9)


def test_times_may_be_dates(tmp_path):
    day = "2026-11-29T10:00:"
    lines = [
        {"prompt_tokens": 1, "completion_tokens": 1, "start": f"{day}00+00:00", "end": f"{day}04+00:00"},
        {"prompt_tokens": 1, "completion_tokens": 1, "start": f"{day}02+00:00", "end": f"{day}04+00:00"},
    ]
    assert [one.concurrency for one in read_log(write(tmp_path / "log.jsonl", lines))] == [1.5, 2.0]


def test_a_moment_counts_as_one_request(tmp_path):
    line = {"prompt_tokens": 1, "completion_tokens": 1, "start": 3, "end": 3}
    assert read_log(write(tmp_path / "log.jsonl", [line]))[0].concurrency == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a request"),
        ("[1]", "line 1: not a request"),
        ("null", "line 1: not a request"),
        ({"prompt_tokens": 3}, "completion_tokens"),
        ({"prompt_tokens": 3, "completion_tokens": "many"}, "not a request"),
        ({"prompt_tokens": 3, "completion_tokens": 0}, "1 or more"),
        ({"prompt_tokens": 3, "completion_tokens": 1, "concurrency": float("nan")}, "1 or more"),
        ({"prompt_tokens": 3, "completion_tokens": 1, "usage": 5}, "not a request"),
        ({"prompt_tokens": 3, "completion_tokens": 1, "start": 3}, "not a request"),
        ({"prompt_tokens": 3, "completion_tokens": 1, "start": 3, "end": 2}, "ends before"),
        ({"prompt_tokens": 3, "completion_tokens": 1, "start": "noon", "end": "night"}, "not a request"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        read_log(write(tmp_path / "log.jsonl", [line]))


def test_times_of_some_requests_only_are_refused(tmp_path):
    lines = [
        {"prompt_tokens": 1, "completion_tokens": 1, "start": 3, "end": 4},
        {"prompt_tokens": 1, "completion_tokens": 1},
    ]
    with pytest.raises(UserError, match="1 of 2 lines have no start"):
        read_log(write(tmp_path / "log.jsonl", lines))


def test_no_requests_and_no_file(tmp_path):
    with pytest.raises(UserError, match="has no requests"):
        read_log(write(tmp_path / "log.jsonl", []))
    with pytest.raises(UserError, match="No such file"):
        read_log(tmp_path / "none")


def test_short_answers_lose_and_long_ones_gain():
    """The drafter reads the prompt too, which one new token never earns back."""
    costs = [costs_at(1, 0.010, 1.5)]
    log = [LoggedRequest(1000, 2, 1.0), LoggedRequest(10, 500, 1.0)]
    found = forecast(log, costs, [0.8, 0.6])
    assert (found.length, found.gaining, found.losing) == (2, 0.5, 0.5)
    plain = [1.0 + 0.010, 0.010 + 4.99]
    drafted = [1.2 + 0.015 / 2.4, 0.012 + 499 * 0.015 / 2.4]
    assert found.speedup == pytest.approx(sum(plain) / sum(drafted))


def test_large_batches_cost_more_and_what_is_beyond_them_is_counted():
    costs = [costs_at(8, 0.02, 3.0), costs_at(1, 0.01, 1.2)]
    assert forecast([LoggedRequest(1, 100, 1.0)], costs, [0.8, 0.6]).length == 2
    busy = forecast([LoggedRequest(1, 100, 8.0), LoggedRequest(1, 100, 30.0)], costs, [0.8, 0.6])
    assert (busy.length, busy.speedup, busy.beyond) == (0, 1.0, 1)


@pytest.mark.proof
def test_a_million_requests(tmp_path):
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for i in range(1_000_000):
            file.write(f'{{"prompt_tokens": 9, "completion_tokens": 50, "start": {i}, "end": {i + 3}}}\n')
    log = read_log(path)
    found = forecast(log, [costs_at(1, 0.01, 1.2), costs_at(8, 0.02, 1.2)], [0.8, 0.6])
    assert (len(log), found.requests, found.gaining) == (1_000_000, 1_000_000, 1.0)
    assert log[500_000].concurrency == 3.0

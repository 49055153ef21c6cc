"""drafter=auto: several families, a budget of seconds, one winner."""

import json
import os
from pathlib import Path

import pytest
from workbench import Bench, fork

from distill import auto, families

SMALL = (
    "drafter=auto",
    "drafter.minutes=0.2",
    "drafter.plans=[{depth: 2}]",
    "drafter.answers=2",
    "drafter.tokens=4",
    "score.replay_prompts=4",
    "score.batch_sizes=[2]",
)
TWO = "drafter.families=[eagle,medusa,ngram]"


def without(command, *keys):
    return [o for o in command if o.partition("=")[0] not in keys]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("auto"))


@pytest.fixture(autouse=True)
def _young(monkeypatch):
    """The process of all tests has lived for minutes."""
    monkeypatch.setattr(auto, "lived", lambda: 0.0)


def go(bench: Bench, *more: str):
    from workbench import train

    return train([*without(bench.command, "drafter.depth"), *SMALL, TWO, *more])


def test_a_few_seconds_of_three_families(bench):
    done = go(bench)
    assert done.code == 0, done.err
    print(done.out)
    folder = done.folder
    record = json.loads((folder / "auto.json").read_text())
    print(json.dumps(record, indent=1))

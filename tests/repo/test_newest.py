"""What was run with the newest releases (`make newest`) agrees with the ranges and with CI's pins."""

import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from workbench import ROOT

from newest import PACKAGES, TABLE, TESTS

RUN = json.loads(TABLE.read_text())


def required() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def pinned(name: str) -> Version:
    found = re.search(rf"^{re.escape(name)}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M | re.I)
    assert found, f"constraints.txt has no {name}"
    return Version(found[1])


@pytest.mark.parametrize("name", PACKAGES)
def test_version_ranges_admit_the_pin_and_the_newest_run(name):
    run, pin = Version(RUN["versions"][name]), pinned(name)
    ranges = [one.specifier for one in required() if one.name == name]
    assert ranges
    for admitted in ranges:
        assert admitted.contains(str(run)), f"{name} {run} was run, and pyproject.toml excludes it"
        assert admitted.contains(str(pin)), f"{name} {pin} is pinned, and pyproject.toml excludes it"
    assert pin <= run, f"{name} {pin} is pinned, and {run} was run last: make newest"


def test_newest_run_passed_a_quarter_of_the_tests():
    tests = RUN["tests"]
    assert tests["failures"] == tests["errors"] == 0 == len(RUN["failed"])
    assert 4 * (tests["tests"] - tests["skipped"]) >= tests["of"] > 0
    assert RUN["quick"]["exit"] == 0


def test_what_is_run_is_there():
    assert [name for name in TESTS if not (ROOT / name).exists()] == []
    assert {"torch", "transformers", "lightning", "peft", "datasets", "deepspeed"} <= {*PACKAGES}

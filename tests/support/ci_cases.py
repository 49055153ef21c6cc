"""Which tests run in CI: those of the core, of parametrized ones the cases of `covering`, `ci` and `states`.

`covering(rest=False)` drops the other cases: a product of thousands that differ in nothing but their pairs.
Tests of the zoo and of the laboratory get the marker of their tier, the cases that are left out get `proof`.
This is done while pytest collects, before `-m` selects. Of cases that are named on pytest's command line only
those named are considered, so a single case always runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

import pytest

from drafters.registry import ZOO

STATES = {  # drafter -> what it keeps of a row: CI runs one of each in tests that are marked `states`
    "medusa": "nothing",
    "suffix": "counts of its text",
    "eagle": "pairs of features and tokens, and their keys",
    "diffusion": "the same, and a block of masks",
    "lyanna": "states of rejected tokens",
    "lm": "a cache of its own",
    "skip": "a part of the target's cache",
    "union": "two of these",
}
ZOO_TESTS = ("tests/drafters/zoo", "tests/decode/lossy")


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark what tests a drafter of the zoo, or the laboratory."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        folder = item.path.parent.relative_to(item.config.rootpath).as_posix()
        if folder in ZOO_TESTS or params.get("drafter_name") in ZOO:
            item.add_marker(pytest.mark.zoo)
        if folder == "tests/lab":
            item.add_marker(pytest.mark.lab)


def mark_proofs(items: list[pytest.Item]) -> None:
    """Mark as `proof`, or drop, the cases that `states`, `covering` and `ci` leave out of CI."""
    dropped = set[pytest.Item]()
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("proof"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        if group[0].get_closest_marker("states"):
            kept = [item for item in group if item.callspec.params["drafter_name"] in (*STATES, *ZOO)]
            group = _rest_are_proofs(group, kept)
        if marker := group[0].get_closest_marker("covering"):
            zoo = [item for item in group if item.get_closest_marker("zoo")]
            tiers = [item for item in group if item not in zoo], zoo
            pairs, rest = marker.kwargs.get("pairs", False), marker.kwargs.get("rest", True)
            chosen = [item for tier in tiers for item in cover(tier, marker.args, pairs)]
            dropped |= set() if rest else set(group) - set(chosen)
        elif marker := group[0].get_closest_marker("ci"):
            chosen = [item for item in group if item.callspec.id in marker.args]
            if len(group) > 1 and len(chosen) < len(marker.args):
                ids = [item.callspec.id for item in group]
                raise pytest.UsageError(f"{group[0].nodeid}: no such case: {set(marker.args) - set(ids)}")
        else:
            continue
        _rest_are_proofs(group, chosen)
    if dropped:
        items[0].config.hook.pytest_deselected(items=list(dropped))  # so that pytest counts them
        items[:] = [item for item in items if item not in dropped]


def _rest_are_proofs(group: list[pytest.Item], chosen: list[pytest.Item]) -> list[pytest.Item]:
    """Mark the cases that are not chosen; all are chosen if none is. Returns the chosen ones."""
    chosen = chosen or group
    for item in group:
        if item not in chosen:
            item.add_marker(pytest.mark.proof)
    return chosen


def cover(items: list[pytest.Item], names: tuple[str, ...], pairs: bool) -> list[pytest.Item]:
    """The fewest cases, chosen greedily, that show every value of every parameter once.

    Args:
        items: the cases of one test.
        names: parameters to cover; all of them if empty.
        pairs: cover every pair of values of two parameters (pairwise testing) instead.
    """

    def shown(item: pytest.Item) -> set[tuple]:
        params = sorted(item.callspec.params.items())
        values = [(name, repr(value)) for name, value in params if not names or name in names]
        return set(combinations(values, 2 if pairs else 1))

    values = {item: shown(item) for item in items}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        chosen.append(max(items, key=lambda item: len(values[item] & missing)))  # the first of the best
        missing -= values[chosen[-1]]
    return chosen

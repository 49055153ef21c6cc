"""Every number of every drafter's config.json, replaced: one line, or a drafter that drafts as quickly."""

from __future__ import annotations

import json
import resource
import time

from faces import both, random_texts

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as hub

VALUES = (2**24, 2**31, -1, 0, 1e308)
GROWTH = 256 * 2**10  # KiB that all of it may take


def numbers(settings, path=()):
    """Where numbers are; of the sizes of adapted maps, which tensors on file show, the first."""
    pairs = list(settings.items() if isinstance(settings, dict) else enumerate(settings))
    for key, value in pairs[:2] if path[-1:] == ("targets",) else pairs:
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, key))
        elif type(value) in (int, float):
            yield (*path, key)


def replaced(settings, path, value):
    copy = json.loads(json.dumps(settings))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return copy


def test_no_number_takes_memory_or_time(drafter_name, tiny_target, make_drafter, tmp_path):
    target, drafter = both(tiny_target, make_drafter, drafter_name)
    hub.save(drafter, target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    prompts = random_texts(1, 8).tolist()
    said = []
    hub.load(tmp_path, target)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    for path in numbers(config["settings"]):
        for value in VALUES:
            settings = replaced(config["settings"], path, value)
            (tmp_path / "config.json").write_text(json.dumps(config | {"settings": settings}))
            try:
                loaded = hub.load(tmp_path, target)
                generate(target, loaded, prompts, plan=Plan(depth=2), max_new_tokens=3, sampler=Sampler(0.0))
            except UserError as error:
                said.append(str(error))
    assert not [line for line in said if not line.isprintable()]
    assert said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH
    assert time.monotonic() - begun < 60

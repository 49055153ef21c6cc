"""Where no plan is given, the fastest row of the checkpoint's score decides; else a reason says why not."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from cards import row, scorecard
from workbench import make_target

import foredraft
from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.hardware import hardware
from decode.model.load import load_target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from distill.config.build import quiet
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.fastest_plan import MOST_NODES, Fastest
from drafters.hub import SCORECARD

OTHERWISE = Plan(depth=2, width=2, nodes=4, proposal="auto")
CHAIN, SAMPLED, TREE = Plan(depth=3), Plan(depth=2, proposal="sampled"), Plan(depth=2, width=2, nodes=3)
LOSSY = Plan(depth=2, rule="typical", lossy=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny chat model."""
    quiet()
    return foredraft.load_target(str(make_target(tmp_path_factory.mktemp("fastest") / "t")), dtype="float32")


@pytest.fixture
def folder(tmp_path, model, make_drafter):
    """An EAGLE for it."""
    target = load_target(model.target.model.name_or_path)
    checkpoint_io.save(make_drafter("eagle", target), target, tmp_path)
    return tmp_path


def measured(
    shape: Plan, speedup: float, temperature: float = 0.0, batch: int = 1, passes: str = "uncompiled", **more
):
    """A row of a scorecard."""
    times = {"seconds": [1.0], "tokens": [4], "plain_seconds": [1.0], "plain_tokens": [4]}
    timing = times | {"passes": passes, "plain_passes": passes}
    given = {"decode": shape.name, "lossy": shape.lossy, "nodes": shape.nodes}
    given |= {"plan": shape.settings, "speedup": speedup, "timing": timing}
    return row(temperature, batch, **given | more)


def write(folder, rows, name: str = "score.json", **more) -> None:
    here = {"hardware": hardware(torch.device("cpu")), "dtype": "float32"}
    (folder / name).write_text(json.dumps(scorecard(rows, **here | more)))


def chosen(model, folder, temperature: float = 0.0, batch: int = 1) -> tuple[Plan, str]:
    drafter = foredraft.load_drafter(str(folder), model)
    return Fastest(OTHERWISE).choose(drafter, model.target, Sampler(temperature), batch)


@pytest.mark.parametrize(
    "plan",
    [
        *(CHAIN, SAMPLED, TREE, LOSSY, OTHERWISE, replace(TREE, proposal="hybrid")),
        *(Plan(tree=((0,), (1,), (0, 0)), proposal="sampled", replacement=True), Plan(3, min_confidence=0.3)),
        Plan(2, drafts=3, proposal="sampled", draft_temperature=0.5),
        Plan(2, adapt=DepthPolicy(0.6, ((1, (1.0, 1.2, 1.5)), (8, (1.0, 1.5, 2.5))))),
    ],
    ids=lambda plan: plan.name,
)
def test_plan_is_read_as_it_was_written(plan):
    assert plan_of(read := json.loads(json.dumps(plan.settings))) == plan
    assert read == plan.settings


@pytest.mark.parametrize("name", ["score.json", SCORECARD])
def test_fastest_row_of_the_temperature_and_batch_decides(model, folder, name):
    rows = [
        measured(TREE, 1.2),
        measured(CHAIN, 1.5),
        measured(SAMPLED, 1.1, 1.0),
        measured(TREE, 1.9, batch=4),
    ]
    write(folder, [*rows, measured(LOSSY, 3.0)], name)
    assert chosen(model, folder) == (CHAIN, "")
    assert chosen(model, folder, 1.0) == (SAMPLED, "")
    assert chosen(model, folder, batch=4) == (TREE, "")


def test_plain_decoding_is_chosen_where_no_draft_pays(model, folder):
    write(folder, [measured(TREE, 0.85), measured(CHAIN, 0.99)])
    assert chosen(model, folder) == (Plan(), "")


@pytest.mark.parametrize(
    ("rows", "more", "reason"),
    [
        (None, {"hardware": "Abacus"}, "scored on Abacus, this is "),
        (None, {"dtype": "bfloat16"}, "scored in bfloat16, the target is in float32"),
        (None, {"control": "shuffled_taps"}, "other weights or inputs"),
        (None, {"quantize": "int8"}, "other weights or inputs"),
        (None, {"schema": 3}, "version 3"),
        ([measured(CHAIN, 1.5, 1.0)], {}, "not scored at T=0 and batch 1"),
        ([measured(CHAIN, 1.5, passes="compiled")], {}, "not scored at T=0 and batch 1"),
        ([measured(CHAIN, 1.5, passes="captured")], {}, "not scored at T=0 and batch 1"),
        ([measured(CHAIN, 1.5, plan=None)], {}, "from an older version"),
        ([measured(CHAIN, 1.5, plan={"depth": -1})], {}, "depth=-1"),
        (
            [measured(CHAIN, 1.5, plan={"depth": 2, "lossy": True, "rule": "typical"})],
            {},
            "not for a default",
        ),
        ([measured(CHAIN, 1.5, plan={"depth": MOST_NODES + 1})], {}, "not for a default"),
    ],
)
def test_reason_says_why_nothing_measured_is_used(model, folder, rows, more, reason):
    write(folder, [measured(CHAIN, 1.5)] if rows is None else rows, **more)
    plan, found = chosen(model, folder)
    assert plan is OTHERWISE
    assert reason in found
    assert "\n" not in found


def test_unscored_and_damaged_checkpoints_have_the_default(model, folder):
    assert chosen(model, folder) == (OTHERWISE, "the drafter was not scored")
    (folder / "score.json").write_text("{")
    assert "version none" in chosen(model, folder)[1]


def test_default_that_the_drafter_cannot_draft_is_refused(model, tmp_path, make_drafter):
    target = load_target(model.target.model.name_or_path)
    checkpoint_io.save(make_drafter("ngram", target), target, tmp_path)
    drafter = foredraft.load_drafter(str(tmp_path), model)
    with pytest.raises(UserError, match="no distribution to draw from"):
        Fastest(SAMPLED).choose(drafter, model.target, Sampler(0.0), 1)


def test_python_and_transformers_decode_by_the_score(model, folder):
    write(folder, [measured(TREE, 1.2), measured(CHAIN, 1.5)])
    drafter = foredraft.load_drafter(str(folder), model)
    by_score = foredraft.generate(model, "say 3", drafter, max_new_tokens=8)
    assert by_score == replace(
        foredraft.generate(model, "say 3", drafter, max_new_tokens=8, plan=CHAIN),
        tokens_per_second=by_score.tokens_per_second,
    )
    write(folder, [measured(TREE, 0.9)])
    assert foredraft.generate(model, "say 3", drafter, max_new_tokens=8).tau == 1


def test_drawn_tokens_without_a_measured_plan_are_a_warning(model, folder):
    write(folder, [measured(CHAIN, 1.5)])
    drafter = foredraft.load_drafter(str(folder), model)
    with pytest.warns(
        UserWarning,
        match=r"hybrid-16 .* not scored at T=0.7 and batch 2.*temperatures=\[0,0.7\] .*batch_sizes=\[2\]",
    ):
        foredraft.generate(model, ["a", "b"], drafter, temperature=0.7, max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foredraft.generate(model, ["a", "b"], drafter, max_new_tokens=4)

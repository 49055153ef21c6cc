"""foredraft limit: the limit of trees on the target's own text, and how much of it a drafter takes."""

import json

import pytest
from workbench import Bench, foredraft, write_prompts

from distill.commands.limit import describe


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("limit"))
    return made, made.untrained_eagle()


def limit(bench, folder, *more, drafter=False):
    made, checkpoint = bench
    prompts = write_prompts(folder / "p.jsonl", 12)
    argv = [f"target={made.target}", f"prompts={prompts}", "prompts.heldout_share=0.5", "nodes=[2,4,8]"]
    argv += ["starts=6", "score.max_new_tokens=8", f"answers={folder / 'answers'}"]
    argv += [f"out={folder / 'out.json'}", *[f"checkpoint={checkpoint}"] * drafter]
    done = foredraft("limit", *argv, *more)
    return done, json.loads((folder / "out.json").read_text()) if done.code == 0 else None


def test_a_target_has_a_bound_and_best_trees(bench, tmp_path):
    done, card = limit(bench, tmp_path)
    assert done.code == 0, done.err
    assert [tree["nodes"] for tree in card["trees"]] == [2, 4, 8]
    best = [tree["best"][0] for tree in card["trees"]]
    assert best == sorted(best)
    for tree in card["trees"]:
        assert tree["best"][1] <= tree["best"][0] <= tree["best"][2]
    assert card["bounded"]
    assert card["drafter"] is None
    assert f"mu = {card['mu'][0]:.3f}" in done.out


def test_fraction_and_losses_of_a_drafter_sum_to_1(bench, tmp_path):
    done, card = limit(bench, tmp_path, "decode.depth=2", "decode.width=2", "decode.nodes=4", drafter=True)
    assert done.code == 0, done.err
    found = card["drafter"]
    parts = [found[name][0] for name in ("fraction", "coverage_loss", "shape_loss")]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0
    assert "of the best trees of 4 nodes" in done.out


def test_a_bound_that_does_not_apply_is_left_out(bench, tmp_path):
    done, card = limit(bench, tmp_path, "temperature=0")
    assert not card["bounded"]
    assert "T=0: the target is certain" in done.out
    drawn = ["decode=chain", "decode.depth=2", "decode.proposal=sampled"]
    done, card = limit(bench, tmp_path, *drawn, drafter=True)
    assert done.code == 0, done.err
    assert card["drafter"]["fraction"] is None
    assert 0 < card["drafter"]["first_level"][0] <= 1
    assert "its tokens are sampled" in done.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["temperature=-1"], "temperature"),
        (["nodes=[]"], "nodes"),
        (["starts=0"], "starts=0"),
        (["checkpoint=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(bench, tmp_path, given, said):
    done, _ = limit(bench, tmp_path, *given)
    done.refused(said)


def test_trees_that_keep_more_than_the_bound_are_explained():
    tree = {"nodes": 8, "bound": 1.0, "published": 2.0, "best": [1.5, 1.4, 1.6]}
    card = {"temperature": 1.0, "bounded": True, "mu": [2.0, 1.9, 2.1], "mu2": 5.0, "correlation": [0.5]}
    card |= {"positions": 9, "starts": 3, "trees": [tree], "drafter": None}
    card |= {"per_doubling": [0.3, 0.2, 0.4], "expected_per_doubling": 0.35}
    assert "at 8 nodes the best trees keep more than the bound" in describe(card)

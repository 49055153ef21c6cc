"""Runs whose loss is a sum of terms, and runs of long blocks."""

from __future__ import annotations

import pytest
from workbench import fork, kill_in_training, same, train, weights

from distill.training.module import DEPTHS
from distill.utils.run_record import read_options

STEPS = ("trainer.max_steps=2", "score.every=2")
SMALL = {
    "eagle": (),
    "diffusion": ("drafter.anchors=8", "drafter.info_rank=8"),
}
MIXED = "objective.terms={kl: {objective: kl}, tv: {objective: tv, factor: 0.5}}"


@pytest.mark.parametrize("drafter", ["eagle", "diffusion"])
def test_each_term_is_logged_and_the_sum_is_the_loss(drafter, bench, logged):
    chosen = [f"drafter={drafter}", *SMALL[drafter], "drafter.depth=3", "decode.depth=3"]
    done = bench.train(*chosen, *STEPS, "objective=ce_focal_chain", "weights=decay").succeeded()
    losses = {name: logged(done.folder, f"train/loss_{name}") for name in ("ce", "focal", "chain")}
    total = logged(done.folder, "train/loss")
    assert len(total) == 2
    for step, loss in total.items():
        summed = sum(values[step] for values in losses.values())
        if drafter == "eagle":  # its loss on features is not a term
            assert 0 < summed < loss
        else:
            assert summed == pytest.approx(loss, rel=1e-4)
    by_depth = [logged(done.folder, f"train/divergence_chain_{depth}") for depth in (1, 2, 3)]
    assert all(0 <= value <= 1 for values in by_depth for value in values.values())
    recorded = read_options(done.folder)
    assert recorded is not None
    assert recorded.values["objective"]["terms"]["focal"]["weights"]["gamma"] == 1.0


def test_depth_invariant_drafter_takes_terms_whose_weights_are_by_depth(bench, logged):
    quick = [word for word in bench.command if not word.startswith("drafter.depth=")]
    lm = (*quick, "drafter=lm", "drafter.layers=1", *STEPS, "score.enabled=false")
    done = train([*lm, "objective=mix", MIXED, "weights=constant"]).succeeded()
    assert len(logged(done.folder, "train/loss_tv")) == 2
    place = "objective.terms.chain.weights"
    train([*lm, "objective=ce_chain", "weights=constant"]).refused(place, f"set {place}=constant")
    train([*lm, "objective=mix", MIXED, "weights=focal"]).refused("error: weights: this drafter")


@pytest.mark.proof
def test_resumed_run_of_a_mix_ends_with_the_same_bits(bench, tmp_path, monkeypatch):
    command = [
        *bench.command,
        *("drafter=diffusion", *SMALL["diffusion"], "score.every=2", "score.enabled=false"),
        *("objective=ce_focal_chain", "objective.terms.chain.weights.warmup=0.5"),
    ]

    def run(folder: str):
        return train([*command, f"output_dir={tmp_path / folder}"])

    straight = run("a").succeeded()
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert fork(lambda: run("b").code) == 9
    resumed = run("b")
    assert "resuming from step 2" in resumed.out
    ends = [weights(done.folder / "checkpoints" / "6") for done in (straight, resumed)]
    assert same(*ends)


# -- blocks of 8 and 16 ----------------------------------------------------------------------------

BLOCKS = {
    "dflash": ("drafter.layers=1",),
    "dspark": ("drafter.layers=1", "drafter.markov_rank=8"),
    "diffusion": SMALL["diffusion"],
    "p_eagle": ("drafter.taps=[1]", "drafter.draft_vocab_size=null"),
}


@pytest.mark.parametrize("depth", [7, 15])
@pytest.mark.parametrize("drafter", BLOCKS)
@pytest.mark.ci("dspark-15", "p_eagle-7")
def test_blocks_of_8_and_16_train_and_draft_chains_of_7_and_15(drafter, depth, bench, logged):
    plan = (f"drafter.depth={depth}", f"decode.depth={depth}", "rollout.max_new_tokens=24")
    one = (f"drafter={drafter}", *BLOCKS[drafter], *plan, *STEPS, "drafter.anchors=4")
    done = bench.train(*one, "objective=ce_chain", "weights=constant", "score.max_new_tokens=20").succeeded()
    assert len(logged(done.folder, f"train/divergence_chain_{depth}")) == 2
    assert not logged(done.folder, f"train/alpha_{depth + 1}")
    assert depth < DEPTHS


@pytest.mark.parametrize("drafter", BLOCKS)
@pytest.mark.covering(pairs=False)
def test_chain_longer_than_the_block_is_refused_before_work(drafter, bench):
    before = set(bench.root.glob("outputs/rollouts/*"))
    done = bench.train(
        f"drafter={drafter}",
        *BLOCKS[drafter],
        "drafter.depth=7",
        "decode.depth=8",
        "rollout.max_new_tokens=9",
    )
    done.refused("a draft of depth 8, but this drafter predicts 7 tokens", "drafter.depth=8")
    assert set(bench.root.glob("outputs/rollouts/*")) == before

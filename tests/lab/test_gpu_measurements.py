"""What the queue of GPU measurements runs, at a tiny size on a CPU: rounds, training steps, runs, tests."""

from __future__ import annotations

import json
import math

import pytest
import torch
from workbench import command

from benchmark import run
from benchmarks.gpu import attention, marked_tests
from benchmarks.gpu.device import Operations, ceilings, kernels, named_peak, waits
from benchmarks.gpu.random_target import random_target
from decode.errors import UserError
from gpu_queue.page import page
from gpu_queue.results import Result
from gpu_queue.steps import TINY, steps

CPU = torch.device("cpu")
STEPS = {step.name: step for step in steps()}


def measured(name, folder, *more):
    """What a step's command writes at its tiny size, in this process."""
    out = folder / "result.json"
    argv = ["benchmark.py", *STEPS[name].command(str(out), tiny=True)[1:], *more]
    command(run, argv).succeeded()
    return json.loads(out.read_text())


def shown(card):
    return page([Result("name", "group", "what", [], "abc", "a card", True, "2", 1.0, "", card)])


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith(("rounds", "context"))])
@pytest.mark.ci("rounds-llama-8b", "rounds-pocket-draft-model")
def test_rounds_have_a_row_for_plain_decoding_and_for_every_plan(name, tmp_path):
    card = measured(name, tmp_path, "score.prompts=2", "score.max_new_tokens=20", "score.repeats=2")
    plain, chain, tree = card["rows"]
    assert [row["decode"] for row in card["rows"]] == ["plain", "chain-3", "tree-16 (depth 4, width 4)"]
    assert [row["slots"] for row in card["rows"]] == [1, 4, 17]
    assert (plain["tau"], plain["speedup"], plain["verify_over_plain"]) == (1.0, 1.0, 1.0)
    assert "synthetic" not in plain
    for row in (chain, tree):
        assert row["spread"][0] <= row["tokens_per_second"] <= row["spread"][1]
        parts = [row[f"{part}_ms"] for part in ("draft", "verify", "other")]
        assert sum(parts) == pytest.approx(row["round_ms"])
        assert row["draft_share"] == pytest.approx(row["draft_ms"] / row["round_ms"])
        assert math.isfinite(row["host_ms"])  # a difference of two runs
        assert row["reads"] == 1, "a round reads the device once"
        assert row["operations"] > plain["operations"] > 20
        assert (row["kernels"], row["kernels_ms"]) == (None, None), "there is no card"
    captured = "target.capture=true" in STEPS[name].words
    assert {row["passes"] for row in card["rows"]} == {"captured" if captured else "uncompiled"}
    synthetic = any(word.startswith("acceptance") for word in STEPS[name].words)
    assert [row["synthetic"] for row in (chain, tree)] == [
        [0.86, 0.88, 0.76, 0.72] if synthetic else None
    ] * 2
    assert not synthetic or (tree["tau"] > 2 and tree["strayed"] == 0)
    assert card["bound_ms"] == pytest.approx(1000 * card["weights_bytes"] / card["copy_bytes"])
    assert ("SYNTHETIC" in shown(card)) == synthetic


def test_kernels_of_attention_are_compared_and_timed(tmp_path):
    card = measured("attention", tmp_path)
    assert [(row["keys"], row["queries"]) for row in card["rows"]] == [(64, 1), (64, 3)]
    for row in card["rows"]:
        assert set(row["us"]) == {"decoder", "folded", "repeated", "products"}
        assert all(us > 0 for us in row["us"].values())
        assert row["bytes"] == 2 * 2 * 64 * 16 * 2  # keys and values, heads, slots, dimensions, bf16
        assert row["bound_us"] == pytest.approx(1e6 * row["bytes"] / card["copy_bytes"])
    assert "| 64 | 3 |" in shown(card)


def test_a_kernel_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.KERNELS, "products", lambda q, k, v, mask: attention.attend(q, k, v))
    argv = ["benchmark.py", *STEPS["attention"].command(str(tmp_path / "out.json"), tiny=True)[1:]]
    outcome = command(run, argv)
    assert outcome.code == 2
    assert "kernels: products differs from decoder by" in outcome.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["like=no/model"], "like=no/model: not known; choose one of Qwen/Qwen3-0.6B"),
        (["sizes={layers:2}"], "sizes.layers: no such size"),
        (["like=null", "sizes={hidden_size:8}"], "sizes: are for like="),
        (["sizes={hidden_size:30}"], "like=meta-llama/Llama-3.1-8B: no model of these sizes; "),
        (["dtype=int8"], "dtype=int8: choose one of"),
        (["acceptance=[0.5]"], "1 rates for a draft of depth 3"),
        (["score.max_new_tokens=8"], "score.max_new_tokens=8: must be 16 or more"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(more, said, tmp_path):
    words = STEPS["rounds-llama-8b"].command(str(tmp_path / "out.json"), tiny=False)[1:]
    sizes = [] if any(word.startswith("sizes") for word in more) else [TINY]
    command(run, ["benchmark.py", *words, "trainer.accelerator=cpu", *sizes, *more]).refused(said)


def test_a_random_target_has_the_shape_of_its_model_in_its_dtype():
    sizes = {"num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 32, "vocab_size": 96}
    torch.manual_seed(0)
    target = random_target("HuggingFaceTB/SmolLM2-135M", sizes, "bfloat16", CPU)
    assert (len(target.layers), target.hidden_size, target.vocab_size) == (2, 72, 96)
    assert target.dtype == torch.bfloat16
    assert target.config.num_key_value_heads == 3
    assert not any(weight.requires_grad for weight in target.model.parameters())
    last = target.read(torch.arange(40)[None]).last
    assert len(target.head(last).argmax(-1).unique()) > 10, "texts are not all alike"


# -- training -------------------------------------------------------------------------------------


def counted(folder, *more):
    """Counts of a step of EAGLE-3 for Llama-3.1-8B, on shapes alone."""
    out = folder / "counts.json"
    words = ("step_counts", "drafter.depth=3", "drafter.anchors=0", "rows=2", "tokens=2048", f"out={out}")
    command(run, ["benchmark.py", *words, *more]).succeeded()
    return json.loads(out.read_text())


def test_training_step_of_a_large_target_needs_no_number_of_the_device(tmp_path):
    """On the meta device a read fails."""
    large, small = counted(tmp_path), counted(tmp_path, "logits_rows=128")
    for card in (large, small):
        assert (card["uploads"], card["reads"]) == (2, 0)
        assert card["uploaded_bytes"] > 8 * 4096
    assert large["teraflop"] == pytest.approx(small["teraflop"])
    assert large["operations"] < small["operations"] / 2
    assert large["gigabytes"] < small["gigabytes"] * 0.8, "each chunk reads the head"


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("step")])
@pytest.mark.ci("step-llama-8b")
def test_a_training_step_is_timed_and_its_work_counted(name, tmp_path):
    card = measured(name, tmp_path)
    assert card["spread"][0] <= card["step_ms"] <= card["spread"][1]
    assert card["tokens_per_second"] == pytest.approx(1000 * 2 * 16 / card["step_ms"])
    assert card["of_measured_product"] == pytest.approx(
        1000 * card["flop"] / card["step_ms"] / card["bf16_flops"]
    )
    assert card["of_named_peak"] is None
    assert card["depth"] == 2
    twice = measured(name, tmp_path, "rows=4")
    assert twice["flop"] == pytest.approx(2 * card["flop"], rel=0.02)
    assert "| Eagle3, depth 2 | 2 x 16 |" in shown(card)


@pytest.mark.proof
def test_a_run_is_timed(tmp_path):
    card = measured("fit-pocket-eagle", tmp_path, f"runs={tmp_path / 'runs'}")
    assert (card["what"], card["run"]) == ("fit", "eagle-4-0")
    assert card["spread"][0] <= card["step_ms"] <= card["spread"][1]
    assert f"eagle-4-0: {card['step_ms']:.1f} ms a step" in shown(card)


@pytest.mark.proof
def test_a_field_row_is_trained_after_the_run_that_it_reads(tmp_path):
    card = measured("field-union", tmp_path, f"runs={tmp_path / 'runs'}")
    assert {path.name for path in tmp_path.glob("runs/*/*-0")} == {"eagle-2-0", "union-0-0"}
    assert card["drafter"] == "union"
    assert card["samples"] == []
    assert "| tree-16 (depth 4, width 4) | 0 |" in shown(card)
    command(run, ["benchmark.py", "field", "arm=none"]).refused(
        "arm=none: there is none; choose one of bigram"
    )


# -- tests ----------------------------------------------------------------------------------------

FILE = """
import pytest
@pytest.mark.gpu
def test_a(): pass
@pytest.mark.gpu
def test_b(): pytest.skip("no card")
@pytest.mark.gpu
def test_c(): assert 1 == 2, "wrong"
def test_d(): pass
"""


def test_marked_tests_are_counted_and_failures_named(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_card.py").write_text(FILE)
    (tmp_path / "tests" / "test_other.py").write_text("import no_such_package\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(marked_tests, "ROOT", tmp_path)
    out = tmp_path / "out.json"
    command(run, ["benchmark.py", "tests", f"out={out}"]).refused("1 failed, tests.test_card::test_c: ")
    card = json.loads(out.read_text())
    assert [card[kind] for kind in ("passed", "failed", "skipped")] == [1, 1, 1]
    assert card["reasons"] == ["no card"]
    assert "1 passed, 1 failed, 1 skipped." in shown(card)
    command(run, ["benchmark.py", "tests", "marker=long"]).refused("marker=long: no test in ['tests'] has it")


# -- the device -----------------------------------------------------------------------------------


def test_reads_of_the_device_are_counted_until_the_block_ends():
    values, before = torch.arange(3), dict(vars(torch.Tensor))
    with waits(CPU) as found:
        values.tolist()
        assert found.reads == 1
        int(values[0])
        values.cpu()
        assert bool(values[1] > 0)
        assert found.reads == 4
        values + 1
        assert found.reads == 4
    values.tolist()
    assert found.reads == 4
    assert found.seconds >= 0
    assert dict(vars(torch.Tensor)) == before


@pytest.mark.gpu
def test_a_card_runs_kernels_and_is_waited_for(tmp_path):
    card, values = torch.device("cuda"), torch.ones(4, device="cuda")
    number, seconds = kernels(lambda: values + values, card)
    assert number == 1
    assert 0 < seconds < 1e-3
    with waits(card) as found:
        for _ in range(40):
            torch.mm(*torch.ones(2, 2048, 2048, device=card))
        values.tolist()
        torch.ones(3).tolist()
        torch.cuda.synchronize()
    assert found.reads == 2, "the host's own values are no reads"
    assert found.seconds > 1e-4
    out = tmp_path / "result.json"
    words = STEPS["rounds-llama-8b"].command(str(out), tiny=True)[1:]
    command(run, ["benchmark.py", *words, "trainer.accelerator=gpu"]).succeeded()
    rows = json.loads(out.read_text())["rows"]
    assert all(row["kernels"] > 50 and row["reads"] == 1 for row in rows)
    assert all(row["kernels_ms"] > 0 for row in rows)
    words = STEPS["step-llama-8b"].command(str(out), tiny=True)[1:]
    command(run, ["benchmark.py", *words, "trainer.accelerator=gpu"]).succeeded()
    assert json.loads(out.read_text())["kernels"] > 100


def test_peaks_are_of_named_cards():
    assert named_peak("NVIDIA H200") == named_peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert named_peak("NVIDIA H100 PCIe") == 756e12
    assert named_peak("AMD EPYC") is None
    assert kernels(lambda: None, CPU) is None
    assert all(value > 0 for value in ceilings(CPU).values())


def test_operations_are_counted_without_views_and_by_what_they_are_made_of():
    values = torch.ones(3, 3)
    with torch.inference_mode(), Operations() as found:
        torch.nn.functional.linear(values.t()[:2], values).view(-1).add_(torch.empty(6).zero_())
    assert found.count == 3  # a product, a sum, zeros


def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    from benchmarks.gpu import step

    monkeypatch.setattr(step, "optimizer_step", lambda *_: lambda: torch.tensor(float("nan")))
    words = STEPS["step-llama-8b"].command("out.json", tiny=True)[1:]
    with pytest.raises(UserError, match="not finite"):
        step.training_step(_configured(words), None)


def _configured(words):
    from workbench import CONF

    from distill.config.compose import compose

    return compose(words[1:], CONF, "lab/step")

"""speculators: the race of training steps against it, and its own logits of our exports."""

from __future__ import annotations

import ast
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from served_mtp import speculators_layout
from torch.utils.flop_counter import FlopCounterMode
from workbench import CONF, ROOT, command

from benchmark import run
from benchmarks.check_speculators.check import TOLERANCE, compare
from benchmarks.train_step.flops import products
from benchmarks.train_step.ours import build
from benchmarks.train_step.race import RECIPE, THEIRS, _case, turns
from benchmarks.train_step.workers import HERE, Contender, Worker, rates
from decode.errors import UserError
from decode.model.load import load_target
from distill.config.compose import compose
from drafters.checkpoint import io as checkpoint_io
from drafters.hf.mtp_weights import native

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "layers": 1}
SHAPE |= {"window": None, "taps": 3, "vocab_size": 64, "draft_vocab_size": 16, "depth": 2}
# A python that ignores what it is told to run, and answers as a worker would.
STUB = """#!{python}
import json, sys
case = json.loads(sys.stdin.readline())
print(json.dumps({{"peak_mib": 7.5, "torch": "stub"}}), flush=True)
for number, line in enumerate(sys.stdin):
    {misbehave}
    with open({log!r}, "a") as log:
        log.write(f"{{sum(case['loss_mask'])}} {{json.loads(line)['steps']}}\\n")
    print(json.dumps({{"cpu_seconds": 2.0}}), flush=True)
"""
TINY = [f"shape.{k}={'null' if v is None else v}" for k, v in SHAPE.items()]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
QUICK = ["tokens=24", "turn=4", "steps=2", "repeats=3", "gemm=16", "compiled=false"]


def stub(folder, misbehave="pass"):
    path = folder / "python"
    path.write_text(STUB.format(python=sys.executable, log=str(folder / "log"), misbehave=misbehave))
    path.chmod(0o755)
    return path


def benchmark(folder, *more):
    return command(run, ["benchmark.py", "train", *TINY, *QUICK, f"out={folder / 'train.json'}", *more])


@pytest.mark.proof
def test_a_race_writes_a_row_for_everybody(tmp_path):
    done = benchmark(tmp_path, f"speculators={stub(tmp_path)}").succeeded()
    card = json.loads((tmp_path / "train.json").read_text())
    rows = {row["name"]: row for row in card["rows"]}
    shares = ("all", "half", "all_bf16", "half_bf16")
    assert list(rows) == [f"{side}_{share}" for share in shares for side in ("ours", "speculators")]
    for share in shares:
        mine, theirs = rows[f"ours_{share}"], rows[f"speculators_{share}"]
        assert (theirs["peak_mib"], theirs["ratio"]) == (7.5, 1.0)
        assert theirs["tokens_per_cpu_second"] == 2 * 24 / 2.0  # steps x tokens / the stub's seconds
        assert mine["spread"][0] <= mine["tokens_per_cpu_second"] <= mine["spread"][1]
        assert mine["ratio"] == pytest.approx(mine["tokens_per_cpu_second"] / 24)
        assert mine["mflop"] == theirs["mflop"] > 0
        work = mine["tokens_per_cpu_second"] * mine["mflop"] * 1e6
        ceilings = {dtype: work / (rate * 1e9) for dtype, rate in card["gemm_gflops"].items()}
        assert mine["ceiling_share"] == pytest.approx(ceilings)
        assert set(ceilings) == {"float32", "bfloat16"}
    assert rows["ours_half"]["mflop"] < rows["ours_all"]["mflop"]
    assert card["torch"] == {"ours": torch.__version__, "speculators": "stub"}
    assert "ours_half" in done.out
    # All of the stub's cases took every turn, with their own masks.
    asked = (tmp_path / "log").read_text().split("\n")[:-1]
    assert sorted(asked) == sorted(["24 2", "12 2"] * 2 * 3)


@pytest.mark.parametrize(("given", "rate"), [([], 6e-3), (["optimizer.optimizer.lr=1e-3"], 1e-3)], ids=str)
def test_both_sides_use_the_learning_rate_of_a_run(given, rate):
    cfg = compose([*TINY, *given], CONF, "lab/train")
    assert _case(cfg, [1])["optimizer"]["lr"] == rate


def test_workers_take_turns_to_be_first():
    order = []

    def worker(name):
        return SimpleNamespace(
            contender=SimpleNamespace(name=name, work=10.0),
            ask=lambda what: order.append((name, what["steps"])) or {"cpu_seconds": 4.0},
        )

    found = rates([worker(name) for name in "abc"], steps=2, repeats=3, advanced=lambda: None)
    assert [name for name, _ in order] == list("abcbcacab")
    assert {steps for _, steps in order} == {2}
    assert found == {name: [5.0] * 3 for name in "abc"}


BUILDER = """
import torch
kept = []
def build(case):
    print("hello")  # not a reply
    def prepare(loss_mask):
        kept.append(torch.ones(case["before"], 2**18))
        def step():
            torch.ones(case["within"] * len(loss_mask) // 100, 2**18)
            return case["loss"]
        return step
    return prepare
"""


@pytest.fixture
def builder(tmp_path):
    path = tmp_path / "builder.py"
    path.write_text(BUILDER)

    def contender(before=0, within=1, loss=0.0):
        case = {"seed": 0, "peak": True, "device": "cpu", "loss_mask": [1] * 100}
        case |= {"before": before, "within": within, "loss": loss}
        return Contender("it", path, case, 1.0)

    return contender


@pytest.mark.parametrize(("before", "within"), [(0, 40), (60, 40), (60, 0)])
@pytest.mark.ci("60-40")
def test_peak_memory_is_that_of_the_step_only(builder, before, within):
    with Worker(builder(before, within)) as worker:
        peak = worker.ask(worker.contender.case)["peak_mib"]
        assert worker.ask({"steps": 3})["cpu_seconds"] > 0
    assert peak == pytest.approx(within, abs=4)


@pytest.mark.proof
def test_a_loss_that_is_no_number_ends_the_race(builder):
    with Worker(builder(loss=float("nan"))) as worker, pytest.raises(UserError, match="the loss is nan"):
        worker.ask(worker.contender.case)


@pytest.mark.covering
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("turn", [None, 8, 32])
def test_products_are_those_that_a_step_makes(layers, train_head, turn):
    """Short texts: what attention makes beyond its share (hidden scores, scores again) is little.

    So is what it does make, but by no product: the scores of an anchor's own keys.
    """
    shape = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "layers": layers}
    mask = turns(64, turn) if turn else [1] * 64
    case = {"shape": shape, "train_head": train_head, "gradient_checkpointing": False, "compiled": False}
    case |= {"precision": "float32", "device": "cpu", "optimizer": {"lr": 1e-3}}
    step = build(RECIPE | case)(mask)
    with FlopCounterMode(display=False) as counter:
        step()
    needed = products(shape, mask, train_head)
    assert counter.get_total_flops() == pytest.approx(needed, rel=0.05)


def test_half_of_the_positions_are_supervised_in_turns():
    assert turns(8, 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sum(turns(512, 64)) == 256


@pytest.mark.gpu
@pytest.mark.parametrize("window", ["null", "512"])
def test_memory_is_linear_in_the_length_of_a_text(tmp_path, window):
    """From 4k to 16k tokens: not more than four times as much, but for what rounds up."""

    def peak(tokens):
        sizes = [f"memory.tokens={tokens}", f"shape.window={window}", "compiled=false"]
        sizes += ["memory.shape.vocab_size=512", "memory.shape.draft_vocab_size=512", "memory.shape.depth=3"]
        benchmark(tmp_path, "case=memory", "trainer.accelerator=gpu", *sizes).succeeded()
        return json.loads((tmp_path / "train.json").read_text())["rows"][0]["peak_mib"]

    assert peak(16384) <= 4.1 * peak(4096)


@pytest.mark.proof
def test_one_step_at_the_sizes_of_memory(tmp_path):
    sizes = ["shape.vocab_size=512", "shape.draft_vocab_size=512", "shape.depth=3", "tokens=400"]
    benchmark(tmp_path, "case=memory", *(f"memory.{size}" for size in sizes)).succeeded()
    card = json.loads((tmp_path / "train.json").read_text())
    shape = SHAPE | {"vocab_size": 512, "draft_vocab_size": 512, "depth": 3}
    assert (card["shape"], card["train_head"], card["tokens"]) == (shape, True, 400)
    (row,) = card["rows"]
    assert row["block_mib"] == 400 * 512 * 4 / 2**20
    assert row["peak_mib"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "speculators: an environment of its own is needed"),
        (["speculators=/nowhere/python"], "speculators=/nowhere/python: no such python"),
        pytest.param([f"speculators={sys.executable}"], "No module named", marks=pytest.mark.proof),
        (["case=pace"], "case=pace: choose speed or memory"),
        (["tokens=2"], "tokens=2"),
        (["repeats=0"], "repeats=0"),
        (["shape.depth=0"], "shape.depth=0"),
        (["shape.draft_vocab_size=65"], "shape.draft_vocab_size=65"),
        (["trainer.accelerator=gpu"], "trainer.accelerator=gpu: for case=memory alone"),
        pytest.param(["trainer.accelerator=gpu", "case=memory"], "torch finds no GPU here", marks=NO_GPU),
        (["optimizer=muon"], "leave optimizer=adamw"),
    ],
)
def test_bad_option_is_refused(tmp_path, given, said):
    benchmark(tmp_path, *given).refused(said)
    assert not (tmp_path / "train.json").exists()


@pytest.mark.proof
def test_a_worker_that_ends_in_the_race_says_why(tmp_path):
    python = stub(tmp_path, "sys.exit('out of luck')")
    benchmark(tmp_path, f"speculators={python}").refused("speculators_all", "out of luck")


@pytest.mark.parametrize("file", [THEIRS, HERE / "worker.py"])
def test_nothing_of_ours_runs_in_the_other_environment(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    assert names
    assert not {name.split(".")[0] for name in names} & {"distill", "drafters", "decode"}


# -- logits of exports, by speculators itself in its own environment ---------------------------------

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
CASES = {
    "eagle3": {},
    "eagle3 of speculators": {"norm_before_residual": True, "norm_output": True, "layers": 2},
    "eagle3 with biases": {"layers": 2, "qkv_bias": True, "o_bias": True},
    "eagle3 of Qwen3's layers": {"layers": 2, "qk_norm": True},
    "eagle3 of Qwen3's layers with biases": {"qk_norm": True, "qkv_bias": True},
    "p_eagle": {"layers": 2},
    "p_eagle with biases": {"fc_norm": False, "qkv_bias": True},
    "p_eagle of gpt-oss": {"norm_before_fc": True, "fc_norm": False},
    "dflash": {},
    "dflash of fewer tokens": {"draft_vocab_size": 1000},
    "dspark": {},
    "dspark of masks": {"sample_from_anchor": False},
    "dspark of fewer tokens": {"draft_vocab_size": 1000},
}


MTPS = {
    "qwen3": {"qk_norm": True},
    "qwen3_5_text": {"qk_norm": True, "gate": True, "zero_centred": True},
}


@pytest.fixture
def pocket_target():
    """With the path that speculators reads it from."""
    return load_target(str(ROOT / "data" / "pocket"), "float32")


@pytest.mark.proof
@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no environment with speculators")
@pytest.mark.parametrize("case", CASES)
def test_speculators_has_our_logits(pocket_target, make_drafter, case):
    drafter = make_drafter(case.split(" ")[0], pocket_target, depth=4, **CASES[case])
    opened = compare(drafter, pocket_target, PYTHON, 5)
    assert not isinstance(opened, str), opened
    assert opened.places >= 100
    assert opened.most < TOLERANCE * opened.scale
    print(case, opened)


@pytest.mark.proof
@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no environment with speculators")
@pytest.mark.parametrize(("kind", "options"), MTPS.items())
def test_an_mtp_head_of_speculators_has_our_logits(pocket_target, make_drafter, tmp_path, kind, options):
    """Files that it opens itself, read here."""
    trained = {"family": "qwen", "hidden_first": False, "before_norm": True, "norm_output": True}
    drafter = make_drafter("mtp", pocket_target, depth=3, **trained, **options)
    tensors = native(checkpoint_io.as_saved(drafter).weights, drafter.settings, len(pocket_target.layers))
    layers = pocket_target.config.to_dict() | {"model_type": kind, "layer_types": ["full_attention"] * 4}
    layers |= {"head_dim": drafter.settings["head_dim"], "num_hidden_layers": 4}
    layers["rope_parameters"] = {"rope_type": "default", "rope_theta": drafter.settings["rope_theta"]}
    layout = speculators_layout(tensors, layers, pocket_target.model.name_or_path, 3)
    layout.write(tmp_path)
    back = checkpoint_io.load(tmp_path, pocket_target)
    opened = compare(back, pocket_target, PYTHON, 5, layout)
    assert not isinstance(opened, str), opened
    assert opened.places >= 100
    assert opened.most < TOLERANCE * opened.scale


def test_without_the_package_it_says_so(pocket_target, make_drafter, tmp_path):
    drafter = make_drafter("eagle3", pocket_target, draft_vocab_size=9)
    assert "no such file" in str(compare(drafter, pocket_target, str(tmp_path / "python"), 1))
    assert "No module named 'speculators'" in str(compare(drafter, pocket_target, sys.executable, 1))

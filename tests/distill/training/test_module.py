"""The Lightning module: the denominator of a step, what is logged and saved, its optimizers and its speed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, FalconConfig, OPTConfig
from workbench import CONF, weights

from benchmarks.train_step.flops import products
from decode.errors import UserError
from decode.sampling import Sampler
from distill.config.compose import compose
from distill.config.read import read_options
from distill.data import datamodule as feed
from distill.data.batches import MicroBatch, RolloutBatches
from distill.data.datamodule import RolloutData
from distill.data.on_policy import OnPolicy
from distill.losses import chunked_logits
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
from distill.options.run import OptimizerOptions
from distill.scoring.scorer import Scorer
from distill.training import throughput as meter
from distill.training.checkpointing import ScoreCheckpoint
from distill.training.grad_norm import UnusedParameters
from distill.training.module import DistillModule
from distill.training.optim import hidden_matrices, muon, warm_up_and_decay
from distill.training.trainer import build_optimizer
from distill.utils.run_folder import checkpoints

SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}
# One plain step in full precision. Padding differs between ways of sharing rows out, and noise with it.
PLAIN = {
    "optimizer__optimizer": SGD,
    "trainer__precision": "32-true",
    "trainer__max_steps": 1,
    "drafter__feature_noise": 0.0,
    "score__enabled": False,
    "taps": "online",
}


def test_accumulation_is_one_large_batch_with_clipping(bench, tmp_path, logged):
    """Without clipping in test_equivalences.py."""
    plain = {**PLAIN, "trainer__gradient_clip_val": 0.01}
    bench.run(tmp_path / "whole", **plain, batch_size=8)
    bench.run(tmp_path / "parts", **plain, batch_size=2, trainer__accumulate_grad_batches=4)
    whole, parts = (weights(tmp_path / name / "checkpoints" / "1") for name in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    for name in ("train/loss", "train/divergence_1", "train/divergence_2", "train/top1_1", "train/alpha_1"):
        one, four = (logged(tmp_path / folder, name) for folder in ("whole", "parts"))
        assert len(one) == 1
        assert four == pytest.approx(one, abs=1e-6), name


def test_weights_that_are_not_finite_are_not_saved(bench, tmp_path):
    changes = {"optimizer__optimizer": SGD | {"lr": 1e30, "weight_decay": 1e30}, "optimizer__warmup": 0.0}
    with pytest.raises(UserError, match="weights are not finite after step 1"):
        bench.run(tmp_path, **PLAIN | changes, trainer__gradient_clip_val=None, score__every=1)
    assert checkpoints(tmp_path) == []


def test_rank_saves_once_where_a_disk_shows_files_late(bench, tmp_path, monkeypatch, spy):
    """Another machine's rank would save without the others, and wait for ever."""
    saved, exists = spy(ScoreCheckpoint, "save"), Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.name.isdigit() and exists(path))
    bench.run(tmp_path, score__enabled=False, trainer__accumulate_grad_batches=2)
    assert [arguments[-1] for arguments, _ in saved] == [3, 6]


def test_checkpoint_holds_the_drafter_and_no_target(bench, tmp_path):
    bench.run(tmp_path, score__enabled=False, optimizer__warmup=0.3)
    newest = checkpoints(tmp_path)[-1]
    found = weights(newest)
    assert {name.split(".")[0] for name in found} == {"fc", "layer"}, "the target's are not saved"
    state = TorchCheckpointIO().load_checkpoint(newest / "trainer" / "state.ckpt", weights_only=True)
    assert set(state["state_dict"]) == {f"drafter.{name}" for name in found}
    options, (schedule,) = bench.base.optimizer, state["lr_schedulers"]
    assert schedule["_last_lr"] == [pytest.approx(options.optimizer.lr * options.final_lr)]


def test_denormal_numbers_are_flushed_only_in_training(bench, tmp_path, monkeypatch):
    """A product of chances of 1e-45 costs a CPU a hundred others; decoding keeps every number."""
    seen = []

    def flushes() -> bool:
        return (torch.full((8,), 1e-30) * 1e-10).sum().item() == 0

    def note(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **o: seen.append((owner, flushes())) or call(*a, **o))

    note(Objective, "__call__")
    note(torch.Tensor, "backward")
    note(Scorer, "__call__")
    bench.run(tmp_path, **{**PLAIN, "score__enabled": True})
    assert seen == [(Objective, True), (torch.Tensor, True), (Scorer, False)]
    assert not flushes()


# -- a module without a run ------------------------------------------------------------------------


def module_of(target, drafter, on_policy=None, **sizes: int) -> Any:
    """A module in the middle of a run of 8 steps; `logged` has what it logs."""
    module: Any = DistillModule(
        target, drafter, Objective(kl, constant), torch.optim.SGD, 0.0, 1.0, on_policy
    )
    micros = [micro(on_policy=3)]
    module._trainer = SimpleNamespace(
        **{"max_steps": 8, "accumulate_grad_batches": 1, "world_size": 1} | sizes,
        precision="64-true",
        datamodule=SimpleNamespace(micros=lambda step: micros),
        strategy=SimpleNamespace(reduce=lambda t, reduce_op: t, batch_to_device=lambda m: m),
    )
    module.logged = {}
    module.log_dict = module.logged.update
    return module


def micro(**changes) -> MicroBatch:
    """Two rows of six anchors each, at step 6."""
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    return MicroBatch(tokens, torch.arange(9).expand(2, -1) >= 3, 12, 6, 11)._replace(**changes)


@pytest.fixture
def models(tiny_target, make_drafter):
    target = tiny_target(vocab=40)
    return target, make_drafter("eagle", target)


def test_loss_has_its_rows_weights_and_undoes_what_lightning_divides_by(models):
    def loss(*weight: float, anchors=12, **sizes):
        rows = torch.tensor(weight) if weight else None
        return module_of(*models, **sizes).training_step(micro(weight=rows, anchors=anchors), 0).item()

    first, second = loss(1.0, 0.0), loss(0.0, 1.0)
    assert loss(2.0, 0.5) == pytest.approx(2 * first + second / 2, rel=1e-12)
    assert loss() == pytest.approx(first + second, rel=1e-12)
    averaged = loss(anchors=24, accumulate_grad_batches=3, world_size=2)
    assert averaged == pytest.approx(3 * loss(), rel=1e-12)


def test_step_is_told_its_progress_and_seed_and_reads_no_row_twice(models, monkeypatch, spy):
    target, drafter = models
    states = target.read(micro().tokens)
    unrolled, shares = spy(type(drafter), "unroll"), spy(drafter, "aux_weights_at")
    weighed = spy(Objective, "__call__")
    monkeypatch.setattr(target, "read", lambda *args: pytest.fail("these states are cached"))
    module_of(target, drafter).training_step(micro(target_states=states), 0)
    (((_, batch, _), _),) = unrolled
    assert (batch.seed, batch.progress) == (11, 0.75)
    assert [arguments for arguments, _ in shares] == [(0.75,)]
    assert weighed[0][0][5] == 0.75, "weights would not warm up"
    assert torch.initial_seed() == 11, "dropout would not be a function of the step"


def test_logged_values_are_means_over_a_depths_rows_or_all_anchors(models, spy):
    target, drafter = models
    drafter.add_confidence()
    scores = spy(Objective, "__call__")
    module = module_of(target, drafter.double(), OnPolicy(0.0, 0.0, Sampler(1.0), 4, 9))
    module.training_step(micro(), 0).backward()
    module.on_before_optimizer_step(torch.optim.SGD(drafter.parameters()))
    ((_, (total, rows)),) = scores
    first = rows[0]
    assert first.rows > rows[-1].rows
    for row in rows:
        want = {"alpha": row.alpha.item() / row.rows, "survival": row.survival.item() / first.rows}
        want["confidence"] = row.confidence_loss.item() / row.rows
        assert {name: module.logged[f"train/{name}_{row.depth}"] for name in want} == pytest.approx(
            want, rel=1e-6
        )
    assert module.logged["train/loss"] == pytest.approx(total.item() / 12, rel=1e-6)
    assert module.logged["train/on_policy"] == pytest.approx(3 / 12)


def test_trial_leaves_no_micro_batch(models):
    """DeepSpeed would take it for one of the first step."""
    module = module_of(*models, accumulate_grad_batches=2)
    module.training_step(micro(), 0)
    module.forget()
    for _ in range(2):
        assert not module.logged
        module.training_step(micro(), 0).backward()
        module.on_before_optimizer_step(torch.optim.SGD(module.drafter.parameters()))
    assert module.logged


def test_weight_that_no_process_used_gets_no_gradient():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    unused = UnusedParameters(lambda: weights)
    others = torch.tensor([0.0, 1.0, 0.0])  # another process has used the second
    for mine in (0, 2):
        for weight in weights:
            weight.grad = None
        loss = unused.attach(weights[mine].sum())
        loss.backward()
        assert loss.item() == 2.0
        assert all(weight.grad is not None for weight in weights), "DDP would wait"
        unused.drop_gradients(lambda counts: counts + others)
        assert [weight.grad is not None for weight in weights] == [mine == 0, True, mine == 2]


RATE = 0.01
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LAYER = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
HIDDEN = {
    "eagle": {"fc", *LAYER},
    "eagle3": {"fc", *LAYER},
    "medusa": {"0"},
    "hydra": {"skip", "linear"},
    "medusa2": {"0", "up", "down"},
    "mlp": {"0", "1", "2"},
    "lm": LLAMA,
    "hf_dllm": LLAMA,
}


def optimized(drafter, target):
    """The module's optimizer and schedule."""
    make = partial(muon, lr=RATE, momentum=0.95, betas=(0.9, 0.95), weight_decay=0.0)
    module = DistillModule(target, drafter, Objective(kl, constant), make, 0.0, 1.0)
    module._trainer = SimpleNamespace(max_steps=8)
    found = module.configure_optimizers()
    return found["optimizer"], found["lr_scheduler"]["scheduler"]


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(name, tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter(name, target)
    optimizer, _ = optimized(drafter, target)
    names = {id(w): name for name, w in drafter.named_parameters() if w.requires_grad}
    parts = {type(p).__name__: [w for g in p.param_groups for w in g["params"]] for p in optimizer.parts}
    assert {names[id(w)].split(".")[-2] for w in parts["Muon"]} <= HIDDEN[name]
    matrices = [w.shape for w in parts["AdamW"] if w.ndim == 2]
    assert all(40 in shape or 10 in shape for shape in matrices), "a matrix that is not Muon's has tokens"
    assert sorted(id(w) for w in parts["Muon"] + parts["AdamW"]) == sorted(names)


def test_embeddings_are_found_whatever_their_name():
    """Falcon's are `word_embeddings`; its head is tied to them."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for config in (FalconConfig(**sizes), OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16)):
        model = AutoModelForCausalLM.from_config(config)
        found = {id(weight) for weight in hidden_matrices(model)}
        names = {name for name, weight in model.named_parameters() if id(weight) in found}
        assert names
        assert not [name for name in names if "embed" in name or "head" in name]


def test_group_keeps_its_own_rate(tiny_target, make_drafter):
    """Medusa-2's adapters wait for the heads, whichever optimizer has them."""
    target = tiny_target(vocab=40, layers=4, hidden=16)
    drafter = make_drafter("medusa2", target)
    optimizer, schedule = optimized(drafter, target)
    lora = {id(w) for w in drafter.lora.parameters()}
    want = [group.rate for group in drafter.param_groups()]
    for step in range(8):
        for group in optimizer.param_groups:
            (tuned,) = {id(w) in lora for w in group["params"]}
            assert group["lr"] == pytest.approx(RATE * want[tuned](step / 8))
        optimizer.step()
        schedule.step()


def test_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = warm_up_and_decay(optimizer, 10, warmup=0.28, final_lr=0.2), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    fall = [0.2 + 0.4 * (1 + math.cos(math.pi * i / 7)) for i in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, *fall, 0.2])


def test_both_optimizers_have_their_settings_and_step_by_the_loaded_groups():
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = muon([{"params": weights, "hidden": [True, False]}], RATE, 0.9, (0.8, 0.7), 0.1, True)
    hidden, rest = (part.param_groups[0] for part in optimizer.parts)
    assert (hidden["momentum"], hidden["weight_decay"]) == (0.9, 0.1)
    assert (rest["betas"], rest["weight_decay"]) == ((0.8, 0.7), 0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    for rate in (0.0, RATE):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight in weights:
            weight.grad = torch.eye(4)
        optimizer.step()
        assert [bool((weight == 1).all()) for weight in weights] == [rate == 0.0] * 2


def test_orthogonal_step_has_the_size_of_adamws():
    """0.2 sqrt(max(n, m)) times a matrix whose singular values are near 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    optimizer = muon([{"params": [weight], "hidden": [True]}], RATE, 0.95, (0.9, 0.95), 0.0, True)
    weight.grad = torch.randn(64, 16)
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach()) / (RATE * 0.2 * 64**0.5)
    assert ((values > 0.6) & (values < 1.3)).all()


def test_what_muon_refuses_is_found_before_any_work(bench):
    before = bench.runs()
    bench.train("optimizer=muon", "optimizer.optimizer.momentum=-1").refused("momentum")
    assert bench.runs() == before


READING, TRAINING, SAVING, MAKING = 2.0, 3.0, 1000.0, 500.0  # seconds by the clock of these tests


@pytest.fixture
def clock(monkeypatch):
    """Time passes only while a batch is read, trained on, saved, and while rollouts are made."""
    now = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: now[0])
    for part in (meter, feed):
        monkeypatch.setattr(part, "time", fake)

    def takes(kind, name, seconds):
        before = getattr(kind, name)

        def slow(*args, **options):
            now[0] += seconds
            return before(*args, **options)

        monkeypatch.setattr(kind, name, slow)

    takes(RolloutBatches, "__getitem__", READING)
    takes(Objective, "__call__", TRAINING)
    takes(ScoreCheckpoint, "save", SAVING)
    takes(RolloutData, "open", MAKING)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_are_of_the_steps_since_the_last_line(accumulate, clock, bench, tmp_path, spy, logged):
    seen = spy(DistillModule, "training_step")
    every = {"trainer__log_every_n_steps": 2, "score__every": 2, "score__enabled": False}
    bench.run(tmp_path, **every, trainer__accumulate_grad_batches=accumulate, rollout__refresh_every=3)
    names = ("step_seconds", "data_wait", "tokens_per_second", "supervised_per_second", "peak_gib")
    values = {name: logged(tmp_path, f"train/{name}") for name in names}
    assert all(list(found) == [1, 3, 5] for found in values.values())
    assert not logged(tmp_path, "train/mfu"), "no such thing on a CPU"
    files = bench.root.glob("outputs/rollouts/*/*.parquet")
    known = {tuple(t) for f in files for t in datasets.Dataset.from_parquet(str(f))["tokens"]}

    def length(padded: list[int]) -> int:
        """Of the stored row that was padded to this."""
        return next(n for n in range(len(padded), 0, -1) if tuple(padded[:n]) in known)

    for number, step in enumerate((1, 3, 5)):
        calls = seen[2 * number * accumulate : 2 * (number + 1) * accumulate]
        micros = [batch for (_, batch, _), _ in calls]
        tokens = sum(length(row) for micro in micros for row in micro.tokens.tolist())
        anchors = sum(int(micro.loss_mask[:, 2:].sum()) for micro in micros)
        seconds = 2 * accumulate * (READING + TRAINING)
        assert values["step_seconds"][step] == pytest.approx(seconds / 2)
        assert values["data_wait"][step] == pytest.approx(READING / (READING + TRAINING))
        assert values["tokens_per_second"][step] == pytest.approx(tokens / seconds)
        assert values["supervised_per_second"][step] == pytest.approx(anchors / seconds)
        assert 0.01 < values["peak_gib"][step] < 100


SIZES = {"layers": 1, "depth": 2, "draft_vocab_size": 40}


def test_mfu_is_the_work_that_a_step_needs_by_its_time(clock, bench, tmp_path, monkeypatch, spy, logged):
    """The drafter's by `flops`, which counts from shapes and masks, and the target's forward pass."""
    seen, most = spy(DistillModule, "training_step"), 1e6
    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: most)
    monkeypatch.setattr(chunked_logits, "product_dtype", lambda dtype, *_: dtype)  # on every machine
    run = {"trainer__max_steps": 3, "batch_size": 1, "taps": "online", "score__enabled": False}
    settings = SIZES | {"taps": [0, 1, 1], "anchors": 0, "fc_norm": False}
    words = [f"drafter.{name}={value}" for name, value in settings.items()]
    bench.run(tmp_path, drafter=compose(["drafter=eagle3", *words], CONF).drafter, **run)
    (module, first, _), *rest = (arguments for arguments, _ in seen)
    config = module.target.model.config
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "vocab_size": module.target.vocab_size,
        "taps": 3,
        **SIZES,
    }
    needed = products(shape, first.loss_mask[0].tolist(), True)
    layers = [w for layer in module.target.layers for w in layer.parameters() if w.dim() == 2]
    length = first.tokens.shape[1]  # without attention, which torch counts only on a GPU
    needed += 2 * length * sum(w.numel() for w in layers)
    mfu = logged(tmp_path, "train/mfu")
    assert list(mfu) == [1, 2], "the step in which operations are counted takes longer"
    for (_, micro, _), value in zip(rest, mfu.values(), strict=True):
        per_second = needed / length * micro.tokens.shape[1] / (READING + TRAINING)
        assert 1 <= value * most / per_second < 1.25


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_grouped_queries_is_counted(kernel):
    """As a GPU's kernels are: torch before 2.13 ended the run in its first step."""
    b, heads, shared, n, width = 2, 4, 2, 6, 16
    q, k = (b, heads, n, width), (b, shared, n, width)
    product = 2 * b * heads * n * n * width
    formulas: Any = meter.ATTENTION
    op, gradient = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
        for suffix in ("", "_backward")
    )
    assert formulas[op](q, k, k, None, out_shape=q) == 2 * product
    assert formulas[gradient](q, q, k, k, out_shape=(q, k, k)) == 5 * product
    if kernel == "flash":  # torch calls the formulas
        with FlopCounterMode(display=False, custom_mapping=meter.ATTENTION) as counter:
            op(*(torch.empty(shape, device="meta") for shape in (q, k, k)))
        assert counter.get_total_flops() == 2 * product


def test_counting_ends_with_a_run_that_fails_and_its_error_stays(bench, tmp_path, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr(DistillModule, "backward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bench.run(tmp_path, score__enabled=False)
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("words", "precision", "fused"),
    [
        ([], "bf16-mixed", True),
        ([], "32-true", True),
        ([], "16-mixed", None),  # its scaler would unscale gradients after they are clipped
        (["optimizer=muon"], "bf16-mixed", True),
        (["+optimizer.optimizer.fused=false"], "bf16-mixed", False),
        (["optimizer.optimizer._target_=torch.optim.NAdam"], "bf16-mixed", None),  # takes no such option
    ],
)
def test_adamw_is_one_kernel_where_it_can_be(words, precision, fused):
    cfg = compose([*words, "optimizer.optimizer.lr=0.1"], CONF)
    trainer: Any = SimpleNamespace(precision=precision, strategy=None)
    build = build_optimizer(read_options(OptimizerOptions, cfg.optimizer), trainer)
    made = build([{"params": [torch.nn.Parameter(torch.ones(1))], "hidden": [False]}])
    assert made.param_groups[0].get("fused") == fused

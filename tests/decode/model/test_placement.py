"""A target in parts, over processes or devices, is the target."""

import json
import os
import random
import re
import signal
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM
from workbench import Bench, fork, make_target, ranks, same, spawn, tau, weights

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.cache import MultiDeviceStore, RowStore
from decode.model.load import load_target
from decode.model.placement.offload import assign_layers
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.hf.build import cut_target
from drafters.models.eagle import Eagle

PROMPTS = [[1, 17, 40, 7], [2, 9], [1, 5, 6, 7, 8, 30, 2]]
TEXT = torch.arange(4, 40)[None]


@pytest.fixture(scope="module")
def whole(bench) -> Target:
    return load_target(str(bench.target))


def answers(target: Target, prompts=PROMPTS, drafter=None, plan=None) -> list[list[int]]:
    options = {"max_new_tokens": 12, "sampler": Sampler(1.0), "seed": 3, "plan": plan}
    return [output.tokens for output in generate(target, drafter, prompts, **options).outputs]


def check_same(target: Target, whole: Target) -> None:
    assert torch.equal(target.read(TEXT).last, whole.read(TEXT).last)
    assert answers(target) == answers(whole)
    drafted = []
    for one in (target, whole):  # with trees, whose settled nodes move in the cache
        torch.manual_seed(0)
        drafter = Eagle.for_target(one, depth=1, feature_noise=0.0, feature_weight=1.0)
        one.tap(drafter.taps)
        drafted.append(answers(one, PROMPTS, drafter, Plan(depth=3, width=2, nodes=6)))
    assert drafted[0] == drafted[1]
    for layers in (1, 2):
        assert same(cut_target(target, layers).state_dict(), cut_target(whole, layers).state_dict())


# -- sharded -------------------------------------------------------------------------------------


def check_rank(rank: int, store: Path, folder: Path) -> int:
    """What one of two processes finds of a target that they hold together."""
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", store=distributed.FileStore(str(store), 2), **options)
    whole = load_target(str(folder))
    target = load_target(str(folder), placement="sharded")
    # One process has three times as much to read, and answers of other lengths.
    for _ in range(3 if rank else 1):
        assert torch.equal(target.read(TEXT).last, whole.read(TEXT).last)
        assert answers(target, PROMPTS[rank:]) == answers(whole, PROMPTS[rank:])
        target.idle(0.01)
    target.join()
    if not rank:
        leave_within(target)
        check_same(target, whole)  # as a process that scores adapters does
    target.join()
    target.join()  # nobody reads in between
    assert target.fingerprint() == whole.fingerprint()
    assert same(cut_target(target, 1).state_dict(), cut_target(whole, 1).state_dict())
    layers = sum(p.numel() * p.itemsize for p in whole.layers.parameters())
    assert target.bytes == whole.bytes - layers // 2
    assert all(isinstance(layer, FSDPModule) for layer in target.layers)
    assert not any(p.requires_grad for p in target.model.parameters())
    return 0


def leave_within(target: Target) -> None:
    """A signal whose handler raises between two layers interrupts after the pass."""

    class Left(BaseException):
        pass

    def leave(number, frame):
        raise Left

    signal.signal(signal.SIGTERM, leave)
    layer: nn.Module = target.layers[1]
    sends = layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Left):
        target.read(TEXT)
    sends.remove()
    assert signal.getsignal(signal.SIGTERM) is leave


def test_processes_that_share_a_target_read_independently(bench, tmp_path):
    other = spawn(lambda: check_rank(1, tmp_path / "store", bench.target))
    assert fork(lambda: check_rank(0, tmp_path / "store", bench.target)) == 0
    assert os.waitpid(other, 0)[1] == 0


def both(bench: Bench, *more: str) -> tuple[Path, Path]:
    """Run folders of two processes with a target each, and with one together; `option=` leaves one out."""
    folders = []
    named = {option.partition("=")[0] for option in more}
    command = [option for option in bench.command if option.partition("=")[0] not in named]
    command += [option for option in more if not option.endswith("=")]
    command += ["trainer.devices=2", "trainer.max_steps=2", "score.every=2", "target.dtype=float32"]
    for placement in ("replicated", "sharded"):
        where = [f"target.placement={placement}", f"output_dir={bench.root / placement}"]
        done = [outcome.succeeded() for outcome in ranks(2, [*command, *where])]
        folders.append(done[0].folder)
    return folders[0], folders[1]


def compare(whole: Path, sharded: Path) -> None:
    """Rollouts, weights and scores are the same to the last bit."""
    mine, theirs = (sorted(run.parents[1].glob("rollouts/*/*.parquet")) for run in (whole, sharded))
    assert [p.name for p in mine] == [p.name for p in theirs]
    assert all(pq.read_table(a).equals(pq.read_table(b)) for a, b in zip(mine, theirs, strict=True))
    for checkpoint in (p for p in (whole / "checkpoints").iterdir() if p.name.isdigit()):
        other = sharded / "checkpoints" / checkpoint.name
        assert tau(checkpoint) == tau(other)
        assert json.loads((other / "score.json").read_text())["audit_passed"]
        if (checkpoint / "model.safetensors").exists():
            assert same(weights(checkpoint), weights(other))


@pytest.mark.proof
def test_run_with_a_sharded_target_is_the_run_with_whole_ones(bench):
    whole, sharded = both(bench, "trainer=ddp", "taps=online", "score.replay_prompts=4")
    compare(whole, sharded)
    sizes = [(run / "checkpoints/2/trainer/state.ckpt").stat().st_size for run in (whole, sharded)]
    assert abs(sizes[0] - sizes[1]) < 1000, "one layer of the target has 36 KB"


LM = "trainer=ddp drafter=lm drafter.depth= drafter.layers=1"


@pytest.mark.proof
@pytest.mark.parametrize(
    "options",
    [
        "trainer=fsdp taps=memory",
        "trainer=deepspeed_3 taps=cache",
        "trainer=ddp taps=memory taps_gb=1e-5",  # a process reads rows while another has all of its own
        "trainer=ddp taps=online rollout.refresh_every=2",
        f"{LM} taps=memory on_policy.share=0.5",
        f"{LM} taps=online drafter.lora={{r:2,alpha:4}}",
        "trainer=ddp drafter=ngram drafter.depth=",
    ],
)
def test_sharded_target_serves_every_trainer_and_reader(tmp_path, options):
    compare(*both(Bench(tmp_path), *options.split()))


# -- device_map ----------------------------------------------------------------------------------


def test_layers_on_disk_read_the_same(bench, whole):
    spread = load_target(str(bench.target), placement="device_map", max_memory={"cpu": "110KB"})
    assert [next(layer.parameters()).device.type for layer in spread.layers] == ["cpu", "meta"]
    assert spread.fingerprint() == whole.fingerprint()
    check_same(spread, whole)


@pytest.mark.proof
def test_run_with_layers_on_disk_is_the_run_without(bench, tmp_path):
    options = {"trainer__max_steps": 2, "score__every": 2, "target__dtype": "float32", "taps": "online"}
    spread = {"target__placement": "device_map", "target__max_memory": {"cpu": 1}}
    bench.run(tmp_path / "whole", **options, output_dir=str(tmp_path / "a"))
    bench.run(tmp_path / "spread", **options, **spread, output_dir=str(tmp_path / "b"))
    one, other = (tmp_path / name / "checkpoints" / "2" for name in ("whole", "spread"))
    assert same(weights(one), weights(other))
    assert tau(one) == tau(other)


def test_keys_and_values_on_several_devices_are_those_of_one():
    dice = random.Random(0)
    torch.manual_seed(0)
    places = [0, 1, 1, 0, 2]
    one, split = RowStore(5, 3, 4), MultiDeviceStore(places, 3, 4)
    for step in range(12):
        rows, new = len(one.lengths), dice.randint(1, 4)
        for store in (one, split):
            store.begin(new)
        for layer in range(5):
            keys, values = torch.randn(2, rows, 2, new, 3)  # (B, heads, n, dim) each
            pairs = zip(one.write(layer, keys, values), split.write(layer, keys, values), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        counts = [dice.randint(1, new) for _ in range(rows)]
        slots = torch.tensor([[0, *sorted(dice.sample(range(1, new), new - 1))] for _ in range(rows)])
        for store in (one, split):
            store.keep(counts, slots if step % 2 else None)
            if step == 6:
                store.select([0, 2])
            if step == 8:  # two rows more than there ever were: room is made
                more = RowStore(5, 3, 2) if store is one else MultiDeviceStore(places, 3, 2)
                fill(more, torch.Generator().manual_seed(1))
                store.append(more)
        assert one.lengths == split.lengths
        assert one.bytes_per_token == split.bytes_per_token
    assert len(one.lengths) == 5


def fill(store: RowStore, dice: torch.Generator) -> None:
    rows = len(store.lengths)
    store.begin(5)
    for layer in range(5):
        store.write(layer, *torch.randn(2, rows, 2, 5, 3, generator=dice))
    store.keep([5 - row % 3 for row in range(rows)])


def test_appended_rows_take_the_memory_of_rows_that_have_ended():
    dice = torch.Generator().manual_seed(2)
    store, more = RowStore(5, 4, 16), RowStore(5, 2, 5)
    for one in (store, more):
        fill(one, dice)
    kept, joined = store._data[:, :, [0, 3], :5].clone(), more._data[:, :, :, :5].clone()
    place = store._data.data_ptr()
    store.select([0, 3])
    store.append(more)
    assert store._data.data_ptr() == place
    assert store.lengths == [5, 5, 5, 4]
    assert torch.equal(store._data[:, :, :, :5], torch.cat([kept, joined], 2))


@pytest.fixture(scope="module")
def empty() -> Target:
    """Without memory: 8 layers of 40 KiB, embedding and head of 8 KiB each, and a norm."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    with torch.device("meta"):
        return Target(LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **sizes)))


def test_devices_are_filled_in_order_and_the_rest_is_read_from_disk(empty):
    layer = sum(p.numel() * 4 for p in empty.layers[0].parameters())
    fixed = empty.bytes - 8 * layer
    assert assign_layers(empty, 0, {0: fixed + 9 * layer}) == [0] * 8
    room = {0: fixed + 3 * layer, 1: 2 * layer + 5, "cpu": 3 * layer - 1}
    # The first device keeps room for a layer that comes from elsewhere.
    assert assign_layers(empty, 0, room) == [0, 0, 1, 1, "cpu", "cpu", "disk", "disk"]
    assert assign_layers(empty, "cpu", {"cpu": fixed + layer}) == ["cpu"] + ["disk"] * 7
    with pytest.raises(UserError, match="device 0 needs"):
        assign_layers(empty, 0, {0: fixed, "cpu": 9 * layer})


@pytest.mark.gpu
def test_attention_does_not_plan_for_every_length(bench):
    load_target(str(bench.target), device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_layers_on_the_host_compute_on_the_gpu(tmp_path):
    deep = str(make_target(tmp_path / "deep", layers=4))
    whole = load_target(deep, device="cuda")
    layer = sum(p.numel() * p.itemsize for p in whole.layers[0].parameters())
    # Of the room for three layers one is kept for those that come from the host.
    room = {0: whole.bytes - layer, "cpu": "1GB"}
    spread = load_target(deep, device="cuda", placement="device_map", max_memory=room)
    placed = [next(layer.parameters()).device.type for layer in spread.layers]
    assert placed == ["cuda", "cuda", "meta", "meta"]
    assert torch.equal(spread.read(TEXT.cuda()).last, whole.read(TEXT.cuda()).last)
    assert answers(spread) == answers(whole)


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "options", "line"),
    [
        ("split", "", "target.placement=split: choose replicated or sharded or device_map"),
        ("sharded", "", "target.placement=sharded: needs foredraft train with several processes"),
        ("device_map", "trainer=ddp trainer.devices=2", "target.placement=device_map: is for one process"),
        ("device_map", "drafter=medusa2", "drafter: this one reads copies of the target"),
        ("device_map", "drafter=prompt", "drafter: this one reads copies of the target"),
    ],
)
def test_impossible_placement_is_refused(bench, placement, options, line):
    bench.train(f"target.placement={placement}", *options.split()).refused(line)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"compiled": True}, "target.compile=true: layers of target.placement=device_map cannot be compiled"),
        ({"max_memory": {"cpu": "much"}}, "target.max_memory={'cpu': 'much'}: `size` much is not"),
        ({"max_memory": {"hard disk": 1}}, "target.max_memory={'hard disk': 1}: Device hard disk is not"),
    ],
)
def test_impossible_device_map_is_refused(bench, options, line):
    with pytest.raises(UserError, match=re.escape(line)):
        load_target(str(bench.target), placement="device_map", **options)

"""The fingerprint of weights: every element counts, in every dtype that a folder is loaded in."""

import copy
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from families import WORKS, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from workbench import make_target

from decode.errors import UserError
from decode.hardware import cache_folder
from decode.kernels.checksum import WORDS, bit_checksum, value_checksum
from decode.model.head_target import HeadTarget
from decode.model.identity import weight_files
from decode.model.identity.fingerprint import PREFIX, config_hash, fingerprint, module_fingerprint
from decode.model.load import load_target
from decode.model.target import Target
from drafters.checkpoint import io as checkpoint_io
from drafters.models.mlp import Mlp

pytestmark = pytest.mark.usefixtures("own_cache")
DTYPES = ["float32", "bfloat16", "float16", "float64"]
KINDS = ["llama tied, biased", "qwen3", "gemma3, window 6", "qwen3 experts", "phi, biased head", "gpt2"]


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_target(tmp_path / "target")


@pytest.fixture
def target(folder) -> Target:
    return load_target(str(folder))


def write(
    folder: Path,
    tied: bool = False,
    gpt2: bool = False,
    stored: torch.dtype = torch.bfloat16,
    size: str = "1GB",
) -> Path:
    """A model folder whose weights reach far below the smallest value of float16."""
    make_target(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    if gpt2:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    if tied:
        model.config.tie_word_embeddings = True
        model.set_output_embeddings(model.get_output_embeddings())
        model.tie_weights()
    for number, weight in enumerate(model.parameters()):
        torch.manual_seed(number)
        weight.data *= 10 ** torch.empty_like(weight).uniform_(-8, 0)
    model.to(stored).save_pretrained(folder, max_shard_size=size)
    return folder


def flip(weight: Tensor, place: int) -> None:
    """Move an element by one unit in the last place of bf16, without a trace but the value."""
    flat = weight.data.view(-1)
    before = flat[place].to(torch.bfloat16)
    after = (before.view(torch.int16) ^ 1).view(torch.bfloat16)
    flat[place] = after.to(weight.dtype)


def flip_on_file(folder: Path, name: str = "model.layers.0.mlp.down_proj.weight") -> None:
    state = load_file(folder / "model.safetensors")
    flip(state[name], 5)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def head_name(folder: Path) -> str:
    """The fingerprint of a target whose layers are not here."""
    return HeadTarget.load(str(folder)).fingerprint()


# -- checksums -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bit_changes_a_checksum_and_layout_does_not(data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(rows, columns).to(torch.bfloat16).to(dtype)
    found = int(value_checksum(values))
    assert found == int(value_checksum(values.t().contiguous().t()))
    assert found == int(value_checksum(torch.stack([values, values], 1)[:, 1]))
    if dtype != torch.float16:  # which files round otherwise
        assert found == int(value_checksum(values.to(torch.bfloat16)))
    changed = values.clone()
    flip(changed, data.draw(st.integers(0, values.numel() - 1)))
    assert found != int(value_checksum(changed))
    assert int(bit_checksum(values)) != int(bit_checksum(changed))


def test_places_count_across_blocks():
    size = 4 * WORDS + 5  # elements of one block, and some
    values = torch.zeros(2 * size, dtype=torch.bfloat16)
    seen = {int(value_checksum(values))}
    for place in (0, 1, 4, 4 * WORDS - 1, 4 * WORDS, 4 * WORDS + 4, size, 2 * size - 1):
        changed = values.clone()
        changed[place] = 1
        seen.add(int(value_checksum(changed)))
    assert len(seen) == 9
    torch.manual_seed(0)
    values = torch.randn(3 * 2**10, 2**10).to(torch.bfloat16)
    blocks = values.view(3, -1)
    assert int(value_checksum(values)) != int(value_checksum(blocks[[1, 0, 2]]))
    assert int(value_checksum(values)) == int(value_checksum(values.t().contiguous().t()))  # not contiguous


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_small_numbers_count_by_their_bits(dtype):
    values = torch.tensor([0, 1, 0, 1, 1, 0, 0], dtype=torch.float32).to(dtype)
    assert int(value_checksum(values)) != int(value_checksum(values[[1, 0, 2, 3, 4, 5, 6]]))
    assert int(value_checksum(values)) == int(bit_checksum(values))


def test_subnormals_zeros_and_nans_have_their_checksums():
    plain = torch.tensor([1e-39, 2.3e-41, -1e-40, 3e-45, float("inf"), 3.4e38, -3.4e38, 1.00390625])
    assert int(value_checksum(plain)) == int(value_checksum(plain.to(torch.bfloat16))), "subnormals, ties"
    zero = torch.zeros(4)
    assert int(value_checksum(zero)) != int(value_checksum(-zero)), "a file has -0, and so does the model"
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FABCDEF], dtype=torch.int32)
    nans = [*bits.view(torch.float32), torch.tensor(torch.nan).bfloat16(), torch.tensor(torch.nan).half()]
    (name,) = {int(value_checksum(nan.expand(3).clone())) for nan in nans}
    assert name != int(value_checksum(torch.full((3,), torch.inf)))


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_element_of_any_tensor_is_another_fingerprint(kind, tmp_path):
    model_type, options, *_ = WORKS[kind]
    save(tmp_path, model_type, options)
    target = Target(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    before, dice = target.fingerprint(), torch.Generator().manual_seed(0)
    assert before.startswith(PREFIX)
    counted = {name for name, tensor in target.model.state_dict().items() if tensor.is_floating_point()}
    assert counted >= {name for name, _ in target.model.named_parameters()}
    for name, tensor in target.model.state_dict().items():
        if name in counted:
            place = int(torch.randint(tensor.numel(), (1,), generator=dice))
            version = tensor._version
            flip(tensor, place)
            assert tensor._version == version
            assert target.fingerprint() != before, name
            flip(tensor, place)
    assert target.fingerprint() == before


def test_buffers_of_the_state_dict_count(target):
    names, bias = [target.fingerprint()], torch.zeros(8)
    target.model.register_buffer("correction", bias)
    names.append(target.fingerprint())
    bias[3] = 1
    assert len({*names, target.fingerprint()}) == 3


def test_exchanged_rows_tensors_and_layers_are_another_fingerprint(target):
    state = copy.deepcopy(target.model.state_dict())
    embedding = state["model.embed_tokens.weight"]
    rows, columns = embedding.clone(), embedding.clone()
    rows[[0, 1]] = embedding[[1, 0]]
    columns[:, [0, 1]] = embedding[:, [1, 0]]
    exchanged = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    layers = {exchanged.get(name[:15], name[:15]) + name[15:]: weight for name, weight in state.items()}
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    names = [target.fingerprint()]
    for change in (
        {"model.embed_tokens.weight": rows},
        {"model.embed_tokens.weight": columns},
        {gate: state[up], up: state[gate]},
        layers,
        {},
    ):
        target.model.load_state_dict(state | change)
        names.append(target.fingerprint())
    assert names[-1] == names[0]
    assert len(set(names)) == 5


@pytest.mark.parametrize(
    ("tied", "gpt2", "stored", "size"),
    [
        (False, False, torch.bfloat16, "1GB"),
        (True, False, torch.bfloat16, "20KB"),  # several files and an index
        (False, False, torch.float32, "20KB"),  # rounded twice on the way to float16 and bf16
        (True, True, torch.float32, "1GB"),
        (False, False, torch.float16, "1GB"),
    ],
)
def test_every_dtype_and_the_head_have_one_fingerprint(tmp_path, tied, gpt2, stored, size):
    folder = write(tmp_path / "target", tied, gpt2, stored, size)
    targets = [load_target(str(folder), dtype) for dtype in DTYPES]
    targets += [HeadTarget.load(str(folder), dtype) for dtype in ("float16", "bfloat16")]
    assert len({target.fingerprint() for target in targets}) == 1
    assert len({target.config_hash() for target in targets}) == 1


def test_tied_weights_and_equal_copies_are_one_model(tmp_path):
    target = load_target(str(write(tmp_path / "tied", tied=True)))
    untied = copy.deepcopy(target.model)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    assert target.fingerprint() == Target(untied).fingerprint()
    flip(untied.lm_head.weight, 3)
    assert target.fingerprint() != Target(untied).fingerprint()


def test_weights_changed_after_loading_in_float16_count(tmp_path):
    folder = write(tmp_path / "half")
    target, whole = load_target(str(folder), "float16"), load_target(str(folder), "bfloat16")
    before = target.fingerprint()
    assert before == whole.fingerprint()
    target.model.get_submodule("model.layers.1.mlp.down_proj").weight.data[0, 0] += 1
    assert target.fingerprint() != before
    (folder / "model.safetensors").unlink()  # nothing to read
    assert target.fingerprint() != before


def test_files_changed_after_loading_do_not_count(folder, target):
    before = target.fingerprint()
    flip_on_file(folder)
    assert target.fingerprint() == before
    assert load_target(str(folder)).fingerprint() == head_name(folder) != before


def test_head_reads_its_files_once_until_they_change(folder, monkeypatch):
    read, checksums = [], weight_files._read_checksums
    monkeypatch.setattr(weight_files, "_read_checksums", lambda *a: read.append(a) or checksums(*a))
    before = head_name(folder)
    assert head_name(folder) == before
    assert len(read) == 1
    stat = (folder / "model.safetensors").stat()
    flip_on_file(folder)
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it were the same
    changed = head_name(folder)
    assert changed != before
    assert len(read) == 2
    for memory in cache_folder().glob("checksums/*.json"):
        memory.write_text("{")  # damaged
    head = HeadTarget.load(str(folder))
    assert head.fingerprint() == changed
    head.head.weight.data[0, 0] += 1
    assert head.fingerprint() != changed


def test_head_of_stacked_experts_is_the_whole_target(tmp_path, monkeypatch):
    """Experts are stacked when a file is loaded, which is done once."""
    model_type, options, *_ = WORKS["qwen3 experts"]
    folder = save(tmp_path / "experts", model_type, options)
    whole = load_target(str(folder), decodes=False)
    assert head_name(folder) == whole.fingerprint()
    monkeypatch.setattr("decode.model.head_target.load_target", lambda *a, **k: pytest.fail("loaded again"))
    assert head_name(folder) == whole.fingerprint()


def test_head_without_its_layers_on_file_has_its_own_fingerprint(folder, target):
    file = folder / "model.safetensors"
    state = {name: w for name, w in load_file(file).items() if ".layers." not in name}
    save_file(state, file, {"format": "pt"})
    names = [target.fingerprint(), head_name(folder)]
    flip_on_file(folder, "model.norm.weight")
    assert len({*names, head_name(folder)}) == 3


def names_of(folder: str) -> tuple[str, str]:
    return head_name(Path(folder)), load_target(folder, "float16").fingerprint()


def test_eight_processes_find_one_fingerprint(tmp_path):
    folder = str(write(tmp_path / "shards", size="20KB"))
    with ProcessPoolExecutor(8, get_context("fork")) as pool:
        names = {name for pair in pool.map(names_of, [folder] * 8) for name in pair}
    assert names == {load_target(folder).fingerprint()}


def test_unwritable_cache_changes_nothing(folder, target, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert head_name(folder) == target.fingerprint()


def test_large_embedding_takes_seconds():
    embedding = torch.zeros(262_144, 64, dtype=torch.bfloat16)
    begin = time.perf_counter()
    before = fingerprint([("embedding", embedding)])
    assert time.perf_counter() - begin < 10
    flip(embedding, 200_000 * 64 + 7)  # between the rows that samples would read
    assert fingerprint([("embedding", embedding)]) != before
    assert fingerprint([("embedding", embedding.view(64, -1))]) != fingerprint([("other", embedding)])


# -- drafters --------------------------------------------------------------------------------------


def saved_drafter(target: Target, folder: Path) -> Path:
    folder.mkdir()
    drafter = Mlp.for_target(target, inner_size=8, depth=1, tie_weights=False, scale_input=False)
    checkpoint_io.save(drafter, target, folder)
    return folder


def test_drafter_trained_in_bf16_loads_for_a_target_in_float16(tmp_path):
    folder = write(tmp_path / "half")
    half, target = load_target(str(folder), "float16"), load_target(str(folder), "bfloat16")
    drafter = saved_drafter(target, tmp_path / "new")
    assert checkpoint_io.load(drafter, half).origin.fingerprint == half.fingerprint()
    half.model.get_submodule("model.layers.0.input_layernorm").weight.data[0] += 1
    with pytest.raises(UserError, match="other weights"):
        checkpoint_io.load(drafter, half)


def test_drafter_of_an_older_version_is_refused(target, tmp_path):
    path = saved_drafter(target, tmp_path / "old") / "config.json"
    config = json.loads(path.read_text())
    config["target"]["fingerprint"] = "51c9d4e68eca37d4"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"older version.*make it again"):
        checkpoint_io.load(path.parent, target)


def test_changed_element_of_a_drafter_parts_it_from_its_scorecard(target, tmp_path):
    drafter = checkpoint_io.load(saved_drafter(target, tmp_path / "one"), target)
    assert drafter.origin.content == module_fingerprint(drafter)
    flip(max(drafter.parameters(), key=Tensor.numel), 11)
    assert drafter.origin.content != module_fingerprint(drafter)


# -- the configuration -----------------------------------------------------------------------------


def test_hash_of_the_configuration_has_what_changes_the_computation(target):
    seen = {target.config_hash()}
    for name, value in {
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        "rms_norm_eps": 0.5,
        "num_attention_heads": 1,
        "hidden_act": "gelu",
        "sliding_window": 3,
    }.items():
        other = copy.deepcopy(target.config)
        setattr(other, name, value)
        seen.add(config_hash(other))
    assert len(seen) == 6
    renamed = copy.deepcopy(target.config)
    renamed._name_or_path, renamed.use_cache, renamed.eos_token_id = "elsewhere", False, 1
    assert config_hash(renamed) == target.config_hash()

"""The fingerprint of a target's weights: the same in every dtype that its folder is loaded in."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from workbench import make_target

from decode.errors import UserError
from decode.model.load import load_target
from decode.model.target import Target
from drafters.checkpoint import io as hub
from drafters.models.mlp import Mlp

DTYPES = ["float32", "bfloat16", "float16", "float64"]


def write(folder, tied: bool, gpt2: bool, stored: torch.dtype, size: str):
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


@pytest.mark.parametrize(
    ("tied", "gpt2", "stored", "size"),
    [
        (False, False, torch.bfloat16, "1GB"),
        (True, False, torch.bfloat16, "20KB"),  # several files and an index
        (False, False, torch.float32, "20KB"),  # rounded twice on the way to float16 and bf16
        (True, True, torch.float32, "1GB"),
    ],
)
def test_it_is_the_same_in_every_dtype(tmp_path, tied, gpt2, stored, size):
    folder = write(tmp_path, tied, gpt2, stored, size)
    targets = {dtype: load_target(str(folder), dtype) for dtype in DTYPES}
    names = {target.fingerprint() for target in targets.values()}
    assert len(names) == 1
    half = targets["float16"].fingerprints()
    assert half[0] in names
    assert half[1] not in names
    assert targets["bfloat16"].fingerprints() == [half[0]]


def test_weights_changed_after_loading_are_those_that_count(tmp_path):
    folder = write(tmp_path, False, False, torch.bfloat16, "1GB")
    target = load_target(str(folder), "float16")
    before = target.fingerprints()
    target.head.weight.data[0, 0] += 1
    assert not set(before) & set(target.fingerprints())
    (folder / "model.safetensors").unlink()  # nothing to read
    assert len(set(target.fingerprints())) == 1


def test_a_drafter_trained_in_bf16_loads_beside_a_target_in_float16(tmp_path):
    folder = write(tmp_path / "target", False, False, torch.bfloat16, "1GB")
    half = load_target(str(folder), "float16")
    for name, dtype in (("new", "bfloat16"), ("old", "float16")):
        target = load_target(str(folder), dtype)
        drafter = Mlp.for_target(target, inner_size=8, depth=1, tie_weights=False, scale_input=False)
        (tmp_path / name).mkdir()
        hub.save(drafter, target, tmp_path / name)
    config = tmp_path / "old" / "config.json"  # as versions before wrote it in float16
    config.write_text(config.read_text().replace(*half.fingerprints()))
    for name in ("new", "old"):
        assert hub.load(tmp_path / name, half).origin.fingerprint == half.fingerprint()
    half.head.weight.data[0, 0] += 1
    with pytest.raises(UserError, match="other weights"):
        hub.load(tmp_path / "new", Target(half.model))

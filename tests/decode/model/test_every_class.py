"""No causal class of transformers is accepted that gives wrong rows past what its configuration names."""

import pytest
import torch
from families import NOBODY, VOCAB, save
from tiny_classes import CLASSES, tiny_model

from decode.errors import UserError
from decode.model import probe as probe_module
from decode.model.load import load_target
from decode.model.probe import find_abilities
from decode.model.target import Target

pytestmark = pytest.mark.usefixtures("own_cache")
LENGTHS = (90, 45, 20)
STEPS = 8
MADE = {"cohere2", "doge", "gemma3_text", "gpt2", "gpt_neo", "gpt_oss", "phi3", "starcoder2", "mistral"}


@torch.inference_mode()
def worst_row(target: Target) -> float:
    """Largest relative error of texts of very different lengths, read together and then token by token."""
    dice = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 60, (n,), generator=dice).tolist() for n in LENGTHS]
    errors = []

    def compare(hidden, text):
        want = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        errors.append(float((target.head(hidden) - want).abs().max() / want.abs().max()))

    target.start(len(texts), 128)
    last = target.forward(torch.tensor([text + [0] * (max(LENGTHS) - len(text)) for text in texts]))
    for row, text in enumerate(texts):
        compare(last[row, len(text) - 1], text)
    target.keep(LENGTHS)
    for _ in range(STEPS):
        tokens = torch.randint(1, 60, (len(texts), 1), generator=dice)
        last = target.forward(tokens)
        target.keep([1] * len(texts))
        for row, text in enumerate(texts):
            text.append(int(tokens[row]))
            compare(last[row, 0], text)
    return max(errors)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.ci("gpt_neo", "minimax_m3_vl_text", "doge", "mistral", "smollm3", "llama4_text")
def test_class_is_right_past_its_window_or_refused(kind):
    model = tiny_model(kind)
    if model is None:
        assert kind not in MADE
        pytest.skip("needs more than its configuration")
    try:
        target = Target(model)
        refused = find_abilities(target).decode
    except UserError as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
    else:
        assert worst_row(target) < 1e-4
    assert (kind == "gpt_neo") <= bool(refused)


NEO = NOBODY | {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("layers", "types"), [(2, [[["global", "local"], 1]]), (6, [[["global"], 5], [["local"], 1]])], ids=str
)
def test_long_window_is_found_and_named(layers, types, tmp_path):
    """Also where no layer has it but the last."""
    options = NEO | {"num_layers": layers, "attention_types": types, "window_size": 256}
    folder = str(save(tmp_path / "model", "gpt_neo", options))
    with pytest.raises(UserError, match=r"cannot be decoded losslessly here.*past its window_size"):
        load_target(folder)


def test_texts_of_the_probe_pass_a_window_three_times(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no class has passed yet
    real, lengths = probe_module._texts, []

    def spy(*arguments, **options):
        texts = real(*arguments, **options)
        lengths.extend(map(len, texts))
        return texts

    monkeypatch.setattr(probe_module, "_texts", spy)
    find_abilities(Target(tiny_model("mistral")))
    long, short = lengths
    assert long > 3 * probe_module.SHORT
    assert short + 4 > 3 * probe_module.SHORT, "with what it accepts"


class Fields(dict):
    """A configuration of nothing but these fields."""

    to_dict = dict.copy
    __setattr__ = dict.__setitem__


def test_only_counts_of_tokens_are_shortened():
    shortened = {
        "attention_window_size": (2048, 4),
        "attention_window": ([512, 512], [4, 4]),
        "compress_rates": ({"sparse": 3, "heavy": 128}, {"sparse": 3, "heavy": 4}),
        "index_topk_blocks": (16, 1),
    }
    shortened |= dict.fromkeys(("index_topk", "local_period", "refresh_interval", "sliding_window"), (100, 4))
    others = "attn_layer_period block_multiple_of chunk_size_feed_forward max_window_layers num_blocks "
    others += "num_local_experts sliding_window_pattern"
    kept = dict.fromkeys(others.split(), 28) | {"use_sliding_window": True, "window_size": 3}
    config = Fields({name: long for name, (long, _) in shortened.items()} | kept)
    assert sorted(probe_module._shorten(config)) == sorted(shortened)
    assert config == {name: short for name, (_, short) in shortened.items()} | kept

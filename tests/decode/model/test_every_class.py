"""No causal class of transformers is accepted that gives wrong rows past what its configuration names."""

import pytest
import torch
from families import NOBODY, VOCAB, save
from tiny_classes import CLASSES, WINDOW, tiny_model
from torch import nn

from decode.errors import UserError
from decode.model import probe as probe_module
from decode.model.load import load_target
from decode.model.probe import find_abilities
from decode.model.target import Target

LENGTHS = (90, 45, 20)
STEPS = 8


@pytest.fixture(autouse=True)
def fresh_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
        for row, (text, token) in enumerate(zip(texts, tokens.flatten().tolist(), strict=True)):
            text.append(token)
            compare(last[row, 0], text)
    return max(errors)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.ci("gpt_neo", "minimax_m3_vl_text", "doge", "mistral", "smollm3", "llama4_text")
def test_a_class_is_right_past_its_window_or_refused(kind):
    model = tiny_model(kind)
    if model is None:
        pytest.skip("not made from its configuration alone")
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


def test_classes_of_many_kinds_are_made():
    kinds = ("cohere2", "doge", "gemma3_text", "gpt2", "gpt_neo", "gpt_oss", "phi3", "starcoder2")
    assert [kind for kind in kinds if tiny_model(kind) is None] == []


NEO = NOBODY | {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("layers", "types"), [(2, [[["global", "local"], 1]]), (6, [[["global"], 5], [["local"], 1]])], ids=str
)
def test_a_long_window_is_found_and_named(layers, types, tmp_path):
    """Also where no layer has it but the last."""
    options = NEO | {"num_layers": layers, "attention_types": types, "window_size": 256}
    folder = str(save(tmp_path / "model", "gpt_neo", options))
    with pytest.raises(UserError, match=r"cannot be decoded losslessly here.*past its window_size") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_an_older_probe_vouches_for_nothing(tmp_path, monkeypatch):
    """What a class passed is remembered with the source of the probe and all fields of the configuration."""
    markers = set()
    for window in (256, 257):
        target = Target(tiny_model("mistral"))
        target.config.sliding_window = window
        markers.add(probe_module._marker(target))
        monkeypatch.setattr(probe_module.inspect, "getsource", lambda module: "another")
        markers.add(probe_module._marker(target))
        monkeypatch.undo()
    assert len(markers) == 4


class Named:
    """A configuration of nothing but these fields."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def to_dict(self):
        return dict(vars(self))


def test_what_counts_tokens_is_shortened_and_nothing_else():
    shortened = {
        "attention_window_size": (2048, 4),
        "attention_window": ([512, 512], [4, 4]),
        "compress_rates": ({"sparse": 3, "heavy": 128}, {"sparse": 3, "heavy": 4}),
        "index_topk": (2048, 4),
        "index_topk_blocks": (16, 1),
        "local_period": (64, 4),
        "refresh_interval": (100, 4),
        "sliding_window": (4096, 4),
    }
    kept = {
        "attn_layer_period": 8,
        "block_multiple_of": 256,
        "chunk_size_feed_forward": 64,
        "max_window_layers": 28,
        "num_blocks": 32,
        "num_local_experts": 8,
        "sliding_window_pattern": 6,
        "use_sliding_window": True,
        "window_size": 3,
    }
    config = Named(**{name: long for name, (long, _) in shortened.items()}, **kept)
    assert sorted(probe_module._shorten(config)) == sorted(shortened)
    assert config.to_dict() == {name: short for name, (_, short) in shortened.items()} | kept


@torch.inference_mode()
def test_the_texts_pass_what_is_shortened_three_times(monkeypatch):
    target, lengths = Target(tiny_model("mistral")), set()
    real = nn.Embedding.forward

    def forward(self, tokens):
        lengths.add(tokens.shape[1])
        return real(self, tokens)

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    copies = []
    real_copy = probe_module._small_copy
    monkeypatch.setattr(probe_module, "_small_copy", lambda lm: copies.append(real_copy(lm)) or copies[-1])
    find_abilities(target)
    assert copies[0].config.sliding_window == probe_module.SHORT < WINDOW
    texts = probe_module._texts(copies[0], 13, 9, more=7)
    assert len(texts[0]) > 3 * probe_module.SHORT
    assert len(texts[1]) + 4 > 3 * probe_module.SHORT, "with what it accepts"
    assert max(lengths) >= len(texts[0]) + 6

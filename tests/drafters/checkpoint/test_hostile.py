"""A saved drafter's files: what they hold, and that damaged and hostile ones are refused in one line.

Nothing is allocated or imported before.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from drafter_checks import V, both, random_texts
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import registry
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.pretrained import from_pretrained
from drafters.export import layout
from drafters.export import weight_files as stored
from drafters.hf import lora_files
from drafters.hub import untrusted_files as files

HUGE = 10**9
NUMBERS = (2**24, 2**31, -1, 0, 1e308)
GROWTH = 256 * 2**10  # KiB of memory that all tried numbers may take


def write(folder, config) -> None:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def refused(folder, target, match=".") -> None:
    with pytest.raises(UserError, match=match) as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.fixture
def checkpoint(tiny_target, make_drafter, tmp_path):
    """Makes a folder with a drafter of a kind; returns target, folder and config."""

    def make(kind="eagle"):
        target, drafter = both(tiny_target, make_drafter, kind)
        checkpoint_io.save(drafter, target, tmp_path, "some/target")
        return target, tmp_path, json.loads((tmp_path / "config.json").read_text())

    return make


def numbers(settings, path=()):
    """Where numbers are; of the sizes of adapted maps, which tensors on file show, the first."""
    pairs = list(settings.items() if isinstance(settings, dict) else enumerate(settings))
    for key, value in pairs[:2] if path[-1:] == ("targets",) else pairs:
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, key))
        elif type(value) in (int, float):
            yield (*path, key), type(value)


def replaced(settings, path, value):
    copy = json.loads(json.dumps(settings))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return copy


def test_a_saved_drafter_holds_no_weight_of_the_target(pair, tmp_path):
    target, drafter = pair
    drafter.requires_grad_(False)
    checkpoint_io.save(drafter, target, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    held = sum(w.numel() for w in drafter.state_dict().values()) * 4
    assert (tmp_path / "model.safetensors").stat().st_size < held + 10_000
    target.model.to(torch.bfloat16)
    target.head = Target(target.model).head  # of another dtype it is the same target
    loaded = checkpoint_io.load(tmp_path, target)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16 for _ in drafter.parameters()}


@pytest.mark.states
def test_no_number_takes_memory_or_time(checkpoint, drafter_name, monkeypatch):
    """Every number of every drafter's settings, replaced: one line, or a drafter that drafts as quickly."""
    target, folder, config = checkpoint(drafter_name)
    prompts, texts, built, begin = random_texts(1, 8).tolist(), [], set(), Drafter.__init__

    def watched(self, *arguments):
        built.add(torch.get_default_device().type)
        begin(self, *arguments)

    monkeypatch.setattr(Drafter, "__init__", watched)
    held = checkpoint_io.load(folder, target).state_dict()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    for path, kind in numbers(config["settings"]):
        for value in NUMBERS:
            write(folder, config | {"settings": replaced(config["settings"], path, value)})
            built.clear()
            try:
                loaded = checkpoint_io.load(folder, target)
            except UserError as error:
                texts.append(str(error))
                assert value < HUGE or built <= {"meta"}, "built before it was looked at"
                continue
            # A size within the bound of all numbers is compared with the tensors on file, if there are any.
            name = str(path[-1])
            least = 2**24 if held and "size" in name and name != "size" else 2**25
            assert kind is float or value < least or "theta" in name, (path, value)
            with suppress(UserError):
                generate(target, loaded, prompts, plan=Plan(depth=2), max_new_tokens=3, sampler=Sampler(0.0))
    assert texts
    assert all(text.isprintable() for text in texts)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("other", [{"seed": 5}, {"layers": 5}, {"vocab": 41}], ids=str)
def test_another_targets_drafter_is_refused(checkpoint, tiny_target, other):
    _, folder, _ = checkpoint()
    shape = {"vocab": V, "layers": 4, "hidden": 16, "dtype": torch.float32}
    refused(folder, tiny_target(**shape | other), "some/target")


def test_the_bundled_target_is_found_from_any_folder(pocket, make_drafter, tmp_path, monkeypatch):
    checkpoint_io.save(make_drafter("bigram", pocket), pocket, tmp_path, "data/pocket")
    monkeypatch.chdir(tmp_path)
    assert from_pretrained(tmp_path).origin.name == "data/pocket"


WRONG = [
    *({"settings": value} for value in (None, [], {"hidden_size": 3})),
    *({"target": value} for value in (None, "me")),
    *({"format": value} for value in (None, 99)),
    *({"drafter": value} for value in (3, "", "nobody")),
]
WRONG_SETTINGS = [
    *({"depth": value} for value in ("3", 3.0, True, None, [3], {"_target_": "os.system"})),
    {"detach": 1},
    *({"eps": value} for value in ("1e-6", 1e999)),
    *({"hidden_size": value} for value in (-16, 0)),
    {"heads": 0},
    {"_target_": "os.system"},
    {"__class__": "x"},
    {"self": 1},
    {"folder": "../../etc"},
    {"x" * 5000: 1},
]


@pytest.mark.parametrize("change", WRONG + WRONG_SETTINGS, ids=lambda change: str(change)[:40])
def test_settings_of_another_type_or_name_are_refused(checkpoint, change):
    target, folder, config = checkpoint()
    if change in WRONG_SETTINGS:
        change = {"settings": config["settings"] | change}
    write(folder, {key: value for key, value in (config | change).items() if value is not None})
    refused(folder, target)


@pytest.mark.parametrize(
    "change",
    [
        {"_target_": "os.system"},
        {"auto_map": {"AutoModel": "evil.Model"}, "_attn_implementation": "nobody-we-know/kernel"},
        {"a": [["_partial_", {"_partial_": True}]]},
        *({"model_type": kind} for kind in ("nobody", "t5")),
        *({"hidden_size": size} for size in ("x", 32)),
        {"num_hidden_layers": 2**20},
        {"vocab_size": 2**24},
        {"many": list(range(2**16 + 1))},
        {"long": "x" * 2**17},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_models_configuration_inside_is_no_back_door(checkpoint, change):
    target, folder, config = checkpoint("lm")
    before = set(sys.modules)
    model = config["settings"]["config"] | change
    write(folder, config | {"settings": config["settings"] | {"config": model}})
    if "auto_map" in change:  # what it names is dropped
        loaded = checkpoint_io.load(folder, target)
        assert loaded.model.config._attn_implementation == "sdpa"
        assert "auto_map" not in loaded.settings["config"]
    else:
        refused(folder, target)
    assert "evil" not in {name.partition(".")[0] for name in set(sys.modules) - before}


def test_only_names_of_the_table_are_classes(checkpoint, monkeypatch):
    target, folder, config = checkpoint()
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    for kind in ("os", "os:system", "drafters.models.eagle:Eagle", "../eagle", "__import__", "eagle\n"):
        write(folder, config | {"drafter": kind})
        refused(folder, target, "is not known.* eagle, .* lm, ")


def test_json_that_is_no_honest_json(checkpoint):
    target, folder, config = checkpoint()
    text = json.dumps(config)
    depths = ["NaN", "Infinity", '3, "depth": 900', "[" * 1000 + "]" * 1000, "9" * 5000]
    depths += ['{"a":' * 100_000 + "1" + "}" * 100_000]
    others = ["", "{", "[]", "3", "null", '"text"', '{"format": 1}', text[:-1]]
    assert '"depth": 3' in text
    for hostile in [text.replace('"depth": 3', f'"depth": {depth}') for depth in depths] + others:
        write(folder, hostile)
        refused(folder, target, "not a drafter's config")
    (folder / "config.json").write_bytes(b"\xff\xfe" + text.encode())
    refused(folder, target, "not a drafter's config")
    with (folder / "config.json").open("wb") as file:
        file.truncate(5 * 10**9)  # a hole: it costs no disk
    refused(folder, target, "5000000000 bytes")
    (folder / "config.json").unlink()
    refused(folder, target, r"no config\.json")


def raw(entry, length=None, body=b"1234") -> bytes:
    """A safetensors file of one entry, or of this header."""
    header = entry if isinstance(entry, bytes) else json.dumps({"fc.weight": entry}).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def test_headers_that_lie(checkpoint):
    target, folder, _ = checkpoint()
    path = folder / "model.safetensors"
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for content in (
        b"",
        b"junk" * 100,
        raw(b"{}", 2**62),
        raw(b"{}", files.HEADER_BYTES),
        raw(b"[" * 10**6),
        raw(entry | {"shape": [HUGE, HUGE]}),
        raw(entry | {"data_offsets": [0, 2**60]}, body=b""),
        raw(entry | {"shape": [-1]}),
        raw(entry | {"dtype": "PICKLE"}),
    ):
        path.write_bytes(content)
        refused(folder, target, "damaged checkpoint")
    path.unlink()
    refused(folder, target, "damaged checkpoint")


def test_tensors_are_those_that_the_settings_ask_for(checkpoint):
    target, folder, _ = checkpoint()
    path = folder / "model.safetensors"
    good = load_file(path)
    name, value = next(iter(good.items()))
    for change, why in (
        ({"../../../root/.bashrc": value.clone()}, "no such tensor"),
        ({"/etc/passwd": value.clone()}, "no such tensor"),
        ({name: value[..., :1].clone()}, "config.json implies"),
        ({name: value.to(torch.int64)}, "is int"),
        ({name: torch.full_like(value, float("nan"))}, "not finite"),
        ({name: torch.full_like(value, float("inf"))}, "not finite"),
    ):
        save_file(good | change, path)
        refused(folder, target, f"damaged checkpoint .*{why}")
    save_file({k: v for k, v in good.items() if k != name}, path)
    refused(folder, target, "1 tensors are missing")


def test_a_map_of_tokens_stays_in_the_targets_vocabulary(checkpoint):
    target, folder, _ = checkpoint("eagle3")
    path = folder / "model.safetensors"
    good = load_file(path)
    for wrong in (target.vocab_size, -2, 2**62):
        save_file(good | {"d2t": good["d2t"].clone().index_fill(0, torch.tensor([0]), wrong)}, path)
        refused(folder, target, "tokens that the target does not have")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(checkpoint, name, tmp_path_factory):
    target, folder, _ = checkpoint()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / name
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    refused(folder, target, "a link to a file outside its folder")


def test_a_downloaded_file_that_is_not_ours_is_never_opened(checkpoint, monkeypatch):
    target, folder, _ = checkpoint()
    for name in ("pytorch_model.bin", "modeling_evil.py", "tokenizer.pkl"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickles"))
    checkpoint_io.load(folder, target)
    assert set(checkpoint_io.FILES) == {*layout.FILES, *lora_files.FILES, *stored.PATTERNS}
    assert {Path(name).suffix for name in checkpoint_io.FILES} == {".json", ".safetensors", ".pt", ".bin"}


@pytest.fixture
def adapted(tiny_target, make_drafter, tmp_path):
    """A folder of adapters of a cut target."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("lm", target, lora={"r": 2, "alpha": 4}, path=None, layers=1)
    checkpoint_io.save(drafter, target, tmp_path)
    assert (tmp_path / lora_files.FILES[1]).exists()
    return target, tmp_path, json.loads((tmp_path / "config.json").read_text())


def write_base(folder, config, path) -> None:
    base = config["settings"]["base"] | {"path": path}
    write(folder, config | {"settings": config["settings"] | {"base": base}})


def test_adapters_name_no_relative_path_and_downloaded_ones_no_folder(
    adapted, tmp_path_factory, draft_folder
):
    target, folder, config = adapted
    for path in ("../../models/x", "models", "a/b/c", "/a/../../b", 3, ["a"], {"a": 1}):
        write_base(folder, config, path)
        refused(folder, target, "settings.base")
    there = tmp_path_factory.mktemp("models--me--x") / "snapshots" / "abc"
    there.parent.mkdir()
    folder.rename(there)
    write_base(there, config, draft_folder(target.vocab_size))
    refused(there, target, "need a model in a folder of the machine")


def test_adapters_fit_their_maps(adapted):
    target, folder, config = adapted
    path = folder / lora_files.FILES[1]
    good = load_file(path)
    name = next(name for name in good if "lora_A" in name)
    shapes = (good[name][:1].clone(), good[name][:, :1].clone(), good[name].flatten())
    changes = [*({name: wrong} for wrong in shapes), {"base_model.model.nowhere.lora_A.weight": shapes[0]}]
    for change in changes:
        save_file(good | change, path)
        refused(folder, target, "fits no weight")
    save_file(good, path)
    checkpoint_io.load(folder, target)
    for lora in ({"r": HUGE}, {"alpha": "x"}, {"r": 0}, {"targets": HUGE}):
        settings = config["settings"] | {"lora": config["settings"]["lora"] | lora}
        write(folder, config | {"settings": settings})
        refused(folder, target)

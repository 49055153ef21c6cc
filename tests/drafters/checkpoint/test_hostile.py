"""Files that mean harm are refused in one line, before anything is allocated or imported."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from faces import V, both
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from distill.utils.atomic_files import sha256
from drafters import registry
from drafters.base import Drafter
from drafters.checkpoint import io as hub
from drafters.checkpoint import validate as untrusted
from drafters.export import layout
from drafters.export import weight_files as stored
from drafters.families import lora_files as adapters
from drafters.hub import untrusted_files as files

HUGE = 10**9
KINDS = ("eagle", "eagle3", "medusa", "medusa2", "lyanna", "mlp", "lm", "suffix", "union")  # a family each


def write(folder, config) -> None:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def refused(folder, target, match=".") -> str:
    with pytest.raises(UserError, match=match) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    return str(error.value)


@pytest.fixture
def checkpoint(tiny_target, make_drafter, tmp_path):
    """Makes a folder with a drafter of a kind; returns target, folder and config."""

    def make(kind="eagle"):
        target, drafter = both(tiny_target, make_drafter, kind)
        hub.save(drafter, target, tmp_path)
        return target, tmp_path, json.loads((tmp_path / "config.json").read_text())

    return make


def watch(monkeypatch) -> None:
    """From now on no constructor may run but on the meta device."""
    real = Drafter.__init__

    def watched(self):
        assert torch.get_default_device().type == "meta", "built before it was looked at"
        real(self)

    monkeypatch.setattr(Drafter, "__init__", watched)


def numbers(settings, path=()):
    """Where whole numbers are, however deep."""
    pairs = settings.items() if isinstance(settings, dict) else enumerate(settings)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, key))
        elif type(value) is int:
            yield (*path, key)


def replaced(settings, path, value):
    copy = json.loads(json.dumps(settings))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_no_size_is_believed(checkpoint, kind, monkeypatch):
    """Every whole number of every family's settings, beyond all bounds, and just too large for the file."""
    target, folder, config = checkpoint(kind)
    watch(monkeypatch)
    names, begun = list(numbers(config["settings"])), time.monotonic()
    assert names
    for path in names:
        write(folder, config | {"settings": replaced(config["settings"], path, HUGE)})
        if "theta" not in str(path[-1]):
            refused(folder, target)
    # Below the bound of all numbers, sizes are still those of the tensors on file.
    for path in [p for p in names if "size" in str(p[-1]) and p[-1] != "size"]:
        write(folder, config | {"settings": replaced(config["settings"], path, 2**23)})
        refused(folder, target)
    assert time.monotonic() - begun < 60


def test_parts_without_end_are_not_made(checkpoint):
    target, folder, config = checkpoint("medusa")
    write(folder, config | {"settings": config["settings"] | {"layers": 2**24}})
    begun = time.monotonic()
    refused(folder, target, "ask for more than")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": "3"},
        {"depth": 3.0},
        {"depth": True},
        {"depth": None},
        {"depth": [3]},
        {"depth": {"_target_": "os.system"}},
        {"detach": 1},
        {"eps": "1e-6"},
        {"eps": 1e999},
        {"hidden_size": -16},
        {"hidden_size": 0},
        {"heads": 0},
        {"_target_": "os.system"},
        {"__class__": "x"},
        {"self": 1},
        {"folder": "../../etc"},
        {"x" * 5000: 1},
    ],
    ids=lambda settings: str(settings)[:40],
)
def test_settings_of_another_type_or_name_are_refused(checkpoint, settings):
    target, folder, config = checkpoint()
    write(folder, config | {"settings": config["settings"] | settings})
    refused(folder, target)


@pytest.mark.parametrize(
    "change",
    [
        {"_target_": "os.system"},
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"a": [["_partial_", {"_partial_": True}]]},
        {"model_type": "nobody"},
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
        assert not hub.load(folder, target).training
    else:
        refused(folder, target)
    assert "evil" not in {name.partition(".")[0] for name in set(sys.modules) - before}


@pytest.mark.parametrize(
    "kind", ["os", "os:system", "drafters.models.eagle:Eagle", "../eagle", "__import__", "eagle\n"]
)
def test_only_names_of_the_table_are_classes(checkpoint, kind, monkeypatch):
    target, folder, config = checkpoint()
    write(folder, config | {"drafter": kind})
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    refused(folder, target, "is not known")


def test_json_that_is_no_honest_json(checkpoint):
    target, folder, config = checkpoint()
    text = json.dumps(config)
    for hostile in (
        text.replace('"depth": 3', '"depth": NaN'),
        text.replace('"depth": 3', '"depth": Infinity'),
        text.replace('"depth": 3', '"depth": 3, "depth": 900'),
        text.replace('"depth": 3', '"depth": ' + "[" * 1000 + "]" * 1000),
        text.replace('"depth": 3', '"depth": ' + '{"a":' * 100_000 + "1" + "}" * 100_000),
        text.replace('"depth": 3', '"depth": ' + "9" * 5000),
        text[:-1],
    ):
        assert hostile != text
        write(folder, hostile)
        refused(folder, target, "not a drafter's config")
    (folder / "config.json").write_bytes(b"\xff\xfe" + text.encode())
    refused(folder, target, "not a drafter's config")
    with (folder / "config.json").open("wb") as file:
        file.truncate(5 * 10**9)  # a hole: it costs no disk
    refused(folder, target, "5000000000 bytes")


def raw(header: bytes, length: int | None = None, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def test_headers_that_lie(checkpoint):
    target, folder, _ = checkpoint()
    path = folder / "model.safetensors"
    entry = {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}
    for content in (
        raw(b"{}", 2**62),
        raw(b"{}", files.HEADER_BYTES),
        raw(b"[" * 10**6),
        raw(json.dumps({"fc.weight": entry}).encode(), None, b"1234"),
        raw(json.dumps({"fc.weight": entry | {"shape": [1], "data_offsets": [0, 2**60]}}).encode()),
        raw(json.dumps({"fc.weight": entry | {"shape": [-1]}}).encode(), None, b"1234"),
        raw(json.dumps({"fc.weight": entry | {"dtype": "PICKLE", "shape": [1]}}).encode(), None, b"1234"),
    ):
        path.write_bytes(content)
        refused(folder, target, "damaged checkpoint")


def test_tensors_are_those_that_the_settings_ask_for(checkpoint):
    target, folder, _ = checkpoint()
    path = folder / "model.safetensors"
    good = load_file(path)
    name, value = next(iter(good.items()))
    for change, why in (
        ({"../../../root/.bashrc": value.clone()}, "none of that name"),
        ({"/etc/passwd": value.clone()}, "none of that name"),
        ({name: value[..., :1].clone()}, "by config.json it is"),
        ({name: value.to(torch.int64)}, "is int"),
        ({name: torch.full_like(value, float("nan"))}, "not finite"),
        ({name: torch.full_like(value, float("inf"))}, "not finite"),
    ):
        save_file(good | change, path)
        refused(folder, target, f"damaged checkpoint .*{why}")
    save_file({k: v for k, v in good.items() if k != name}, path)
    refused(folder, target, "1 tensors are missing")
    save_file({}, path)
    refused(folder, target, "tensors are missing")


def test_a_map_of_tokens_stays_in_the_targets_vocabulary(checkpoint):
    target, folder, _ = checkpoint("eagle3")
    path = folder / "model.safetensors"
    good = load_file(path)
    for wrong in (target.vocab_size, -2, 2**62):
        save_file(good | {"d2t": good["d2t"].clone().index_fill(0, torch.tensor([0]), wrong)}, path)
        refused(folder, target, "tokens that the target has not")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(checkpoint, name, tmp_path_factory):
    target, folder, _ = checkpoint()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / name
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    refused(folder, target, "a link to a file outside its folder")


def test_what_the_hubs_cache_links_to_is_its_own(checkpoint, tmp_path_factory):
    target, folder, _ = checkpoint()
    cache = tmp_path_factory.mktemp("models--me--drafter")
    there = cache / "snapshots" / "abc"
    there.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in folder.iterdir():
        blob = cache / "blobs" / sha256(path)
        path.rename(blob)
        (there / path.name).symlink_to(blob)
    assert hub.load(there, target).origin.folder == there


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture
def adapted(tiny_target, make_drafter, tmp_path):
    """A folder of adapters of a cut target."""
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    drafter = make_drafter("lm", target, lora={"r": 2, "alpha": 4}, path=None, layers=1)
    hub.save(drafter, target, tmp_path)
    assert (tmp_path / adapters.FILES[1]).exists()
    return target, tmp_path, json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("path", ["../../models/x", "models", "a/b/c", "/a/../../b", 3, ["a"], {"a": 1}])
def test_adapters_name_no_base_by_a_relative_path(adapted, path):
    target, folder, config = adapted
    hub.load(folder, target)
    base = config["settings"]["base"] | {"path": path}
    write(folder, config | {"settings": config["settings"] | {"base": base}})
    refused(folder, target, "settings.base")


def test_downloaded_adapters_name_no_folder_of_this_machine(adapted, tmp_path_factory, draft_folder):
    target, folder, config = adapted
    there = tmp_path_factory.mktemp("models--me--x") / "snapshots" / "abc"
    there.parent.mkdir()
    folder.rename(there)
    base = config["settings"]["base"] | {"path": draft_folder(target.vocab_size)}
    write(there, config | {"settings": config["settings"] | {"base": base}})
    refused(there, target, "belong to a model in a folder of the machine")


def test_adapters_fit_their_maps(adapted):
    target, folder, config = adapted
    path = folder / adapters.FILES[1]
    good = load_file(path)
    name = next(name for name in good if "lora_A" in name)
    for wrong in (good[name][:1].clone(), good[name][:, :1].clone(), good[name].flatten()):
        save_file(good | {name: wrong}, path)
        refused(folder, target, "fits no map")
    save_file(good | {"base_model.model.nowhere.lora_A.weight": good[name].clone()}, path)
    refused(folder, target, "fits no map")
    save_file(good, path)
    for lora in ({"r": HUGE}, {"alpha": "x"}, {"r": 0}, {"targets": HUGE}):
        settings = config["settings"] | {"lora": config["settings"]["lora"] | lora}
        write(folder, config | {"settings": settings})
        refused(folder, target)


def test_a_file_of_a_downloaded_folder_that_is_not_ours_is_never_opened(checkpoint, monkeypatch):
    target, folder, _ = checkpoint()
    for name in ("pytorch_model.bin", "modeling_evil.py", "tokenizer.pkl"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickles"))
    hub.load(folder, target)
    assert set(hub.FILES) == {*layout.FILES, *adapters.FILES, *stored.PATTERNS}
    assert {Path(name).suffix for name in hub.FILES} == {".json", ".safetensors", ".pt", ".bin"}
    assert untrusted.MAX_INT < HUGE

"""A saved drafter comes back as it was, or is refused in one line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from contract import saved
from faces import V, both

from decode.errors import UserError
from decode.model.target import Target
from drafters.checkpoint import io as hub
from drafters.checkpoint.pretrained import from_pretrained
from drafters.registry import drafter_class, short_name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes the folder of a saved drafter, once for each name; read only."""
    known = {}

    def folder(name, pair):
        if name not in known:
            *_, known[name] = saved(pair, tmp_path_factory.mktemp(name))
        return known[name]

    return folder


def test_a_saved_drafter_holds_no_weight_of_the_target(pair, drafter_name, folders):
    folder = folders(drafter_name, pair)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    held = sum(w.numel() for w in pair[1].state_dict().values()) * 4
    assert (folder / "model.safetensors").stat().st_size < held + 10_000


def test_a_target_in_another_dtype_is_the_same_target(pair, drafter_name, folders):
    target, drafter = pair
    folder = folders(drafter_name, pair)
    target.model.to(torch.bfloat16)
    target.head = Target(target.model).head
    loaded = hub.load(folder, target)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16 for _ in drafter.parameters()}


@pytest.fixture(scope="module")
def eagle(tiny_target, make_drafter, folders):
    target, drafter = both(tiny_target, make_drafter, "eagle")
    return target, folders("eagle", (target, drafter))


@pytest.mark.parametrize("other", [{"seed": 5}, {"layers": 5}, {"vocab": 41}], ids=str)
def test_another_targets_drafter_is_refused(eagle, tiny_target, other):
    stranger = tiny_target(**{"vocab": V, "layers": 4, "hidden": 16, "dtype": torch.float32} | other)
    with pytest.raises(UserError, match="some/target"):
        hub.load(eagle[1], stranger)


def damaged(folder, copy, **changes):
    """A copy of a saved drafter's folder with another config."""
    shutil.copytree(folder, copy)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.update({key: value})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def refused(folder, target, match=".") -> None:
    with pytest.raises(UserError, match=match) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": None},
        {"settings": []},
        {"target": None},
        {"target": "me"},
        {"format": None},
        {"format": 99},
        {"drafter": 3},
        {"drafter": ""},
    ],
    ids=str,
)
def test_a_damaged_config_is_refused_in_one_line(eagle, tmp_path, changes):
    refused(damaged(eagle[1], tmp_path / "copy", **changes), eagle[0])


def test_settings_that_a_drafter_does_not_know_are_refused(pair, drafter_name, folders, tmp_path):
    folder = folders(drafter_name, pair)
    refused(damaged(folder, tmp_path / "copy", settings={"hidden_size": 3}), pair[0])


def test_an_unknown_drafter_is_answered_with_the_known_ones(eagle, tmp_path):
    names = ".*".join(sorted(["eagle", "lm", "suffix"]))
    refused(damaged(eagle[1], tmp_path / "copy", drafter="nobody"), eagle[0], rf"'nobody'.*{names}")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"text"', '{"format": 1}'])
def test_a_config_that_is_none_is_refused(eagle, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, eagle[0], "not a drafter's config")


@pytest.mark.parametrize("content", [b"", b"junk" * 100, None], ids=["empty", "junk", "missing"])
def test_damaged_weights_are_refused(eagle, tmp_path, content):
    copy = damaged(eagle[1], tmp_path / "copy")
    path = copy / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    refused(copy, eagle[0], "damaged checkpoint")


def test_a_folder_without_a_checkpoint_is_refused(eagle, tmp_path):
    refused(tmp_path, eagle[0], r"no config\.json")


def test_every_yaml_has_a_name_in_the_table(drafter_name, pair):
    name = short_name(pair[1])
    assert drafter_class(name) is type(pair[1])


def test_the_bundled_target_is_found_from_any_folder(pocket, make_drafter, tmp_path, monkeypatch):
    drafter = make_drafter("bigram", pocket)
    hub.save(drafter, pocket, tmp_path, "data/pocket")
    monkeypatch.chdir(tmp_path)
    assert from_pretrained(tmp_path).origin.name == "data/pocket"

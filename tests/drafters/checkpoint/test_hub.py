"""A saved drafter comes back as it was, or is refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from contract import saved
from faces import V

from decode.errors import UserError
from decode.model.target import Target
from drafters.checkpoint import io as hub
from drafters.checkpoint.pretrained import from_pretrained
from drafters.registry import drafter_class, short_name


def test_a_saved_drafter_holds_no_weight_of_the_target(pair, tmp_path):
    _, drafter, folder = saved(pair, tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    held = sum(w.numel() for w in drafter.state_dict().values()) * 4
    assert (folder / "model.safetensors").stat().st_size < held + 10_000


def test_another_targets_drafter_is_refused(pair, tiny_target, tmp_path):
    _, _, folder = saved(pair, tmp_path)
    for other in [{"seed": 5}, {"layers": 5}, {"vocab": 41}]:
        stranger = tiny_target(**{"vocab": V, "layers": 4, "hidden": 16, "dtype": torch.float32} | other)
        with pytest.raises(UserError, match="some/target"):
            hub.load(folder, stranger)


def test_a_target_in_another_dtype_is_the_same_target(pair, tiny_target, tmp_path):
    target, drafter, folder = saved(pair, tmp_path)
    target.model.to(torch.bfloat16)
    target.head = Target(target.model).head
    loaded = hub.load(folder, target)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16 for _ in drafter.parameters()}


def damage(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": None},
        {"settings": []},
        {"settings": {"hidden_size": 3}},
        {"target": None},
        {"target": "me"},
        {"format": None},
        {"format": 99},
        {"drafter": 3},
        {"drafter": "os:system"},
        {"drafter": "drafters.models.eagle:Eagle"},
        {"drafter": ""},
    ],
    ids=str,
)
def test_a_damaged_config_is_refused_in_one_line(pair, tmp_path, changes):
    target, _, folder = saved(pair, tmp_path)
    damage(folder, **changes)
    with pytest.raises(UserError) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)


def test_an_unknown_drafter_is_answered_with_the_known_ones(pair, tmp_path):
    target, drafter, folder = saved(pair, tmp_path)
    damage(folder, drafter="nobody")
    with pytest.raises(UserError, match=rf"'nobody'.*{short_name(drafter)}"):
        hub.load(folder, target)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"text"', '{"format": 1}'])
def test_a_config_that_is_none_is_refused(pair, tmp_path, text):
    target, _, folder = saved(pair, tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="not a drafter's config"):
        hub.load(folder, target)


@pytest.mark.parametrize("content", [b"", b"junk" * 100, None], ids=["empty", "junk", "missing"])
def test_damaged_weights_are_refused(pair, tmp_path, content):
    target, _, folder = saved(pair, tmp_path)
    path = folder / "model.safetensors"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match="damaged checkpoint"):
        hub.load(folder, target)


def test_a_folder_without_a_checkpoint_is_refused(pair, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        hub.load(tmp_path, pair[0])


def test_every_yaml_has_a_name_in_the_table(drafter_name, pair):
    name = short_name(pair[1])
    assert drafter_class(name) is type(pair[1])


def test_the_bundled_target_is_found_from_any_folder(pocket, make_drafter, tmp_path, monkeypatch):
    drafter = make_drafter("bigram", pocket)
    hub.save(drafter, pocket, tmp_path, "data/pocket")
    monkeypatch.chdir(tmp_path)
    assert from_pretrained(tmp_path).origin.name == "data/pocket"

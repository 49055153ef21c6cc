"""What a drafter's card says of its target: published name and licence, from the target's own files."""

from __future__ import annotations

import pytest
from ggufs import F32, tiny_llama, write_gguf
from workbench import ROOT, make_target

from decode.model.load import load_target
from drafters.checkpoint import pretrained
from drafters.checkpoint.published import Published, published

HUB = "https://huggingface.co/acme/target-7b"
KEYS = {"general.name": "Target 7B", "general.license": "Apache-2.0"}


def gguf_target(folder, card: str = "", **keys):
    named = {name.replace("__", "."): value for name, value in keys.items()}
    file = write_gguf(folder / "t.gguf", tiny_llama(layers=2), F32, keys=named)
    if card:
        file.with_suffix(".md").write_text(card)
    return load_target(str(file), "float32")


@pytest.mark.parametrize(
    ("keys", "card", "found"),
    [
        ({}, "", Published()),
        (KEYS, "", Published("Target 7B", "apache-2.0")),
        (KEYS | {"general.base_model.0.repo_url": HUB}, "", Published("acme/target-7b", "apache-2.0")),
        (
            KEYS,
            "---\nbase_model: acme/target-8b\nlicense: mit\n---\n# A model\n",
            Published("acme/target-8b", "mit"),
        ),
        (KEYS, "---\n[not: yaml\n---\n", Published("Target 7B", "apache-2.0")),
        ({"general.name": "/home/alice/models/target"}, "", Published("target", "")),
        ({"general.license": "mit\nbase_model: other/model"}, "", Published()),
    ],
)
def test_name_and_licence_are_those_of_the_file_and_of_its_card(keys, card, found, tmp_path, own_cache):
    assert published(gguf_target(tmp_path, card, **keys)) == found


def test_folder_has_a_licence_if_its_card_does(tmp_path):
    target = load_target(str(make_target(tmp_path / "target")))
    assert published(target) == Published()
    (tmp_path / "target" / "README.md").write_text("---\nlicense: mit\nbase_model: acme/base\n---\n")
    assert published(target) == Published("", "mit")
    assert published(load_target(str(ROOT / "data" / "pocket"))).licence == "apache-2.0"


def test_card_and_config_of_a_drafter_carry_both(tmp_path, own_cache, make_drafter):
    target = gguf_target(tmp_path, **KEYS | {"general.base_model.0.repo_url": HUB})
    pretrained.save_pretrained(make_drafter("medusa", target), tmp_path / "out", target)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# A drafter for acme/target-7b: `medusa`" in text
    assert "base_model: acme/target-7b\n" in text
    assert "within the licenses of the target (apache-2.0) and the data" in text
    assert "| target | acme/target-7b, as " in text
    assert "| target's licence | apache-2.0 |" in text
    again = pretrained.from_pretrained(tmp_path / "out", target)
    assert (again.origin.published, again.origin.licence) == ("acme/target-7b", "apache-2.0")

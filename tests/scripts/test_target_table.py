"""The table of docs/targets.md is what the probe says."""

import pytest
from workbench import ROOT

import target_table

QUICK = ("Llama 2, 3", "gpt-oss", "DeepSeek-V3, R1, Kimi-K2", "Mamba", "Llama 4", "BLOOM")


@pytest.fixture(autouse=True)
def fresh_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def page_rows():
    text = (ROOT / "docs" / "targets.md").read_text()
    inside = text.partition(target_table.BEGIN)[2].partition(target_table.END)[0]
    return [row for row in inside.splitlines() if row.startswith("| ") and not row.startswith("| family")]


def test_every_family_has_its_row():
    assert sorted(row.split(" | ")[0].removeprefix("| ") for row in page_rows()) == sorted(
        target_table.FAMILIES
    )


@pytest.mark.parametrize("name", target_table.FAMILIES)
@pytest.mark.ci(*QUICK)
def test_the_page_says_what_the_probe_says(name):
    assert target_table.line(name) in page_rows()

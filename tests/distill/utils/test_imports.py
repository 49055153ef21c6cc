"""Imports without garbage collection."""

import gc
import sys

import pytest

from distill.utils.imports import import_uncollected

SEEN = "import gc\nenabled = gc.isenabled()\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_pauses_and_is_as_before(module, enabled):
    (gc.enable if enabled else gc.disable)()
    name = module(f"paused_{enabled}", SEEN)
    assert import_uncollected(name).enabled is False
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert import_uncollected(name) is sys.modules[name]
    assert gc.get_freeze_count() == 0, "a module that was imported before changes nothing"


def test_collector_goes_on_after_a_failed_import(module):
    with pytest.raises(ZeroDivisionError):
        import_uncollected(module("broken", "1 / 0"))
    assert gc.isenabled()

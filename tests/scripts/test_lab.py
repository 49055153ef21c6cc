"""scripts/lab: every benchmark is found, and its configuration composes; its other tests are in tests/lab."""

from importlib import import_module

import hydra
import pytest
from workbench import CONF

from benchmark import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_found_with_its_configuration(name):
    module, _, function = BENCHMARKS[name].partition(":")
    assert callable(getattr(import_module(module), function))
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        assert hydra.compose(f"lab/{name}")


def test_every_configuration_belongs_to_a_script():
    names = {path.stem for path in (CONF / "lab").glob("*.yaml")} - {"arms"}  # a base of others
    assert names == BENCHMARKS.keys() | {"check_speculators", "train_target"}

"""docs/adding.md: with one file, one yaml and one line a drafter keeps the contract, trains and loads.

And with one file and one yaml a rule is found, decodes and is scored.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import contract
import pytest
import torch
import yaml
from drafter_checks import both
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from workbench import CONF, QUICK, ROOT, command, fork, make_target, write_prompts

from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan, plan_of
from decode.sampling import Sampler
from decode.verification.rule import class_in_file, rule_names
from distill.cli.main import main
from distill.config.compose import compose
from distill.losses import divergences
from distill.main import run
from drafters import registry
from drafters.checkpoint.io import load

PAGE = (ROOT / "docs" / "adding.md").read_text()
CODE, NAME, RULE, DIVERGENCE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
YAML, RULE_YAML, DIVERGENCE_YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
CASES = [case for name, case in vars(contract).items() if name.startswith("test_")]
CASES = [case for case in CASES if list(inspect.signature(case).parameters) == ["pair"]]
assert len(CASES) > 10


def loaded(name: str, path: Path) -> ModuleType:
    """A file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def added(tmp_path_factory) -> Path:
    """Its file is a module, its name in the table, its yaml in a copy of conf/."""
    root = tmp_path_factory.mktemp("adding")
    (root / "tiny.py").write_text(CODE)
    sys.modules["drafters.models.tiny"] = loaded("drafters.models.tiny", root / "tiny.py")
    ((name, place),) = yaml.safe_load("{" + NAME + "}").items()
    registry.CLASSES[name] = place
    shutil.copytree(CONF, root / "conf")
    (root / "conf" / "drafter" / "tiny.yaml").write_text(YAML)
    yield root
    del registry.CLASSES[name], sys.modules["drafters.models.tiny"]


@pytest.fixture
def pair(added, tiny_target):
    """The drafter of the page, with random weights, and a small target."""

    def make(name, target, **options):
        torch.manual_seed(0)
        drafter = instantiate(yaml.safe_load(YAML), **options)(target).to(target.dtype).eval()
        for weight in drafter.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        return drafter

    return both(tiny_target, make, "tiny")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_added_drafter_keeps_the_contract(pair, case):
    case(pair)


def test_added_drafter_trains_is_scored_and_drafts(added):
    target = make_target(added / "target")
    prompts = write_prompts(added / "prompts.jsonl", 12)
    argv = [f"target={target}", f"prompts={prompts}", f"output_dir={added / 'outputs'}", *QUICK]
    argv += ["drafter=tiny", "trainer.max_steps=2", "score.every=2"]
    assert not fork(lambda: command(lambda: main(run, added / "conf"), ["train.py", *argv]).code)
    (card,) = (added / "outputs").glob("*/*/checkpoints/2/score.json")
    target = load_target(str(added / "target"))
    drafter = load(card.parent, target)
    assert type(drafter).__name__ == "Tiny"
    target.tap(drafter.taps)
    options = {"max_new_tokens": 12, "sampler": Sampler(), "plan": Plan(depth=2)}
    drafted, plain = (generate(target, d, [[1, 60, 61, 2]], **options) for d in (drafter, None))
    assert drafted.outputs[0].tokens == plain.outputs[0].tokens
    assert sum(drafted.outputs[0].drafted)


@pytest.mark.proof
def test_every_drafter_test_passes_for_it_in_a_copy(tmp_path):
    """All tests that run for every drafter, those of CI and proofs."""
    for name in ("src", "conf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("scripts", "data", "docs", "pyproject.toml", "train.py", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src" / "drafters" / "models" / "tiny.py").write_text(CODE)
    (tmp_path / "conf" / "drafter" / "tiny.yaml").write_text(YAML)
    table = tmp_path / "src" / "drafters" / "registry.py"
    table.write_text(table.read_text().replace("CLASSES = {\n", f"CLASSES = {{\n{NAME}", 1))
    marks = "(proof or not proof) and not gpu and not engine and not docs"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += ["-k", "tiny and not tiny_", "tests/drafters", "tests/decode", "tests/distill"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", ended.stdout)[-1]) > 50


def test_added_drafter_gets_a_page(added):
    (added / "src" / "drafters" / "models").mkdir(parents=True)
    shutil.copy(added / "tiny.py", added / "src" / "drafters" / "models")
    builder = runpy.run_path(str(ROOT / "scripts" / "build_site.py"))
    assert "tiny" in builder["drafters"](added)
    page = builder["drafter_page"](added, "tiny")
    assert "| `drafter.depth` | `5` |" in page
    assert "`drafters.models.tiny.Tiny`" in page


# -- a rule -----------------------------------------------------------------------------------------


@pytest.fixture
def margin(tmp_path, monkeypatch) -> Iterator[Path]:
    """The page's rule next to the others, and its yaml in a copy of conf/."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "margin.py").write_text(RULE)
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "decode" / "rule" / "margin.yaml").write_text(RULE_YAML)
    rules = importlib.import_module("decode.lossy.rules")
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path / "rules")])
    for known in (rule_names, class_in_file):
        known.cache_clear()
    yield tmp_path / "conf"
    sys.modules.pop("decode.lossy.rules.margin", None)
    for known in (rule_names, class_in_file):
        known.cache_clear()


def test_a_rule_is_found_by_its_file_and_its_yaml(margin, tiny_target, make_drafter):
    overrides = ["decode=chain", "decode/rule=margin", "decode.rule.margin=0.25", "decode.lossy=true"]
    plan = instantiate(compose(overrides, margin).decode, _convert_="all")
    assert "margin" in rule_names()
    assert plan.name == "chain-3 margin 0.25 LOSSY"
    defaults = plan_of({"depth": 3, "rule": "margin", "lossy": True}).rule.settings
    assert defaults == {"name": "margin", "margin": 0.1}
    with pytest.raises(InstantiationException, match="rule=margin changes the target's distribution"):
        instantiate(compose(overrides[:-1], margin).decode, _convert_="all")
    target = tiny_target(vocab=6)
    drafter, options = make_drafter("mlp", target), {"max_new_tokens": 40, "sampler": Sampler(1.0)}
    plans = [Plan(3, rule={"name": "margin", "margin": m}, lossy=True) for m in (0.0, 1.0)]
    strict, loose = (generate(target, drafter, [[1, 2, 3]], plan=p, **options).outputs[0] for p in plans)
    assert max(loose.accepted) == min(loose.draft_lengths) == 3
    assert sum(strict.accepted) < sum(loose.accepted)


# -- a divergence -----------------------------------------------------------------------------------


def test_a_divergence_takes_a_function_and_a_yaml(monkeypatch, tmp_path):
    """Its gradient is the slope of its value, by autograd."""
    (tmp_path / "more.py").write_text(f"from __future__ import annotations\n\n{DIVERGENCE}")
    function = loaded("more", tmp_path / "more.py").hellinger
    monkeypatch.setattr(divergences, "hellinger", function, raising=False)
    divergence = instantiate(yaml.safe_load(DIVERGENCE_YAML))
    p = torch.randn(3, 5, dtype=torch.float64).softmax(-1)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    value, slope = divergence(SimpleNamespace(q=logits.softmax(-1)), SimpleNamespace(p=p))
    value.sum().backward()
    torch.testing.assert_close(logits.grad, slope)

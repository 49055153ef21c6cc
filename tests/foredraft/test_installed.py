"""Drafters and objectives of packages other than foredraft, found by their entry points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from workbench import CONF, ROOT, foredraft, train

import foredraft as foredraft_package
from decode.errors import UserError
from distill.config.compose import compose
from distill.export import recipe_of
from drafters.checkpoint.folder import read_config
from drafters.models.mlp import Mlp
from drafters.registry import drafter_class, known_names, short_name

DRAFTER = """
from drafters.models.mlp import Mlp

class Mine(Mlp):
    pass
"""
LOSS = """
from distill.losses.divergences import by_autograd

@by_autograd
def mine(log_q, teacher, gamma):
    return -(teacher.p * (1 - log_q.exp()) ** gamma * log_q).sum(-1)

class Wrong:
    pass
"""
OPTIONS = """# what its author says
depth: 2                # tokens ahead
inner_size: 8
tie_weights: true
scale_input: true
draft_vocab_size: null
"""
YAML = re.compile(r"```yaml\n(.*?)```", re.S)


class Packages:
    """A folder on sys.path, as of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def install(self, name: str, **entries: str) -> None:
        """Note a package and its entry points, as pip does."""
        groups = [f"[foredraft.{kind}s]\n{entry}\n" for kind, entry in entries.items()]
        self.file(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        self.file(f"{name}-1.0.dist-info/entry_points.txt", "".join(groups))


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Iterator[Packages]:
    found = Packages(tmp_path / "site")
    found.folder.mkdir()
    monkeypatch.syspath_prepend(str(found.folder))
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.fixture
def mine(packages) -> Packages:
    """A package with a drafter and an objective."""
    packages.file("my_pkg/__init__.py", "")
    packages.file("my_pkg/mine.py", DRAFTER)
    packages.file("my_pkg/loss.py", LOSS)
    packages.file("my_pkg/conf/drafter/mine.yaml", OPTIONS)
    packages.file("my_pkg/conf/objective/mine.yaml", "# sharper\ngamma: 2.0              # of the miss\n")
    packages.install("my-pkg", drafter="mine = my_pkg.mine:Mine", objective="mine = my_pkg.loss:mine")
    return packages


def test_package_is_in_help_and_in_errors(mine):
    shown = foredraft("train", "drafter=mine", "objective=mine", "--help").succeeded().out
    assert shown.count("installed: mine (my-pkg 1.0)") == 2
    assert "drafter.depth=2 " in shown
    assert "objective.gamma=2.0  of the miss" in shown
    assert "my_pkg" not in sys.modules  # help imports nothing of it
    train(["drafter=mini"]).refused("mine")
    train(["objective=mine", "objective.gama=2"]).refused("did you mean gamma?")


@pytest.mark.proof
def test_trained_drafter_and_objective_of_a_package_load_back(mine, bench):
    options = ["drafter=mine", "objective=mine", "objective.gamma=1.5", "compile_objective=always"]
    assert not bench.fork(*options, "trainer.max_steps=3", f"output_dir={mine.folder / 'outputs'}")
    (best,) = (mine.folder / "outputs").glob("*/*/checkpoints/best")
    assert json.loads((best / "config.json").read_text())["drafter"] == "mine"
    assert "gamma: 1.5" in (best.parents[1] / ".hydra" / "config.yaml").read_text()
    packages = {"drafter=mine": "my-pkg==1.0", "objective=mine": "my-pkg==1.0"}
    assert json.loads((best.parents[1] / "run.json").read_text())["packages"] == packages
    assert (recipe_of(best) or {})["packages"] == packages
    asked = ["generate", f"checkpoint={best}", "prompt=hi", "max_new_tokens=4", "decode=chain"]
    assert foredraft(*asked, "decode.depth=2").code == 0
    assert short_name(drafter_class("mine")(32, 260, 2, 8, True, True)) == "mine"
    (mine.folder / "my-pkg-1.0.dist-info" / "entry_points.txt").unlink()
    code = "from foredraft.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "drafter 'mine' is not known; install the package that has it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_downloaded_config_names_registered_drafters_only(mine):
    for name in ("my_pkg.mine:Mine", "my_pkg.mine.Mine", "os:system", "loss"):
        config = {"format": 1, "drafter": name, "settings": {}, "target": {}}
        mine.file("folder/config.json", json.dumps(config))
        with pytest.raises(UserError, match="is not known; install the package"):
            read_config(mine.folder / "folder")
    assert "my_pkg" not in sys.modules


def test_broken_package_stops_only_what_uses_it(mine):
    mine.file("my_pkg/mine.py", "import no_such_module\n")
    train(["drafter=mine"]).refused("drafter=mine of my-pkg 1.0: cannot be imported (ModuleNotFoundError")
    assert "mine" in known_names()
    assert drafter_class("mlp") is Mlp
    assert foredraft("train", "--help").code == 0
    train(["objective=mine", "drafter.dept=3"]).refused("did you mean depth?")


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ("eagle = my_pkg.mine:Mine", "drafter=eagle of my-pkg 1.0: foredraft has one of this name"),
        ("hass = my_pkg.mine:Mine", "drafter=hass of my-pkg 1.0: foredraft has one of this name"),
        ("mine = my_pkg.absent:Mine", "there is no module my_pkg.absent"),
        ("mine = my_pkg.mine", "write module:name"),
        ("mine = my_pkg.mine:Mlp", "must name the module that defines it, drafters.models.mlp.Mlp"),
        ("mine = my_pkg.loss:Wrong", "my_pkg.loss.Wrong is no subclass of drafters.base.Drafter"),
        ("other = my_pkg.mine:Mine", "the package must contain that file"),
        ("a-b = my_pkg.mine:Mine", "letters, digits and _ only"),
    ],
)
def test_wrong_entry_point_is_refused(mine, drafter, reason):
    mine.install("my-pkg", drafter=drafter)
    train([f"drafter={drafter.partition(' ')[0]}"]).refused(reason)
    if drafter.startswith("eagle"):
        assert drafter_class("eagle").__module__ == "drafters.models.eagle"


def test_name_of_two_packages_is_refused(mine):
    mine.install("other", drafter="mine = my_pkg.mine:Mine")
    train(["drafter=mine"]).refused("they declare the same name", "my-pkg 1.0", "other 1.0")


def test_wrong_options_and_objectives_are_refused(mine):
    mine.install("my-pkg", drafter="mine = my_pkg.mine:Mine", objective="mine = my_pkg.loss:Wrong")
    train(["objective=mine"]).refused("objective=mine of my-pkg 1.0: my_pkg.loss.Wrong must be a function")
    for text, reason in (("_target_: os.system", "remove _target_"), ("- 1", "lines of"), ("a: [", "read")):
        mine.file("my_pkg/conf/drafter/mine.yaml", text)
        train(["drafter=mine"]).refused(reason)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("return -(teacher.p * (1 - log_q.exp()) ** gamma * log_q).sum(-1)", ("write @by_autograd above",)),
        ("return log_q.logits, teacher.p", ("must return (M,) values", "a tensor (4, 16), a tensor (4, 16)")),
        ("return nothing.sum(-1)", ("NameError: name 'nothing'", "loss.py, line 2")),
    ],
)
def test_objective_that_cannot_be_trained_is_refused_before_work_starts(mine, loss, said):
    mine.file("my_pkg/loss.py", f"def mine(log_q, teacher, gamma):\n    {loss}\n")
    train(["objective=mine", f"output_dir={mine.folder / 'outputs'}"]).refused("objective mine:", *said)
    assert not [*(mine.folder / "outputs").glob("*/*")]
    with pytest.raises(UserError, match="objective mine:"):
        foredraft_package.train(objective="mine", output_dir=mine.folder / "outputs")


def test_package_of_the_page_is_found(packages):
    page, adding = ((ROOT / "docs" / name).read_text() for name in ("own.md", "adding.md"))
    ((project,), (loss,)) = (re.findall(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("toml", "python"))
    files = {"losses.py": loss, "tiny.py": re.findall(r"```python\n(.*?)```", adding, re.S)[0]}
    files |= zip(("conf/objective/focal.yaml", "conf/drafter/tiny.yaml"), YAML.findall(page), strict=True)
    for name, text in ({"__init__.py": ""} | files).items():
        packages.file(f"my_pkg/{name}", text)
    groups = tomllib.loads(project)["project"]["entry-points"]
    entries = {kind: f"foredraft.{kind}s" for kind in ("objective", "drafter")}
    found = {kind: groups[group].popitem() for kind, group in entries.items()}
    packages.install("my-pkg", **{kind: " = ".join(entry) for kind, entry in found.items()})
    config = compose(["objective=focal", "drafter=tiny"], CONF)
    assert (config.objective.gamma, config.drafter.depth) == (2.0, 5)
    assert drafter_class("tiny").__module__ == "my_pkg.tiny"


def test_class_without_an_entry_point_has_no_name():
    with pytest.raises(UserError, match=r"Own: not a known drafter; declare it as an entry point"):
        short_name(type("Own", (Mlp,), {})(32, 260, 2, 8, True, True))

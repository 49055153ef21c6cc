"""The command `foredraft`, and the wheel that installs it: help, refusals, contents."""

import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest
from workbench import CONF, ROOT, foredraft, make_target, write_prompts

from foredraft.cli import COMMANDS, command_of


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_function_a_configuration_and_help(name):
    command = COMMANDS[name]
    module, _, function = command.function.partition(":")
    assert callable(getattr(import_module(f"distill.{module}"), function))
    assert not command.config or (CONF / f"{command.config}.yaml").is_file()
    done = foredraft(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: foredraft {name} ")
    assert f"  {name} " in foredraft("--help").out


def test_advise_has_other_options_in_an_engine():
    assert command_of("advise", ["engine=vllm"]).config == "advise_engine"
    done = foredraft("advise", "engine=vllm", "--help")
    assert done.code == 0
    assert "engine_python" in done.out


def test_unknown_command_is_refused_with_the_nearest():
    foredraft("trian").refused("did you mean train?")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from foredraft.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'lightning'} & set(sys.modules); assert not slow, slow"
    )
    for arguments in (["--help"], ["train", "--help"], ["generate", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# -- the wheel, which works without the repository ------------------------------------------------

NAMES = {"foredraft", "distill", "drafters", "decode"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_has_configurations_data_and_one_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "foredraft = foredraft.cli:main" in archive.read(entry).decode()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == NAMES
    for kind in ("conf", "data"):
        there = {str(p.relative_to(ROOT)) for p in (ROOT / kind).rglob("*") if p.is_file()}
        there = {f"foredraft/{name}" for name in there if not name.startswith("conf/lab/")}
        assert there == {name for name in names if name.startswith(f"foredraft/{kind}/")}
    cited = set(re.findall(r"docs/[\w/]+\.md", foredraft("train", "--help").out + foredraft("--help").out))
    assert {f"foredraft/{name}" for name in cited} <= names
    assert {"docs/start.md", "docs/sweeps.md"} <= cited
    assert {"distill/report/page.css", "decode/py.typed", "foredraft/py.typed"} <= names


def test_no_dependency_owns_our_top_level_names():
    required = metadata.requires("foredraft") or []
    ours = {re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0].lower().replace("_", "-") for line in required}
    assert {"torch", "transformers", "hydra-core"} <= ours
    for name, owners in metadata.packages_distributions().items():
        if name in NAMES:
            assert not {owner.lower() for owner in owners} - {"foredraft"}, (name, owners)


@pytest.mark.proof
def test_wheel_trains_and_generates_in_an_empty_folder(wheel, tmp_path):
    installed, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    make_target(tmp_path / "target")
    prompts, held_out = write_prompts(tmp_path / "p.jsonl", 8), write_prompts(tmp_path / "h.jsonl", 4, 100)
    small = [f"target={tmp_path / 'target'}", f"prompts={prompts}", f"prompts.heldout={held_out}"]
    small += ["prompts.self=0", "trainer.max_steps=2", "score.every=2", "rollout.max_new_tokens=8"]
    small += ["score.max_new_tokens=6", "score.prompts=2", "score.replay_prompts=2", "batch_size=2"]
    small += ["logger=csv"]
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder = Path(python("-m", "foredraft", "train", "experiment=quick", *small).splitlines()[-1])
    assert (work / folder).parents[1].name == "outputs"
    best = f"checkpoint={work / folder / 'checkpoints' / 'best'}"
    assert python("-m", "foredraft", "generate", best, "prompt=say 3", "max_new_tokens=6")
    code = (
        "import foredraft; m = foredraft.load_target(); import distill.utils.paths as p; print(p.CONF)\n"
        "print(foredraft.generate(m, 'How do I use grep?', max_new_tokens=4).tokens)"
    )
    assert python("-c", code).startswith(str(installed / "foredraft" / "conf"))

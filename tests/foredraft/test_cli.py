"""The command `foredraft`: its commands, help and refusals."""

import subprocess
import sys
from importlib import import_module

import pytest
from workbench import CONF, foredraft

from foredraft.cli import COMMANDS


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

"""The command foredraft: words, help, and refusals in one line."""

import subprocess
import sys
from importlib import import_module

import pytest
from workbench import CONF, foredraft

from foredraft.cli import COMMANDS


@pytest.mark.parametrize("word", COMMANDS)
def test_every_word_has_a_function_a_configuration_and_help(word):
    command = COMMANDS[word]
    module, _, function = command.function.partition(":")
    assert callable(getattr(import_module(f"distill.{module}"), function))
    assert not command.config or (CONF / f"{command.config}.yaml").is_file()
    done = foredraft(word, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: foredraft {word} ")
    assert f"  {word} " in foredraft("--help").out


def test_an_unknown_word_is_one_line_with_the_nearest():
    done = foredraft("trian")
    done.refused("error: foredraft trian: did you mean train? choose one of train, generate, ")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from foredraft.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'lightning'} & set(sys.modules); assert not slow, slow"
    )
    for arguments in (["--help"], ["train", "--help"], ["generate", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

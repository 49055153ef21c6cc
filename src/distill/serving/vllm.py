"""Serve a target with vLLM, with a drafter's export or without."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from distill.engines.launch import VLLM_VARIABLES, interpreter, serve

PACKAGE, SERVER = "vllm", "vllm.entrypoints.openai.api_server"  # what `vllm serve` runs


class VLLM:
    """An installation of vLLM.

    Args:
        python: interpreter that has it.
        arguments: of every server.
        patience: seconds until a server has to be ready.
        option: that names the interpreter, for messages.

    Raises:
        UserError: no interpreter, or one without vLLM.
    """

    def __init__(
        self,
        python: str,
        arguments: Sequence[str] = (),
        patience: float = 900.0,
        option: str = "score.engine_python",
    ) -> None:
        self.python = interpreter(python, PACKAGE, option)
        self.arguments, self.patience = list(arguments), patience

    def serve(self, command: str, log: Path, *arguments: str) -> AbstractContextManager[str]:
        """The url of a running server; see `launch.serve`.

        Args:
            command: `vllm serve MODEL ...`, as an export prints it.
            log: file for its output.
            arguments: more of them; those of the installation come last, and decide.
        """
        program, verb, model, *rest = shlex.split(command)
        assert (program, verb) == ("vllm", "serve"), command
        words = ["--model", model, *rest, *arguments, *self.arguments]
        return serve(self.python, SERVER, words, log, patience=self.patience, variables=VLLM_VARIABLES)

"""Serve a target with vLLM, with or without an exported drafter."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from decode.model.load import source_of
from distill.engines.launch import VLLM_VARIABLES, Installation, Running, serve
from distill.options.answers import TargetOptions
from distill.utils.paths import bundled

PACKAGE, SERVER = "vllm", "vllm.entrypoints.openai.api_server"  # what `vllm serve` runs


class VLLM(Installation):
    """An installation of vLLM; see `Installation`."""

    package = PACKAGE

    def serve(
        self, command: str, log: Path, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Running]:
        """Start a server and yield it; see `launch.serve`.

        Args:
            command: `vllm serve MODEL ...`, as an export prints it.
            log: file for its output.
            arguments: additional arguments; the installation's arguments come last and override them.
            variables: environment variables of the server, unless they are set here.
        """
        program, verb, model, *rest = shlex.split(command)
        assert (program, verb) == ("vllm", "serve"), command
        return self._serve(["--model", model, *rest, *arguments], log, variables)

    def serve_target(
        self,
        target: TargetOptions,
        name: str,
        log: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
    ) -> AbstractContextManager[Running]:
        """Start a server with only a target, named `name`; otherwise like `serve`."""
        source, revision = source_of(str(bundled(target.name)), target.revision)
        words = ["--model", str(source), "--served-model-name", name, "--dtype", target.dtype]
        words += ["--revision", revision] if revision and not isinstance(source, Path) else []
        words += ["--trust-remote-code"] * target.trust_remote_code
        return self._serve([*words, *arguments], log, variables)

    def _serve(
        self, words: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Running]:
        every = VLLM_VARIABLES | dict(variables or {})
        return serve(
            self.python, SERVER, [*words, *self.arguments], log, patience=self.patience, variables=every
        )

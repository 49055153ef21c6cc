"""Serve a GGUF file with llama.cpp, with or without a drafter, from the wheel xllamacpp."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from distill.engines import inside
from distill.engines.launch import Installation, Running, serve, version_of

PACKAGE, SERVER = "xllamacpp", "foredraft_llama_server"  # package, and module of `inside` that serves with it


class LlamaCpp(Installation):
    """An environment that has xllamacpp; its arguments are those of `llama-server`; see `Installation`."""

    package = PACKAGE

    def build(self) -> str:
        """Build of llama.cpp, as in b11549: the last part of the package's version."""
        return f"b{version_of(self.python, PACKAGE).rpartition('.')[2]}"

    def serve(self, model: Path, log: Path, *arguments: str) -> AbstractContextManager[Running]:
        """Start a server of a GGUF file; yields it. The paths of its url are those of `llama-server`.

        Args:
            model: the target.
            log: file for its output.
            arguments: more arguments, such as `-md DRAFTER.gguf --spec-type draft-eagle3`. The installation's
                come last and override them.

        Raises:
            UserError: see `launch.serve`.
        """
        return serve(
            self.python,
            SERVER,
            ["-m", str(model), *arguments, *self.arguments],
            log,
            patience=self.patience,
            variables={"PYTHONPATH": str(Path(inside.__path__[0]).absolute())},
        )

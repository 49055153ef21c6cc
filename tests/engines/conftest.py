"""Fixtures of tests that run an engine: `make engines` installs them and names them in the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _named(variable: str, what: str) -> Path:
    """The path in an environment variable; without one the test is skipped, and CI has one."""
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
def llama_cpp() -> Path:
    """Source folder of llama.cpp: `convert_hf_to_gguf.py`, and `build/bin/llama-server`."""
    return _named("FOREDRAFT_LLAMA_CPP", "folder of llama.cpp")

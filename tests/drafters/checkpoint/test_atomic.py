"""Files that cannot be written: one kind of error, with the file's name, whichever library writes it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from workbench import fork

from drafters.checkpoint.atomic import publish, writing

LARGE = torch.zeros(10_000)
WRITERS = {
    "safetensors": lambda path: save_file({"a": LARGE}, path),
    "torch": lambda path: torch.save({"a": LARGE}, path),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": torch.randn(10_000).numpy()}), path),
    "text": lambda path: path.write_text("x" * 10_000),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_above_the_limit_is_an_os_error_that_names_it(writer, tmp_path):
    def body() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with publish(tmp_path / "final") as temporary:
                WRITERS[writer](temporary)
        except OSError as error:
            return 7 * ((error.errno, Path(error.filename)) == (errno.EFBIG, tmp_path / "final"))
        return 1

    assert os.waitstatus_to_exitcode(fork(body)) == 7
    assert not list(tmp_path.iterdir())


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
POSITION = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SafetensorError(FULL), errno.ENOSPC),
        (SafetensorError("I/O error: something"), errno.EIO),
        (RuntimeError(POSITION), errno.EIO),
        (SafetensorError("no such tensor"), None),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_errors_of_the_system_are_os_errors_and_others_stay(error, code, tmp_path):
    with pytest.raises(OSError if code else type(error)) as found, writing(tmp_path / "x"):
        raise error
    if code:
        assert (found.value.errno, found.value.filename) == (code, str(tmp_path / "x"))
    else:
        assert found.value is error

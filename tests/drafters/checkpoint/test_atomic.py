"""Files that cannot be written: one kind of error, with the name of the file, whichever library writes it."""

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
def test_a_limit_on_files_is_an_error_of_the_system_with_the_files_name(writer, tmp_path):
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            errno.ENOSPC,
        ),
        (SafetensorError("I/O error: something"), errno.EIO),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), errno.EIO),
    ],
)
def test_a_librarys_error_of_the_system_is_one(error, code, tmp_path):
    with pytest.raises(OSError, match=os.strerror(code)) as found, writing(tmp_path / "x"):
        raise error
    assert (found.value.errno, found.value.filename) == (code, str(tmp_path / "x"))


@pytest.mark.parametrize("error", [SafetensorError("no such tensor"), RuntimeError("shapes differ")])
def test_other_errors_stay_as_they_are(error, tmp_path):
    with pytest.raises(type(error), match=str(error)), writing(tmp_path):
        raise error

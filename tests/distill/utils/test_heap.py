"""Memory that is freed stays with the process: no page is faulted in twice."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from distill.utils.heap import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        block = torch.ones(2**20)  # 4 MiB, 1024 pages
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_block_is_used_again():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    kept, faults = out.split()
    assert kept == "False" or int(faults) < 1024  # fewer than those of one block in fifty

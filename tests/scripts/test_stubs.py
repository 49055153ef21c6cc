"""Stubs of functions as prompts: which records give one, and what is left out."""

import json

import pytest

from targets import stubs

NAMED = {"instruction": "Sum an array.", "input": "[1, 2]", "response": "def total(xs):\n    return sum(xs)"}
STUB = 'from typing import List\n\n\ndef total(xs):\n    """ Sum an array.\n    >>> total([1, 2])\n    """\n'


@pytest.mark.parametrize(
    ("changes", "prompt", "reason"),
    [
        ({}, STUB, ""),
        ({"input": "xs = [1, 2]"}, STUB.replace("    >>> total([1, 2])\n", ""), ""),
        ({"response": "Here:\ndef total(xs) -> int:\n  pass"}, STUB.replace("(xs):", "(xs) -> int:"), ""),
        ({"response": "print(3)"}, "", "no function"),
        ({"response": "def main():\n    pass"}, "", "no function"),
        ({"response": "def is_prime(n):\n    pass"}, "", "a name of the benchmark"),
        ({"instruction": "Sum an array in Java."}, "", "another language"),
    ],
)
def test_stub_has_signature_and_instruction(changes, prompt, reason):
    assert stubs.stub(NAMED | changes, {"is_prime"}) == (prompt, reason)


def test_each_signature_is_written_once_and_the_rest_is_counted(tmp_path, capsys):
    (tmp_path / "given.json").write_text(
        json.dumps([NAMED, NAMED, NAMED | {"response": "def is_prime(n):\n  1"}])
    )
    (tmp_path / "bench.jsonl").write_text(json.dumps({"entry_point": "is_prime"}) + "\n")
    stubs.main([str(tmp_path / "given.json"), "--without", str(tmp_path / "bench.jsonl")])
    printed = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in printed.out.splitlines()] == [STUB]
    assert printed.err.startswith("1 stubs; left out: {'a signature that was written': 1,")

"""JSON files that were written by a run: whole, or an error in one line."""

import pytest

from decode.errors import UserError
from distill.utils.atomic_files import read_json, write_json

DAMAGED = ["", "{", '{"a": 1', "[1]", '"text"', "3", "null", "\x00", "[" * 100_000, "{}", '{"a": "1"}']


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path, "advice", a=int) is None
    write_json(path, {"a": 1})
    assert read_json(path, "advice", a=int) == {"a": 1}


@pytest.mark.parametrize("data", [*map(str.encode, DAMAGED), b"\xff\xfe{}"])
def test_damaged_file_is_named_in_a_line(data, tmp_path):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError) as refused:
        read_json(tmp_path / "a.json", "remove it", a=int)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{tmp_path / 'a.json'}: damaged (")
    assert line.endswith("; remove it")

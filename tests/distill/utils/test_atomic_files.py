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


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_named_in_a_line(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_json(path, "remove it", a=int)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{path}: damaged (")
    assert line.endswith("); remove it")


def test_bytes_that_are_no_text_are_damage(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="damaged"):
        read_json(tmp_path / "a.json", "remove it")

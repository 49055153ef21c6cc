"""Scripts that score answers: their input, and how they fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
from workbench import ROOT

from decode.errors import UserError
from distill.prompts.prompt import Prompt
from distill.scoring.script_judge import ScriptJudge, judge_record

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
NUMBERS = ROOT / "scripts/lab/judges/exact_number.py"
ANSWERED = Prompt.of("sum", [QUESTION], category="math", reference="2 + 3 = 5, so #### 5")


def judge(tmp_path, body: str, name: str = "judge.py") -> ScriptJudge:
    path = tmp_path / name
    path.write_text(body)
    return ScriptJudge(str(path), "score.judge")


def test_script_is_started_once_and_reads_every_record(tmp_path):
    body = """
import json, sys
for count, line in enumerate(sys.stdin):
    record = json.loads(line)
    print(count + len(record["answer"]) / 100, flush=True)
"""
    with judge(tmp_path, body) as asked:
        assert [asked(judge_record(ANSWERED, text)) for text in ("", "12345")] == [0.0, 1.05]
        assert asked({"answer": "x" * 10**6}) == 2 + 10**4, "longer than a pipe holds"
    with asked:
        assert asked(judge_record(ANSWERED, "é\n")) == 0.02  # started again
    asked = judge(tmp_path, "import time\ntime.sleep(60)\n")  # reads nothing
    asked.seconds = 0.3
    with asked, pytest.raises(UserError, match="no score within"):
        asked({"answer": "x" * 10**6})


def test_record_has_the_prompt_the_answer_and_the_reference():
    reference = {"reference": "2 + 3 = 5, so #### 5"}
    expected = {"id": "sum", "category": "math", "messages": [QUESTION], "answer": "five"} | reference
    assert judge_record(ANSWERED, "five") == expected
    assert judge_record(Prompt.of("open", [QUESTION]), "")["reference"] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(3)", r"exit code 3"),
        ("print('well done', flush=True)", "wrote 'well done'"),
        ("print('nan', flush=True)", "wrote 'nan'"),
        ("os.write(1, b'\\xff\\xfe\\n')", "must write a number on a line"),
        ("os.write(1, b'0.5\\x00\\n')", "wrote '0.5"),
        ("time.sleep(60)", r"no score within judge\.timeout=0\.5 s"),
        ("os.write(1, b'1'); time.sleep(60)", r"no score within judge\.timeout=0\.5 s"),
        ("while True: os.write(1, b'1' * 999)", "wrote '11"),
        ("while True: os.write(1, b'1\\n' * 999)", r"wrote '1|wrote more: '1'"),
        ("os.write(1, b'1\\n2\\n')", "wrote more: '2'"),
        ("os.close(1); time.sleep(60)", "the script closed its output"),
        ("os.write(1, b'\\n')", "wrote ''"),
    ],
)
def test_malformed_score_is_one_line(tmp_path, body, message):
    asked = judge(tmp_path, f"import os, time\n{body}\ntime.sleep(60 * ('SystemExit' not in {body!r}))")
    asked.seconds = 0.5 if "seconds" in message or "within" in message else 20.0
    with asked, pytest.raises(UserError, match=rf"^score\.judge=.*(?:{message})") as error:
        asked({"answer": ""})
    assert str(error.value).isprintable()


@pytest.mark.parametrize("pause", [0, 0.01])
def test_two_lines_for_a_record_are_refused(tmp_path, pause):
    body = "import sys, time\nfor line in sys.stdin:\n    print(1, flush=True)\n"
    body += f"    time.sleep({pause})\n    print(2, flush=True)\n"

    def score() -> None:
        with judge(tmp_path, body) as asked:
            for _ in range(4):
                asked({"answer": ""})

    with pytest.raises(UserError, match="one line for a record, and wrote more"):
        score()


def test_any_program_can_judge_and_others_are_named(tmp_path):
    with pytest.raises(UserError, match=r"score\.judge=/nowhere: no such file"):
        ScriptJudge("/nowhere", "score.judge")
    with judge(tmp_path, "no program", "judge") as asked, pytest.raises(UserError, match="cannot be run"):
        asked({"answer": ""})
    asked = judge(tmp_path, '#!/bin/sh\nwhile read -r line; do echo "${#line}"; done\n', "judge")
    (tmp_path / "judge").chmod(0o755)
    with asked:
        assert asked({"a": 1}) == len('{"a": 1}')


@pytest.mark.parametrize(
    ("answer", "score"),
    [("so 5", 1.0), ("1,005.0", 0.0), ("5.0 apples", 1.0), ("none", 0.0), ("5, not 6", 0.0)],
)
def test_judge_of_numbers_compares_the_last(answer, score):
    with ScriptJudge(str(NUMBERS), "score.judge") as asked:
        assert asked(judge_record(ANSWERED, answer)) == score


def test_judge_of_numbers_needs_a_reference():
    record = '{"id": "p", "answer": "1", "reference": null}\n'
    done = subprocess.run([sys.executable, NUMBERS], input=record, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "prompt p" in done.stderr

"""foredraft generate judge.script=...: steps that a script decides on."""

from __future__ import annotations

import re

import pytest
from workbench import Outcome, foredraft, make_target

from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.utils.redact import printable
from drafters.checkpoint import io as hub

LENGTH = 12


@pytest.fixture(scope="module")
def bench(tmp_path_factory, make_drafter):
    """A tiny chat model, a draft model that is another one, a drafter that is none; judges of one mind."""
    root = tmp_path_factory.mktemp("bench")
    folder = make_target(root / "target")
    target = load_target(str(folder))
    for name in ("lm", "eagle"):
        (root / name).mkdir()
        hub.save(make_drafter(name, target), target, root / name, str(folder))
    for score in (0, 1):
        (root / f"{score}.py").write_text(
            f"import sys\nfor line in sys.stdin:\n    print({score}, flush=True)\n"
        )
    return root


def run(bench, judge: str, *overrides: str, drafter: str = "lm") -> Outcome:
    argv = [f"target={bench / 'target'}", f"max_new_tokens={LENGTH}", "prompt=hello", *overrides]
    argv += [f"checkpoint={bench / drafter}"] if drafter else []
    return foredraft("generate", *argv, f"judge.script={bench / judge}", r"judge.step=e")


def test_a_judge_that_likes_nothing_leaves_the_target_its_answer(bench):
    target, tokenizer = load_target(str(bench / "target")), load_tokenizer(str(bench / "target"))
    ids = Chat(tokenizer).encode([{"role": "user", "content": "hello"}])
    options = {"max_new_tokens": LENGTH, "sampler": Sampler(0.0), "stop": stop_tokens(target)}
    tokens = generate(target, None, [ids], **options).outputs[0].tokens
    done = run(bench, "0.py").succeeded()
    assert done.out == printable(tokenizer.decode(tokens, skip_special_tokens=True)) + "\n"
    figures = r"0 of \d+ steps are the draft model's, 12 tokens, \d+ tokens/s"
    assert re.fullmatch(figures + r"; plain \d+ tokens/s \(\d+\.\d\dx\); LOSSY\n", done.err)


def test_a_judge_that_likes_everything_leaves_the_answer_to_the_draft_model(bench):
    done = run(bench, "1.py", "plain=false").succeeded()
    assert re.fullmatch(
        r"(\d+) of \1 steps are the draft model's, \d+ tokens, \d+ tokens/s; LOSSY\n", done.err
    )
    assert done.out != run(bench, "0.py").out


@pytest.mark.parametrize(
    ("options", "drafter", "message"),
    [
        ([], "", "give checkpoint=, one of drafter=lm"),
        ([], "eagle", "this drafter writes no steps without the target; give a checkpoint of drafter=lm"),
        (["stop=[x]"], "lm", r"leave stop=\[\] and set judge.step"),
    ],
)
def test_what_no_judge_can_decide_on_is_refused_in_one_line(bench, options, drafter, message):
    done = run(bench, "1.py", *options, drafter=drafter)
    assert done.code == 2
    assert re.search(rf"^error: judge\.script: .*{message}$", done.err.strip())


def test_a_script_that_is_not_there_is_named(bench):
    done = run(bench, "none.py")
    assert done.code == 2
    assert re.search(r"judge\.script=.*none\.py: no such file", done.err)

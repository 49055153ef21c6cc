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
from drafters.checkpoint import io as checkpoint_io

LENGTH = 12


@pytest.fixture(scope="module")
def bench(tmp_path_factory, make_drafter):
    """A tiny chat model, a draft model and an EAGLE for it, and judges that always say 0 or 1."""
    root = tmp_path_factory.mktemp("bench")
    folder = make_target(root / "target")
    target = load_target(str(folder))
    for name in ("lm", "eagle"):
        (root / name).mkdir()
        checkpoint_io.save(make_drafter(name, target), target, root / name, str(folder))
    for score in (0, 1):
        body = f"import sys\nfor line in sys.stdin:\n    print({score}, flush=True)\n"
        (root / f"{score}.py").write_text(body)
    return root


def run(bench, judge: str, *overrides: str, drafter: str = "lm") -> Outcome:
    argv = [f"target={bench / 'target'}", f"max_new_tokens={LENGTH}", "prompt=hello", *overrides]
    argv += [f"checkpoint={bench / drafter}"] if drafter else []
    return foredraft("generate", *argv, f"judge.script={bench / judge}", r"judge.step=e")


def test_rejected_steps_are_the_targets(bench):
    target, tokenizer = load_target(str(bench / "target")), load_tokenizer(str(bench / "target"))
    ids = Chat(tokenizer).encode([{"role": "user", "content": "hello"}])
    options = {"max_new_tokens": LENGTH, "sampler": Sampler(0.0), "stop": stop_tokens(target)}
    tokens = generate(target, None, [ids], **options).outputs[0].tokens
    done = run(bench, "0.py").succeeded()
    assert done.out == printable(tokenizer.decode(tokens, skip_special_tokens=True)) + "\n"
    figures = r"0 of \d+ steps are the draft model's, 12 tokens, \d+ tokens/s"
    assert re.fullmatch(figures + r"; plain \d+ tokens/s \(\d+\.\d\dx\); LOSSY\n", done.err)


def test_accepted_steps_are_the_draft_models(bench):
    done = run(bench, "1.py", "plain=false").succeeded()
    assert re.fullmatch(
        r"(\d+) of \1 steps are the draft model's, \d+ tokens, \d+ tokens/s; LOSSY\n", done.err
    )
    assert done.out != run(bench, "0.py").out


@pytest.mark.parametrize(
    ("script", "options", "drafter", "said"),
    [
        ("1.py", [], "", "drafter=lm"),
        ("1.py", [], "eagle", "drafter=lm"),
        ("1.py", ["stop=[x]"], "lm", "judge.step"),
        ("none.py", [], "lm", "no such file"),
    ],
)
def test_what_cannot_be_judged_is_refused(bench, script, options, drafter, said):
    run(bench, script, *options, drafter=drafter).refused("judge.script", said)

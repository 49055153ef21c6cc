"""foredraft generate: one prompt answered on the terminal, and steps that a script decides on."""

from __future__ import annotations

import copy
import io
import re
import sys
from xml.etree import ElementTree

import pytest
import torch
from letters import MIXED
from torch import nn
from workbench import CONF, Outcome, foredraft, make_target, make_tokenizer

from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Output, Piece, Times
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill import text_generation
from distill.cli.main import rewrite
from distill.commands.generate import DRAFTED, PLAIN, plain_comparison, read_prompt, show, summary
from distill.config.compose import compose
from distill.prompts.chat_template import Chat
from distill.utils.progress import wants_color
from distill.utils.redact import printable
from drafters.checkpoint import io as checkpoint_io

NASTY = "it's \"so\" called: {a: [1, 2]}, x=${oc.env:HOME} \\${b} C:\\new\\\n\n#2 'end\\"
LENGTH = 12
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory, make_drafter):
    """A tiny chat model, a draft model and an EAGLE for it, and judges that always say 0 or 1."""
    root = tmp_path_factory.mktemp("bench")
    folder = make_target(root / "my target")
    target = load_target(str(folder))
    for name in ("lm", "eagle"):
        (root / name).mkdir()
        checkpoint_io.save(make_drafter(name, target), target, root / name, str(folder))
    for score in (0, 1):
        body = f"import sys\nfor line in sys.stdin:\n    print({score}, flush=True)\n"
        (root / f"{score}.py").write_text(body)
    return root


def run(bench, *overrides: str, drafter: str = "eagle") -> Outcome:
    argv = [f"target={bench / 'my target'}", f"max_new_tokens={LENGTH}", "threads=1", *overrides]
    argv += [f"checkpoint={bench / drafter}"] if drafter else []
    return foredraft("generate", *argv)


def judge(bench, script: str, *overrides: str, drafter: str = "lm") -> Outcome:
    options = ["prompt=hello", f"judge.script={bench / script}", "judge.step=e", *overrides]
    return run(bench, *options, drafter=drafter)


def plain_answer(bench, prompt, template="chat", sampler=None) -> str:
    """Text of the target's own answer."""
    target, tokenizer = load_target(str(bench / "my target")), load_tokenizer(str(bench / "my target"))
    ids = Chat(tokenizer, template).encode([{"role": "user", "content": prompt}])
    options = {"max_new_tokens": LENGTH, "sampler": sampler or Sampler(0.0), "stop": stop_tokens(target)}
    tokens = generate(target, None, [ids], **options).outputs[0].tokens
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


FIGURES = r"tree-16 \(depth 4, width 4\): 12 tokens, tau \d\.\d\d, \d+ tokens/s"
UNSCORED = "; a default plan: the drafter was not scored\n"


def test_answer_is_the_targets_and_figures_go_to_stderr(bench):
    done = run(bench, "prompt=How do I use grep?").succeeded()
    assert done.out == printable(plain_answer(bench, "How do I use grep?")) + "\n"
    assert re.fullmatch(FIGURES + r"; plain \d+ tokens/s \(\d+\.\d\dx\)" + UNSCORED, done.err)


def test_any_prompt_reaches_the_target(bench, monkeypatch):
    asked, encode = [], Chat.encode
    monkeypatch.setattr(Chat, "encode", lambda self, m: asked.append(m[0]["content"]) or encode(self, m))
    monkeypatch.setattr(sys, "stdin", io.StringIO(NASTY + "\n"))
    for given, prompt in ((NASTY, NASTY), ("null", "null"), ("'quoted'", "'quoted'"), ("-", NASTY)):
        done = run(bench, f"prompt={given}", drafter="").succeeded()
        assert asked.pop() == prompt
        assert done.out == printable(plain_answer(bench, prompt)) + "\n"
        assert re.fullmatch(r"plain: 12 tokens, \d+ tokens/s\n", done.err)
        asked.clear()


def test_plain_decoding_may_be_left_out(bench, monkeypatch):
    calls = []
    monkeypatch.setattr(text_generation, "generate", lambda *a, **k: calls.append(a[1]) or generate(*a, **k))
    done = run(bench, "prompt=hello", "plain=false")
    assert re.fullmatch(FIGURES + UNSCORED, done.err)
    assert [drafter is None for drafter in calls] == [False], "one warm-up, with the drafter"


def test_sampling_and_decode_options_are_applied(bench):
    settings = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    overrides = ["prompt=hello", "prompts.template=none"]
    overrides += [f"sampling.{name}={value}" for name, value in settings.items()]
    done = run(bench, *overrides, "decode=chain")
    assert done.out == printable(plain_answer(bench, "hello", "none", Sampler(**settings))) + "\n"
    assert done.err.startswith("chain-3: ")
    assert run(bench, *overrides, "seed=1").out != done.out


def test_stop_strings_end_the_answer(bench):
    text = plain_answer(bench, "hello", sampler=Sampler(1.0))
    letter = next(c for c in text[1:] if c.isascii() and c.isalnum())
    options = [
        "decode=dynamic",
        "decode.proposal=fixed",
        "sampling.temperature=1.0",
        f"stop=['{letter}', 'never mind', '\\n']",
    ]
    done = run(bench, "prompt=hello", *options)
    assert done.out == printable(text[: text.index(letter) + 1]) + "\n"
    cfg = compose(rewrite(["prompt=x", r'stop=["User:", "\n"]'], CONF), CONF, "generate")
    assert list(cfg.stop) == ["User:", r"\n"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["prompt=  \n"], "prompt: it is empty"),
        (["prompt=\udcff"], "prompt: not UTF-8"),
        ([], "prompt: must be given"),
        (["prompt=" + "x" * 400], "402 tokens and leaves no room"),
        (["prompt=x", "checkpoint=/no/where"], "checkpoint=/no/where: no such folder"),
        (["prompt=x", "max_new_tokens=0"], "max_new_tokens=0"),
        (["prompt=x", "color=blue"], "color=blue"),
        (["prompt=x", "sampling.top_p=0"], "top_p=0"),
        (["prompt=x", "checkpoint=/", "decode=auto"], "decode=fastest reads it there"),
        (["prompt=x", "checkpoint=/", "decode.depth=2"], "decode.depth: of a plan; name the plan, too"),
        (["prompt=x", "stop=['']"], "an empty stop string"),
        (["prompt=x", "stop=a"], "stop=a"),
        (["prompt=x", "prompts.template=jinja"], "prompts.template=jinja"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(bench, overrides, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(bench, *overrides, drafter="")
    done.refused(reason)
    assert done.out == ""
    assert not list(tmp_path.iterdir())


def test_svg_draws_the_answer_that_is_printed(bench, tmp_path):
    picture = tmp_path / "answer.svg"
    done = run(bench, "prompt=a < b & c", f"svg={picture}", "plain=false").succeeded()
    texts = [
        "".join(text.itertext())
        for group in ElementTree.parse(picture).getroot().iter(f"{SVG}g")
        for text in group.iter(f"{SVG}text")
    ]
    assert "".join(texts).removesuffix("    ") == done.out.replace("\n", "").replace("\t", "    ")
    tau = re.search(r"tau (\d\.\d\d)", done.err)
    assert tau
    assert f"eagle: tau {tau[1]} in this answer" in picture.read_text()


@pytest.mark.parametrize(
    ("overrides", "drafter", "reason"),
    [
        (["svg={}/a.svg"], "", "svg: shows accepted draft tokens; give checkpoint="),
        (["svg={}/a.svg", "judge.script=judge.py"], "lm", "svg: a judge accepts steps"),
        (["svg={}/none/a.svg"], "eagle", "is no file in a folder that exists"),
    ],
)
def test_svg_is_refused_before_work_starts(bench, tmp_path, overrides, drafter, reason):
    done = run(bench, "prompt=hello", *(o.format(tmp_path) for o in overrides), drafter=drafter)
    done.refused(reason)
    assert done.out == ""


def piece(tokens, drafted=None) -> Piece:
    return Piece(tokens, [bool(d) for d in drafted or [0] * len(tokens)], Output(tokens), Times())


def test_character_has_the_colour_of_its_last_token(capsys):
    """Here é of two tokens, the second of them drafted, and 中 of three, the last of them not."""
    made = [piece([0]), piece([6, 7, 8], [0, 1, 0]), piece([9, 10, 11], [1, 1, 1]), piece([12])]
    last, parts = show(iter(made), MIXED, color=True)
    assert last is made[-1]
    assert parts == [("a", False), ("é", True), ("b", False), ("éa", True), ("中", False), ("\ufffd", False)]
    green = "{}{}{}".format
    expected = f"a{green(DRAFTED, 'é', PLAIN)}b{green(DRAFTED, 'éa', PLAIN)}中\ufffd\n"
    legend, text = capsys.readouterr().out.split("\n\n", 1)
    assert text == expected
    assert DRAFTED in legend
    show(iter(made), MIXED, color=False)
    assert capsys.readouterr().out == re.sub(r"\x1b\[\d+m", "", expected)


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_terminals_that_want_it(tty, variables, is_wanted, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wanted = [wants_color(option) for option in ("auto", "always", "never")]
    assert wanted == [tty and is_wanted, True, False]


def test_figures_by_hand():
    output = Output([0] * 10, emitted=[4, 3, 2], accepted=[3, 2, 4])
    assert summary(Plan(depth=4), output, Times(total=0.5)) == "chain-4: 10 tokens, tau 3.00, 18 tokens/s"
    assert summary(Plan(), Output([0]), Times()) == "plain: 1 token, 0 tokens/s"
    assert plain_comparison(18.0, 12.0) == "; plain 12 tokens/s (1.50x)"
    assert plain_comparison(0.0, 0.0) == ""


def test_stdin_must_be_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompt("-")


def test_answer_has_no_control_characters(capsys):
    text = "a\x1b[31m\x07b\rc\x9b\u202e d\te\u3000é👩\u200d🚀"
    letters = make_tokenizer()
    show(iter([piece(letters.encode(text, add_special_tokens=False))]), letters, color=False)
    assert capsys.readouterr().out == "a\ufffd[31m\ufffdb\ufffdc\ufffd\ufffd d\te\u3000é👩\u200d🚀\n"


# -- judges ----------------------------------------------------------------------------------------


def test_rejected_steps_are_the_targets_and_accepted_ones_the_draft_models(bench):
    rejected = judge(bench, "0.py").succeeded()
    assert rejected.out == printable(plain_answer(bench, "hello")) + "\n"
    figures = r"0 of \d+ steps are the draft model's, 12 tokens, \d+ tokens/s"
    assert re.fullmatch(figures + r"; plain \d+ tokens/s \(\d+\.\d\dx\); LOSSY\n", rejected.err)
    accepted = judge(bench, "1.py", "plain=false").succeeded()
    figures = r"(\d+) of \1 steps are the draft model's, \d+ tokens, \d+ tokens/s; LOSSY\n"
    assert re.fullmatch(figures, accepted.err)
    assert accepted.out != rejected.out


@pytest.mark.parametrize(
    ("script", "options", "drafter", "reason"),
    [
        ("1.py", [], "", "drafter=lm"),
        ("1.py", [], "eagle", "drafter=lm"),
        ("1.py", ["stop=[x]"], "lm", "judge.step"),
        ("none.py", [], "lm", "no such file"),
    ],
)
def test_steps_that_cannot_be_judged_are_refused(bench, script, options, drafter, reason):
    judge(bench, script, *options, drafter=drafter).refused("judge.script", reason)


# -- a drafter that verifies with a copy of the target ---------------------------------------------


class Tunes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def verifier(self, target: Target) -> Target:
        tuned = copy.deepcopy(target.model)
        tuned.get_output_embeddings().weight.data.mul_(self.scale.sum())
        return Target(tuned)


def test_tuned_copy_of_a_target_follows_new_weights_of_either(bench):
    target, drafter = load_target(str(bench / "my target")), Tunes()
    model = text_generation.Model(target, chat=None)
    seen = [model.verifier(drafter)]
    assert model.verifier(drafter) is seen[0]
    target.model.get_submodule("model.layers.0.mlp.down_proj").weight.data.mul_(2)
    seen.append(model.verifier(drafter))
    drafter.scale.data[1] = 5
    seen.append(model.verifier(drafter))
    assert len({verifier.fingerprint() for verifier in seen}) == 3
    assert seen[2].fingerprint() == drafter.verifier(target).fingerprint()
    assert model.verifier(drafter) is seen[2]

"""The authors' own decoding loops accept of an export, round by round, what our decoder accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from engine_tests import ask_script, fit
from workbench import ROOT

from decode.evaluation.teacher_forced import Rollout
from decode.generation.generate import generate
from decode.generation.types import Output
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.scoring.served import figures
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.models.medusa import Medusa

RUN = ROOT / "tests" / "support" / "authors_loops.py"
POCKET = ROOT / "data" / "pocket"
PACKAGES = {"eagle": "eagle-llm 1.2.1", "medusa": "medusa-llm 0.1"}
TOKENS, DEPTH, STEPS = 64, 3, 20
CHAIN = [[0] * (depth + 1) for depth in range(DEPTH)]
CASES = {  # name: kind, tree as that package takes it
    "EAGLE, a chain of 3": ("eagle", CHAIN),
    "EAGLE, its tree of 25 nodes": ("eagle", None),
    "Medusa, a chain of 3": ("medusa", [1, 1, 1]),
    "Medusa, a tree of 40 nodes": ("medusa", [4, 3, 2]),
}
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(str(POCKET), "float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Eight of the held-out prompts, of all categories."""
    chat = Chat(load_tokenizer(str(POCKET)))
    return [chat.encode(p.messages) for p in read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")][::13]


@pytest.fixture(scope="module")
def trained(target, prompts) -> Callable[[str], Drafter]:
    """The EAGLE of 800 steps, or a Medusa that has seen six of the eight answers a few times."""

    @cache
    def trained(kind: str) -> Drafter:
        if kind == "eagle":
            made = checkpoint_io.load(ROOT / "tests" / "fixtures" / "drafters" / "eagle", target)
            target.tap(made.taps)
            return made
        plain = zip(prompts, answers(target, None, prompts, Plan()), strict=True)
        return fitted(target, [Rollout(prompt, output.tokens) for prompt, output in plain][:6])

    return trained


def answers(target: Target, drafter: Drafter | None, prompts: list[list[int]], plan: Plan) -> list[Output]:
    options = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0), "stop": stop_tokens(target)}
    return generate(target, drafter, prompts, plan=plan, **options).outputs


def fitted(target: Target, texts: Sequence[Rollout]) -> Drafter:
    """Heads with a bias, as the authors' have, which is large enough to matter."""
    heads = Medusa.for_target(target, depth=DEPTH, layers=1, own_head=True, bias=True).train()
    for block in heads.blocks:
        torch.nn.init.normal_(block.layers[0].bias)
    target.tap(heads.taps)
    rows = [torch.tensor([*text.prompt, *text.answer]) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, text in zip(mask, texts, strict=True):
        row[len(text.prompt) : len(text.prompt) + len(text.answer)] = True
    with torch.no_grad():
        read = target.read(tokens)
    batch = Batch(tokens, mask, read.taps, read.last)
    return fit(heads, target, batch, 1e-3, STEPS)


def accepted(rounds: Sequence[Sequence[int]]) -> str:
    """Share of rounds that accept a token at each depth, and tokens per round with the target's own."""
    counts = [count for each in rounds for count in each]
    shares = [sum(count > depth for count in counts) / len(counts) for depth in range(max(counts))]
    return f"{figures(shares)}, tau {1 + sum(counts) / len(counts):.2f}"


@pytest.mark.parametrize("case", CASES)
def test_the_authors_loop_accepts_of_an_export_what_we_accept(
    authors_python, target, prompts, trained, engine_row, tmp_path, case
):
    kind, tree = CASES[case]
    drafter = trained(kind)
    formats.write_layout(checkpoint_io.as_saved(drafter), target, "authors").write(tmp_path)
    theirs = ask_script(authors_python, RUN, kind, POCKET, tmp_path, prompts, TOKENS, tree)
    plan = Plan(tree=tuple(map(tuple, theirs["tree"])))
    ours = answers(target, drafter, prompts, plan)
    # Their answers continue behind the end with what the last round accepted, as ours do before the cut.
    texts = [found[: len(one.tokens)] for found, one in zip(theirs["answers"], ours, strict=True)]
    # A round writes its root there and the token behind the accepted ones here. So where the last token is
    # the target's own, which is where nothing is cut off, they begin one more round, which writes it.
    more = [1 + sum(one.accepted) + len(one.accepted) == len(one.tokens) for one in ours]
    there = [found[: len(one.accepted)] for found, one in zip(theirs["accepted"], ours, strict=True)]
    here = [one.accepted for one in ours]
    equal = f"{sum(found == one.tokens for found, one in zip(texts, ours, strict=True))} of {len(ours)} equal"
    engine_row(case, "authors", PACKAGES[kind], equal, accepted(here), accepted(there))
    assert texts == [one.tokens for one in ours]
    assert there == here
    assert [len(found) - len(one) for found, one in zip(theirs["accepted"], here, strict=True)] == more
    assert {0, 1, 2, plan.depth} <= {count for each in here for count in each}  # of all kinds

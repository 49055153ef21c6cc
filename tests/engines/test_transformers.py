"""transformers itself drafts with an exported draft model, DFlash or MTP head, and accepts what we accept."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tests import ask_script, exported, fit, greedy_texts, random_target
from transformers import AutoTokenizer, MellumConfig
from workbench import ROOT

from decode.generation.generate import generate
from decode.generation.types import Round
from decode.model.load import load_target, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.scoring.served import figures
from drafters.base import Batch, Drafter
from drafters.hf.mtp_weights import Arrangement
from drafters.models.dflash import DFlash
from drafters.models.lm import DraftLM
from drafters.models.mtp import Mtp

RUN = ROOT / "tests" / "support" / "transformers_drafts.py"
TOKENS = 48
MELLUM: dict[str, Any] = {"mlp_layer_types": ["dense"] * 3, "layer_types": ["full_attention"] * 3}
Case = tuple[Target, Drafter, list[list[int]], int]
pytestmark = pytest.mark.engine


def pocket() -> Target:
    return load_target(str(ROOT / "data" / "pocket"), "float32")


def questions(width: int) -> torch.Tensor:
    """(8, width) first tokens of questions to the bundled target."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "pocket")
    lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines()
    rows = [tokenizer(json.loads(line)["messages"][0]["content"]).input_ids for line in lines]
    rows = [row[:width] for row in rows if len(row) >= width]
    return torch.tensor(rows[:: len(rows) // 8][:8])


def fitted(target: Target, drafter: Drafter, prompts: torch.Tensor, steps: int) -> Drafter:
    """A drafter that is trained on the answers to six of eight prompts."""
    target.tap(drafter.taps)
    texts = greedy_texts(target, prompts[:6], TOKENS)
    read = target.read(texts)
    batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), read.taps, read.last)
    return fit(drafter.train(), target, batch, 3e-3, steps)


def draft_model(folder: Path) -> Case:
    target = pocket()
    drafter = DraftLM.for_target(target, path=str(ROOT / "data" / "pocket-draft"), train=False)
    return target, drafter.float().eval(), questions(8).tolist(), 5


def dflash(folder: Path) -> Case:
    target, prompts = pocket(), questions(8)
    options = {"taps": [2, 5, 9], "layers": 2, "depth": 4, "anchors": 0, "mask_id": None}
    drafter = fitted(target, DFlash.for_target(target, **options), prompts, 240)
    return target, drafter, prompts.tolist(), 4


def mtp(folder: Path) -> Case:
    target = random_target(MellumConfig, folder, **MELLUM)
    prompts = torch.randint(target.vocab_size, (8, 12), generator=torch.Generator().manual_seed(1))
    options = {"path": None, "draft_vocab_size": None, "qk_norm": True} | dict.fromkeys(Arrangement._fields)
    drafter = fitted(target, Mtp.for_target(target, depth=1, **options), prompts, 120)
    return target, drafter, prompts.tolist(), 1


CASES = {
    "lm": ("draft model, bundled", draft_model),
    "dflash": ("DFlash, two layers", dflash),
    "mtp": ("MTP, beside a random Mellum", mtp),
}


def counted(case: Case, ends_drafts: bool) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Answers, and how many tokens every round drafts and accepts, by our decoder.

    Args:
        case: what decodes.
        ends_drafts: count no drafted tokens behind an end token, nor where the answer's length leaves no
            room: a draft model drafts them here, and not there.
    """
    target, drafter, prompts, depth = case
    ends, answers, counts = stop_tokens(target), [], []
    for prompt in prompts:
        rounds: list[Round] = []
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0)}
        options |= {"plan": Plan(depth=depth), "stop": ends, "on_round": rounds.append}
        (output,) = generate(target, drafter, [prompt], **options).outputs
        answers.append(output.tokens)
        counts.append([])
        settled = 1  # by the prefill, which is the first round
        for one in rounds[1:]:
            drafted = one.draft.tokens[0].tolist()
            if ends_drafts:
                drafted = drafted[: TOKENS - settled - 1]
                found = [place for place, token in enumerate(drafted) if token in ends]
                drafted = drafted[: found[0] + 1] if found else drafted
            counts[-1].append([len(drafted), int(one.result.accepted)])
            settled += counts[-1][-1][1] + 1
    return answers, counts


@pytest.mark.parametrize("kind", CASES)
def test_transformers_drafts_what_we_draft(transformers_python, engine_row, tmp_path, kind):
    name, make = CASES[kind]
    target, _, prompts, depth = case = make(tmp_path / "target")
    exported(case[1], target, "transformers", tmp_path / "draft")
    answers, ours = counted(case, kind == "lm")
    # A draft model drafts there before the target's first pass: it is given the token that we begin with.
    given = [[*prompt, answer[0]] for prompt, answer in zip(prompts, answers, strict=True)]
    given, tokens = (given, TOKENS - 1) if kind == "lm" else (prompts, TOKENS)
    where = target.model.name_or_path
    theirs = ask_script(transformers_python, RUN, kind, where, tmp_path / "draft", given, tokens)
    begun = [answer[: TOKENS - tokens] for answer in answers]
    plain = [first + rest for first, rest in zip(begun, theirs["plain"], strict=True)]
    found = [first + one["answer"] for first, one in zip(begun, theirs["drafted"], strict=True)]
    # What is counted of an answer's last draft depends on where the answer is cut.
    there, here = (
        [one[:-1] for one in each] for each in ([one["rounds"] for one in theirs["drafted"]], ours)
    )
    shares = [shares_of([*chain.from_iterable(each)], depth) for each in (here, there)]
    same = sum(map(list.__eq__, found, plain))
    engine = f"transformers {theirs['version']}"
    engine_row(name, "transformers", engine, f"{same} of {len(plain)} equal", *shares)
    assert found == plain == answers
    assert there == here
    drafted, accepted = map(sum, zip(*chain.from_iterable(here), strict=True))
    assert accepted > 0.2 * drafted  # else there is nothing to compare


def shares_of(rounds: list[list[int]], depth: int) -> str:
    """Share of rounds that accept each position, and the counts of all tokens."""
    shares = [sum(count > place for _, count in rounds) / len(rounds) for place in range(depth)]
    drafted, accepted = map(sum, zip(*rounds, strict=True))
    return f"{figures(shares)}, {accepted} of {drafted} drafted tokens"

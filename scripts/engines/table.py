"""Serve a drafter of every kind in vLLM, and write the table of docs/engines.md: part of `make engines`.

Runs lie in outputs/engines; what is there is not trained again. Lines of what tests serve (EAGLE, EAGLE-3,
DSpark, MTP, the authors' packages, llama.cpp) come from the tests before this, by pytest's junit file in that
folder; those of programs that do not run here, from tests that restate their loaders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.hardware import hardware
from distill.report.served import difference, figures, speed, texts
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
RUNS = ROOT / "outputs" / "engines"
TESTS = RUNS / "tests.xml"
STEPS = 100  # of few and short answers: a minute for each drafter
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = ("drafter", "`to=`", "engine", "loads", "greedy answers", "accepted here", "accepted there, noise")
NAMES = (*NAMES, "agrees", "speedup there")


class Case(NamedTuple):
    """A drafter to serve in vLLM.

    Attributes:
        name: in the table.
        settings: overrides of train.py.
        to: format that it is served in.
    """

    name: str
    settings: tuple[str, ...]
    to: str = "vllm"


CASES = (
    Case("EAGLE-3, `fc_norm=false`", ("drafter=eagle3", "drafter.fc_norm=false")),
    Case("EAGLE-3, 1024 tokens", ("drafter=eagle3", "drafter.draft_vocab_size=1024")),
    Case("P-EAGLE", ("drafter=p_eagle",), "speculators"),
    Case("Medusa", ("drafter=medusa",)),
    Case("Medusa-2, tuned target", ("drafter=medusa2",)),
    Case("DFlash, one layer", ("drafter=dflash", "drafter.layers=1")),
    Case("draft model", ("drafter=lm_given", "drafter.path=data/pocket-draft")),
)
FILES = "tests/drafters/export/test_export"
ENGINE, AUTHORS = f"{FILES}_eagle.py::test_an_engine_computes", f"{FILES}_authors.py::test_the_authors_eagle"
RESTATED = {  # drafter, `to`, program: the test that compares logits
    ("EAGLE", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle without-sglang]",
    ("EAGLE-3", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle3.1-sglang]",
    ("EAGLE-3, `fc_norm=false`", "sglang", "SGLang 0.5.23"): f"{ENGINE}_the_drafters_logits[eagle3-sglang]",
    ("EAGLE-3", "authors", "SafeAILab's EAGLE"): f"{AUTHORS}_computes_the_drafters_logits[eagle3]",
}


def main(python: str, only: str) -> int:
    """Train, serve and write the page; returns the number of lines that are not as they should be."""
    chosen = [case for case in CASES if only in case.name]
    RUNS.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    run([sys.executable, "train.py", *common("rollouts"), "drafter=ngram"], RUNS / "rollouts.log")
    with ThreadPoolExecutor(2) as pool:
        cards = list(pool.map(lambda case: served(case, python), chosen))
    lines = [*tested(), *(cells(case, card) for case, card in zip(chosen, cards, strict=True)), *restated()]
    write(lines, [card for card in cards if card], (time.monotonic() - begun) / 60)
    wrong = [line[0] for line in lines if "NO" in line]
    print(f"{len(lines) - len(wrong)} of {len(lines)} are served as they were scored", *wrong, sep="\n  ")
    return len(wrong)


def common(name: str) -> list[str]:
    """Overrides of every run: few and short answers, whose hidden states are read once."""
    words = [f"output_dir={RUNS}", f"hydra.run.dir={RUNS / name}", "logger=csv", "score.enabled=false"]
    words += ["prompts.self=0", "prompts.limit=96", "rollout.max_new_tokens=64", "rollout.until=answer"]
    return [*words, "max_tokens=160", "batch_size=4", f"trainer.max_steps={STEPS}"]


def served(case: Case, python: str) -> Scorecard | None:
    """The scorecard of a case, with what vLLM measured; None where a command failed."""
    name = "-".join(word.partition("=")[2].replace("/", "_") for word in case.settings)
    card, checkpoint = RUNS / f"{name}.json", RUNS / name / "checkpoints" / "last"
    if not checkpoint.exists() and run(
        [sys.executable, "train.py", *common(name), *case.settings], RUNS / f"{name}.train.log"
    ):
        return None
    words = [f"checkpoint={checkpoint}", "score.engine=vllm", f"score.engine_python={python}", f"out={card}"]
    words += ["decode=chain", "decode.depth=3", "score.alternatives=[]", "score.prompts=2"]
    words += ["score.replay_prompts=32", "target.dtype=float32", f"answers={RUNS}/heldout"]
    command = [sys.executable, "-m", "foredraft", "score", *words]
    return None if run(command, RUNS / f"{name}.score.log") else read_scorecard(card)


def run(command: Sequence[str], log: Path) -> int:
    """Run a command with its output in a file; says where that is if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output).returncode
    print(f"{'failed' if code else 'done'}: {log}", flush=True)
    return code


def cells(case: Case, card: Scorecard | None) -> list[str]:
    """The line of a drafter that vLLM served."""
    if not card or not card.served:
        return [case.name, f"`{case.to}`", "vllm", "NO", *[""] * 5]
    one = card.served[0]
    here = f"{figures(one.scored_survival)}, tau {one.scored_tau:.2f}"
    there = f"{figures(one.survival)} ± {figures(one.noise)}, tau {one.tau:.2f}"
    sound = one.agrees and not (one.texts and one.texts[2])
    agrees = "yes" if sound else "NO"
    return [case.name, f"`{case.to}`", one.engine, "yes", texts(one), here, there, agrees, speed(one)]


def tested() -> Iterator[list[str]]:
    """Lines of the tests that ran before this."""
    for test in ElementTree.parse(TESTS).iter("testcase") if TESTS.exists() else ():
        passed = test.find("failure") is None and test.find("error") is None
        for found in test.iter("property"):
            if found.get("name") == "engine_row":
                row = json.loads(found.get("value", ""))
                told = [row["drafter"], f"`{row['to']}`", row["engine"], "yes", row["texts"]]
                yield [*told, row["here"], row["there"], "yes" if passed else "NO", ""]


def restated() -> Iterator[list[str]]:
    """Lines of loaders that are restated from their source."""
    for (name, to, program), test in RESTATED.items():
        failed = run([sys.executable, "-m", "pytest", "-q", test], RUNS / "restated.log")
        told = "NO" if failed else "logits within 1e-5"
        yield [name, f"`{to}`", f"{program}, restated", "", "", "", "", told, ""]


def write(lines: Sequence[Sequence[str]], cards: Sequence[Scorecard], minutes: float) -> None:
    """Replace the table of the page."""
    rows = [f"| {' | '.join(line)} |" for line in (NAMES, *lines)]
    rows.insert(1, "|---" * len(NAMES) + "|")
    notes = [f"- {difference(one)}" for card in cards for one in card.served if not one.agrees]
    where = f"Written by `make engines` at commit {commit()} on {hardware(torch.device('cpu'))}, T=0, fp32, "
    where += f"{STEPS} steps, in {minutes:.0f} minutes after the tests, training included."
    table = "\n".join([where, "", *rows, "", *notes])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("python", help="interpreter that has vLLM")
    parser.add_argument("--only", default="", help="drafters whose names contain this")
    given = parser.parse_args()
    raise SystemExit(main(given.python, given.only))

"""Train a drafter of every kind, serve each in vLLM, and write docs/engines.md: part of `make engines`.

Lines of engines that no run can start come from tests: those of pytest's junit file that has been written, and
the restated loaders, which run here. Runs lie in outputs/engines; what is there is not trained again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from decode.evaluation.scorecard import Scorecard, read_scorecard
from decode.hardware import hardware
from distill.report.served import difference, figures, speed, texts
from distill.utils.provenance import commit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
RUNS = ROOT / "outputs" / "engines"
STEPS = 400  # enough for tau >= 1.5 of most
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


class Case(NamedTuple):
    """A drafter to serve.

    Attributes:
        name: in the table.
        settings: overrides of train.py.
        to: format that it is served in.
    """

    name: str
    settings: tuple[str, ...]
    to: str = "vllm"


CASES = (
    Case("EAGLE", ("drafter=eagle",)),
    Case("EAGLE-3", ("drafter=eagle3",)),
    Case("EAGLE-3, `fc_norm=false`", ("drafter=eagle3", "drafter.fc_norm=false")),
    Case("EAGLE-3, 1024 tokens", ("drafter=eagle3", "drafter.draft_vocab_size=1024")),
    Case("P-EAGLE", ("drafter=p_eagle",), "speculators"),
    Case("Medusa", ("drafter=medusa",)),
    Case("Medusa-2, tuned target", ("drafter=medusa2",)),
    Case("DFlash", ("drafter=dflash",)),
    Case("draft model", ("drafter=lm_given", "drafter.path=data/pocket-draft")),
)


def main(python: str, only: str) -> int:
    """Train, serve and write the page; returns the number of drafters that a test would fail on."""
    chosen = [case for case in CASES if only in case.name]
    RUNS.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    run([sys.executable, "train.py", *common("rollouts"), "drafter=ngram"], RUNS / "rollouts.log")
    with ThreadPoolExecutor(2) as pool:
        cards = list(pool.map(lambda case: served(case, python), chosen))
    lines = [line(case, card) for case, card in zip(chosen, cards, strict=True)]
    write(lines, [card for card in cards if card], (time.monotonic() - begun) / 60)
    wrong = [case.name for case, card in zip(chosen, cards, strict=True) if not sound(card)]
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} are served as they were scored", *wrong, sep="\n  ")
    return len(wrong)


def common(name: str) -> list[str]:
    """Overrides of every run."""
    place = RUNS / name
    return [f"output_dir={RUNS}", f"hydra.run.dir={place}", "logger=csv", f"trainer.max_steps={STEPS}"]


def served(case: Case, python: str) -> Scorecard | None:
    """The scorecard of a case, with what vLLM measured; None where a command failed."""
    name = "-".join(word.partition("=")[2].replace("/", "_") for word in case.settings)
    folder, card = RUNS / name, RUNS / f"{name}.json"
    if not (folder / "checkpoints" / "last").exists():
        words = [*common(name), *case.settings, "score.enabled=false"]
        if run([sys.executable, "train.py", *words], RUNS / f"{name}.train.log"):
            return None
    words = [f"checkpoint={folder}/checkpoints/last", "score.engine=vllm", f"score.engine_python={python}"]
    words += [f"out={card}", "decode=chain", "decode.depth=3", "score.alternatives=[]", "score.prompts=8"]
    command = [sys.executable, "-m", "foredraft", "score", *words, f"answers={RUNS}/heldout"]
    return None if run(command, RUNS / f"{name}.score.log") else read_scorecard(card)


def run(command: Sequence[str], log: Path) -> int:
    """Run a command with its output in a file; says where that is if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output).returncode
    print(f"{'failed' if code else 'done'}: {log}", flush=True)
    return code


def sound(card: Scorecard | None) -> bool:
    """The engine drafted as was scored, and wrote its plain text."""
    measured = card.served if card else []
    return bool(measured) and all(one.agrees and not (one.texts and one.texts[2]) for one in measured)


def line(case: Case, card: Scorecard | None) -> str:
    """A line of the table."""
    if not card or not card.served:
        return f"| {case.name} | `{case.to}` | NO {'| ' * 7}|"
    one = card.served[0]
    told = "yes" if one.agrees else "NO"
    cells = [case.name, f"`{case.to}`", "yes", texts(one), f"{one.scored_tau:.2f}", f"{one.tau:.2f}"]
    cells += [
        figures(one.scored_survival),
        f"{figures(one.survival)} ± {figures(one.noise)}",
        told,
        speed(one),
    ]
    return f"| {' | '.join(cells)} |"


def write(lines: Sequence[str], cards: Sequence[Scorecard], minutes: float) -> None:
    """Replace the table of the page."""
    found = [one for card in cards for one in card.served]
    engine = found[0].engine if found else "vLLM"
    names = [engine, "`to=`", "loads", "greedy answers", "tau here", "tau there", "accepted here"]
    names += ["accepted there, noise", "agrees", "speedup there"]
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    notes = [f"- {difference(one)}" for one in found if not one.agrees]
    where = f"Written by `make engines` at commit {commit()} on {hardware(torch.device('cpu'))}"
    where += f", {STEPS} steps, T=0, in {minutes:.0f} minutes with the training."
    table = "\n".join([where, "", *head, *lines, "", *notes])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("python", help="interpreter that has vLLM")
    parser.add_argument("--only", default="", help="drafters whose names contain this")
    given = parser.parse_args()
    raise SystemExit(main(given.python, given.only))

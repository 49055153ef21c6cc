"""One headline: tau and speedup are of the same draft, and the same in all places that show them."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path

import cards
import pytest
from workbench import Bench, Outcome

from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.served import Headline
from decode.model.load import load_target
from distill.export import write
from distill.loggers.base import scalars
from distill.report import acceptance_panels, panels
from distill.scoring.tables import by_setting, headline

NUMBERS = r"tau (\d\.\d\d) \((\d\.\d\d)\.\.(\d\.\d\d), (\w+)\)[ ,]+speedup (\d\.\d\d)x"
# Several drafts, so that the fastest may be another than the first.
SEVERAL = (
    "score.alternatives=[{depth: 1}]",
    "score.replay_prompts=4",
    "drafter.depth=2",
    "trainer.max_steps=6",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Bench, Outcome]:
    bench = Bench(tmp_path_factory.mktemp("headline"))
    return bench, bench.train(*SEVERAL).succeeded()


def shown(head: Headline) -> tuple[str, ...]:
    low, high = head.tau_interval
    return (f"{head.tau:.2f}", f"{low:.2f}", f"{high:.2f}", head.source, f"{head.speedup:.2f}")


def of_terminal(out: str) -> tuple[str, ...]:
    return re.search(rf"headline of step \d+: {NUMBERS}", out).groups()


def of_page(folder: Path) -> tuple[str, ...]:
    page = html.unescape((folder / "report.html").read_text())
    tile = r"tau, tokens per target pass</dt><dd>([\d.]+)</dd><dd class=\"note\">"
    tile += r"95 % interval ([\d.]+) to ([\d.]+); (\w+)"
    speed = r"speedup over plain decoding</dt><dd>([\d.]+)×"
    return (*re.search(tile, page).groups(), re.search(speed, page)[1])


def of_metrics(folder: Path, step: int) -> dict[str, float]:
    with (folder / "csv" / "metrics.csv").open() as file:
        (line,) = [line for line in csv.DictReader(file) if line["step"] == str(step) and line["score/tau"]]
    return {name: float(value) for name, value in line.items() if name.startswith("score/") and value}


def test_terminal_report_metrics_and_card_have_one_headline(done, tmp_path):
    bench, outcome = done
    folder, best = outcome.folder, outcome.folder / "checkpoints" / "best"
    card = read_scorecard(best / "score.json")
    head = card.headline
    assert head.source == "replayed"
    assert card.compared.speedup == head.speedup
    assert (card.compared.decode, card.compared.batch_size) == (head.decode, head.batch_size)
    assert of_terminal(outcome.out) == of_page(folder) == shown(head)
    write(best, load_target(str(bench.target)), "native", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert re.search(rf"\*\*{NUMBERS}\*\*: {head.decode}, T=0, batch 1", text).groups() == shown(head)
    newest = read_scorecard(folder / "checkpoints" / "6" / "score.json")
    logged, last = of_metrics(folder, 6), newest.headline
    low, high = last.tau_interval
    assert [logged[f"score/{name}"] for name in ("tau", "tau_low", "tau_high")] == pytest.approx(
        [last.tau, low, high], rel=1e-6
    )
    assert logged["score/speedup"] == pytest.approx(last.speedup, rel=1e-6)
    assert logged["score/tau_decoded"] == pytest.approx(newest.compared.tau, rel=1e-6)
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("step 6/6 ")]
    assert re.search(NUMBERS, line).groups() == shown(last)


ROWS = [
    cards.row(0.0, decode="tree-16", tau=1.33, speedup=0.9, replay=cards.replay(1.48)),
    cards.row(0.0, decode="chain-2", tau=1.2, speedup=1.2, replay=cards.replay(1.25)),
]


def test_speedup_is_of_the_draft_with_that_tau_and_the_fastest_is_named():
    card = cards.card_of(ROWS)
    assert shown(card.headline) == ("1.48", "1.28", "1.68", "replayed", "0.90")
    page = str(panels.headline(card))
    assert ">1.48<" in page
    assert ">0.90×<" in page
    assert "the fastest of this setting: chain-2, 1.20×" in page
    values = scalars(card)
    assert (values["score/tau"], values["score/tau_decoded"], values["score/speedup"]) == (1.48, 1.33, 0.9)


def test_headline_without_replay_says_that_it_is_decoded():
    card = cards.card_of([cards.row(0.0, tau=1.33, replay=None)])
    assert "tau 1.33 (1.08..1.58, decoded)" in headline(card)
    assert "counted by the decoder" in str(panels.headline(card))
    assert "score/tau" not in scalars(card)
    assert scalars(card)["score/tau_decoded"] == 1.33
    head, (line,) = by_setting(card)
    assert line[head.index("tau")].startswith("1.33~")
    assert line[head.index("tau_decoded")] == "1.33"


def test_bars_and_line_of_a_panel_are_of_one_source():
    panel = str(acceptance_panels.positions(cards.card_of(ROWS)))
    for name in ("accepted this far (replayed)", "accepted, if all before were (replayed)"):
        assert name in panel
    assert "accepted this far (decoded, fewer prompts)" in panel

"""Passports: files, findings, an engine's counts, and who reads them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from cards import audit, card_of, row, scorecard
from drafter_checks import V
from workbench import foredraft

from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.served import Served
from distill.scoring import compare
from drafters.checkpoint import passport
from drafters.checkpoint.folder import target_origin
from drafters.checkpoint.pretrained import from_pretrained, push_to_hub, save_pretrained
from drafters.hub import PASSPORT, PASSPORT_PAGE

SERVED = Served(
    engine="vllm 0.32.0",
    decode="chain-2",
    temperature=0.0,
    batch_size=1,
    depth=2,
    prompts=12,
    tokens=480,
    rounds=240,
    tau=1.31,
    survival=[0.25, 0.06],
    scored_tau=1.98,
    scored_survival=[0.61, 0.07],
    noise=[0.05, 0.04],
    tokens_per_second=30.0,
    plain_tokens_per_second=20.0,
    texts=[11, 1, 0],
    same_rounds=[2, 11],
    agrees=False,
    cause="layer ids | off by one",
)


@pytest.fixture
def made(tiny_target, make_drafter, tmp_path) -> tuple[Path, object]:
    """A scored checkpoint and its target."""
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    folder = tmp_path / "checkpoint"
    save_pretrained(make_drafter("eagle", target), folder, target)
    (folder / "score.json").write_text(json.dumps(scorecard()))
    return folder, target


def page_of(folder, card) -> str:
    return passport.page(passport.passport(folder, card, "eagle", target_origin(folder)), card)


def test_page_has_files_findings_and_the_command(made):
    folder, _ = made
    card = card_of(categories=["chat", "code"])
    said = page_of(folder, card)
    weights = (folder / "model.safetensors").read_bytes()
    assert f"{hashlib.sha256(weights).hexdigest()} ({len(weights):,} bytes)" in said
    assert "audit: passed" in said
    assert "| 0 | chain-2 | 1 | 2.000 | 1.800..2.200 | 0.600 | 0.350 | 1.43x |" in said
    assert "| chat | 1 | 2.000 | - |" in said
    assert "| 0 to 128 | 4 | 1.500 |" in said
    assert "Not measured" in said
    assert "| hardware | Abacus 9000, 2 cores |" in said
    assert "| torch | 2.13.0 |" in said
    assert said.rstrip().endswith("again=true seed=7")


def test_counts_of_an_engine_stand_beside_ours_with_the_cause(made):
    card = card_of()
    object.__setattr__(card, "served", [SERVED])
    said = page_of(made[0], card)
    assert "tau 1.310, here 1.980; DIFFERS: layer ids \\| off by one." in said
    assert "| 1 | 0.250 | 0.610 | 0.050 | differs |" in said
    assert "| 2 | 0.060 | 0.070 | 0.040 |  |" in said
    assert "11 as the engine's plain ones, 1 near ties, 0 others" in said
    assert "as many rounds as here: 2 of 11" in said
    assert "30.0 tokens/s, 1.50x of plain" in said


def test_failed_audit_and_lossy_rules_are_on_the_page(made):
    card = card_of(
        [row(lossy=True, rule="typical", decode="chain-2")], audit=audit(mismatches=1, passed=False)
    )
    said = page_of(made[0], card)
    assert "audit: FAILED" in said
    assert "chain-2 (lossy)" in said


def test_command_writes_both_files_and_compare_reads_them(made, tmp_path):
    folder, _ = made
    told = foredraft("passport", f"checkpoint={folder}")
    assert told.code == 0, told.err
    assert (folder / PASSPORT_PAGE).is_file()
    values = json.loads((folder / PASSPORT).read_text())
    assert values["files"].keys() == {"config.json", "model.safetensors"}
    elsewhere = tmp_path / "elsewhere"
    assert foredraft("passport", f"checkpoint={folder}", f"folder={elsewhere}").code == 0
    assert {path.name for path in elsewhere.iterdir()} == {PASSPORT, PASSPORT_PAGE}
    (scored,) = compare.read([str(elsewhere)])
    assert scored.card.headline == card_of().headline == read_scorecard(elsewhere / PASSPORT).headline
    assert foredraft("compare", f"a={elsewhere}", f"b={folder}").code == 0


def test_checkpoint_without_scores_is_refused(made):
    folder, _ = made
    (folder / "score.json").unlink()
    foredraft("passport", f"checkpoint={folder}").refused("no score.json there")


def test_passport_travels_with_a_push(made, fake_hub):
    folder, target = made
    push_to_hub(from_pretrained(folder, target), "me/drafter")
    files = fake_hub.repos["me/drafter"].files
    assert PASSPORT in files
    page = files[PASSPORT_PAGE].decode()
    assert "foredraft passport checkpoint=me/drafter" in page
    assert str(folder) not in page

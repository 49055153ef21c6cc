"""foredraft inspect-data: rows and statistics of a store, by hand and on the pocket target's own answers."""

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from workbench import ROOT, Outcome, foredraft, make_target, make_tokenizer

from decode.errors import UserError
from decode.model.head import Head
from decode.model.load import load_target, load_tokenizer
from decode.model.target import TargetOutput
from decode.sampling import Sampler
from distill.commands.inspect_data import CLOSE, OPEN, PLAIN, SUPERVISED, show
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.rollouts import surprisal as surprise
from distill.rollouts.heldout import held_out_answers
from distill.rollouts.statistics import RowCounts
from distill.rollouts.store import SCHEMA as STORES
from distill.rollouts.store import find
from distill.rollouts.surprisal import SurprisalStats, lines, measure, reference_distribution

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "finish_reason": pa.string(),
        "ids": pa.string(),
    }
)


def row(name, prompt, answer, reason="stop", ids="exact"):
    mask = [0] * len(prompt) + [1] * len(answer)
    return {
        "id": name,
        "tokens": prompt + answer,
        "loss_mask": mask,
        "finish_reason": reason,
        "ids": ids,
    }


def table(rows):
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_store(folder: Path, shards, **plan) -> Path:
    """Shards of rows and a manifest."""
    folder.mkdir(parents=True)
    names = [f"shard-{i:05d}.parquet" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        pq.write_table(table(rows), folder / name)
    entries = [{"file": name, "rows": len(rows)} for name, rows in zip(names, shards, strict=True)]
    (folder / "manifest.json").write_text(json.dumps({"schema": STORES, "plan": plan, "shards": entries}))
    return folder


def script(*argv: str) -> Outcome:
    return foredraft("inspect-data", *argv)


# -- counts, by hand -------------------------------------------------------------------------------

HAND = [
    row("a", [1, 2, 3], [4, 4, 5, 6]),  # even
    row("b", [1], [4, 5, 7, 7], "length"),  # odd
    row("c", [1, 2], [4, 4, 4, 5, 5, 7, 2, 2], "length"),  # even, longer than 8
    row("a", [1, 2, 3], [4, 4, 5, 6], ids="reencoded"),  # odd, a again
    row("d", [9, 9], [], "stop"),  # even, nothing supervised
]


@pytest.mark.parametrize("cuts", [[5], [2, 3], [1, 0, 4]], ids=str)
def test_counts_do_not_depend_on_the_shards(cuts):
    counts, first = RowCounts(16, 8), 0
    for size in cuts:
        counts.add(table(HAND[first : first + size]))
        first += size
    assert counts.answer.tolist() == [4, 4, 8, 4, 0]
    assert counts.prompt.tolist() == [3, 1, 2, 3, 2]
    assert counts.reasons == {"stop": 3, "length": 2}
    assert counts.ids == {"exact": 4, "reencoded": 1}
    assert (counts.cut, counts.lost, counts.duplicates) == (1, 2, 1)
    # 4: 5 and 2 times, 5: 3 and 2, 6: 1 and 1, 7: 1 and 2, 2: 2 and 0
    assert {i: (int(e), int(o)) for i, (e, o) in enumerate(counts.halves.T) if e or o} == {
        2: (2, 0),
        4: (5, 3),
        5: (3, 2),
        6: (1, 1),
        7: (1, 2),
    }


def test_a_row_that_just_fits_is_not_cut():
    counts = RowCounts(16, 5)
    counts.add(table(HAND))
    assert (counts.cut, counts.lost) == (3, 2 + 5 + 2)


def test_a_draft_vocabulary_is_chosen_on_one_half_and_measured_on_the_other():
    counts = RowCounts(16, 8)
    counts.add(table(HAND))
    # The even rows' order: 4 (5), 5 (3), 2 (2), 6, 7; the odd rows have 8 tokens, 3 of them 4, 2 of them 5.
    for size, share in ((1, 3 / 8), (2, 5 / 8), (3, 5 / 8), (4, 6 / 8), (5, 1.0)):
        assert counts.coverage(size, ()) == pytest.approx(share)
    assert counts.coverage(2, [7]) == pytest.approx(5 / 8), "7 is in, which puts 5 out: 3 + 2 of 8"
    assert counts.coverage(1, [0]) == 0
    alone = RowCounts(16, 8)
    alone.add(table(HAND[:1]))
    assert alone.coverage(4, ()) is None


def test_what_is_said_of_the_counts():
    counts = RowCounts(16, 8)
    counts.add(table(HAND))
    said = [" ".join(line.split()) for line in counts.lines([])]
    assert said == [
        "rows 5, 1 of them duplicates of another, 1 WITHOUT A SUPERVISED TOKEN",
        "tokens 31, 64.5% (20) supervised",
        "percentiles 0 50 90 99 100",
        "prompt tokens 1 2 3 3 3",
        "answer tokens 0 4 8 8 8",
        "finish_reason stop 3, length 2",
        "ids exact 4, reencoded 1",
        "cut at max_tokens=8 1 rows (20.0%), which lose 2 supervised tokens (10.0%)",
        "draft vocabulary most frequent tokens of half the rows: share of the others' answers",
        "1: 37.50% 2: 62.50% 4: 75.00% 8: 100.00%",
    ]
    assert any("-" in line for line in RowCounts(16, 8).lines([])), "a store without rows has no shares"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"loss_mask": [0, 1]}, "not as long"),
        ({"tokens": [1, 2, 3, 4, 4, 5, 16]}, r"4\.\.16|1\.\.16 in a vocabulary of 16"),
        ({"tokens": [1, 2, 3, 4, 4, 5, -1]}, r"-1\.\.5"),
    ],
)
def test_rows_that_cannot_be_are_refused(bad, said):
    with pytest.raises(UserError, match=said):
        RowCounts(16, 8).add(table([HAND[0] | bad]))


# -- entropy, by hand ------------------------------------------------------------------------------


class Known:
    """A target whose law at position t is row t, whatever the tokens."""

    device = torch.device("cpu")

    def __init__(self, laws, max_positions=None):
        self.head = Head(torch.tensor(laws).log().T.contiguous())
        self.max_positions = max_positions

    def read(self, tokens):
        states = torch.eye(self.head.weight.shape[1])[: tokens.shape[1]][None]
        return TargetOutput(states, states[:, :, None][:, :, :0])


LAWS = [[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [0.9, 0.05, 0.03, 0.02], [0.125, 0.5, 0.25, 0.125]]
ENTROPY = [1.75 * math.log(2), 2 * math.log(2), -sum(p * math.log(p) for p in LAWS[2]), 1.75 * math.log(2)]
ROW = {"tokens": [3, 1, 2, 0], "loss_mask": [0, 1, 0, 1]}


def test_a_token_is_measured_by_the_law_before_it():
    """Token 1 by row 0 and token 3 by row 2; the fourth row predicts nothing."""
    found = measure(Known(LAWS), [ROW], Sampler(1.0))
    np.testing.assert_allclose(found.entropy, [ENTROPY[0], ENTROPY[2]], rtol=1e-6)
    np.testing.assert_allclose(found.surprisal, [2 * math.log(2), -math.log(0.9)], rtol=1e-5)
    second = [sum(p * math.log(p) ** 2 for p in LAWS[t]) for t in (0, 2)]
    np.testing.assert_allclose(
        found.variance, [second[0] - ENTROPY[0] ** 2, second[1] - ENTROPY[2] ** 2], 1e-5
    )
    assert found.likeliest.tolist() == [False, True]
    assert found.place.tolist() == [0, 1]
    difference, error = found.excess()
    assert difference == pytest.approx((0.25 * math.log(2) - math.log(0.9) - ENTROPY[2]) / 2, rel=1e-4)
    assert error == pytest.approx(math.sqrt(found.variance.sum()) / 2)


def test_places_count_supervised_tokens_and_long_rows_are_cut(monkeypatch):
    monkeypatch.setattr(surprise, "CHUNK", 2)
    everything = {"tokens": [3, 1, 2, 0], "loss_mask": [1, 1, 1, 1]}
    found = measure(Known(LAWS), [everything, ROW], Sampler(1.0))
    assert found.place.tolist() == [1, 2, 3, 0, 1], "what the first token was drawn from is not known"
    np.testing.assert_allclose(found.entropy[:3], ENTROPY[:3], rtol=1e-6)
    assert measure(Known(LAWS, max_positions=3), [everything], Sampler(1.0)).place.tolist() == [1, 2]
    assert not len(measure(Known(LAWS), [{"tokens": [1], "loss_mask": [1]}], Sampler(1.0)).entropy)


def test_a_warped_law_leaves_tokens_without_a_chance():
    found = measure(Known(LAWS), [ROW], Sampler(1.0, top_k=1))
    assert found.possible.tolist() == [False, True]
    np.testing.assert_allclose(found.entropy, 0, atol=1e-9)
    assert found.excess() == (0, 0)
    plan = {"sampler": {"temperature": 1.0, "top_k": 1}, "answers": "write"}
    said = lines(found, reference_distribution(plan))
    assert any("without a chance       1 tokens" in line for line in said)
    assert any(line.startswith("WARNING") for line in said)


def test_the_law_is_the_stores_own_where_tokens_are_drawn():
    def plan(answers="write", **sampler):
        return reference_distribution({"answers": answers, "sampler": sampler})

    assert plan(temperature=0.7) == (Sampler(0.7), "T=0.7", True)
    assert plan(temperature=1.0, top_p=0.9) == (Sampler(1.0, top_p=0.9), "T=1 and its warpers", True)
    for other in (plan("given", temperature=0.7), plan(temperature=0.0)):
        assert other == (Sampler(1.0), "T=1", False)
    assert not plan(temperature=1.0, repetition_penalty=1.2).drawn


def verdict(excess: float, drawn: bool) -> str:
    """Of 100 tokens with entropy 1, variance 1 and this excess."""
    ones = np.ones(100)
    found = SurprisalStats(ones, ones + excess, ones, ones > 0, np.arange(100))
    law = reference_distribution({"answers": "write" if drawn else "given", "sampler": {"temperature": 1.0}})
    said = lines(found, law)
    assert f"{excess:+.3f} +- 0.100 from the entropy (z = {10 * excess:.1f})" in said[1]
    return said[3]


def test_the_verdict_by_hand():
    for excess in (0.39, -0.39):
        assert all("agree" in verdict(excess, drawn) for drawn in (True, False))
    assert verdict(0.41, True).startswith("WARNING: surprisal and entropy differ")
    assert verdict(-0.41, True).startswith("WARNING: surprisal and entropy differ")
    assert verdict(0.41, False).startswith("WARNING: surprisal is above")
    assert verdict(-0.41, False).startswith("surprisal is below the entropy")


def test_places_are_shown_in_ranges_that_double():
    place = np.arange(20)
    found = SurprisalStats(place * 1.0, place + 1.0, place + 1.0, place > 0, place)
    reference = reference_distribution({"answers": "given", "sampler": {}})
    shown = [line.split() for line in lines(found, reference)[5:]]
    assert shown == [
        ["1..8", "8", "3.500", "4.500"],
        ["9..16", "8", "11.500", "12.500"],
        ["17..32", "4", "17.500", "18.500"],
    ]


# -- rows ------------------------------------------------------------------------------------------


def test_supervised_text_is_coloured_or_in_brackets():
    tokenizer = make_tokenizer()
    ids, mask = Chat(tokenizer).encode_answered(
        [
            {"role": "user", "content": "a\tb\x1b[31m"},
            {"role": "assistant", "content": "é\n"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    )
    shown = {"id": "x", "tokens": ids, "loss_mask": mask, "finish_reason": "given", "ids": "reencoded"}
    text = "<|user|>a␉b␛[31m<|assistant|>{}é␊\n<|end|>{}<|user|>c<|assistant|>{}d<|end|>{}"
    header = f"-- row 3, id x: {len(ids) - sum(mask)} prompt tokens, 6 supervised, finish_reason given, "
    for color, marks in ((True, (SUPERVISED, PLAIN)), (False, (OPEN, CLOSE))):
        first, rest = show(3, shown, tokenizer, color).split("\n", 1)
        assert first == header + "ids reencoded"
        assert rest == text.format(*marks, *marks)


@pytest.mark.parametrize("field", ["id", "finish_reason", "ids"])
def test_columns_of_a_store_send_nothing_to_the_terminal(field):
    shown = row("x", [5], [6]) | {field: "a\x1b[2J\r\x07\x9b\u202e\n-- row 9"}
    header = show(0, shown, make_tokenizer(), False).split("\n")[0]
    assert "a\ufffd[2J\ufffd\ufffd\ufffd\ufffd -- row 9" in header


def test_half_a_character_at_the_end_is_shown():
    tokenizer = make_tokenizer()
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    shown = {"id": "x", "tokens": ids[:1], "loss_mask": [1], "finish_reason": "length", "ids": "exact"}
    assert show(0, shown, tokenizer, False).endswith(f"\n{OPEN}\ufffd{CLOSE}")


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random target and a store of hand-made rows with its fingerprints."""
    root = tmp_path_factory.mktemp("tiny")
    folder = make_target(root / "target")
    target, chat = load_target(str(folder)), Chat(load_tokenizer(str(folder)))
    plan = {
        "template": "chat",
        "tokenizer": chat.fingerprint(),
        "target": target.fingerprint(),
        "answers": "given",
        "sampler": {"temperature": 1.0},
        "stop": [3],
    }
    write_store(root / "stores" / "hand", [HAND[:2], HAND[2:]], **plan)
    return root


def run(tiny, *argv):
    return script(f"target={tiny / 'target'}", f"store={tiny / 'stores' / 'hand'}", *argv)


def test_without_a_sample_no_target_is_loaded(tiny, monkeypatch):
    monkeypatch.setattr("distill.config.build.load_target", None)
    done = run(tiny, "sample=0", "rows=0", "max_tokens=8").succeeded()
    counts = RowCounts(260, 8)
    counts.add(table(HAND))
    assert done.out.splitlines()[1:] == counts.lines([3])


@pytest.mark.proof
def test_rows_are_drawn_by_the_seed_or_named(tiny):
    first, again, other = (run(tiny, "sample=0", "rows=2", f"seed={s}").out for s in (0, 0, 2))
    assert first == again != other
    assert first.count("-- row") == 2
    assert run(tiny, "sample=0", "rows=99").out.count("-- row") == 5
    named = run(tiny, "sample=0", "row=a").out
    assert [line for line in named.splitlines() if line.startswith("-- row")] == [
        "-- row 0, id a: 3 prompt tokens, 4 supervised, finish_reason stop, ids exact",
        "-- row 3, id a: 3 prompt tokens, 4 supervised, finish_reason stop, ids reencoded",
    ]


def test_colour_is_for_those_who_want_it(tiny, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert SUPERVISED not in run(tiny, "sample=0", "row=b").out
    assert SUPERVISED in run(tiny, "sample=0", "row=b", "color=always").out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["store=/no/where"], "store=/no/where: no such folder"),
        (["store=ROOM"], "no manifest.json"),
        (["store=null", "stores=ROOM/foreign"], "no finished store in"),
        (["row=zz"], "row=zz: no row of"),
        (["rows=-1"], "rows=-1: must be at least 0"),
        ([f"target={ROOT / 'data' / 'pocket'}"], "made with another tokenizer"),
        (["prompts.template_options={enable_thinking: false}"], "prompts.template_options"),
        (["color=blue"], "color=blue"),
        (["target=/no/where"], "no such folder"),
        (["store=ROOM/damaged"], "shard-00000.parquet"),
        (["store=ROOM/foreign"], "not the manifest of a store"),
        (["store=ROOM/older"], "another version made it"),
        (["store=ROOM/linked"], "a link to a file outside its folder"),
        (["store=ROOM/outside"], "not the manifest of a store"),
    ],
)
def test_a_mistake_is_one_line(tiny, overrides, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    shutil.copytree(tiny / "stores" / "hand", room / "damaged")
    (room / "damaged" / "shard-00000.parquet").write_bytes(b"PAR1")
    older = json.loads((tiny / "stores" / "hand" / "manifest.json").read_text()) | {"schema": STORES - 1}
    (room / "older").mkdir()
    (room / "older" / "manifest.json").write_text(json.dumps(older))
    (room / "foreign").mkdir()
    (room / "foreign" / "manifest.json").write_text("{}")
    shutil.copytree(tiny / "stores" / "hand", room / "linked")
    (room / "linked" / "shard-00000.parquet").unlink()
    (room / "linked" / "shard-00000.parquet").symlink_to(tiny / "stores" / "hand" / "shard-00000.parquet")
    outside = json.loads((tiny / "stores" / "hand" / "manifest.json").read_text())
    outside["shards"][0]["file"] = "../damaged/shard-00000.parquet"
    (room / "outside").mkdir()
    (room / "outside" / "manifest.json").write_text(json.dumps(outside))
    done = run(tiny, *(override.replace("ROOM", str(room)) for override in overrides))
    done.refused(said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["room"]


def test_the_newest_finished_store_is_taken(tiny, tmp_path):
    for age, name in ((300, "old"), (100, "new"), (200, "middle")):
        shutil.copytree(tiny / "stores" / "hand", tmp_path / name)
        at = (tmp_path / name / "manifest.json").stat().st_mtime - age
        os.utime(tmp_path / name / "manifest.json", (at, at))
    (tmp_path / "unfinished").mkdir()
    assert find(None, str(tmp_path)) == tmp_path / "new"


# -- on the pocket target's own answers -----------------------------------------------------------


@pytest.fixture(scope="module")
def pocket_store(tmp_path_factory) -> Callable[[float], Path]:
    """The bundled target's answers at a temperature, made when they are asked for."""
    root = tmp_path_factory.mktemp("pocket")
    target = load_target(str(ROOT / "data" / "pocket"), "bfloat16")
    chat = Chat(load_tokenizer(str(ROOT / "data" / "pocket")))
    prompts = read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")[:32]

    @cache
    def make(temperature: float) -> Path:
        folder = root / str(temperature)
        held_out_answers(target, chat, prompts, Sampler(temperature), 32, 0, folder)
        return next(folder.glob("*/manifest.json")).parent

    return make


def numbers(done: Outcome) -> dict[str, float]:
    """Entropy, surprisal and z that were printed."""
    lines = [line.split() for line in done.out.splitlines()]
    entropy = next(line for line in lines if line[:1] == ["entropy"])
    surprisal = next(line for line in lines if line[:1] == ["surprisal"] and "nats," in line)
    return {"entropy": float(entropy[3]), "surprisal": float(surprisal[1]), "z": float(surprisal[-1][:-1])}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.ci("0.7")
def test_the_targets_own_draws_surprise_it_as_they_should(pocket_store, temperature):
    done = script(f"store={pocket_store(temperature)}", "rows=1").succeeded()
    found = numbers(done)
    assert abs(found["z"]) < 4
    assert "surprisal and entropy agree" in done.out
    assert "WARNING" not in done.out
    assert f"entropy at T={temperature:g} " in done.out
    assert done.out.count("-- row") == 1
    assert "rows                   32," in done.out
    assert "<|assistant|>⟦" in done.out


@pytest.mark.proof
def test_greedy_answers_are_below_the_entropy_and_doubted_if_said_to_be_draws(pocket_store, tmp_path):
    store = pocket_store(0.0)
    done = script(f"store={store}", "rows=0")
    found = numbers(done)
    assert found["surprisal"] < found["entropy"] - 0.3
    assert found["z"] < -4
    assert "surprisal is below the entropy" in done.out
    likeliest = next(line for line in done.out.splitlines() if "likeliest" in line)
    assert float(likeliest.split()[3][:-1]) > 98
    shutil.copytree(store, tmp_path / "lie")
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["plan"]["sampler"]["temperature"] = 1.0
    (tmp_path / "lie" / "manifest.json").write_text(json.dumps(manifest))
    lie = script(f"store={tmp_path / 'lie'}", "rows=0")
    assert "WARNING: surprisal and entropy differ" in lie.out


@pytest.mark.proof
def test_another_targets_answers_are_found_out(pocket_store, tmp_path):
    """Here answers to other prompts."""
    store = pocket_store(1.0)
    manifest = json.loads((store / "manifest.json").read_text())
    rows = pq.read_table(store / manifest["shards"][0]["file"]).to_pylist()
    swapped = []
    for one, other in zip(rows, rows[1:] + rows[:1], strict=True):
        start, begin = one["loss_mask"].index(1), other["loss_mask"].index(1)
        swapped.append(row(one["id"], one["tokens"][:start], other["tokens"][begin:]))
    write_store(tmp_path / "swapped", [swapped], **manifest["plan"] | {"target": "another"})
    done = script(f"store={tmp_path / 'swapped'}", "rows=0")
    found = numbers(done)
    assert found["surprisal"] > found["entropy"]
    assert found["z"] > 4
    assert "WARNING: the store names another target" in done.out
    assert "WARNING: surprisal and entropy differ" in done.out

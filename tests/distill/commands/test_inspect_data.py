"""foredraft inspect-data: rows and statistics of a store, by hand and on answers of the bundled target."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from workbench import ROOT, foredraft, make_target, make_tokenizer

from decode.model.head import Head
from decode.model.load import load_target, load_tokenizer
from decode.model.target import TargetOutput
from decode.sampling import Sampler
from distill.commands.inspect_data import CLOSE, OPEN, PLAIN, SUPERVISED, show
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.rollouts import surprisal as surprise
from distill.rollouts.heldout import held_out_answers
from distill.rollouts.shard import COLUMNS
from distill.rollouts.statistics import RowCounts
from distill.rollouts.store import SCHEMA as STORES
from distill.rollouts.store import find
from distill.rollouts.surprisal import SurprisalStats, lines, measure, reference_distribution


def row(name, prompt, answer, reason="stop", ids="exact"):
    mask = [0] * len(prompt) + [1] * len(answer)
    tokens = {"tokens": prompt + answer, "loss_mask": mask}
    return {"id": name, **tokens, "finish_reason": reason, "ids": ids}


def table(rows):
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def write_store(folder: Path, shards, **plan) -> Path:
    """Shards of rows and a manifest."""
    folder.mkdir(parents=True)
    entries = []
    for i, rows in enumerate(shards):
        entries.append({"file": f"shard-{i:05d}.parquet", "rows": len(rows)})
        pq.write_table(table(rows), folder / entries[-1]["file"])
    (folder / "manifest.json").write_text(json.dumps({"schema": STORES, "plan": plan, "shards": entries}))
    return folder


# -- counts, by hand -------------------------------------------------------------------------------

HAND = [
    row("a", [1, 2, 3], [4, 4, 5, 6]),  # even
    row("b", [1], [4, 5, 7, 7], "length"),  # odd
    row("c", [1, 2], [4, 4, 4, 5, 5, 7, 2, 2], "length"),  # even, longer than 8
    row("a", [1, 2, 3], [4, 4, 5, 6], ids="reencoded"),  # odd, a again
    row("d", [9, 9], [], "stop"),  # even, nothing supervised
]


def counted(*shards, max_tokens=8):
    counts = RowCounts(16, max_tokens)
    for rows in shards:
        counts.add(table(rows))
    return counts


@pytest.mark.parametrize("shards", [[HAND], [HAND[:2], HAND[2:]], [HAND[:1], [], HAND[1:]]])
def test_counts_do_not_depend_on_the_shards(shards):
    counts = counted(*shards)
    assert counts.answer.tolist() == [4, 4, 8, 4, 0]
    assert counts.prompt.tolist() == [3, 1, 2, 3, 2]
    assert counts.reasons == {"stop": 3, "length": 2}
    assert counts.ids == {"exact": 4, "reencoded": 1}
    assert (counts.cut, counts.lost, counts.duplicates) == (1, 2, 1)
    # Of the even and of the odd rows.
    halves = {token: pair for token, pair in enumerate(counts.halves.T.tolist()) if any(pair)}
    assert halves == {2: [2, 0], 4: [5, 3], 5: [3, 2], 6: [1, 1], 7: [1, 2]}
    said = [" ".join(line.split()) for line in counts.lines([])]
    assert "answer tokens 0 4 8 8 8" in said  # percentiles
    assert said[-1] == "1: 37.50% 2: 62.50% 4: 75.00% 8: 100.00%"
    counts = counted(*shards, max_tokens=5)
    assert (counts.cut, counts.lost) == (3, 2 + 5 + 2), "a row of 5 just fits"


def test_coverage_is_measured_on_the_other_half():
    counts = counted(HAND)
    # The even rows' order: 4 (5), 5 (3), 2 (2), 6, 7; the odd rows have 8 tokens, 3 of them 4, 2 of them 5.
    for size, share in ((1, 3 / 8), (2, 5 / 8), (3, 5 / 8), (4, 6 / 8), (5, 1.0)):
        assert counts.coverage(size, ()) == pytest.approx(share)
    assert counts.coverage(2, [7]) == pytest.approx(5 / 8), "7 is in, which puts 5 out: 3 + 2 of 8"
    assert counts.coverage(1, [0]) == 0
    for few in (counted(HAND[:1]), counted()):  # no odd row
        assert few.coverage(4, ()) is None
        assert "-" in few.lines([])[-1]


# -- entropy, by hand ------------------------------------------------------------------------------


class Known:
    """A target whose distribution at position t is row t, whatever the tokens."""

    device = torch.device("cpu")

    def __init__(self, probs, max_positions=None):
        self.head = Head(torch.tensor(probs).log().T.contiguous())
        self.max_positions = max_positions

    def read(self, tokens):
        states = torch.eye(self.head.weight.shape[1])[: tokens.shape[1]][None]
        return TargetOutput(states, states[:, :, None][:, :, :0])


PROBS = [[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [0.9, 0.05, 0.03, 0.02], [0.125, 0.5, 0.25, 0.125]]
ENTROPY = [1.75 * math.log(2), 2 * math.log(2), -sum(p * math.log(p) for p in PROBS[2]), 1.75 * math.log(2)]
ROW = {"tokens": [3, 1, 2, 0], "loss_mask": [0, 1, 0, 1]}


def test_token_is_measured_by_the_distribution_before_it():
    """Token 1 by row 0 and token 3 by row 2; the fourth row predicts nothing."""
    found = measure(Known(PROBS), [ROW], Sampler(1.0))
    np.testing.assert_allclose(found.entropy, [ENTROPY[0], ENTROPY[2]], rtol=1e-6)
    np.testing.assert_allclose(found.surprisal, [2 * math.log(2), -math.log(0.9)], rtol=1e-5)
    second = [sum(p * math.log(p) ** 2 for p in PROBS[t]) for t in (0, 2)]
    variance = [second[0] - ENTROPY[0] ** 2, second[1] - ENTROPY[2] ** 2]
    np.testing.assert_allclose(found.variance, variance, 1e-5)
    assert found.likeliest.tolist() == [False, True]
    assert found.place.tolist() == [0, 1]
    difference, error = found.excess()
    assert difference == pytest.approx((0.25 * math.log(2) - math.log(0.9) - ENTROPY[2]) / 2, rel=1e-4)
    assert error == pytest.approx(math.sqrt(found.variance.sum()) / 2)


def test_places_count_supervised_tokens_and_long_rows_are_cut(monkeypatch):
    monkeypatch.setattr(surprise, "CHUNK", 2)
    everything = {"tokens": [3, 1, 2, 0], "loss_mask": [1, 1, 1, 1]}
    found = measure(Known(PROBS), [everything, ROW], Sampler(1.0))
    assert found.place.tolist() == [1, 2, 3, 0, 1], "what the first token was drawn from is not known"
    np.testing.assert_allclose(found.entropy[:3], ENTROPY[:3], rtol=1e-6)
    assert measure(Known(PROBS, max_positions=3), [everything], Sampler(1.0)).place.tolist() == [1, 2]
    assert not len(measure(Known(PROBS), [{"tokens": [1], "loss_mask": [1]}], Sampler(1.0)).entropy)


def test_warpers_make_tokens_impossible():
    found = measure(Known(PROBS), [ROW], Sampler(1.0, top_k=1))
    assert found.possible.tolist() == [False, True]
    np.testing.assert_allclose(found.entropy, 0, atol=1e-9)
    assert found.excess() == (0, 0)
    plan = {"sampler": {"temperature": 1.0, "top_k": 1}, "answers": "write"}
    assert any(line.startswith("WARNING") for line in lines(found, reference_distribution(plan)))


def test_reference_is_the_sampler_of_the_store():
    def plan(answers="write", **sampler):
        return reference_distribution({"answers": answers, "sampler": sampler})

    assert plan(temperature=0.7) == (Sampler(0.7), "T=0.7", True)
    assert plan(temperature=1.0, top_p=0.9) == (Sampler(1.0, top_p=0.9), "T=1 and its warpers", True)
    for other in (plan("given", temperature=0.7), plan(temperature=0.0)):
        assert other == (Sampler(1.0), "T=1", False)
    assert not plan(temperature=1.0, repetition_penalty=1.2).drawn


@pytest.mark.parametrize(
    ("excess", "drawn", "verdict"),
    [
        (0.39, True, "surprisal and entropy agree"),
        (-0.39, False, "surprisal and entropy agree"),
        (0.41, True, "WARNING: surprisal and entropy differ"),
        (-0.41, True, "WARNING: surprisal and entropy differ"),
        (0.41, False, "WARNING: surprisal is above"),
        (-0.41, False, "surprisal is below"),
    ],
)
def test_four_standard_errors_are_a_difference(excess, drawn, verdict):
    """Of 100 tokens with entropy 1, variance 1 and this excess."""
    ones = np.ones(100)
    found = SurprisalStats(ones, ones + excess, ones, ones > 0, np.arange(100))
    plan = {"answers": "write" if drawn else "given", "sampler": {"temperature": 1.0}}
    shown = lines(found, reference_distribution(plan))
    assert f"{excess:+.3f} +- 0.100 from the entropy (z = {10 * excess:.1f})" in shown[1]
    assert shown[3].startswith(verdict)


def test_places_are_shown_in_ranges_that_double():
    place = np.arange(20)
    found = SurprisalStats(place * 1.0, place + 1.0, place + 1.0, place > 0, place)
    shown = lines(found, reference_distribution({"answers": "given", "sampler": {}}))[5:]
    means = [["1..8", "8", "3.500", "4.500"], ["9..16", "8", "11.500", "12.500"]]
    assert [line.split() for line in shown] == [*means, ["17..32", "4", "17.500", "18.500"]]


# -- rows ------------------------------------------------------------------------------------------


def test_supervised_text_is_coloured_or_in_brackets():
    tokenizer = make_tokenizer()
    texts = [("user", "a\tb\x1b[31m"), ("assistant", "é\n"), ("user", "c"), ("assistant", "d")]
    ids, mask = Chat(tokenizer).encode_answered([{"role": role, "content": text} for role, text in texts])
    shown = row("x", ids, [], "given", "reencoded") | {"loss_mask": mask}
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
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    assert show(0, row("x", [], half), tokenizer, False).endswith(f"\n{OPEN}\ufffd{CLOSE}")


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random target and a store of hand-made rows with its fingerprints."""
    root = tmp_path_factory.mktemp("tiny")
    folder = make_target(root / "target")
    plan = {"tokenizer": Chat(load_tokenizer(str(folder))).fingerprint(), "template": "chat", "stop": [3]}
    plan |= {"target": load_target(str(folder)).fingerprint(), "answers": "given"}
    write_store(root / "stores" / "hand", [HAND[:2], HAND[2:]], **plan, sampler={"temperature": 1.0})
    return root


def run(tiny, *argv):
    places = [f"target={tiny / 'target'}", f"store={tiny / 'stores' / 'hand'}"]
    return foredraft("inspect-data", *places, *argv)


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
    named = run(tiny, "sample=0", "row=a").out.splitlines()
    about = "-- row {}, id a: 3 prompt tokens, 4 supervised, finish_reason stop, ids {}".format
    assert {about(0, "exact"), about(3, "reencoded")} == {line for line in named if line.startswith("-- row")}


def test_color_option_is_applied(tiny, monkeypatch):
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
def test_mistake_is_one_line(tiny, overrides, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room, hand = tmp_path / "room", tiny / "stores" / "hand"
    manifest = json.loads((hand / "manifest.json").read_text())
    outside = [{"file": "../damaged/shard-00000.parquet", "rows": 2}]
    changed = {"older": {"schema": STORES - 1}, "outside": {"shards": outside}}
    for name in ("damaged", "linked", "foreign", *changed):
        shutil.copytree(hand, room / name)
        (room / name / "manifest.json").write_text(json.dumps(manifest | changed.get(name, {})))
    (room / "damaged" / "shard-00000.parquet").write_bytes(b"PAR1")
    (room / "foreign" / "manifest.json").write_text("{}")
    (room / "linked" / "shard-00000.parquet").unlink()
    (room / "linked" / "shard-00000.parquet").symlink_to(hand / "shard-00000.parquet")
    done = run(tiny, *(override.replace("ROOM", str(room)) for override in overrides))
    done.refused(said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["room"]


def test_newest_finished_store_is_taken(tiny, tmp_path):
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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.ci("0.7")
def test_surprisal_of_sampled_answers_is_their_entropy(pocket_store, temperature, tmp_path):
    store = pocket_store(temperature)
    done = foredraft("inspect-data", f"store={store}", "rows=1").succeeded()
    (z,) = re.findall(r"^surprisal .* nats,.*\(z = (\S+)\)", done.out, re.MULTILINE)
    assert abs(float(z)) < 4
    assert "WARNING" not in done.out
    assert done.out.count("-- row") == 1
    for text in ("surprisal and entropy agree", f"entropy at T={temperature:g} ", "<|assistant|>⟦"):
        assert text in done.out
    shutil.copytree(store, tmp_path / "lie")
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["plan"] |= {"target": "another", "sampler": {"temperature": 0.1}}
    (tmp_path / "lie" / "manifest.json").write_text(json.dumps(manifest))
    lie = foredraft("inspect-data", f"store={tmp_path / 'lie'}", "rows=0").succeeded().out
    assert "WARNING: the store names another target" in lie
    assert "WARNING: surprisal and entropy differ" in lie

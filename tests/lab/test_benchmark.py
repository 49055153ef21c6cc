"""The race between our loop and Hugging Face's: what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json

import pytest
from workbench import Bench, command, make_target

from benchmark import BENCHMARKS, run
from benchmarks import vs_transformers as race_module
from benchmarks.vs_transformers import Contender, Text, hugging_face, ours, race
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.lm import DraftLM

GREEDY = Sampler(0.0)
EVERYBODY = ["ours-plain", "hf-generate", "hf-assisted", "hf-prompt-lookup", "ours-lm-chain"]


@pytest.fixture(scope="module")
def checkpoint(bench):
    return bench.untrained_eagle()


def benchmark(bench: Bench, *more: str):
    """`python scripts/lab/benchmark.py` in this process, on the tiny target as its own draft model."""
    given = [a for a in bench.command if a.startswith(("target=", "prompts")) and a != "prompts.self=0"]
    quick = ["compiled=false", "score.prompts=3", "score.max_new_tokens=9", "score.repeats=2"]
    draft = [] if "drafter=eagle" in more else [f"drafter.path={bench.target}"]
    out = f"out={bench.root / 'race.json'}"
    return command(run, ["benchmark.py", "decode", *given, *quick, *draft, out, *more])


def test_a_race_writes_a_row_for_everybody(bench, checkpoint):
    done = benchmark(bench, f"checkpoint={checkpoint}", "plans.tree.depth=3").succeeded()
    card = json.loads((bench.root / "race.json").read_text())
    rows = {row["name"]: row for row in card["rows"]}
    assert list(rows) == [*EVERYBODY, *(f"ours-eagle-{plan}" for plan in ("chain", "tree", "hybrid"))]
    for name, row in rows.items():
        assert row["spread"][0] <= row["tokens_per_second"] <= row["spread"][1]
        assert row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1]
        assert (row["differ"], row["near_ties"], row["largest_gap"]) == (0, 0, None), name
        assert row["tokens"] == rows["ours-plain"]["tokens"]
    assert rows["ours-plain"]["ratio"] == rows["ours-plain"]["tau"] == rows["hf-generate"]["tau"] == 1.0
    assert rows["ours-lm-chain"]["tau"] > 2
    assert (card["prompts"], card["repeats"], card["threads"], len(card["load_average"])) == (3, 2, 1, 2)
    assert [line.split()[0] for line in done.out.splitlines()[1 : 1 + len(rows)]] == list(rows)


def test_drawn_texts_are_not_compared(bench):
    benchmark(bench, "temperature=0.8", "score.repeats=1", "ends=false").succeeded()
    rows = json.loads((bench.root / "race.json").read_text())["rows"]
    assert [row["name"] for row in rows] == EVERYBODY
    assert {row[key] for row in rows for key in ("differ", "near_ties", "largest_gap")} == {None}
    assert {row["tokens"] for row in rows} == {3 * 9}, "nobody stopped"
    assert rows[EVERYBODY.index("ours-lm-chain")]["tau"] > 2, "the target as its own draft model"
    assert rows[EVERYBODY.index("hf-assisted")]["tau"] > 2


def test_race_without_a_draft_model_of_the_vocabulary(bench):
    done = benchmark(bench, "drafter.path=data/pocket-draft", "score.repeats=1").succeeded()
    card = json.loads((bench.root / "race.json").read_text())
    assert [row["name"] for row in card["rows"]] == ["ours-plain", "hf-generate", "hf-prompt-lookup"]
    assert card["draft_model"] is None
    assert "without assisted generation and our chain with a draft model: drafter.path=" in done.out


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("drafter.path=/nowhere", "drafter=/nowhere: no such folder"),
        ("drafter=eagle", "Hugging Face can use drafter=lm_given too"),
        ("checkpoint=/nowhere", "no such folder"),
        ("plans.tree.width=0", "must be >= 0 and >= 1"),
        ("score.repeats=0", "score.repeats=0"),
        ("temperature=-1.0", "temperature=-1.0"),
    ],
)
def test_bad_option_is_refused(bench, option, reason):
    benchmark(bench, option).refused(reason)


@pytest.mark.parametrize("word", ["speed", "checkpoint=x"])
def test_unknown_benchmark_is_refused(word):
    command(run, ["benchmark.py", word]).refused("benchmark", "choose one of auto, decode")


@pytest.mark.parametrize("words", [[], ["--help"]], ids=str)
def test_help_lists_the_benchmarks(words):
    done = command(run, ["benchmark.py", *words])
    assert (done.code, done.err) == (0, "")
    assert set(BENCHMARKS) <= set(done.out.splitlines())


# -- what is counted -----------------------------------------------------------------------------


class Clock:
    """Everybody's calls take a known time, and their order is noted."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(race_module.time, "perf_counter", lambda: self.now)

    def contender(self, name: str, seconds: float, tokens: int, emitted=()) -> Contender:
        def decode(prompt, longest):
            self.calls.append((name, tuple(prompt), longest))
            self.now += seconds * (1 + prompt[0])  # a slower prompt for everybody
            return Text(list(range(tokens)), list(emitted))

        return Contender(name, decode)


def test_speeds_count_whole_calls_and_contenders_take_turns_to_be_first(monkeypatch):
    clock = Clock(monkeypatch)
    who = [clock.contender("a", 1.0, 4), clock.contender("b", 0.5, 4, [2, 1]), clock.contender("c", 2.0, 5)]
    results = race(who, [[0], [1]], max_new_tokens=20, repeats=3)
    a, b, c = (result.row for result in results)
    assert [row["tokens_per_second"] for row in (a, b, c)] == pytest.approx([8 / 3, 16 / 3, 10 / 6])
    assert [row["ratio"] for row in (a, b, c)] == pytest.approx([1, 2, 10 / 16])
    assert [row["tokens"] for row in (a, b, c)] == [8, 8, 10]
    assert [result.texts for result in results] == [[list(range(n))] * 2 for n in (4, 4, 5)]
    assert [row["tau"] for row in (a, b, c)] == [0.0, 1.5, 0.0]
    warm, timed = clock.calls[:3], clock.calls[3:]
    assert [call[2] for call in warm] == [8, 8, 8]
    firsts = [name for name, *_ in timed[::3]]
    assert firsts == ["a", "b", "b", "c", "c", "a"]
    assert all(sorted(n for n, *_ in timed[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(timed), 3))


def test_hugging_faces_passes_are_counted_as_ours_are(tmp_path):
    """The target as its own draft model: every pass but the last settles all of the draft and one more."""
    folder = str(make_target(tmp_path / "target"))
    target = load_target(folder, "float64")
    drafter = DraftLM.for_target(target, path=folder).to(target.dtype).eval()
    prompt, depth = [7, 8, 9], 3
    passes = []
    hook = target.model.register_forward_hook(lambda *_: passes.append(1))
    both = {
        "assisted": hugging_face(target, GREEDY, assistant=drafter.model, depth=depth),
        "plain": hugging_face(target, GREEDY),
    }
    for name, decode in both.items():
        passes.clear()
        text = decode(prompt, 20)
        assert len(text.tokens) == 20
        assert len(text.emitted) + 1 == len(passes)
        assert set(text.emitted[:-1]) == {depth + 1 if name == "assisted" else 1}
    hook.remove()
    own = ours(target, drafter, Plan(depth=depth), GREEDY)(prompt, 20)
    assert own.tokens == text.tokens
    assert set(own.emitted[:-1]) == {depth + 1}


def test_end_tokens_and_the_context_end_a_text_alike(tmp_path):
    target = load_target(str(make_target(tmp_path / "target")), "float64")
    free = ours(target, None, Plan(), GREEDY)([7, 8, 9], 20).tokens
    stop = [free[5]]
    mine, theirs = ours(target, None, Plan(), GREEDY, stop=stop), hugging_face(target, GREEDY, stop=stop)
    assert mine([7, 8, 9], 20).tokens == theirs([7, 8, 9], 20).tokens
    mine, theirs = ours(target, None, Plan(), GREEDY), hugging_face(target, GREEDY)
    long = [7] * 250  # of 256 positions
    assert len(theirs(long, 20).tokens) == len(mine(long, 20).tokens) == 6


def test_rollout_race_has_a_row_for_every_batch_size_and_drafter(bench, checkpoint):
    given = [a for a in bench.command if a.startswith(("target=", "prompts"))]
    out = bench.root / "rollout.json"
    quick = ["score.max_new_tokens=6", "score.repeats=2", "count=2", "batch_sizes=[1,3]", "decode.depth=2"]
    argv = ["benchmark.py", "rollout", *given, *quick, f"checkpoint={checkpoint}", f"out={out}"]
    done = command(run, argv).succeeded()
    card = json.loads(out.read_text())
    rows = card["rows"]
    assert [(r["drafter"], r["batch_size"], r["join"]) for r in rows] == [
        (name, size, join)
        for name in ("none", "eagle, chain-2", "eagle, auto")
        for size, join in ((1, True), (3, True), (3, False))
    ]
    assert rows[0]["ratio"] == 1.0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    # Two answers of six tokens: each a pass over the prompt and five more, together where they share a batch.
    assert [row["passes"] for row in rows[:3]] == [12, 6, 6]
    assert rows[3]["passes"] <= 12
    assert {row["same"] for row in rows} == {1.0}
    assert f"{rows[-1]['ratio']:.2f}x" in done.out

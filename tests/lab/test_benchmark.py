"""The race between our decoding loop and Hugging Face's: what is counted, compared, compiled and refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import families
import pytest
import torch
from workbench import Bench, command, make_target

from benchmark import run
from benchmarks import near_ties
from benchmarks import vs_transformers as race_module
from benchmarks.near_ties import Differences
from benchmarks.vs_transformers import Contender, Text, hugging_face, ours, race
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint.io import save
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram

GREEDY = Sampler(0.0)
EVERYBODY = ["ours-plain", "hf-generate", "hf-assisted", "hf-prompt-lookup", "ours-lm-chain"]
QUICK = ["score.prompts=3", "score.max_new_tokens=9"]


@pytest.fixture(scope="module")
def checkpoint(bench):
    return bench.untrained_eagle()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_target(tmp_path_factory.mktemp("race") / "target"))


def benchmark(bench: Bench, *more: str):
    """The race on the tiny target, which is its own draft model."""
    draft = [] if "drafter=eagle" in more else [f"drafter.path={bench.target}"]
    quick = ["compiled=false", "score.repeats=2", f"out={bench.root / 'race.json'}"]
    return bench.benchmark("decode", *QUICK, *quick, *draft, *more)


def test_a_race_writes_a_row_for_everybody(bench, checkpoint):
    done = benchmark(bench, f"checkpoint={checkpoint}", "plans.tree.depth=3").succeeded()
    card = json.loads((bench.root / "race.json").read_text())
    rows = {row["name"]: row for row in card["rows"]}
    drafted = [f"{who}-eagle-{plan}" for plan in ("chain", "tree", "hybrid") for who in ("ours", "hf")]
    assert list(rows) == [*EVERYBODY, *drafted]
    for own, inside in zip(drafted[::2], drafted[1::2], strict=True):
        assert rows[own]["tau"] == rows[inside]["tau"], "assist decodes the same rounds inside generate"
    for name, row in rows.items():
        assert row["spread"][0] <= row["tokens_per_second"] <= row["spread"][1]
        assert row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1]
        assert (row["differ"], row["near_ties"], row["largest_gap"]) == (0, 0, None), name
        assert row["tokens"] == rows["ours-plain"]["tokens"]
    assert rows["ours-plain"]["ratio"] == rows["ours-plain"]["tau"] == rows["hf-generate"]["tau"] == 1.0
    assert rows["ours-lm-chain"]["tau"] > 2
    assert (card["prompts"], card["repeats"], card["threads"], len(card["load_average"])) == (3, 2, 1, 2)
    assert card["clock"] == "process_time", "one thread does all work, so other programs do not count"
    assert [line.split()[0] for line in done.out.splitlines()[1 : 1 + len(rows)]] == list(rows)


def test_plans_that_the_drafter_has_no_draft_for_are_named_and_left_out(bench, tmp_path):
    ngram = tmp_path / "ngram"
    ngram.mkdir()
    save(Ngram(1, 3), load_target(str(bench.target)), ngram)
    done = benchmark(bench, f"checkpoint={ngram}", "plans.tree.depth=3").succeeded()
    assert "without plans.hybrid: decode.proposal=hybrid: this drafter has no distribution" in done.out
    names = [row["name"] for row in json.loads((bench.root / "race.json").read_text())["rows"]]
    assert names[len(EVERYBODY) :] == [
        "ours-ngram-chain",
        "hf-ngram-chain",
        "ours-ngram-tree",
        "hf-ngram-tree",
    ]
    refused = benchmark(bench, f"checkpoint={ngram}", "~plans.chain", "~plans.tree")
    refused.refused("this drafter has no distribution")


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


# -- what is counted -----------------------------------------------------------------------------


class Clock:
    """Everybody's calls take a known time, and their order is noted."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, seconds: float, tokens: int, emitted=()) -> Contender:
        def decode(prompt, longest):
            self.calls.append((name, tuple(prompt), longest))
            self.now += seconds * (1 + prompt[0])  # a slower prompt for everybody
            return Text(list(range(tokens)), list(emitted))

        return Contender(name, decode)


def test_speeds_count_whole_calls_and_contenders_take_turns_to_be_first():
    clock = Clock()
    who = [clock.contender("a", 1.0, 4), clock.contender("b", 0.5, 4, [2, 1]), clock.contender("c", 2.0, 5)]
    results = race(who, [[0], [1]], max_new_tokens=20, repeats=3, clock=clock)
    a, b, c = (result.row for result in results)
    assert [row["tokens_per_second"] for row in (a, b, c)] == pytest.approx([8 / 3, 16 / 3, 10 / 6])
    assert [row["ratio"] for row in (a, b, c)] == pytest.approx([1, 2, 10 / 16])
    assert [row["tokens"] for row in (a, b, c)] == [8, 8, 10]
    assert [result.texts for result in results] == [[list(range(n))] * 2 for n in (4, 4, 5)]
    assert [row["tau"] for row in (a, b, c)] == [None, 1.5, None]
    warm, timed = clock.calls[:3], clock.calls[3:]
    assert [call[2] for call in warm] == [8, 8, 8]
    firsts = [name for name, *_ in timed[::3]]
    assert firsts == ["a", "b", "b", "c", "c", "a"]
    assert all(sorted(n for n, *_ in timed[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(timed), 3))


def test_hugging_faces_passes_are_counted_as_ours_are(folder):
    """The target as its own draft model: every pass but the last settles all of the draft and one more."""
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


def test_end_tokens_and_the_context_end_a_text_alike(folder):
    target = load_target(folder, "float64")
    free = ours(target, None, Plan(), GREEDY)([7, 8, 9], 20).tokens
    stop = [free[5]]
    mine, theirs = ours(target, None, Plan(), GREEDY, stop=stop), hugging_face(target, GREEDY, stop=stop)
    assert mine([7, 8, 9], 20).tokens == theirs([7, 8, 9], 20).tokens
    mine, theirs = ours(target, None, Plan(), GREEDY), hugging_face(target, GREEDY)
    long = [7] * 250  # of 256 positions
    assert len(theirs(long, 20).tokens) == len(mine(long, 20).tokens) == 6


def test_rollout_race_has_a_row_for_every_batch_size_and_drafter(bench, checkpoint):
    out = bench.root / "rollout.json"
    quick = ["score.max_new_tokens=6", "score.repeats=2", "count=2", "batch_sizes=[1,3]", "decode.depth=2"]
    done = bench.benchmark("rollout", *quick, f"checkpoint={checkpoint}", f"out={out}").succeeded()
    rows = json.loads(out.read_text())["rows"]
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


# -- the compiled plain loop ----------------------------------------------------------------------

compile_for_real = torch.compile
WITHOUT_DRAFTS = ["ours-plain", "hf-generate", "hf-compiled", "hf-prompt-lookup"]


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that were compiled, which are run as they are: no compiler is called."""
    seen = []

    def backend(graph, inputs):
        seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda body: compile_for_real(body, backend=backend))
    yield seen
    torch.compiler.reset()


def compiled_race(bench: Bench, *more: str):
    """The output and the rows of the race on the tiny target, whose vocabulary no draft model has."""
    out = bench.root / "compiled.json"
    done = bench.benchmark("decode", *QUICK, "score.repeats=1", f"out={out}", *more).succeeded()
    return done.out, {row["name"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.ci("llama", "mistral, window 6")
@pytest.mark.parametrize("family", ["llama", "mistral, window 6", "gemma3, window 6", "gpt2"])
def test_compiled_loop_writes_the_same_text(family, graphs, tmp_path):
    """A window that fills up compiles again, within the first texts."""
    kind, options, *seed = families.WORKS[family]
    folder = families.save(tmp_path / "target", kind, options, *seed)
    target = load_target(str(folder), "float64")
    compiled, plain = hugging_face(target, GREEDY, static=40), hugging_face(target, GREEDY)
    assert not graphs
    for prompt in families.PROMPTS[:2]:
        compiled(prompt, 24)
    assert len(graphs) == (3 if "window" in family else 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt in families.PROMPTS:
            assert compiled(prompt, 24) == plain(prompt, 24)
    assert "forward" not in vars(target.model), "the others run the model as it was"


@pytest.mark.proof
def test_compiled_code_runs_in_the_race(bench):
    """With the real compiler, which takes its time."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    out, found = compiled_race(bench)
    assert list(found) == WITHOUT_DRAFTS
    assert {row["differ"] for row in found.values()} == {0}
    assert found["hf-compiled"]["tokens"] == found["ours-plain"]["tokens"]
    assert found["hf-compiled"]["tau"] == 1.0
    assert "compiled Hugging Face's plain loop and ran it once in " in out
    assert "which are not timed" in out


def test_compilation_ends_before_the_timing(bench, graphs, monkeypatch):
    before = []

    def counted(*given, **named):
        before.append(len(graphs))
        return race(*given, **named)

    monkeypatch.setattr("benchmarks.decode.race", counted)
    _, rows = compiled_race(bench, "temperature=0.5")
    assert before == [len(graphs)] == [1]
    assert rows["hf-compiled"]["differ"] is None


def test_without_a_compiler_the_others_race(bench, monkeypatch):
    def none(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda body: compile_for_real(body, backend=none))
    out, rows = compiled_race(bench)
    assert list(rows) == [name for name in WITHOUT_DRAFTS if name != "hf-compiled"]
    assert out.count("without the compiled loop: ") == 1
    torch.compiler.reset()


def test_constant_weights_are_switched_on_and_off_again():
    """Without it the compiled loop is slower than it could be, and nothing else would say so."""
    from torch._inductor import config  # private API: see `_constant_weights`

    assert not config.freezing
    with race_module._constant_weights():
        assert config.freezing
    assert not config.freezing


def test_a_static_cache_holds_what_the_context_does(folder, graphs):
    target = load_target(folder, "float64")
    long = [7] * 250  # of 256 positions
    dynamic, static = (hugging_face(target, GREEDY, static=n)(long, 20).tokens for n in (0, 256))
    assert static == dynamic
    assert len(static) == 6


# -- texts that differ ----------------------------------------------------------------------------

PROMPT, COMMON = [7, 8, 9], [11, 40, 23]
ONE, TWIN = 30, 31  # two tokens of one logit, but for `LIFT`
LIFT = 1e-4  # less than half a rounding of bf16, more than those of fp32


def load(folder, dtype, lift=0.0):
    """The target, with two tokens whose logits after `COMMON` differ by `lift`."""
    target = load_target(folder, dtype)
    weight = target.head.weight
    with torch.inference_mode():
        state = target.read(torch.tensor([PROMPT + COMMON])).last[0, -1].double()
        other = weight[ONE].double() + lift * state / state.square().sum()
        weight[TWIN] = other.to(weight.dtype)
    return target


def compare(target, *others, first=(*COMMON, ONE, 50)):
    """Counts of other texts of the same prompt."""
    count = len(others)
    return Differences(target, [PROMPT] * count, [first] * count)(others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_only_equal_logits_are_a_near_tie(folder, dtype):
    target = load(folder, dtype)
    tie = [*COMMON, TWIN, 60, 61]
    found = compare(target, tie)
    assert (found["differ"], found["near_ties"]) == (1, 1)
    assert found["largest_gap"] < 1e-6
    wide: Any = load(folder, dtype).model
    logits = wide.to(near_ties.WIDER[target.dtype])(torch.tensor([PROMPT + COMMON])).logits[0, -1]
    gaps = (logits - logits[ONE]).abs()
    far = int(gaps.argmax())
    found = compare(target, tie, [*COMMON, far], [*COMMON, ONE, 50])
    assert (found["differ"], found["near_ties"]) == (2, 1)
    assert found["largest_gap"] == pytest.approx(float(gaps[far]), rel=1e-5)
    assert target.dtype == getattr(torch, dtype), "only a copy is cast"


def test_float64_has_no_near_ties(folder):
    found = compare(load(folder, "float64"), [*COMMON, TWIN])
    assert found == {"differ": 1, "near_ties": 0, "largest_gap": 0.0}


def test_bf16_tie_is_none_in_float32(folder):
    """The same gap is above the rounding of fp32, and far below that of bf16."""
    exact = compare(load(folder, "float32", LIFT), [*COMMON, TWIN])
    assert exact["near_ties"] == 0
    assert exact["largest_gap"] == pytest.approx(LIFT, rel=0.2)
    assert compare(load(folder, "bfloat16", LIFT), [*COMMON, TWIN])["near_ties"] == 1


def test_an_equal_or_shorter_text_has_no_gap(folder, monkeypatch):
    monkeypatch.setattr(near_ties, "_logits", lambda *given: pytest.fail("nothing to read"))
    target = load(folder, "bfloat16")
    assert compare(target, COMMON) == {"differ": 1, "near_ties": 0, "largest_gap": None}
    assert compare(target, [*COMMON, ONE, 50]) == {"differ": 0, "near_ties": 0, "largest_gap": None}


def test_differences_of_a_target_too_large_to_cast_are_counted(folder, monkeypatch):
    monkeypatch.setattr(near_ties, "LARGEST_COPY", 10)
    found = compare(load(folder, "bfloat16"), [*COMMON, TWIN], [*COMMON, ONE, 50])
    assert found == {"differ": 1, "near_ties": None, "largest_gap": None}

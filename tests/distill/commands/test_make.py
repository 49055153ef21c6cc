"""foredraft make: from a target to a served drafter, within a budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workbench import ROOT, Bench, foredraft, make_target, options_of

from decode.errors import UserError
from distill.commands.making import answers, candidates, engines, make, serve, speed
from distill.commands.making.options import seconds_of
from distill.commands.making.record import EngineResult, MakeRecord
from distill.commands.making.speed import AnswerSpeed
from distill.commands.rollout import read_work
from distill.engine_costs.costs import EngineCosts, TimedLength
from distill.engines.base import Answer
from distill.search.time_budget import Deadline
from distill.utils.run_folder import checkpoints

SMALL = [
    *("budget=5m", "lengths=[1,2]", "batch_size=2", "logger=csv", "rollout.max_new_tokens=16"),
    *("rollout.samples=1", "max_tokens=64", "target.dtype=float32", "trainer.precision=32-true"),
    *("score.prompts=2", "score.max_new_tokens=8", "score.replay_prompts=3", "score.early_prompts=1"),
]


def words(bench, *more: str) -> list[str]:
    prompts = [f"prompts={bench.prompts}", f"prompts.heldout={bench.heldout}"]
    return [f"target={bench.target}", *prompts, f"output_dir={bench.root / 'outputs'}", *SMALL, *more]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A target with as many layers as EAGLE-3 reads."""
    return make_target(tmp_path_factory.mktemp("deep") / "target", layers=8)


@pytest.fixture
def bench(tmp_path):
    """Each test has its own outputs."""
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """The budget begins with the command, as in a process of its own."""
    monkeypatch.setattr(make, "process_age", lambda: 0.0)


class StepClock(Deadline):
    """A deadline on whose clock a step takes a tenth of a second, and scores take no time."""

    def __init__(self, end: float, points: int, clock: Callable[[], float]) -> None:
        self.now = 0.0
        super().__init__(end - clock(), points, clock=lambda: self.now)

    def on_train_batch_end(self, *given: Any) -> None:
        self.now += 0.1
        super().on_train_batch_end(*given)


@pytest.fixture
def quick(monkeypatch):
    """Few timed prompts, and 40 steps of training: four seconds of its clock."""
    monkeypatch.setattr(make, "Deadline", StepClock)
    monkeypatch.setattr(engines, "PROMPTS", 1)
    monkeypatch.setattr(engines, "UNTRAINED_PROMPTS", 1)
    monkeypatch.setattr(engines, "TOKENS", 8)
    monkeypatch.setattr(make.Making, "_check_time", lambda self, options, after: 4.0)


@pytest.fixture
def costs(monkeypatch):
    """Costs that tests decide: by kind, plain rounds that a round with 2 drafted tokens takes."""

    def choose(**seconds: float) -> None:
        def candidate(self, name: str, run, to: str) -> EngineCosts:
            del self, run, to
            length = TimedLength(length=2, drafted=2, seconds=seconds[name], tau=1.0, measured=1.0)
            return EngineCosts(batch_size=1, plain=1.0, lengths=(length,), prefill=0.0, drafted_prefill=0.0)

        monkeypatch.setattr(engines.Timing, "candidate", candidate)
        monkeypatch.setattr(candidates, "LONGEST", 2)

    return choose


def record_of(bench) -> dict:
    (folder,) = bench.runs()
    return json.loads((folder / "make.json").read_text())


def decided(record: dict) -> dict:
    return {one["what"]: one["chosen"] for one in record["decisions"]}


def test_command_ends_with_formats_commands_and_a_record(bench, quick, costs):
    costs(eagle=1.2, medusa=1.5)
    more = ["ship=[native,vllm]", "candidates=[eagle,medusa]"]
    done = foredraft("make", *words(bench, *more)).succeeded()
    (folder,) = bench.runs()
    record = record_of(bench)
    assert decided(record)["drafter"] == "eagle"
    assert record["words"] == ["drafter=eagle"]
    assert record["limit"] is None  # all of 12 prompts fit
    steps = [int(path.name) for path in checkpoints(folder)]
    assert len(steps) > 2, "save points before the end"
    scored = [step for step in steps if (folder / "checkpoints" / str(step) / "score.json").exists()]
    assert len(scored) > 2, "and they are scored"
    best = folder / "checkpoints" / "best"
    assert (best / "passport.json").exists()
    for to in ("native", "vllm"):
        assert (folder / "export" / f"{best.resolve().name}-{to}" / "README.md").exists()
    assert "vllm: written, and not timed; give vllm_python=" in done.out
    found = record["engines"]["native"]
    assert found["engine"] == "foredraft"
    length = found["length"]
    assert found["predicted"] > 0
    if found["measured"]:
        timed = json.loads((folder / "costs" / "native.json").read_text())["measured"]["costs"][0]["lengths"]
        assert [one["measured"] for one in timed] == [found["measured"]]
    assert f"decode.depth={length}" in record["commands"]["native"] or not length
    assert steps[-1] <= 41, "training ends when its time does"
    assert "of 5 min; decisions: " in done.out
    again = ["score.prompts=1", "score.replay_prompts=1", "score.max_new_tokens=8", "score.audit_prompts=1"]
    foredraft("score", f"checkpoint={best}", *again).succeeded()  # with the run's target and prompts


@pytest.mark.proof
def test_made_drafter_is_pushed_with_its_card_and_passport(bench, quick, costs, fake_hub, monkeypatch):
    costs(eagle=1.2)
    monkeypatch.setattr(make.Making, "_check_time", lambda self, options, after: 15.0)
    decided = EngineResult(engine="vllm 1", ceiling=2.0, predicted=1.3, length=2, measured=1.2, tau=2.0)
    monkeypatch.setattr(engines.Timing, "engines", lambda self: {"vllm": "vllm"})
    monkeypatch.setattr(engines.Timing, "trained", lambda self, *_: decided)
    more = [
        "candidates=[eagle]",
        "ship=[vllm]",
        "export.push_to=me/drafter",
        f"target={ROOT / 'data' / 'pocket'}",
    ]
    done = foredraft("make", *words(bench, *more)).succeeded()
    repo = fake_hub.repos["me/drafter"]
    assert f"uploaded: {fake_hub.url}/me/drafter/commit/{repo.sha}" in done.out
    assert repo.private
    (folder,) = bench.runs()
    (out,) = (folder / "export").iterdir()
    assert repo.files == {path.name: path.read_bytes() for path in out.iterdir()}
    named = {"README.md", "config.json", "model.safetensors", "recipe.json", "scorecard.json"}
    assert repo.files.keys() == named | {"passport.json", "passport.md"}
    text = {name: value.decode() for name, value in repo.files.items() if name != "model.safetensors"}
    card = text["README.md"]
    (command,) = (line for line in card.splitlines() if line.startswith("    vllm serve "))
    assert '"model": "me/drafter", "num_speculative_tokens": 2' in command
    assert "| target's licence | apache-2.0 |" in card
    assert '"source": "prompts.jsonl"' in card, "where the data are from"
    weights = json.loads(text["passport.json"])["files"]["model.safetensors"]
    assert weights["sha256"] == hashlib.sha256(repo.files["model.safetensors"]).hexdigest()
    assert not [name for name, value in text.items() if str(bench.root) in value or str(ROOT) in value]
    written = [path for path in bench.root.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if fake_hub.token.encode() in path.read_bytes()]
    assert fake_hub.token not in done.out + done.err


def test_push_without_a_token_is_refused_before_the_work(bench, fake_hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    more = ["candidates=[eagle]", "ship=[native]", "export.push_to=me/drafter"]
    foredraft("make", *words(bench, *more)).refused("no token of the Hub is known here")
    foredraft("make", *words(bench, *more, "ship=[native,vllm]")).refused("a repository holds one format")
    assert not list((bench.root / "outputs").glob("rollouts/*"))


@pytest.mark.proof
def test_given_drafter_without_training_takes_no_answers(bench, quick, costs):
    costs(lm_given=1.2)
    more = ["drafter=lm_given", f"drafter.path={bench.target}", "ship=[native]"]
    foredraft("make", *words(bench, *more)).succeeded()
    record = record_of(bench)
    assert record["answers"] is False
    assert "answers" not in record["took"]
    assert not list((bench.root / "outputs").glob("rollouts/*"))
    found = record["engines"]["native"]
    assert found["tau"] == 3, "the target drafts for itself"
    assert found["predicted"] == pytest.approx(3 / 1.2)
    assert found["length"] == (2 if found["measured"] >= 1 else 0)


def test_nothing_is_made_where_no_draft_can_pay(bench, costs):
    costs(medusa=3.0, eagle=2.9)
    done = foredraft("make", *words(bench, "candidates=[eagle,medusa]")).succeeded()
    assert "=> do not draft: no shipped engine gains, even if all is accepted" in done.out
    record = record_of(bench)
    assert record["draft"] is False
    assert decided(record)["draft"] is False
    assert "the largest ceiling is 1.03x" in next(
        one["because"] for one in record["decisions"] if one["what"] == "draft"
    )
    assert not checkpoints(bench.runs()[0])
    assert not list((bench.root / "outputs").glob("rollouts/*"))


def test_candidate_with_the_best_forecast_is_chosen(bench, costs, monkeypatch):
    costs(eagle=2.0, medusa=1.2)  # 1.85 and 1.75 tokens of a round
    chosen = []
    monkeypatch.setattr(make.Making, "_train", lambda self, options: chosen.append(self.record) or options)
    monkeypatch.setattr(make.Making, "_end", lambda self, options: None)
    foredraft("make", *words(bench, "candidates=[eagle,medusa]")).succeeded()
    assert chosen[0].words == ["drafter=medusa"]
    assert "eagle 1.00x, medusa 1.46x" in next(
        one.because for one in chosen[0].decisions if one.what == "drafter"
    )


def test_gguf_without_the_targets_file_is_refused_before_anything_is_timed(bench, deep, monkeypatch):
    monkeypatch.setattr(candidates, "time_candidates", None)
    said = "export.target_gguf=<file>"
    foredraft("make", *words(bench, "ship=[vllm,gguf]", f"target={deep}")).refused(said)
    assert not list((bench.root / "outputs").glob("rollouts/*"))


@pytest.fixture
def served(monkeypatch):
    """Some GGUF file of the target."""
    monkeypatch.setattr(make.gguf_file, "target_file", lambda *_: Path("target.gguf"))


def test_settings_follow_from_the_formats(bench, deep, costs, served, monkeypatch):
    costs(eagle3=1.2)
    monkeypatch.setattr(make.Making, "_train", lambda self, options: options)
    monkeypatch.setattr(make.Making, "_end", lambda self, options: None)
    more = ["ship=[gguf,native]", "candidates=[eagle3,medusa]", f"target={deep}"]
    foredraft("make", *words(bench, *more)).succeeded()
    record = record_of(bench)
    assert {"drafter.fc_norm=false", "drafter.norm_before_fc=true"} < set(record["words"])
    assert decided(record)["drafter=medusa"] is False  # llama.cpp has none


@pytest.mark.parametrize(
    ("drafter", "option"),
    [(["drafter=eagle3"], "drafter"), (["drafter=union", "drafter.first=eagle3"], "drafter.first")],
)
def test_settings_that_a_format_needs_are_set_for_a_named_drafter(
    bench, deep, costs, served, monkeypatch, drafter, option
):
    kind = drafter[0].partition("=")[2]
    costs(**{kind: 1.2})
    monkeypatch.setattr(make.Making, "_train", lambda self, options: options)
    monkeypatch.setattr(make.Making, "_end", lambda self, options: None)
    done = foredraft("make", *words(bench, *drafter, "ship=[vllm,gguf]", f"target={deep}")).succeeded()
    record = record_of(bench)
    changes = [f"{option}.fc_norm=false", f"{option}.norm_before_fc=true"]
    assert record["words"] == [drafter[0], *changes]
    assert decided(record)[f"{option}.fc_norm"] is False
    reason = "to=gguf: llama.cpp has no fc_norm (a norm per tap)"
    assert f"{option}.fc_norm=false, not true: {reason}" in done.out
    assert f"{option}.norm_before_fc=true, not false: {reason}" in done.out


def test_option_that_the_user_names_is_never_changed(bench, deep, served):
    more = ["drafter=eagle3", "drafter.fc_norm=true", "ship=[vllm,gguf]", f"target={deep}"]
    said = "drafter=eagle3: to=gguf: llama.cpp has no fc_norm", "train with drafter.fc_norm=false"
    foredraft("make", *words(bench, *more)).refused(*said)


def test_options_of_a_drafter_that_an_experiment_names_hold_for_every_candidate():
    assert candidates.with_kind(["drafter.depth=2"], "eagle") == ["drafter=eagle", "drafter.depth=2"]
    assert candidates.with_kind(["drafter=hass", "drafter.depth=2"], "eagle") == [
        "drafter=hass",
        "drafter.depth=2",
    ]
    assert candidates.with_kind([], "eagle") == ["drafter=eagle"]


@pytest.mark.proof
def test_drawn_answers_have_an_acceptance_too(bench, quick, costs):
    costs(eagle=1.01)
    more = ["candidates=[eagle]", "score.temperatures=[1.0]"]
    foredraft("make", *words(bench, *more)).succeeded()
    assert record_of(bench)["engines"]["native"]["predicted"] > 0


def test_stopped_run_goes_on_where_it_was(bench, quick, costs, monkeypatch):
    costs(eagle=1.2)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(make, "train", stop)
        assert foredraft("make", *words(bench, "candidates=[eagle]")).code == 130
    before = record_of(bench)
    assert before["took"]["answers"] > 0
    assert before["speed"]["answers"] == 12
    assert before["speed"]["start"] < before["took"]["sample of answers"]
    monkeypatch.setattr(make.Making, "_choose", stop)
    monkeypatch.setattr(answers, "fit_prompts", stop)
    more = ["candidates=[eagle]", "budget=6m"]  # a larger budget is the same run
    done = foredraft("make", *words(bench, *more)).succeeded()
    assert done.out.startswith("resuming: ")
    after = record_of(bench)
    assert after["took"]["answers"] == before["took"]["answers"]
    assert after["spent"] > before["spent"]


def test_budget_that_is_too_small_is_refused_before_the_answers(bench, costs):
    costs(eagle=1.2)
    more = ["candidates=[eagle]", "budget=10s"]
    foredraft("make", *words(bench, *more)).refused("budget=10s: after choosing the drafter", "larger")
    assert not list((bench.root / "outputs").glob("rollouts/*"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("budget=25", "budget=25: give a time above 0"),
        ("budget=0m", "budget=0m: give a time above 0"),
        ("ship=[]", "ship: name at least one format"),
        ("ship=[native,native]", "each once"),
        ("ship=[onnx]", "to=onnx: choose"),
        ("trainer.max_steps=3", "trainer.max_steps: foredraft make decides it"),
        ("score.every=3", "score.every: foredraft make decides it"),
        ("trainer.devices=2", "foredraft make: trains in one process"),
        ("decode=dynamic", "decode: foredraft make drafts chains"),
        ("decode.depth=3", "decode.depth: foredraft make drafts chains"),
        ("lengths=[0]", "lengths: give numbers of 1 or more"),
        ("answers_share=1.0", "answers_share=1.0: must be between 0 and 1"),
        ("candidates=[]", "candidates: name at least one drafter"),
        ("candidates=[eagel]", "drafter=eagel: did you mean eagle"),
        ("budgte=3m", "did you mean budget"),
    ],
)
def test_wrong_options_are_refused(bench, more, said):
    foredraft("make", *words(bench, more)).refused(said)
    assert not bench.runs()


class Clocked:
    """An engine, and a clock that only its work moves: 1 s a prompt, and 2 s and 0.5 s a row a round."""

    context, begins = 256, True

    def __init__(self, target, batch_size: int, *_) -> None:
        self.batch_size = batch_size

    def __call__(self, requests, params, ended=lambda _: None):
        lengths = [min(4 + number % 9, params.max_new_tokens) for number in range(len(requests))]
        assert len(requests) <= self.batch_size
        Clocked.now += 1.0 * len(requests)
        ended(0.0)
        for number in range(1, max(lengths)):
            Clocked.now += 2.0 + 0.5 * sum(length > number for length in lengths)
            ended(number)
        return [Answer([5] * length, False) for length in lengths]


@pytest.fixture
def clocked(bench, monkeypatch, tmp_path):
    """Fits the prompts of a run to a time by `Clocked`, where loading takes 100 s."""

    def loaded(options):
        Clocked.now += 100.0
        return read_work(options)

    def fit(seconds: float):
        Clocked.now = 0.0
        command = [w for w in words(bench, "drafter=eagle") if not w.startswith(("budget", "lengths"))]
        options = options_of(*command)
        return answers.fit_prompts(options, seconds, tmp_path, lambda: Clocked.now)

    monkeypatch.setattr(answers, "read_work", loaded)
    monkeypatch.setattr(speed, "in_process", lambda options, target, *_: Clocked(target, 12))
    return fit


def test_prompts_are_as_many_as_the_time_allows(clocked):
    enough = clocked(1000.0)
    assert (enough.limit, enough.answers) == (None, 12)
    few = clocked(100.0 + 60.0)
    assert 2 <= few.limit < 12
    assert few.seconds <= 160.0
    assert clocked(1.0).limit == 1
    options = options_of("drafter=eagle", "prompts.heldout_share=0.5")
    shared = replace(options, prompts=replace(options.prompts, heldout=None))
    assert answers._with_held_out(shared, 5) == 10


def test_loading_is_no_part_of_an_answer(clocked):
    found = clocked(1000.0).speed
    assert 100.0 < found.start < 120.0, "loading, and a first answer of four tokens"
    assert (found.prompt, found.step, found.row) == pytest.approx((1.0, 2.0, 0.5))
    assert found.longest == 10


def test_answers_wait_only_where_a_batch_is_full():
    found = AnswerSpeed(answers=8, start=7.0, prompt=1.0, step=2.0, row=0.5, rounds=10.0, longest=20.0)
    one = 8 * (1.0 + 5.0)
    assert found.seconds(8, shard=8, batch=8) == 7.0 + one + 2.0 * 20
    assert found.seconds(16, shard=8, batch=8) == 7.0 + 2 * (one + 2.0 * 20), "a shard after the other"
    assert found.seconds(16, shard=16, batch=8) == 7.0 + 2 * one + 2.0 * 30, "others join as these end"
    assert found.seconds(0, shard=16, batch=8) == 7.0
    whole = AnswerSpeed(answers=8, start=7.0, prompt=3.0)
    assert whole.seconds(10, shard=4, batch=2) == 37.0


@pytest.mark.parametrize("lengths", [[1, 1], [5, 5], [9, 2, 4]])
def test_rounds_of_any_sample_have_a_cost(lengths):
    rounds = [float(sum(length > number for length in lengths)) for number in range(1, max(lengths))]
    found = speed._fitted([speed._Call([3.0, *rounds], lengths)], len(lengths), start=0.0)
    told = found.seconds(len(lengths), shard=100, batch=100)
    assert told == pytest.approx(3.0 + sum(rounds))
    assert min(found.step, found.row) >= 0


def test_slow_draft_is_not_served(tmp_path):
    found = EngineResult(engine="vllm 1", ceiling=2.0, predicted=1.2, length=3, measured=0.9, tau=2.0)
    making = object.__new__(make.Making)
    making.record, making.total = MakeRecord.open(tmp_path), 60.0
    making.record.commands["vllm"] = "vllm serve x"
    making._decide_length("vllm", found)
    assert making.record.engines["vllm"].length == 0
    assert "1.20x predicted from the scored acceptance, 0.90x measured" in making.record.decisions[-1].because
    assert "do not draft: 0.90x measured" in making._summary()
    assert "serve it" not in making._summary()


def test_record_is_read_back_and_damage_is_named(tmp_path):
    record = MakeRecord.open(tmp_path)
    record.decide("drafter", "eagle", "it is the fastest")
    record.spent, record.words = 3.0, ["drafter=eagle"]
    record.speed = AnswerSpeed(answers=32, start=2.0, prompt=0.5)
    record.write()
    assert MakeRecord.open(tmp_path) == record
    (tmp_path / "make.json").write_text('{"decisions": [{"what": 1}]}')
    with pytest.raises(UserError, match="damaged; resume=never starts again"):
        MakeRecord.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("25m", 1500.0), ("1.5h", 5400.0), (" 2m ", 120.0)]
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds


def test_commands_draft_as_many_tokens_as_pay():
    vllm = """vllm serve T --speculative-config '{"method": "eagle", "num_speculative_tokens": 3}' --port 1"""
    assert '"num_speculative_tokens": 5' in serve.with_length("vllm", vllm, 5)
    assert serve.with_length("vllm", vllm, 0) == vllm
    llama = "llama-server -m T.gguf -md d --spec-type draft-eagle3 --spec-draft-n-max 3"
    assert serve.with_length("gguf", llama, 2).endswith("--spec-draft-n-max 2")
    assert (
        serve.with_length("native", "foredraft generate", 4)
        == "foredraft generate decode=chain decode.depth=4"
    )
    assert serve.with_length("hf", "python x", 4) == "python x"

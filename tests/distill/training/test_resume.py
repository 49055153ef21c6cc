"""Kills, signals, interruptions and damaged states: the same command resumes, with the same result."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from workbench import (
    Bench,
    Outcome,
    final,
    fork,
    kill_in_training,
    leftovers,
    same,
    tau,
    train,
    write_prompts,
)

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.rollouts import store as rollouts
from distill.scoring import scorer as scoring
from distill.training import checkpointing as callbacks
from distill.training import trainer_state
from distill.training.module import DistillModule
from distill.training.trainer_state import STATE, SUMS
from distill.utils.run_folder import checkpoints
from drafters.checkpoint import atomic as files
from drafters.models.eagle import Eagle
from drafters.vocabulary import ceiling

OPTIONS = ["score.every=2", "trainer.accumulate_grad_batches=2"]


@pytest.fixture(scope="module", autouse=True)
def noisy():
    """A drafter that draws from the global generator, as dropout does."""
    unroll = Eagle.unroll

    def with_noise(self, *args):
        for step in unroll(self, *args):
            yield step._replace(hidden=step.hidden + 0.1 * torch.randn_like(step.hidden))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle, "unroll", with_noise)
        yield


@pytest.fixture(scope="module")
def straight(bench, noisy) -> Path:
    """An undisturbed run: six steps of two micro-batches, a save point every two."""
    return bench.train(*OPTIONS).succeeded().folder


def send(monkeypatch, number: int, owner, name: str, when) -> None:
    """A signal to this process at the first call of `owner.name` for which `when` holds."""
    call, sent = getattr(owner, name), []

    def spoilt(*args, **options):
        if not sent and when(*args):
            sent.append(number)
            os.kill(os.getpid(), number)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, spoilt)


def stop(bench: Bench) -> tuple[int, str]:
    """Exit code of the command in a forked process, and its stderr."""
    inside, outside = os.pipe()

    def body() -> int:
        done = bench.train(*OPTIONS)
        os.write(outside, done.err.encode())
        return done.code

    status = fork(body)
    os.close(outside)
    with os.fdopen(inside) as err:
        return os.waitstatus_to_exitcode(status), err.read()


def assert_same_run(folder: Path, straight: Path) -> None:
    """That a run of six steps, with a save point every two, ended like another, with nothing left over."""
    assert same(final(folder), final(straight))
    assert [p.name for p in checkpoints(folder)] == ["2", "4", "6"]
    for checkpoint in checkpoints(folder):
        assert tau(checkpoint) == tau(straight / "checkpoints" / checkpoint.name)
        assert (checkpoint / "trainer").exists() == (checkpoint.name != "2")
    assert (folder / "checkpoints" / "last").readlink() == Path("6")
    assert (folder / "checkpoints" / "best").exists()
    assert not leftovers(folder)


def unfinished(bench: Bench) -> set[Path]:
    return {p for p in bench.runs() if not (p / "done").exists()}


# -- at known moments ------------------------------------------------------------------------------


def on_path(pattern: str):
    """Whether a call has a path that ends like this."""
    return lambda *args: any(isinstance(a, Path) and a.match(pattern) for a in args)


def in_micro_batch(which: int):
    return lambda module, batch, number: number == which


IO = callbacks.checkpoint_io
# The signal, the step of the newest checkpoint by then, and during which calls it comes.
MOMENTS = {
    "half a checkpoint": ("SIGKILL", 2, (IO, "save", on_path("4.tmp"))),
    "before the links": ("SIGKILL", 4, (callbacks, "_link_to", on_path("4"))),
    "before the score": ("SIGKILL", 4, (callbacks, "write_json", on_path("4/*"))),
    "half a score": ("SIGKILL", 4, (files, "sync", on_path("4/score.json.*"))),
    "before the last links": ("SIGKILL", 6, (callbacks, "_link_to", on_path("6"))),
    "before the last score": ("SIGKILL", 6, (callbacks, "write_json", on_path("6/*"))),
    "in a step": ("SIGTERM", 3, (DistillModule, "training_step", in_micro_batch(4))),
    "between micro-batches": ("SIGUSR1", 3, (DistillModule, "training_step", in_micro_batch(5))),
    # And once more before it is whole.
    "in a save": ("SIGTERM", 4, (IO, "save", on_path("4.tmp")), (files, "sync", on_path("4.tmp/*"))),
    "in a score": ("SIGTERM", 4, (scoring.checkpoint_io, "load", on_path("4"))),
    "in the last score": ("SIGTERM", 6, (scoring.checkpoint_io, "load", on_path("6"))),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.ci("half a checkpoint", "in a step")
def test_interrupted_run_ends_as_undisturbed(moment, bench, straight, monkeypatch, logged):
    name, step, *calls = MOMENTS[moment]
    before = unfinished(bench)
    with monkeypatch.context() as spoilt:
        for call in calls:
            send(spoilt, getattr(signal, name), *call)
        code, err = stop(bench)
    (folder,) = unfinished(bench) - before
    saved = [int(p.name) for p in checkpoints(folder)]
    if name == "SIGKILL":
        assert (code, saved[-1]) == (-signal.SIGKILL, step)
    else:
        assert code == 143
        assert err.startswith(f"stopped by {name} at step {step};")
        assert saved == sorted({*range(2, step, 2), step})
        assert (folder / "checkpoints" / "last").readlink() == Path(str(step))
        scored = [int(p.name) for p in checkpoints(folder) if (p / "score.json").exists()]
        assert scored == list(range(2, step, 2))
    done = bench.train(*OPTIONS).succeeded()
    assert done.folder == folder
    assert f"resuming from step {step}" in done.out
    assert_same_run(folder, straight)
    if name != "SIGKILL":  # which may lose the line of the newest step
        assert logged(folder, "train/loss") == logged(straight, "train/loss")


# -- at random moments -----------------------------------------------------------------------------

# what is begun, how often a run does that, and seconds that it takes
PHASES = {
    "step": (DistillModule, "training_step", 12, 0.01),
    "save": (callbacks.ScoreCheckpoint, "_publish", 3, 0.03),
    "score": (scoring.Scorer, "__call__", 3, 0.3),
}


def within(monkeypatch, phase: str, dice: np.random.Generator, number: int, noted: Path) -> None:
    """A signal at a random moment after some step, save or score has begun; notes what it hits."""
    begun, active = Counter(), ["between"]
    chosen, delay = dice.integers(1, PHASES[phase][2] + 1), dice.uniform(0, PHASES[phase][3])

    def hit() -> None:
        noted.write_text(active[-1])
        os.kill(os.getpid(), number)

    def follow(name: str, call):
        def begin(*args):
            begun[name] += 1
            if name == phase and begun[name] == chosen:
                threading.Timer(delay, hit).start()
            active.append(name)
            try:
                return call(*args)
            finally:
                active.pop()

        return begin

    for name, (owner, method, *_) in PHASES.items():
        monkeypatch.setattr(owner, method, follow(name, getattr(owner, method)))


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_runs_interrupted_at_20_random_moments_end_as_undisturbed(
    number, bench, straight, monkeypatch, tmp_path
):
    dice, interrupted, before = np.random.default_rng(number), Counter(), unfinished(bench)
    while interrupted.total() < 20 or not interrupted.keys() >= PHASES.keys():  # a quick one is hit seldom
        assert interrupted.total() < 60, "the moments were not spread over the run"
        with monkeypatch.context() as spoilt:
            within(spoilt, list(PHASES)[interrupted.total() % 3], dice, number, tmp_path / "hit")
            code, err = stop(bench)
        if code == 0:  # it had ended by then
            continue
        assert code == (143 if number == signal.SIGTERM else -number), err
        (folder,) = unfinished(bench) - before
        interrupted[(tmp_path / "hit").read_text()] += 1
        assert bench.train(*OPTIONS).succeeded().folder == folder
        assert_same_run(folder, straight)
    print(f"interrupted in {interrupted}")


# -- other commands and states ---------------------------------------------------------------------


@pytest.mark.proof
def test_resumed_run_chooses_a_draft_vocabulary_of_the_same_size(bench, tmp_path, monkeypatch):
    """`fit` runs again, before the trainer's state is read."""
    for name, value in {"LARGE": 16, "STEP": 1, "MIN_TOKENS": 1}.items():
        monkeypatch.setattr(f"drafters.vocabulary.{name}", value)
    options = {"drafter__draft_vocab_size": "auto", "score__every": 2}
    bench.run(tmp_path / "straight", **options)
    config = json.loads((tmp_path / "straight" / "checkpoints" / "last" / "config.json").read_text())
    assert config["settings"]["draft_vocab_size"] < ceiling(260)  # bytes and special tokens
    with monkeypatch.context() as spoilt:
        send(spoilt, signal.SIGKILL, IO, "save", on_path("4.tmp"))
        assert fork(lambda: bench.run(tmp_path / "killed", **options) and 0) == 9
    assert "resuming from step 2" in bench.run(tmp_path / "killed", **options)
    assert same(final(tmp_path / "killed"), final(tmp_path / "straight"))


STATES = {
    "muon": ["drafter.depth=2", "optimizer=muon"],
    "fresh rollouts": ["drafter.depth=2", "rollout.refresh_every=2"],
    "on-policy answers": ["drafter=lm", "drafter.layers=1", "on_policy.share=0.6"],
}


@pytest.mark.proof
@pytest.mark.parametrize("name", STATES)
def test_killed_run_with_more_state_ends_with_the_same_bits(name, bench, tmp_path, monkeypatch):
    more = [*STATES[name], "score.enabled=false", *OPTIONS]
    command = [option for option in bench.command if not option.startswith("drafter.")] + more

    def run(folder: str) -> Outcome:
        return train([*command, f"output_dir={tmp_path / folder}"])

    straight = run("a").succeeded()
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert fork(lambda: run("b").code) == 9
    resumed = run("b")
    assert "resuming from step 2" in resumed.out
    assert same(final(straight.folder), final(resumed.folder))


def test_same_command_resumes_a_killed_run_in_its_folder(bench, monkeypatch):
    command, before = ("seed=14", "score.enabled=false"), unfinished(bench)
    with monkeypatch.context() as spoilt:
        send(spoilt, signal.SIGKILL, rollouts.pq, "write_table", on_path("*shard-00001*"))
        assert bench.fork(*command) == 9
    (folder,) = unfinished(bench) - before
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(*command, "batch_size=4") == 9  # another configuration
        assert bench.fork(*command) == 9
    assert folder in unfinished(bench)
    assert len(unfinished(bench) - before) == 2
    done = bench.train(*command)
    assert done.out.startswith(f"resuming: {folder}\n")
    assert "rollouts: reusing all 3 shards" in done.out
    assert done.folder == folder
    other = bench.train(*command)
    assert other.folder != folder
    assert same(final(folder), final(other.folder))
    assert not leftovers(bench.root / "outputs" / "rollouts")


@pytest.mark.proof
def test_run_on_changed_prompts_is_not_resumed(bench, tmp_path, monkeypatch):
    command = f"prompts={write_prompts(tmp_path / 'p.jsonl', 6)}", "score.every=2"
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)
        assert bench.fork(*command) == 9
    write_prompts(tmp_path / "p.jsonl", 7)
    bench.train(*command).refused("have changed since", "resume=never")
    bench.train(*command, "resume=never").succeeded()


def test_ctrl_c_in_training_leaves_the_run_unfinished(bench, monkeypatch):
    before = unfinished(bench)
    with monkeypatch.context() as spoilt:

        def at_step_4(bar, trainer, *_):
            return trainer.global_step == 4

        send(spoilt, signal.SIGINT, callbacks.TrainingBar, "on_train_batch_end", at_step_4)
        status = bench.fork("seed=15", "score.enabled=false")
    assert os.waitstatus_to_exitcode(status) == 130
    (folder,) = unfinished(bench) - before
    done = bench.train("seed=15", "score.enabled=false")
    assert done.folder == folder
    assert "resuming from step 3" in done.out


# -- damaged states --------------------------------------------------------------------------------

PROCESSES = {"processes": 1, "strategy": "SingleDeviceStrategy", "precision": "32-true"}


def save(run: Path, step: int, parts: bool = False) -> Path:
    """A checkpoint with a trainer state: one file, or DeepSpeed's folder."""
    state = run / "checkpoints" / str(step) / STATE
    written = [state / "checkpoint" / f"rank_{rank}.pt" for rank in (0, 1)] if parts else [state]
    written[0].parent.mkdir(parents=True)
    for file in written:
        torch.save({"step": step, "w": torch.randn(50)}, file)
    (state.parent / "state.json").write_text(json.dumps(PROCESSES))
    trainer_state.seal(state.parent)
    return state


def flip(path: Path, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= bit
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the state": flip,
    "half a state": truncate,
    "no state": Path.unlink,
    "half a note of the processes": lambda state: truncate(state.parent / "state.json"),
    "another note of the processes": lambda state: (state.parent / "state.json").write_text("[]"),
    "no note of the processes": lambda state: (state.parent / "state.json").unlink(),
    "half the hashes": lambda state: truncate(state.parent / SUMS),
    "a bit of the hashes": lambda state: flip(state.parent / SUMS),
    "no hashes": lambda state: (state.parent / SUMS).unlink(),
    "hashes that are no text": lambda state: (state.parent / SUMS).write_bytes(b"\xff\0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_state_is_named_and_older_one_taken(name, tmp_path, capsys):
    older, state = save(tmp_path, 2), save(tmp_path, 10)
    assert trainer_state.newest(tmp_path) == state
    assert capsys.readouterr().out == ""
    DAMAGE[name](state)
    assert trainer_state.newest(tmp_path) == older
    (line,) = capsys.readouterr().out.splitlines()
    assert str(state.parent) in line
    assert "from step 2" in line


def test_every_part_of_a_state_is_checked(tmp_path, capsys):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert trainer_state.newest(tmp_path) is None
    older, state = save(tmp_path, 2, parts=True), save(tmp_path, 4, parts=True)
    assert trainer_state.newest(tmp_path) == state
    flip(state / "checkpoint" / "rank_1.pt")
    assert trainer_state.newest(tmp_path) == older
    assert "rank_1.pt" in capsys.readouterr().out


def test_run_ends_where_all_states_are_damaged(tmp_path):
    for step in (2, 4):
        flip(save(tmp_path, step))
    checkpoint = tmp_path / "checkpoints" / "4"
    with pytest.raises(UserError, match=rf"{checkpoint / STATE}: damaged.*drafter\.init_from={checkpoint}"):
        trainer_state.newest(tmp_path)


def test_two_states_are_kept(tmp_path):
    states = [save(tmp_path, step) for step in (2, 4, 6)]
    (tmp_path / "checkpoints" / "8").mkdir()  # of another run that has lost its state
    paths = [tmp_path / "checkpoints" / str(step) for step in (2, 4, 6, 8)]
    trainer_state.keep_newest(paths)
    assert [state.exists() for state in states] == [False, True, True]
    assert not states[0].parent.exists()
    trainer_state.drop_newer(paths, 4)
    assert [state.exists() for state in states] == [False, True, False]
    assert all(path.exists() for path in paths)


def test_run_resumed_from_the_older_state_ends_with_the_same_bits(bench, tmp_path, monkeypatch):
    run, straight = tmp_path / "run", tmp_path / "straight"
    options = {"score__every": 1, "score__enabled": False}
    bench.run(straight, **options)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)  # between the step and its save point
        assert fork(lambda: bench.run(run, **options) and 0) == 9
    newest = run / "checkpoints" / "2" / STATE
    flip(newest, 1 << 4)
    printed = bench.run(run, **options)
    assert f"{newest}: damaged" in printed
    assert "resuming from step 1" in printed.splitlines()
    assert same(final(run), final(straight))
    states = [path for path in checkpoints(run) if trainer_state.has_state(path)]
    assert [path.name for path in states] == ["5", "6"]
    assert all(trainer_state.damage(path / "trainer") is None for path in states)


def test_damaged_scores_are_made_again_and_other_notes_refused(bench, tmp_path):
    """Scores of an old step and of the newest."""
    bench.run(tmp_path)
    scores = {step: tmp_path / "checkpoints" / step / "score.json" for step in ("3", "6")}
    taus = {step: read_scorecard(file).rows[0].tau for step, file in scores.items()}
    truncate(scores["3"])
    scores["6"].write_text("[]")
    printed = bench.run(tmp_path)
    for step, file in scores.items():
        assert f"{file}: damaged; step {step} is scored again\n" in printed
        assert read_scorecard(file).rows[0].tau == taus[step]
    for name in ("prompts.json", "rollouts.json"):
        note = tmp_path / name
        whole = note.read_text()
        truncate(note)
        with pytest.raises(UserError, match=rf"^{note}: damaged.*resume=never.*$"):
            bench.run(tmp_path)
        note.unlink()  # as it says
        bench.run(tmp_path)
        assert note.read_text() == whole

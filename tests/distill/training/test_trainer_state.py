"""Trainer states are hashed: a damaged one is named, and the one before it is taken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from workbench import Bench, final, fork, kill_in_training, same

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.training import trainer_state
from distill.training.trainer_state import STATE, SUMS
from distill.utils.run_folder import checkpoints

PROCESSES = {"processes": 1, "strategy": "SingleDeviceStrategy", "precision": "32-true"}


def save(run: Path, step: int, parts: bool = False) -> Path:
    """A checkpoint with a trainer state: one file, or DeepSpeed's folder."""
    state = run / "checkpoints" / str(step) / STATE
    files = [state / "checkpoint" / f"rank_{rank}.pt" for rank in (0, 1)] if parts else [state]
    files[0].parent.mkdir(parents=True)
    for file in files:
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


def test_newest_state_is_taken(tmp_path, capsys):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert trainer_state.newest(tmp_path) is None
    save(tmp_path, 2)
    state = save(tmp_path, 10)
    assert trainer_state.newest(tmp_path) == state
    assert capsys.readouterr().out == ""


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
    older, state = save(tmp_path, 2), save(tmp_path, 4)
    DAMAGE[name](state)
    assert trainer_state.newest(tmp_path) == older
    (line,) = capsys.readouterr().out.splitlines()
    assert str(state.parent) in line
    assert "from step 2" in line


def test_every_part_of_a_state_is_checked(tmp_path, capsys):
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


def test_run_resumed_from_the_older_state_ends_with_the_same_bits(tmp_path, monkeypatch):
    bench, run, straight = Bench(tmp_path), tmp_path / "run", tmp_path / "straight"
    options = {"score__every": 1, "score__enabled": False}
    bench.run(straight, **options)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)  # between the step and its save point
        assert fork(lambda: bench.run(run, **options) and 0) == 9
    newest = run / "checkpoints" / "2" / STATE
    flip(newest, 1 << 4)
    said = bench.run(run, **options)
    assert f"{newest}: damaged" in said
    assert "resuming from step 1" in said.splitlines()
    assert same(final(run), final(straight))
    states = [path for path in checkpoints(run) if trainer_state.has_state(path)]
    assert [path.name for path in states] == ["5", "6"]
    assert all(trainer_state.damage(path / "trainer") is None for path in states)


def test_damaged_scores_are_made_again_and_other_notes_refused(tmp_path):
    """Scores of an old step and of the newest."""
    bench, run = Bench(tmp_path), tmp_path / "run"
    bench.run(run)
    files = {step: run / "checkpoints" / step / "score.json" for step in ("3", "6")}
    taus = {step: read_scorecard(file).headline.tau for step, file in files.items()}
    truncate(files["3"])
    files["6"].write_text("[]")
    said = bench.run(run)
    for step, file in files.items():
        assert f"{file}: damaged; step {step} is scored again\n" in said
        assert read_scorecard(file).headline.tau == taus[step]
    for name in ("prompts.json", "rollouts.json"):
        whole = (run / name).read_text()
        truncate(run / name)
        with pytest.raises(UserError, match=rf"^{run / name}: damaged.*resume=never.*$"):
            bench.run(run)
        (run / name).unlink()  # as it says
        bench.run(run)
        assert (run / name).read_text() == whole

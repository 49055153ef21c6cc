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


def save(run: Path, step: int, sealed: bool = True, parts: bool = False) -> Path:
    """A checkpoint with a trainer state: one file, or DeepSpeed's folder."""
    state = run / "checkpoints" / str(step) / STATE
    state.parent.mkdir(parents=True)
    if parts:
        (state / "checkpoint").mkdir(parents=True)
        for rank in range(2):
            torch.save({"step": step, "w": torch.randn(50)}, state / "checkpoint" / f"rank_{rank}.pt")
    else:
        torch.save({"step": step, "w": torch.randn(50)}, state)
    (state.parent / "state.json").write_text(json.dumps(PROCESSES))
    if sealed:
        trainer_state.seal(state.parent)
    return state


def flip(path: Path, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= bit
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_the_newest_state_is_taken(tmp_path, capsys):
    assert trainer_state.newest(tmp_path) is None
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert trainer_state.newest(tmp_path) is None
    save(tmp_path, 2)
    state = save(tmp_path, 10)
    assert trainer_state.newest(tmp_path) == state
    assert capsys.readouterr().out == ""


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the state": lambda state: flip(state),
    "half a state": truncate,
    "no state": Path.unlink,
    "half a note of the processes": lambda state: truncate(state.parent / "state.json"),
    "another note of the processes": lambda state: (state.parent / "state.json").write_text("[]"),
    "no note of the processes": lambda state: (state.parent / "state.json").unlink(),
}


@pytest.mark.parametrize("sealed", [True, False])  # False: by an older version
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_named_and_the_older_one_taken(name, sealed, tmp_path, capsys):
    older, state = save(tmp_path, 2, sealed), save(tmp_path, 4, sealed)
    DAMAGE[name](state)
    if name == "no state" and not sealed:  # as after its removal
        assert trainer_state.newest(tmp_path) == older
        return
    assert trainer_state.newest(tmp_path) == older
    (line,) = capsys.readouterr().out.splitlines()
    assert str(state.parent) in line
    assert line.endswith("; going on from step 2, whose trainer state is whole")


@pytest.mark.parametrize("spoil", [truncate, flip, lambda sums: sums.write_bytes(b"\xff\0")])
def test_damaged_hashes_are_damage(spoil, tmp_path, capsys):
    older, state = save(tmp_path, 2), save(tmp_path, 4)
    spoil(state.parent / SUMS)
    assert trainer_state.newest(tmp_path) == older
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_a_state_in_parts_is_checked_part_by_part(sealed, tmp_path, capsys):
    older, state = save(tmp_path, 2, sealed, parts=True), save(tmp_path, 4, sealed, parts=True)
    assert trainer_state.newest(tmp_path) == state
    flip(state / "checkpoint" / "rank_1.pt")
    assert trainer_state.newest(tmp_path) == older
    assert "rank_1.pt" in capsys.readouterr().out


def test_without_an_undamaged_state_the_run_ends(tmp_path, capsys):
    for step in (2, 4):
        flip(save(tmp_path, step))
    with pytest.raises(UserError) as refused:
        trainer_state.newest(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "4"
    assert str(refused.value) == (
        f"{checkpoint / STATE}: damaged (another sha256 than when it was written), and no other trainer "
        f"state is whole; begin a new run from its weights with resume=never drafter.init_from={checkpoint}"
    )
    assert capsys.readouterr().out == ""


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


def test_a_run_goes_on_from_the_older_state_and_ends_as_if_nothing_had_happened(tmp_path, monkeypatch):
    bench, run, straight = Bench(tmp_path), tmp_path / "run", tmp_path / "straight"
    options = {"score__every": 1, "score__enabled": False}
    bench.run(straight, **options)
    with monkeypatch.context() as spoilt:
        kill_in_training(spoilt)  # between the step and its save point
        assert fork(lambda: bench.run(run, **options) and 0) == 9
    newest = run / "checkpoints" / "2" / STATE
    flip(newest, 1 << 4)
    lines = bench.run(run, **options).splitlines()
    damaged = f"{newest}: damaged (another sha256 than when it was written)"
    assert f"{damaged}; going on from step 1, whose trainer state is whole" in lines
    assert "resuming from step 1" in lines
    assert same(final(run), final(straight))
    states = [path.name for path in checkpoints(run) if trainer_state.has_state(path)]
    assert states == ["5", "6"]
    assert all(trainer_state.damage(run / "checkpoints" / step / "trainer") is None for step in states)


def test_a_damaged_score_is_made_again_and_other_notes_are_named(tmp_path):
    """Of an old step and of the newest, where a run goes on."""
    bench = Bench(tmp_path)
    run = tmp_path / "run"
    bench.run(run)
    files = [run / "checkpoints" / step / "score.json" for step in ("3", "6")]
    taus = [read_scorecard(file).headline.tau for file in files]
    truncate(files[0])
    files[1].write_text("[]")
    said = bench.run(run)
    for step, file, tau in zip((3, 6), files, taus, strict=True):
        assert f"{file}: damaged; step {step} is scored again\n" in said
        assert read_scorecard(file).headline.tau == tau
    for name in ("prompts.json", "rollouts.json"):
        whole = (run / name).read_text()
        (run / name).write_text(whole[: len(whole) // 2])
        with pytest.raises(UserError) as refused:
            bench.run(run)
        (line,) = str(refused.value).splitlines()
        assert line.startswith(f"{run / name}: damaged (")
        assert line.endswith("; resume=never starts another run")
        (run / name).unlink()  # as it says
        bench.run(run)
        assert (run / name).read_text() == whole

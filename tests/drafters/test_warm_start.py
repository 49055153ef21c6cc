"""drafter.init_from: training that starts from another drafter's weights."""

import pytest
import torch
from draft_models import quick
from drafter_checks import V, random_texts
from safetensors.torch import load_file, save_file
from workbench import train, weights

from decode.errors import UserError
from distill import train as training
from drafters import vocabulary
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io


@pytest.fixture
def saved(tiny_target, make_drafter, tmp_path):
    """Makes the folder of a drafter, and gives the drafter."""

    def make(name, **options):
        target = tiny_target(vocab=V)
        drafter = make_drafter(name, target, seed=1, **options)
        if drafter.needs_fit:
            texts = [row.tolist() for row in random_texts()]
            drafter.fit([Text(text, [1] * len(text)) for text in texts], target)
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        checkpoint_io.save(drafter, target, folder)
        return drafter, folder, target

    return make


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        ({}, {}, ""),
        ({}, {"draft_vocab_size": 9}, "((9,) here, (7,) there)"),
        ({"fc_norm": False}, {"fc_norm": True}, "(not there)"),
    ],
)
def test_tensors_that_fit_are_taken_over_and_others_listed(saved, make_drafter, there, here, why):
    sizes = {"draft_vocab_size": 7}
    old, folder, target = saved("eagle3", **sizes | there)
    new = make_drafter("eagle3", target, seed=2, **sizes | there | here)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    left = checkpoint_io.warm_start(new, folder, target)
    names = {line.split(" ")[0] for line in left}
    for name, value in new.state_dict().items():
        assert value.equal(before[name] if name in names else old.state_dict()[name])
    assert bool(left) is bool(why)
    assert any(why in line for line in left) or not why
    assert len(names) < len(before)
    assert not before["d2t"].equal(old.d2t)


def test_another_drafters_and_damaged_files_are_no_start(saved, make_drafter, tiny_target, tmp_path):
    (_, folder, target), (_, damaged, _), (_, other, _) = (saved("eagle") for _ in range(3))
    (damaged / "model.safetensors").write_bytes(b"no")
    save_file({"nothing": torch.zeros(1)}, other / "model.safetensors")
    eagle, wider = make_drafter("eagle", target), make_drafter("eagle", tiny_target(vocab=V, hidden=16))
    for drafter, start, said in [
        (make_drafter("eagle3", target), folder, "drafter 'eagle', not 'eagle3'"),
        (eagle, tmp_path, r"no config\.json there"),
        (eagle, damaged, "damaged checkpoint"),
        (wider, folder, r"none of its \d+ tensors fits this drafter"),
        (wider, other, "damaged checkpoint"),
    ]:
        with pytest.raises(UserError, match=said):
            checkpoint_io.warm_start(drafter, start, target)


def test_a_run_starts_from_anothers_checkpoint(bench):
    """With no step to speak of, what it saves is what it was given."""
    first = bench.train("seed=21", "score.enabled=false").succeeded()
    start = first.folder / "checkpoints" / "6"
    more = [f"drafter.init_from={start}", "optimizer.optimizer.lr=1e-12", "score.enabled=false"]
    second = bench.train("seed=22", *more).succeeded()
    assert f"drafter.init_from={start}: every tensor taken over" in second.out
    was, now = weights(start), weights(second.folder / "checkpoints" / "6")
    for name, value in now.items():
        torch.testing.assert_close(value, was[name], rtol=1e-5, atol=1e-6)


def test_a_run_that_starts_from_another_scores_the_same_tokens(bench, monkeypatch):
    """A head over all tokens costs a step of SmolLM2's drafters twice the time."""
    monkeypatch.setattr(vocabulary, "STEP", 1)
    trained, fit = [], training.fit

    def keep(trainer, module, *rest):
        trained.append(module.drafter)
        return fit(trainer, module, *rest)

    monkeypatch.setattr(training, "fit", keep)
    small = ["rollout.seed=0", "drafter.draft_vocab_size=5", "score.enabled=false"]
    first = bench.train("seed=21", *small).succeeded()
    again = f"drafter.init_from={first.folder / 'checkpoints' / '6'}"
    bench.train("seed=22", again, *small).succeeded()
    one, other = (drafter.scored for drafter in trained)
    assert other.equal(one)


def test_a_wrong_start_is_one_line(bench, tmp_path):
    bench.train("seed=23", f"drafter.init_from={tmp_path}").refused(f"checkpoint={tmp_path}: no config.json")
    counted = train(quick(bench, f"drafter.init_from={tmp_path}", drafter="bigram"))
    counted.refused("this drafter has no weights to train")


def test_a_hub_id_is_fetched_and_nothing_but_the_two_files(saved, fake_hub):
    _, folder, _ = saved("eagle")
    fake_hub.give("me/drafter", {p.name: p.read_bytes() for p in folder.iterdir()} | {"evil.py": b"exit(9)"})
    there = checkpoint_io.fetch("me/drafter")
    assert sorted(p.name for p in there.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(there / "model.safetensors").keys() == weights(folder).keys()
    assert not any("evil" in path for _, path in fake_hub.asked)
    with pytest.raises(UserError, match="me/other: no such folder, and not available from the Hub"):
        checkpoint_io.fetch("me/other")

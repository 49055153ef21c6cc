"""drafter.init_from: going on from another drafter's weights."""

import pytest
import torch
from draft_models import quick
from faces import V, random_texts
from safetensors.torch import load_file, save_file
from workbench import train, weights

from decode.errors import UserError
from distill import train as training
from drafters import vocabulary
from drafters.base import Text
from drafters.checkpoint import io as hub


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
        hub.save(drafter, target, folder)
        return drafter, folder, target

    return make


def test_every_tensor_is_taken_over_what_was_counted_too(saved, make_drafter):
    old, folder, target = saved("eagle3", draft_vocab_size=7)
    new = make_drafter("eagle3", target, seed=2, draft_vocab_size=7)
    assert not new.d2t.equal(old.d2t)
    assert hub.warm_start(new, folder, target) == []
    assert all(value.equal(old.state_dict()[name]) for name, value in new.state_dict().items())


def test_other_shapes_are_listed_and_left_alone(saved, make_drafter):
    old, folder, target = saved("eagle3", draft_vocab_size=7)
    new = make_drafter("eagle3", target, seed=2, draft_vocab_size=9)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    left = hub.warm_start(new, folder, target)
    assert "d2t ((9,) here, (7,) there)" in left
    names = {line.split(" ")[0] for line in left}
    for name, value in new.state_dict().items():
        assert value.equal(before[name] if name in names else old.state_dict()[name])
    assert 0 < len(names) < len(before)


def test_what_is_not_there_is_listed(saved, make_drafter):
    _, folder, target = saved("eagle3", draft_vocab_size=7, fc_norm=False)
    new = make_drafter("eagle3", target, seed=2, draft_vocab_size=7)
    left = hub.warm_start(new, folder, target)
    assert left
    assert all(line.endswith(" (not there)") for line in left)


def test_what_cannot_be_gone_on_from_is_refused(saved, make_drafter, tiny_target, tmp_path):
    _, folder, target = saved("eagle")
    with pytest.raises(UserError, match="drafter 'eagle', not 'eagle3'"):
        hub.warm_start(make_drafter("eagle3", target), folder, target)
    with pytest.raises(UserError, match=r"no config\.json there"):
        hub.warm_start(make_drafter("eagle", target), tmp_path, target)
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="damaged checkpoint"):
        hub.warm_start(make_drafter("eagle", target), folder, target)
    _, elsewhere, _ = saved("eagle")
    wider = make_drafter("eagle", tiny_target(vocab=V, hidden=16))
    with pytest.raises(UserError, match=r"none of its \d+ tensors fits this drafter"):
        hub.warm_start(wider, elsewhere, target)
    save_file({"nothing": torch.zeros(1)}, elsewhere / "model.safetensors")
    with pytest.raises(UserError, match="damaged checkpoint"):
        hub.warm_start(wider, elsewhere, target)


# -- a whole run ---------------------------------------------------------------------------------


def test_a_run_goes_on_from_anothers_checkpoint(bench):
    """With no step to speak of, what it saves is what it was given."""
    first = bench.train("seed=21", "score.enabled=false").succeeded()
    start = first.folder / "checkpoints" / "6"
    more = [f"drafter.init_from={start}", "optimizer.optimizer.lr=1e-12", "score.enabled=false"]
    second = bench.train("seed=22", *more).succeeded()
    assert f"drafter.init_from={start}: every tensor taken over" in second.out
    was, now = weights(start), weights(second.folder / "checkpoints" / "6")
    for name, value in now.items():
        torch.testing.assert_close(value, was[name], rtol=1e-5, atol=1e-6)


def test_a_run_that_goes_on_scores_the_tokens_that_the_first_scored(bench, monkeypatch):
    """A head over all tokens costs a step of SmolLM2's drafters twice the time."""
    monkeypatch.setattr(vocabulary, "STEP", 1)
    trained = []
    fit = training.fit
    monkeypatch.setattr(
        training,
        "fit",
        lambda trainer, module, *a: trained.append(module.drafter) or fit(trainer, module, *a),
    )
    small = ["rollout.seed=0", "drafter.draft_vocab_size=5", "score.enabled=false"]
    first = bench.train("seed=21", *small).succeeded()
    again = f"drafter.init_from={first.folder / 'checkpoints' / '6'}"
    bench.train("seed=22", again, *small).succeeded()
    one, other = (drafter.scored for drafter in trained)
    assert one is not None
    assert other is not None
    assert other.equal(one)


def test_a_wrong_start_is_one_line_and_leaves_nothing(bench, tmp_path):
    done = bench.train("seed=23", f"drafter.init_from={tmp_path}")
    assert done.code == 2
    assert done.err.strip().splitlines()[-1].startswith(f"error: checkpoint={tmp_path}: no config.json there")


def test_a_drafter_that_is_counted_has_nothing_to_start_from(bench, tmp_path):
    done = train(quick(bench, f"drafter.init_from={tmp_path}", drafter="bigram"))
    assert done.code == 2
    assert "this drafter has no weights to train" in done.err


# -- from a hub ------------------------------------------------------------------------------------


def test_a_hub_id_is_fetched_and_nothing_but_the_two_files(saved, fake_hub):
    _, folder, _ = saved("eagle")
    fake_hub.give("me/drafter", {p.name: p.read_bytes() for p in folder.iterdir()} | {"evil.py": b"exit(9)"})
    there = hub.fetch("me/drafter")
    assert sorted(p.name for p in there.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(there / "model.safetensors").keys() == weights(folder).keys()
    assert not any("evil" in path for _, path in fake_hub.asked)
    with pytest.raises(UserError, match="me/other: no such folder, and not to be had from the hub"):
        hub.fetch("me/other")

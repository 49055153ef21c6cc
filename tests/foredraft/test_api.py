"""The public face: a notebook's lines, and what they are refused."""

import re

import pytest
from workbench import ROOT, make_target

import foredraft
from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory, make_drafter):
    """A tiny chat model and an untrained drafter for it."""
    root = tmp_path_factory.mktemp("api")
    target = load_target(str(make_target(root / "target")))
    (root / "drafter").mkdir()
    checkpoints.save(make_drafter("eagle", target), target, root / "drafter", str(root / "target"))
    return root


def test_the_lines_of_the_documents_run_from_any_folder(folders, tmp_path, monkeypatch, capsys):
    (block,) = re.findall(
        r"```python\n(import foredraft\n.*?)```", (ROOT / "docs" / "start.md").read_text(), re.S
    )
    assert len([line for line in block.splitlines() if line]) == 5
    monkeypatch.chdir(tmp_path)
    block = block.replace("data/pocket", str(folders / "target"))
    block = block.replace("outputs/<date>/<time>/checkpoints/best", str(folders / "drafter"))
    exec(block, {})  # noqa: S102  our own document
    assert float(capsys.readouterr().out.splitlines()[-1]) >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_changes_no_greedy_answer_and_streams_what_is_generated(folders, temperature):
    model = foredraft.load_target(str(folders / "target"), "target.dtype=float32")
    drafter = foredraft.load_drafter(str(folders / "drafter"), model)
    options = {"max_new_tokens": 12, "sampler": Sampler(temperature)}
    prompt = [{"role": "user", "content": "say 3"}]
    drafted = foredraft.generate(model, "say 3", drafter, **options)
    assert drafted.tokens == foredraft.generate(model, prompt, drafter, **options).tokens
    assert "".join(foredraft.stream(model, prompt, drafter, **options)) == drafted.text
    if not temperature:
        assert foredraft.generate(model, prompt, **options).tokens == drafted.tokens
    card = foredraft.score(model, drafter, ["say 3", prompt], temperatures=[temperature], max_new_tokens=6)
    assert card.audit_passed
    assert card.replay_agrees
    assert card.headline.replay
    assert card.headline.replay.method.startswith("estimate" if temperature else "exact")  # a hybrid tree


def test_several_prompts_are_answered_in_one_batch(folders):
    model = foredraft.load_target(str(folders / "target"), "target.dtype=float32")
    drafter = foredraft.load_drafter(str(folders / "drafter"), model)
    prompts = ["say 3", [{"role": "user", "content": "count to ten"}]]
    options = {"max_new_tokens": 8}
    answers = foredraft.generate(model, prompts, drafter, **options)
    assert answers[0].tokens != answers[1].tokens
    alone = [foredraft.generate(model, prompt, drafter, **options) for prompt in prompts]
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    assert [a.text for a in answers] == [a.text for a in alone]


def test_a_tuned_target_is_merged_once(folders, monkeypatch):
    """Merging copies the decoder layers."""
    model = foredraft.load_target(str(folders / "target"), "target.dtype=float32")
    drafter = foredraft.load_drafter(str(folders / "drafter"), model)
    tuned = foredraft.load_target(str(folders / "target"), "target.dtype=float32").target
    merged = []
    monkeypatch.setattr(drafter, "verifier", lambda target: merged.append(target) or tuned)
    answers = [foredraft.generate(model, "say 3", drafter, max_new_tokens=4).tokens for _ in range(2)]
    answers.append(foredraft.generate(model, "say 3", max_new_tokens=4).tokens)
    assert answers[0] == answers[1] == answers[2]
    assert merged == [model.target]
    assert (tuned.taps, model.target.taps) == (drafter.taps, ())


def test_a_missing_tap_is_said_in_one_line(folders):
    model = foredraft.load_target(str(folders / "target"))
    drafter = foredraft.load_drafter(str(folders / "drafter"), model)
    model.target.tap(())
    with pytest.raises(UserError, match=r"reads hidden states .* call target.tap\(drafter.taps\)"):
        generate(model.target, drafter, [[1, 2]], max_new_tokens=4, sampler=Sampler(0.0), plan=Plan(2))


def test_what_is_wrong_is_a_user_error(folders):
    with pytest.raises(UserError, match="no such option"):
        foredraft.load_target(str(folders / "target"), "target.dtpye=float32")
    model = foredraft.load_target(str(folders / "target"))
    with pytest.raises(UserError):
        foredraft.load_drafter(str(folders / "nowhere"), model)
    drafter = foredraft.load_drafter(str(folders / "drafter"), model)
    with pytest.raises(UserError, match="no prompts"):
        foredraft.score(model, drafter, [])
    with pytest.raises(UserError, match="no prompts"):
        foredraft.generate(model, [], drafter)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = foredraft.lode

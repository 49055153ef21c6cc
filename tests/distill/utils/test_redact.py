"""Keys are shown on no page, in no log and no error: by the names of options, by form and by value."""

import pytest

from distill.utils.redact import HIDDEN, SECRET, hidden, override, reason, without_secrets

KEY = "X9y"  # of no form that is known


def leaks(shown):
    return KEY.lower() in str(shown).lower()


FORMS = [
    *(f"{start}X9yabcdefghijklmnopqrst" for start in ("AIzaSy", "ghp_", "npm_", "pypi-", "ya29.", "glpat-")),
    *(f"{start}X9yabcdefgh" for start in ("hf_", "nvapi-", "gsk_", "sk-ant-api03-", "sk-proj-", "xai-")),
    *("r8_X9yabcdefgh", "xoxb-X9yabcdefghij", "AKIAX9YABCDEFGHIJ", "SG.X9yabcdefghij.X9yabcdefghij"),
    *("dckr_pat_X9yabcdefgh", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiX9y.X9yabcdefgh"),
    *("Bearer X9y", "Authorization: Basic X9yabc==", "Authorization: X9y"),
    *("https://me:X9y@host/v1", "https://X9y@host/v1", "http://host/v1?api_key=X9y&n=1"),
    "https://hooks.slack.com/services/X9y/X9y/X9y",
    "-----BEGIN PRIVATE KEY-----\nX9y\n-----END PRIVATE KEY-----",
]


@pytest.mark.parametrize("value", FORMS)
def test_key_is_known_by_its_form(value):
    assert not leaks(override(f"a.b={value}"))
    assert not leaks(override(f"a.b=[x,'{value}']"))
    assert not leaks(without_secrets({"a": [{"b": value}, f"--x={value}"]}))
    assert not leaks(reason(ValueError(f"refused: {value}")))
    assert "1 of 2" in hidden(f"1 of 2 failed: {value}")


OPTIONS = ["--api-key", "--hf-token", "--api_key", "--ssl-key-password", "--auth", "-key"]
WAYS = ["[{0}=X9y]", "[{0},X9y,--port,80]", "['{0}', 'X9y']", '["{0}=X9y"]', "'{0} X9y'", "[{0}, X9y]"]


@pytest.mark.parametrize("name", OPTIONS)
def test_value_of_an_option_is_hidden_in_every_way_to_write_it(name):
    for way in (form.format(name) for form in [*WAYS, "[--port,80,{0}=X9y]"]):
        shown = override(f"engine.arguments={way}")
        assert not leaks(shown), way
        assert ("80" in shown) == ("80" in way), shown
        assert not leaks(reason(ValueError(f"engine.arguments={way}: wrong")))
    shown = without_secrets({"arguments": [name, "X9y", "--port", "80", f"{name}=X9y", f"{name} X9y"]})
    assert not leaks(shown)
    assert shown["arguments"][:4] == [name, HIDDEN, "--port", "80"]


def test_entry_of_a_mapping_is_hidden():
    lines = ["++a.api_key=X9y", "a={extra: {api_key: X9y}}", """a=['{"api_key": "X9y"}']"""]
    lines += [
        "a=[--env,HF_TOKEN=X9y]",
        "a=[-H,'X-Api-Key: X9y']",
        "a='openai_api_key=X9y'",
        "db_password=X9y",
    ]
    assert [line for line in lines if leaks(override(line))] == []
    names = ("accessKeyId", "access_key_id", "private_key_pem", "connection_string")
    assert without_secrets(dict.fromkeys(names, KEY)) == dict.fromkeys(names, HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        *(f"https://h/x?{name}=X9y" for name in ("pass", "pwd", "credential", "sas", "X-Amz-Credential")),
        *("Cookie: session=X9y", "Set-Cookie: sid=X9y; path=/", "aws_session_token=X9y", "passphrase=X9y"),
        "DefaultEndpointsProtocol=https;AccountKey=X9y==",
    ],
)
def test_headers_and_connection_strings_are_hidden(text):
    assert not leaks(hidden(text))
    assert HIDDEN in hidden(text)


def test_what_reads_the_environment_is_hidden_by_structure():
    hide = [
        "${oc.env:A}",
        "${ oc.env:A}",
        "${${b}.env:A}",
        "x${${b}:A}",
        "${oc.decode:${oc.env:A}}",
        "${f:{a: 1}}",
        "${oc.env:FOREDRAFT_API_KEY,null}",
        "${oc.env:FOREDRAFT_A,${oc.env:A}}",
    ]
    assert without_secrets(hide) == [HIDDEN] * len(hide)
    keep = ["${a.b}", "${a.${b}}", "${device_of:${trainer.accelerator}}", "a: b"]
    keep += ["${oc.env:FOREDRAFT_LLAMA_CPP,null}"]  # a folder, of an option's default
    assert without_secrets(keep) == keep


def test_value_of_the_environment_is_hidden_unless_it_is_a_path(monkeypatch, tmp_path):
    (tmp_path / "google.json").touch()
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "google.json"))
    monkeypatch.setenv("MY_SERVICE_KEY", "/wJalrXUtnFEMI/K7MDENG")
    monkeypatch.setenv("SHORT_TOKEN", "a")
    text = f"wandb sync {tmp_path}/outputs; see {tmp_path}/google.json"
    assert hidden(text) == text
    assert override("a=/wJalrXUtnFEMI/K7MDENG") == f"a={HIDDEN}"
    assert reason(ValueError("a /wJalrXUtnFEMI/K7MDENG b")) == f"a {HIDDEN} b"


def test_what_is_no_secret_stays():
    lines = ["max_tokens=512", "drafter=ngram", "prompts.columns={prompt: question}", "target=acme/sk-model"]
    lines += ["a=[--max-num-batched-tokens,8192,--tokenizer,/a/b]", "rollout.url=http://host:8000/v1"]
    lines += ["drafter.root_token=add", "hdfs=hdfs://host:9000/folder@1", "a.pad_token='<pad>'"]
    assert list(map(override, lines)) == lines
    said = ["bad token: 5 at key=value, expected 'token', got 7; the key is missing", "/x/db_password: c"]
    said += ["target=/etc/passwd: no such folder", "/x/hf_token: no config.json", "a/my_api_key: b"]
    assert list(map(hidden, said)) == said
    assert not SECRET.search("root_token")

"""What no page, logger or error repeats: keys, by the names of options, by form and by the environment."""

import pytest

from distill.utils.redact import HIDDEN, SECRET, hidden, override, reason, without_secrets

KEY = "X9y"  # of no form that is known
FORMS = [
    "hf_X9yabcdefgh",
    "nvapi-X9yabcdefgh",
    "gsk_X9yabcdefgh",
    "AIzaSyX9yabcdefghijklmnopqrst",
    "sk-ant-api03-X9yabcdefgh",
    "sk-proj-X9yabcdefgh",
    "xai-X9yabcdefgh",
    "r8_X9yabcdefgh",
    "ghp_X9yabcdefghijklmnop",
    "glpat-X9yabcdefghij",
    "xoxb-X9yabcdefghij",
    "AKIAX9YABCDEFGHIJ",
    "npm_X9yabcdefgh",
    "pypi-X9yabcdefghijklmn",
    "ya29.X9yabcdefghij",
    "SG.X9yabcdefghij.X9yabcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiX9y.X9yabcdefgh",
    "Bearer X9y",
    "Authorization: Basic X9yabc==",
    "https://me:X9y@host/v1",
    "https://X9y@host/v1",
    "http://host/v1?api_key=X9y&n=1",
    "https://hooks.slack.com/services/X9y/X9y/X9y",
    "-----BEGIN PRIVATE KEY-----\nX9y\n-----END PRIVATE KEY-----",
]


def leaks(shown):
    return KEY.lower() in str(shown).lower()


@pytest.mark.parametrize("value", FORMS)
def test_a_key_is_known_by_its_form(value):
    assert not leaks(override(f"a.b={value}"))
    assert not leaks(override(f"a.b=[x,'{value}']"))
    assert not leaks(without_secrets({"a": [{"b": value}, f"--x={value}"]}))
    assert not leaks(reason(ValueError(f"refused: {value}")))
    assert "1 of 2" in hidden(f"1 of 2 failed: {value}")


@pytest.mark.parametrize(
    "name", ["--api-key", "--hf-token", "--api_key", "--ssl-key-password", "--auth", "-key"]
)
def test_the_value_of_an_option_is_hidden_in_every_way_to_write_it(name):
    ways = [
        f"[{name}=X9y]",
        f"[{name},X9y,--port,80]",
        f"['{name}', 'X9y']",
        f'["{name}=X9y"]',
        f"'{name} X9y'",
    ]
    ways += [f"[--port,80,{name}=X9y]", f"[{name}, X9y]"]
    for way in ways:
        shown = override(f"engine.arguments={way}")
        assert not leaks(shown), way
        assert ("80" in shown) == ("80" in way), shown
        assert not leaks(reason(ValueError(f"engine.arguments={way}: wrong")))
    shown = without_secrets({"arguments": [name, "X9y", "--port", "80", f"{name}=X9y", f"{name} X9y"]})
    assert not leaks(shown)
    assert shown["arguments"][:4] == [name, HIDDEN, "--port", "80"]


@pytest.mark.parametrize(
    "line",
    [
        "++a.api_key=X9y",
        "a={extra: {api_key: X9y}}",
        """a=['{"api_key": "X9y"}']""",
        "a=[--env,HF_TOKEN=X9y]",
        "a=[-H,'X-Api-Key: X9y']",
        "a='openai_api_key=X9y'",
        "db_password=X9y",
    ],
)
def test_an_entry_of_a_mapping_is_hidden(line):
    assert not leaks(override(line))


@pytest.mark.parametrize(
    "text",
    [
        *(f"https://h/x?{name}={KEY}" for name in ("pass", "pwd", "credential", "sas", "X-Amz-Credential")),
        f"Authorization: {KEY}",
        f"Cookie: session={KEY}",
        f"Set-Cookie: sid={KEY}; path=/",
        f"DefaultEndpointsProtocol=https;AccountKey={KEY}==",
        f"aws_session_token={KEY}",
        f"passphrase={KEY}",
        f"dckr_pat_{KEY}abcdefgh",
    ],
)
def test_headers_and_connection_strings_are_hidden(text):
    assert KEY not in hidden(text)
    assert HIDDEN in hidden(text)


@pytest.mark.parametrize("name", ["accessKeyId", "access_key_id", "private_key_pem", "connection_string"])
def test_names_of_cloud_credentials_are_hidden(name):
    assert without_secrets({name: KEY}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "line",
    [
        "target=/etc/passwd: no such folder",
        "/x/hf_token: no config.json",
        "a/my_api_key: b",
        "/x/db_password: c",
    ],
)
def test_a_path_in_front_of_a_message_is_no_secret(line):
    assert hidden(line) == line


def test_what_reads_the_environment_is_hidden_by_structure():
    hide = [
        "${oc.env:A}",
        "${ oc.env:A}",
        "${${b}.env:A}",
        "x${${b}:A}",
        "${oc.decode:${oc.env:A}}",
        "${f:{a: 1}}",
    ]
    assert without_secrets(hide) == [HIDDEN] * len(hide)
    keep = ["${a.b}", "${a.${b}}", "${device_of:${trainer.accelerator}}", "a: b"]
    assert without_secrets(keep) == keep


def test_a_path_of_the_environment_is_no_secret(monkeypatch, tmp_path):
    (tmp_path / "google.json").touch()
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "google.json"))
    monkeypatch.setenv("MY_SERVICE_KEY", "/wJalrXUtnFEMI/K7MDENG")
    text = f"wandb sync {tmp_path}/outputs; see {tmp_path}/google.json"
    assert hidden(text) == text
    assert hidden("a /wJalrXUtnFEMI/K7MDENG b") == f"a {HIDDEN} b"


def test_a_value_of_the_environment_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_KEY", "of-no-known-form")
    monkeypatch.setenv("SHORT_TOKEN", "a")
    assert override("a=of-no-known-form") == f"a={HIDDEN}"
    assert reason(ValueError("a of-no-known-form b")) == f"a {HIDDEN} b"


def test_what_is_no_secret_stays():
    lines = ["max_tokens=512", "drafter=ngram", "prompts.columns={prompt: question}", "target=acme/sk-model"]
    lines += ["a=[--max-num-batched-tokens,8192,--tokenizer,/a/b]", "rollout.url=http://host:8000/v1"]
    lines += ["drafter.root_token=add", "hdfs=hdfs://host:9000/folder@1", "a.pad_token='<pad>'"]
    assert list(map(override, lines)) == lines
    said = "bad token: 5 at key=value, expected 'token', got 7; the key is missing"
    assert hidden(said) == said
    assert not SECRET.search("root_token")

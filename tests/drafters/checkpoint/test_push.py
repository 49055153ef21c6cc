"""Drafters given away: folders, the Hub, model cards, and files that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from cards import audit, card_of, row, scorecard
from drafter_checks import V
from safetensors import SafetensorError
from safetensors.torch import save_file
from workbench import CONF, command, fork, make_target, same

from decode.errors import RemoteError, UserError
from decode.model.load import load_target
from distill.cli.main import main
from distill.config.read import checked_options
from distill.export import export
from distill.options.commands import ExportCommandOptions
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import pretrained
from drafters.checkpoint.atomic import publish, writing
from drafters.checkpoint.model_card import Facts, model_card
from drafters.checkpoint.pretrained import from_pretrained, push_to_hub, save_pretrained
from drafters.export.layout import Layout
from drafters.hub import upload
from drafters.models.eagle import Eagle

REPO = "me/drafter"


@pytest.fixture
def made(tiny_target, make_drafter):
    """A target and an EAGLE for it that nobody has saved yet."""
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    return target, make_drafter("eagle", target)


def same_weights(one: Drafter, other: Drafter) -> bool:
    return same(one.state_dict(), other.state_dict())


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """The client waits a second and more before it asks again."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_a_drafter_is_saved_and_comes_back_bit_for_bit(made, tmp_path):
    target, drafter = made
    save_pretrained(drafter, tmp_path / "new", target)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    loaded = from_pretrained(tmp_path / "new", target)
    assert type(loaded) is Eagle
    assert same_weights(loaded, drafter)
    save_pretrained(loaded, tmp_path / "again")  # it knows its target
    assert same_weights(from_pretrained(tmp_path / "again", target), drafter)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    config["target"] = {name: config["target"][name] for name in ("name", "fingerprint")}  # all that was once
    (tmp_path / "again" / "config.json").write_text(json.dumps(config))
    assert same_weights(from_pretrained(tmp_path / "again", target), drafter)


def test_a_drafter_without_a_target_and_a_folder_in_use_are_refused(made, tmp_path):
    target, drafter = made
    with pytest.raises(UserError, match="pass target="):
        save_pretrained(drafter, tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UserError, match="already exists"):
        save_pretrained(drafter, tmp_path, target)
    with pytest.raises(UserError, match="mine is a file"):
        save_pretrained(drafter, tmp_path / "mine" / "new", target)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_score_goes_along_while_the_weights_are_those_that_were_scored(made, tmp_path):
    target, drafter = made
    folder = tmp_path / "checkpoint"
    save_pretrained(drafter, folder, target)
    card = scorecard()
    (folder / "score.json").write_text(json.dumps(card))
    loaded = from_pretrained(folder, target)
    save_pretrained(loaded, tmp_path / "same")
    assert json.loads((tmp_path / "same" / "scorecard.json").read_text()) == card_of().to_json()
    with torch.no_grad():
        next(loaded.parameters()).add_(1)
    save_pretrained(loaded, tmp_path / "changed")
    assert not (tmp_path / "changed" / "scorecard.json").exists()


def test_a_full_disk_leaves_nothing(made, tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "README.md"))
    monkeypatch.setattr(pretrained, "model_card", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(made[1], tmp_path / "new", made[0])
    assert not list(tmp_path.iterdir())


def test_the_target_that_a_checkpoint_names_is_loaded_if_it_is_still_that_one(tmp_path):
    where = make_target(tmp_path / "target")
    target = load_target(str(where))
    drafter = Eagle.for_target(target, depth=1, feature_noise=0.0, feature_weight=1.0)
    folder = tmp_path / "drafter"
    save_pretrained(drafter, folder, target)
    written = json.loads((folder / "config.json").read_text())["target"]
    assert written["name"] == str(where)
    assert len(written["tokenizer"]) == 16
    assert same_weights(from_pretrained(folder), drafter.to(target.dtype))
    checkpoint_io.tokenizer_hash.cache_clear()
    words = json.loads((where / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {"a": words["model"]["vocab"]["b"], "b": words["model"]["vocab"]["a"]}
    (where / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match=r"tokenizer of .* has changed"):
        from_pretrained(folder)
    assert same_weights(from_pretrained(folder, target), drafter)  # whoever passes it knows it
    checkpoint_io.tokenizer_hash.cache_clear()


def test_what_is_pushed_comes_back_bit_for_bit(made, fake_hub, monkeypatch):
    target, drafter = made
    where = push_to_hub(drafter, REPO, target)
    repo = fake_hub.repos[REPO]
    assert where == f"{fake_hub.url}/{REPO}/commit/{repo.sha}"
    assert repo.private
    assert repo.commits == 1
    assert sorted(repo.files) == ["README.md", "config.json", "model.safetensors"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="or a private one that this login"):
        from_pretrained(REPO, target)
    monkeypatch.setenv("HF_TOKEN", fake_hub.token)
    assert same_weights(from_pretrained(REPO, target), drafter)
    with pytest.raises(UserError, match=r"it has no revision|no such repository"):
        from_pretrained("me/nothing", target)


def test_a_second_push_is_one_commit_that_removes_our_old_files(made, fake_hub):
    target, drafter = made
    old = dict.fromkeys(["adapter_model.safetensors", "medusa_lm_head.pt", "token_map.pt"], b"old")
    fake_hub.give(REPO, {**old, "LICENSE": b"theirs", "config.json": b"{}"})
    push_to_hub(drafter, REPO, target)
    assert fake_hub.repos[REPO].commits == 2
    assert sorted(fake_hub.repos[REPO].files) == ["LICENSE", "README.md", "config.json", "model.safetensors"]
    assert not fake_hub.repos[REPO].private  # it was there, and stays as it was


@pytest.mark.parametrize("cut", ["/lfs/", "/commit/", "/preupload/", "/api/repos/create"])
def test_an_upload_that_is_cut_off_commits_nothing_and_can_be_made_again(made, fake_hub, cut):
    target, drafter = made
    fake_hub.cut = cut
    with pytest.raises(RemoteError, match="cut off") as error:
        push_to_hub(drafter, REPO, target)
    assert "\n" not in str(error.value)
    assert not fake_hub.repos or not fake_hub.repos[REPO].files
    fake_hub.cut = ""
    push_to_hub(drafter, REPO, target)
    assert same_weights(from_pretrained(REPO, target), drafter)


def test_an_upload_that_the_hub_refuses_is_one_line(made, fake_hub, monkeypatch):
    """Without the token."""
    for failing, kind, said in [
        ({"/api/repos/create": 403}, UserError, r"may not write there \(403\)"),
        ({"/commit/": 500}, RemoteError, "answers 500; nothing was committed"),
        ({"/preupload/": 503}, RemoteError, "503"),
    ]:
        fake_hub.failing = failing
        with pytest.raises(kind, match=said):
            push_to_hub(made[1], REPO, made[0])
    secret = "hf_aSecretThatIsWrong"
    monkeypatch.setenv("HF_TOKEN", secret)
    with pytest.raises(UserError, match=r"\(401\)") as error:
        push_to_hub(made[1], REPO, made[0])
    assert secret not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no token of the Hub is known here"):
        push_to_hub(made[1], REPO, made[0])


@pytest.mark.parametrize("name", ["drafter", "a/b/c", "../b", "a/..", "a b/c", "", "https://x/y"])
def test_a_name_that_no_repository_can_have_is_refused_at_once(made, fake_hub, name):
    with pytest.raises(UserError, match="give owner/name"):
        push_to_hub(made[1], name, made[0])
    assert not fake_hub.asked


def test_without_a_network_one_line_says_so(made, fake_hub, monkeypatch):
    target, drafter = made
    push_to_hub(drafter, "me/known", target)
    from_pretrained("me/known", target)
    fake_hub.cut = "/"
    with pytest.raises(RemoteError, match="cut off"):
        from_pretrained(REPO, target)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match="cannot be reached, and the cache has no copy"):
        from_pretrained(REPO, target)
    assert same_weights(from_pretrained("me/known", target), drafter)


def test_weights_of_another_models_repository_are_not_fetched(made, fake_hub):
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"a whole model's"}
    fake_hub.give("me/model", files)
    with pytest.raises(UserError, match=r"not a drafter's config .*drafter\.path=<it>"):
        from_pretrained("me/model", made[0])
    assert not any("safetensors" in path for _, path in fake_hub.asked)


def exported(*arguments: str):
    def task(cfg, folder):
        return export(checked_options(ExportCommandOptions, cfg))

    return command(lambda: main(task, CONF, "export"), ["export.py", *arguments])


def test_a_run_ends_on_the_hub_and_is_whole_if_that_fails(bench, fake_hub, monkeypatch):
    fake_hub.cut = "/commit/"
    push = [f"export.push_to={REPO}"]
    done = bench.train("seed=31", *push)
    assert (done.code, done.err.count("\n")) == (1, 1)
    again = done.err.partition("this exports it again: ")[2].split()
    (folder,) = bench.runs()
    assert again[:2] == ["foredraft", "export"]
    assert not fake_hub.repos[REPO].files
    fake_hub.cut = ""
    retried = exported(*again[2:]).succeeded()
    assert f"uploaded: {fake_hub.url}/{REPO}/commit/" in retried.out
    files = fake_hub.repos[REPO].files
    named = {"README.md", "config.json", "model.safetensors", "recipe.json", "scorecard.json"}
    named |= {"passport.json", "passport.md"}
    assert files.keys() == named
    best = (folder / "checkpoints" / "best").resolve()
    score = json.loads((best / "score.json").read_text())
    assert score["samples"]
    # Texts stay with the run.
    assert json.loads(files["scorecard.json"]) == score | {"target": "target", "samples": []}
    assert files["model.safetensors"] == (best / "model.safetensors").read_bytes()
    target = load_target(str(bench.target))
    assert same_weights(from_pretrained(REPO, target), checkpoint_io.load(best, target))
    text = b"".join(value for name, value in files.items() if name != "model.safetensors").decode()
    assert str(bench.root) not in text, "paths of this machine"
    assert fake_hub.token not in done.out + done.err + retried.out + retried.err + text
    written = [p for p in bench.root.rglob("*") if p.is_file()]
    assert not [p for p in written if fake_hub.token.encode() in p.read_bytes()]
    assert len(written) > 20
    # The card may be changed before it goes up again.
    out = next((folder / "export").iterdir())
    (out / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.delenv("HF_TOKEN")
    exported(*again[2:]).refused("no token of the Hub is known here", "dry_run=true shows")
    dry = exported(*again[2:], "dry_run=true").succeeded()
    assert "exists already and is uploaded unchanged" in dry.out
    assert "would upload to" in dry.out
    assert "dry run: nothing was uploaded" in dry.out
    assert fake_hub.repos[REPO].commits == 1


@pytest.mark.proof
def test_commands_refuse_in_one_line(bench, fake_hub, tmp_path):
    folder = bench.untrained_eagle()
    base = [f"checkpoint={folder}", f"target={bench.target}", f"out={tmp_path / 'out'}"]
    exported(*base[:2], f"out={tmp_path / 'first'}", "to=native").succeeded()
    written = "".join((tmp_path / "first" / name).read_text() for name in ("config.json", "README.md"))
    assert str(bench.root) not in written, "it may be uploaded as it is"
    exported(*base, "to=native", "push_to=nobody").refused("push_to")
    exported(*base, "to=llama.cpp").refused("llama.cpp")
    (tmp_path / "empty").mkdir()  # a format that there is not is named before a target is looked at
    exported(base[0], f"target={tmp_path / 'empty'}", "to=hf").refused("hf has no format for drafter 'eagle'")
    push = [*base, "to=native", f"push_to={REPO}"]
    fake_hub.failing = {"/api/repos/create": 401}
    exported(*push).refused("401")
    fake_hub.failing = {"/preupload/": 503}
    broken = exported(*push)
    assert (broken.code, broken.err.count("\n")) == (1, 1)
    (tmp_path / "out" / "config.json").unlink()  # whatever this folder is now
    exported(*push).refused("choose a new folder")
    bench.train("seed=32", "export.push_to=nobody").refused("push_to=nobody")


def test_a_link_to_elsewhere_is_never_uploaded(tmp_path, fake_hub):
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "id_rsa").write_text("secret")
    (folder / "README.md").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UserError, match="a link to a file outside"):
        upload.upload(folder, REPO)
    assert not fake_hub.asked


# -- the model card --------------------------------------------------------------------------------


@pytest.fixture
def facts(tiny_target, make_drafter):
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle", target, bias=False)
    origin = checkpoint_io.origin_of(drafter, target, "acme/target-7b")
    origin = origin._replace(revision="c" * 40, tokenizer="7" * 16)
    return Facts(drafter, "eagle", origin, card_of(), {"seed": 11})


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n", 2)[1])


def test_the_front_matter_is_what_the_hub_reads(facts):
    matter = front(model_card(facts))
    assert (matter["base_model"], matter["library_name"]) == ("acme/target-7b", "foredraft")
    assert "eagle" in matter["tags"]
    assert "license" not in matter  # it is not ours to choose
    text = model_card(facts._replace(origin=facts.origin._replace(name="/home/alice/pocket", revision=None)))
    assert "base_model" not in front(text)
    assert "alice" not in text
    assert "pocket" in text


def test_every_measured_number_is_in_the_table_with_where_it_was_measured(facts):
    text = model_card(facts)
    first = next(line for line in text.splitlines() if line.startswith("| chain-2 | 0 |"))
    cells = ["chain-2", "0", "1", "2.00 (1.80..2.20)", "1.98", "0.60", "0.35", "1.43x", "211.5", "147.9"]
    assert [cell.strip() for cell in first.strip("|").split("|")] == cells
    assert "| chain-2 | 1 | 8 | 1.52~ (1.27..1.77) | 1.52 |" in text
    assert "**tau 2.00 (1.80..2.20, replayed), speedup 1.43x**: chain-2, T=0, batch 1, 2 held-out" in text
    parts = ["Abacus 9000, 2 cores", "commit 0123456789ab", "prompts 12", "bfloat16", "load average 0.4"]
    parts += ["audit: passed. Of 640 greedy tokens", "- seed: `11`", "revision cccc"]
    assert all(part in text for part in parts)


def test_no_number_is_made_up(facts):
    """Without scorecard and recipe no measurement is left."""
    body = model_card(facts._replace(score=None, recipe=None)).partition("## Score")[2]
    assert "no scorecard" in body
    assert not re.findall(r"\d+\.\d+", body)
    assert "speedup:" not in body


def test_scores_that_are_no_headline_are_marked(facts):
    drift = {"kl": 0.0071, "reverse_kl": 0.008, "top1_agreement": 0.967, "greedy_prefix": 0.5}
    drift |= {"prompts": 4, "tokens": 24}
    marked = {
        "chain-2 (lossy)": card_of([row(0.0, 1, 1.98), row(0.0, 1, 3.0, lossy=True)]),
        "audit: FAILED": card_of(audit=audit(mismatches=9)),
        "no real score": card_of(control="shuffled_taps"),
        "no longer the original: KL 0.0071": card_of(lossless_to="tuned target", target_drift=drift),
        "No draft was faster than plain decoding": card_of([row(speedup=0.8)]),
    }
    plain = model_card(facts)
    for words, score in marked.items():
        assert words in model_card(facts._replace(score=score))
        assert words not in plain


def test_it_says_how_to_serve(facts):
    text = model_card(facts._replace(repo="me/drafter"))
    assert "foredraft generate checkpoint=me/drafter target=acme/target-7b" in text
    assert facts.origin.exports == ("vllm", "sglang", "authors")
    text = model_card(facts._replace(origin=facts.origin._replace(exports=("sglang",))))
    assert "to=sglang" in text
    assert "to=vllm" not in text
    assert "No known engine" in model_card(facts._replace(origin=facts.origin._replace(exports=())))
    layout = Layout({}, {}, "vllm serve {target} --with {drafter}")
    theirs = model_card(facts._replace(to="vllm", layout=layout, repo="me/d"))
    assert "    vllm serve acme/target-7b --with me/d" in theirs
    assert "foredraft generate" not in theirs


def test_a_damaged_scorecard_is_one_line(facts):
    for rows in ([], 3, [{}], [row() | {"tau": "<script>"}]):
        with pytest.raises(UserError, match="its scorecard is damaged") as error:
            model_card(facts._replace(score=card_of(rows=rows)))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="its scorecard is damaged"):
        model_card(facts._replace(score=card_of(audit=3)))


def test_text_of_others_ends_no_line_and_begins_no_markup(facts):
    evil = "x\n\n# Heading | <img src=y> [here](http://z)"
    score = card_of(rows=[row(0.0, 1, 2.0, decode=evil)], hardware=evil)
    text = model_card(facts._replace(score=score, recipe={"a": evil, evil: "`b`"}))
    assert not [line for line in text.splitlines() if line.startswith("# Heading")]
    outside = re.sub("`[^`]*`", "", text)  # nothing is markup within code
    assert "<img" not in outside.replace("\\<img", "")
    assert isinstance(front(text), dict)


# -- files that cannot be written ------------------------------------------------------------------


LARGE = torch.zeros(10_000)
WRITERS = {
    "safetensors": lambda path: save_file({"a": LARGE}, path),
    "torch": lambda path: torch.save({"a": LARGE}, path),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": torch.randn(10_000).numpy()}), path),
    "text": lambda path: path.write_text("x" * 10_000),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_above_the_limit_is_an_os_error_that_names_it(writer, tmp_path):
    def body() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with publish(tmp_path / "final") as temporary:
                WRITERS[writer](temporary)
        except OSError as error:
            return 7 * ((error.errno, Path(error.filename)) == (errno.EFBIG, tmp_path / "final"))
        return 1

    assert os.waitstatus_to_exitcode(fork(body)) == 7
    assert not list(tmp_path.iterdir())


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
POSITION = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SafetensorError(FULL), errno.ENOSPC),
        (SafetensorError("I/O error: something"), errno.EIO),
        (RuntimeError(POSITION), errno.EIO),
        (SafetensorError("no such tensor"), None),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_errors_of_the_system_are_os_errors_and_others_stay(error, code, tmp_path):
    with pytest.raises(OSError if code else type(error)) as found, writing(tmp_path / "x"):
        raise error
    if code:
        assert (found.value.errno, found.value.filename) == (code, str(tmp_path / "x"))
    else:
        assert found.value is error

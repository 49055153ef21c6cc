"""Drafters given away: folders, the Hub, and everything that may go wrong on the way there."""

from __future__ import annotations

import errno
import json

import huggingface_hub
import pytest
import torch
from cards import scorecard
from faces import V
from workbench import CONF, command, make_target

from decode.errors import RemoteError, UserError
from decode.model.load import load_target
from distill.cli.main import main
from distill.config.read import checked_options
from distill.export import export
from distill.options import ExportCommandOptions
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import pretrained
from drafters.checkpoint.pretrained import from_pretrained, push_to_hub, save_pretrained
from drafters.hub import upload
from drafters.models.eagle import Eagle

REPO = "me/drafter"


@pytest.fixture
def made(tiny_target, make_drafter):
    """A target and an EAGLE for it that nobody has saved yet."""
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32)
    return target, make_drafter("eagle", target)


def same(one: Drafter, other: Drafter) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """The client waits a second and more before it asks again."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


# -- folders ---------------------------------------------------------------------------------------


def test_a_drafter_is_saved_and_comes_back_bit_for_bit(made, tmp_path):
    target, drafter = made
    save_pretrained(drafter, tmp_path / "new", target)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    loaded = from_pretrained(tmp_path / "new", target)
    assert type(loaded) is Eagle
    assert same(loaded, drafter)
    save_pretrained(loaded, tmp_path / "again")  # it knows its target
    assert same(from_pretrained(tmp_path / "again", target), drafter)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    config["target"] = {name: config["target"][name] for name in ("name", "fingerprint")}  # all that was once
    (tmp_path / "again" / "config.json").write_text(json.dumps(config))
    assert same(from_pretrained(tmp_path / "again", target), drafter)


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
    assert json.loads((tmp_path / "same" / "scorecard.json").read_text()) == card
    with torch.no_grad():
        next(loaded.parameters()).add_(1)
    save_pretrained(loaded, tmp_path / "changed")
    assert not (tmp_path / "changed" / "scorecard.json").exists()


def test_a_full_disk_leaves_nothing(made, tmp_path, monkeypatch):
    target, drafter = made

    def full(facts):
        raise OSError(errno.ENOSPC, "No space left on device", "README.md")

    monkeypatch.setattr(pretrained, "model_card", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(drafter, tmp_path / "new", target)
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
    assert same(from_pretrained(folder), drafter.to(target.dtype))
    checkpoint_io.tokenizer_hash.cache_clear()
    words = json.loads((where / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {"a": words["model"]["vocab"]["b"], "b": words["model"]["vocab"]["a"]}
    (where / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match=r"tokenizer of .* has changed"):
        from_pretrained(folder)
    assert same(from_pretrained(folder, target), drafter)  # whoever passes it knows it
    checkpoint_io.tokenizer_hash.cache_clear()


# -- the Hub ---------------------------------------------------------------------------------------


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
    assert same(from_pretrained(REPO, target), drafter)
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
    assert same(from_pretrained(REPO, target), drafter)


@pytest.mark.parametrize(
    ("failing", "kind", "said"),
    [
        ({"/api/repos/create": 403}, UserError, r"may not write there \(403\)"),
        ({"/commit/": 500}, RemoteError, "answers 500; nothing was committed"),
    ],
)
def test_an_upload_that_the_hub_refuses_is_one_line(made, fake_hub, failing, kind, said):
    fake_hub.failing = failing
    with pytest.raises(kind, match=said):
        push_to_hub(made[1], REPO, made[0])


def test_a_wrong_token_is_not_told(made, fake_hub, monkeypatch):
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
    assert same(from_pretrained("me/known", target), drafter)


def test_weights_of_another_models_repository_are_not_fetched(made, fake_hub):
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"a whole model's"}
    fake_hub.give("me/model", files)
    with pytest.raises(UserError, match=r"not a drafter's config .*drafter\.path=<it>"):
        from_pretrained("me/model", made[0])
    assert not any("safetensors" in path for _, path in fake_hub.asked)


# -- commands --------------------------------------------------------------------------------------


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
    assert files.keys() == named
    best = (folder / "checkpoints" / "best").resolve()
    score = json.loads((best / "score.json").read_text())
    assert score["samples"]
    # Texts stay with the run.
    assert json.loads(files["scorecard.json"]) == score | {"target": "target", "samples": []}
    assert files["model.safetensors"] == (best / "model.safetensors").read_bytes()
    target = load_target(str(bench.target))
    assert same(from_pretrained(REPO, target), checkpoint_io.load(best, target))
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
    dry = exported(*again[2:]).succeeded()
    assert "exists already and is uploaded unchanged" in dry.out
    assert "would upload to" in dry.out
    assert "dry run: no token of the Hub is known here" in dry.out
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

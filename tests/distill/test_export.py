"""Exports of a run: decided before its work, recommended at its end, and a failure is no success."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ggufs import write_gguf
from workbench import ROOT, foredraft, train

from decode.evaluation.scorecard import Scorecard
from decode.planning import auto
from distill import export
from drafters.export.layout import Layout

SHORT = ("trainer.max_steps=1", "score.every=1")
IMPOSSIBLE = {
    "drafter.taps=['last']": ("drafter=eagle3", "drafter.taps=[last]"),
    "its fusion has a bias": ("drafter=eagle", "drafter.bias=true"),
    "no format for drafter 'hydra'": ("drafter=hydra",),
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_export_that_cannot_succeed_is_refused_before_any_work(bench, said):
    before = bench.runs()
    bench.train(*IMPOSSIBLE[said], "export.to=vllm").refused("to=vllm: ", said, "set to=")
    assert bench.runs() == before
    assert not list((bench.root / "outputs").glob("rollouts/*"))


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("export.to=nonsense", "to=nonsense: choose native, vllm"),
        ("export.push_to=bad", "push_to=bad: give owner/name"),
        ("export.to=[native,nonsense]", "to=nonsense: choose native, vllm"),
        ("export.to=[native,native]", "to=[native,native]: name at least one program, each once"),
        ("export.to=[]", "to=[]: name at least one program"),
        ("export.to=[native,sglang]", "sglang has no format for drafter 'lstm'"),
        ("export.outtype=q2_k", "outtype=q2_k: choose"),
        ("export.to=sglang", "sglang has no format for drafter 'lstm'"),
    ],
)
def test_export_that_needs_no_target_to_be_refused_is_refused_before_it_is_loaded(
    bench, monkeypatch, export, said
):
    monkeypatch.setattr("distill.config.build.load_target", lambda *_, **__: pytest.fail("it is loaded"))
    bench.train("drafter=lstm", export).refused(said)


def test_end_of_a_run_recommends_a_program_that_takes_its_drafter(bench):
    for bias, program in ("true", "sglang"), ("false", "vllm"):
        done = bench.train(f"drafter.bias={bias}", *SHORT).succeeded()
        line = next(line for line in done.out.splitlines() if "foredraft export" in line)
        assert line.endswith(f"to={program}")
        config = json.loads((done.folder / "checkpoints" / "best" / "config.json").read_text())
        assert config["exports"][0] == program
        shown = foredraft(*line.split()[1:]).succeeded().out.rstrip().splitlines()
        assert [text[:10] for text in shown if text.startswith("serve it: ")] == [shown[-1][:10]]


def test_printed_command_names_local_folders_by_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    layout = Layout({}, {}, "vllm serve {target} --draft {drafter}")
    for name, written in (
        ("model", tmp_path / "model"),
        ("data/pocket", ROOT / "data/pocket"),
        ("a/b", "a/b"),
    ):
        drafter: Any = SimpleNamespace(origin=SimpleNamespace(name=name))
        said = export._served(layout, drafter, None, Path("out"))
        assert said == ("", f"vllm serve {written} --draft {tmp_path / 'out'}")


@pytest.mark.proof
def test_run_for_which_plain_decoding_is_chosen_says_do_not_draft(bench, monkeypatch):
    """From training to the exported folder."""
    monkeypatch.setattr(auto, "best_forecast", lambda rows: rows[0])
    monkeypatch.setattr(Scorecard, "pays", property(lambda self: False))
    plans = "decode.plans=[{depth: 1}]", "score.alternatives=[{depth: 2}]"
    command = [word for word in bench.command if not word.startswith("decode")]
    done = train([*command, "decode=auto", *plans, "export.to=native", *SHORT]).succeeded()
    best = done.folder / "checkpoints" / "best"
    rows = json.loads((best / "score.json").read_text())["rows"]
    assert [(row["decode"], row["nodes"]) for row in rows] == [("plain", 0), ("chain-2", rows[1]["nodes"])]
    assert rows[0]["tau"] == 1
    assert "  chain-2, T=0, batch 1 (plain was chosen), " in done.out
    for text in (done.out, (done.folder / "report.html").read_text()):
        assert "do not draft" in text
    scored = foredraft("score", f"checkpoint={best}", "decode=chain", "decode.depth=2").succeeded()
    assert scored.out.rstrip().splitlines()[-1].startswith("do not draft: none is faster")
    plain = "decode=chain", "decode.depth=0", "max_new_tokens=4"
    said = foredraft("generate", f"checkpoint={best}", "prompt=x", *plain).succeeded().err
    assert "plain: 4 tokens, " in said


def test_failing_export_leaves_a_whole_run_and_exit_code_1(bench, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write", full)
        done = bench.train("seed=5", "export.to=native", *SHORT)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "export: [Errno 28] No space left on device" in done.err
    folder = bench.runs()[-1]
    assert (folder / "report.html").exists()
    program, *again = done.err.partition("this exports it again: ")[2].split()
    assert program == "foredraft"
    foredraft(*again).succeeded()
    assert next((folder / "export").iterdir()).name.endswith("-native")
    # The run has ended: the same command is a new one.
    assert bench.train("seed=5", "export.to=native", *SHORT).succeeded().folder != folder


def test_run_is_exported_to_several_programs(bench):
    done = bench.train("seed=6", "drafter.bias=false", "export.to=[vllm,native,sglang]", *SHORT).succeeded()
    written = {path.name.partition("-")[2] for path in (done.folder / "export").iterdir()}
    assert written == {"vllm", "native", "sglang"}
    assert done.out.count("serve it: ") == 3
    score = json.loads((done.folder / "checkpoints" / "best" / "score.json").read_text())
    assert score["served_plan"] == "chain-3", "scored as the first of them drafts"


def test_one_failing_export_of_several_leaves_the_others(bench, monkeypatch):
    write = export.write

    def fails(checkpoint, target, to, *more):
        if to == "vllm":
            raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
        write(checkpoint, target, to, *more)

    monkeypatch.setattr(export, "write", fails)
    done = bench.train("seed=7", "drafter.bias=false", "export.to=[vllm,native]", *SHORT)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.rstrip().endswith("to=vllm")
    written = [path.name.partition("-")[2] for path in (bench.runs()[-1] / "export").iterdir()]
    assert written == ["native"]


@pytest.mark.proof
def test_run_on_a_gguf_file_ends_with_a_file_for_llama_cpp(bench, tmp_path, own_cache):
    file = write_gguf(tmp_path / "tiny.gguf")
    command = [word for word in bench.command if not word.startswith(("drafter.", "target="))]
    command += ["drafter=lm", "drafter.layers=1", "export.to=gguf", *SHORT]
    before = bench.runs()
    train([*command, f"target={bench.target}"]).refused("export.target_gguf=<file>")
    train([*command, f"target={bench.target}", f"export.target_gguf={file}"]).refused("its hidden_size is 64")
    train([*command, f"target={bench.target}", "export.target_gguf=/nowhere.gguf"]).refused("no such file")
    assert bench.runs() == before
    done = train([*command, f"target={file}", "export.outtype=q8_0"]).succeeded()
    out = next((done.folder / "export").glob("*-gguf"))
    assert (out / "drafter.gguf").read_bytes()[:4] == b"GGUF"
    assert not (out / "model.safetensors").exists()
    assert f"{out}/drafter.gguf" in done.out
    checkpoint, other = done.folder / "checkpoints" / "best", tmp_path / "x"
    words = [f"checkpoint={checkpoint}", "to=gguf", f"out={other}"]
    foredraft("export", *words, f"target_gguf={tmp_path}").refused("no GGUF file")
    assert not other.exists()
    foredraft("export", *words, "outtype=f32").succeeded()
    assert (other / "drafter.gguf").stat().st_size > (out / "drafter.gguf").stat().st_size

"""The race against a compiled plain loop: that it is compiled, when, and what is said where it cannot be."""

from __future__ import annotations

import json
import shutil

import families
import pytest
import torch
from workbench import Bench, command, make_target

from benchmark import run
from benchmarks import vs_transformers
from benchmarks.vs_transformers import hugging_face
from decode.model.load import load_target
from decode.sampling import Sampler

GREEDY = Sampler(0.0)
EVERYBODY = ["ours-plain", "hf-generate", "hf-compiled", "hf-prompt-lookup"]
compile_for_real = torch.compile


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that were compiled, which are run as they are: no compiler is called."""
    seen = []

    def backend(graph, inputs):
        seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda body: compile_for_real(body, backend=backend))
    yield seen
    torch.compiler.reset()


def benchmark(bench: Bench, *more: str):
    """`python scripts/lab/benchmark.py decode` on the tiny target, whose vocabulary no draft model has."""
    given = [a for a in bench.command if a.startswith(("target=", "prompts")) and a != "prompts.self=0"]
    quick = ["score.prompts=3", "score.max_new_tokens=9", "score.repeats=1"]
    argv = ["benchmark.py", "decode", *given, *quick, f"out={bench.root / 'compiled.json'}", *more]
    return command(run, argv)


def rows(bench: Bench) -> dict[str, dict]:
    card = json.loads((bench.root / "compiled.json").read_text())
    return {row["name"]: row for row in card["rows"]}


@pytest.mark.ci("llama", "mistral, window 6")
@pytest.mark.parametrize("family", ["llama", "mistral, window 6", "gemma3, window 6", "gpt2"])
def test_compiled_loop_writes_the_same_text(family, graphs, tmp_path):
    """A window that fills up compiles again, within the first texts."""
    kind, options, *seed = families.WORKS[family]
    folder = families.save(tmp_path / "target", kind, options, *seed)
    target = load_target(str(folder), "float64")
    compiled, plain = hugging_face(target, GREEDY, static=40), hugging_face(target, GREEDY)
    assert not graphs
    for prompt in families.PROMPTS[:2]:
        compiled(prompt, 24)
    assert len(graphs) == (3 if "window" in family else 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt in families.PROMPTS:
            assert compiled(prompt, 24) == plain(prompt, 24)
    assert "forward" not in vars(target.model), "the others run the model as it was"


@pytest.mark.proof
def test_compiled_code_runs_in_the_race(bench):
    """With the real compiler, which takes its time."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    done = benchmark(bench).succeeded()
    found = rows(bench)
    assert list(found) == EVERYBODY
    assert {row["differ"] for row in found.values()} == {0}
    assert found["hf-compiled"]["tokens"] == found["ours-plain"]["tokens"]
    assert found["hf-compiled"]["tau"] == 1.0
    assert "compiled Hugging Face's plain loop and ran it once in " in done.out
    assert "which are not timed" in done.out


def test_compilation_ends_before_the_timing(bench, graphs, monkeypatch):
    before, race = [], vs_transformers.race

    def counted(*given, **named):
        before.append(len(graphs))
        return race(*given, **named)

    monkeypatch.setattr("benchmarks.decode.race", counted)
    benchmark(bench, "temperature=0.5").succeeded()
    assert before == [len(graphs)] == [1]
    assert rows(bench)["hf-compiled"]["differ"] is None


def test_without_a_compiler_the_others_race(bench, monkeypatch):
    def none(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda body: compile_for_real(body, backend=none))
    done = benchmark(bench).succeeded()
    assert list(rows(bench)) == [name for name in EVERYBODY if name != "hf-compiled"]
    assert done.out.count("without the compiled loop: ") == 1
    torch.compiler.reset()


def test_constant_weights_are_switched_on_and_off_again():
    """Without it the compiled loop is slower than it could be, and nothing else would say so."""
    from torch._inductor import config  # private API: see `_constant_weights`

    assert not config.freezing
    with vs_transformers._constant_weights():
        assert config.freezing
    assert not config.freezing


def test_a_static_cache_holds_what_the_context_does(tmp_path, graphs):
    target = load_target(str(make_target(tmp_path / "target")), "float64")
    long = [7] * 250  # of 256 positions
    texts = [hugging_face(target, GREEDY, static=n)(long, 20).tokens for n in (0, 256)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6

"""Compiled rounds: captured rounds through Inductor decode as the uncaptured loop does, in fp32."""

import pytest
import torch
from captured import CHAIN, DYNAMIC, PROMPTS, SAMPLED, STATIC, assert_same, decoded, small

from decode.generation.capture import choice, inductor, makers
from decode.generation.capture.makers import captures_of
from decode.plan import Plan

CASES = {
    "plain": (None, Plan(), 0.0),
    "plain, T=1": (None, Plan(), 1.0),
    "chain": ("eagle", CHAIN, 0.0),
    "chain, T=1": ("eagle", SAMPLED, 1.0),
    "tree": ("eagle", DYNAMIC, 0.0),
    "tree, T=1": ("eagle", STATIC, 1.0),
    "draft model": ("lm", CHAIN, 0.0),
    "verification alone": ("ngram", CHAIN, 0.0),
}


@pytest.fixture
def target(tiny_target, monkeypatch):
    """Compiles its rounds, though they are in fp32, whose texts can be compared."""
    monkeypatch.setattr(choice, "HALF", (torch.float32,))
    target = small(tiny_target, torch.float32)
    target.compiles = True
    return target


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci("chain")
def test_compiled_rounds_decode_as_uncaptured(case, target, make_drafter, capsys):
    name, plan, temperature = CASES[case]
    drafter = make_drafter(name, target) if name else None
    assert_same(target, drafter, plan, temperature, atol=1e-4)
    assert captures_of(target)._rounds
    assert "decoding is not captured" not in capsys.readouterr().err


@pytest.mark.proof
def test_code_is_used_again_for_other_weights(target, make_drafter):
    drafter = make_drafter("eagle", target)
    first = decoded(target, drafter, CHAIN, 0.0, True, 1)
    code = sorted(inductor.folder().rglob("*.so"))
    assert code
    for weight in (target.model.lm_head.weight, *drafter.parameters()):
        weight.data = -weight.data
    expected = decoded(target, drafter, CHAIN, 0.0, False, 1)
    assert expected != first
    assert decoded(target, drafter, CHAIN, 0.0, True, 1) == expected
    assert sorted(inductor.folder().rglob("*.so")) == code


def test_without_a_compiler_a_line_says_so(target, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    expected = decoded(target, None, Plan(), 0.0, False, 1)
    assert decoded(target, None, Plan(), 0.0, True, 1) == expected
    said = capsys.readouterr().err
    assert (
        "decoding is not captured: the target cannot be compiled: no C++ compiler (no-such-compiler)" in said
    )


def test_in_single_precision_a_cpu_keeps_compiled_passes(target, monkeypatch, capsys):
    monkeypatch.setattr(choice, "HALF", (torch.bfloat16,))
    decoded(target, None, Plan(), 0.0, True, 1)
    assert "on a CPU rounds in float32 are slower than compiled passes" in capsys.readouterr().err
    assert not captures_of(target)._rounds


def test_changes_that_compiled_code_would_lose_show(target, make_drafter, monkeypatch):
    def loses(module, arguments):
        return lambda *given: module(*makers.clones(given))

    monkeypatch.setattr(makers, "compiled", loses)
    drafter = make_drafter("eagle", target)
    expected = decoded(target, drafter, CHAIN, 0.0, False, 1, prompts=PROMPTS[:2])
    assert decoded(target, drafter, CHAIN, 0.0, True, 1, prompts=PROMPTS[:2]) != expected


@pytest.mark.proof
def test_a_long_compilation_is_said(target, monkeypatch, capsys):
    monkeypatch.setattr(inductor, "SOON", 0.0)
    decoded(target, None, Plan(), 0.0, True, 1)
    assert "compiling a captured round: up to two minutes, once; kept in" in capsys.readouterr().err

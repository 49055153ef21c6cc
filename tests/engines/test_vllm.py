"""Exports served by vLLM itself: they draft as was scored, and a broken one is found and its cause named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workbench import ROOT, foredraft, train

from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.served import Served
from decode.model.load import load_tokenizer
from distill.prompts.chat_template import Chat
from distill.scoring.served import figures, texts
from distill.serving import engine_scores
from drafters.checkpoint import passport
from drafters.checkpoint.folder import target_origin
from drafters.export.layout import Layout

FIXTURES = ROOT / "tests" / "fixtures" / "drafters"
TRAIN = ROOT / "data" / "prompts" / "train.jsonl"
PROMPTS = 20  # held-out ones that are served
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}  # fixtures
STEPS = "trainer.max_steps=30"  # on the answers that are then served, so that much of them is accepted
LONGER = "trainer.max_steps=100"
OTHERS = {  # overrides of train.py, and the format
    "EAGLE-3, `fc_norm=false`": (["drafter=eagle3", "drafter.fc_norm=false", LONGER], "vllm"),
    "P-EAGLE": (["drafter=p_eagle", LONGER], "vllm"),
    "Medusa": (["drafter=medusa"], "vllm"),
    "Medusa-2, tuned target": (["drafter=medusa2"], "vllm"),
    "DFlash, one layer": (["drafter=dflash", "drafter.layers=1", "drafter.depth=7"], "vllm"),
    "draft model": (["drafter=lm_given", f"drafter.path={ROOT / 'data' / 'pocket-draft'}"], "vllm"),
}
pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def answers(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("answers") / "heldout"


@pytest.fixture(scope="session")
def plain() -> dict[str, dict[str, engine_scores.Answered]]:
    """What vLLM answered without a drafter, by the prompts: asked once for all tests."""
    return {}


@pytest.fixture(scope="session")
def some(tmp_path_factory) -> Callable[[int], Path]:
    """A file of so many held-out prompts, the same in all tests: the engine is asked once what it answers."""

    @cache
    def some(count: int) -> Path:
        lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines(keepends=True)
        path = tmp_path_factory.mktemp("some") / "prompts.jsonl"
        path.write_text("".join(lines[:: len(lines) // count][:count]))  # of all categories
        return path

    return some


@pytest.fixture
def scored(vllm_python, answers, plain, some, monkeypatch, tmp_path):
    """Scores a checkpoint here and in vLLM."""
    make = engine_scores.scorer

    def knowing(*args, **options):
        made = make(*args, **options)
        known = made.answered = plain.setdefault(str([request.tokens for request in made.requests]), {})
        for name in [name for name in known if not name.startswith("vllm serve")]:
            del known[name]  # of another test's drafter
        return made

    monkeypatch.setattr(engine_scores, "scorer", knowing)

    def scored(checkpoint: Path, prompts: int = PROMPTS, fails: bool = False):
        out = tmp_path / "card.json"
        words = [f"checkpoint={checkpoint}", "score.engine=vllm", f"score.engine_python={vllm_python}"]
        words += ["decode=chain", "decode.depth=3", "score.alternatives=[]", f"answers={answers}"]
        words += ["target.dtype=float32", f"prompts={TRAIN}", f"prompts.heldout={some(prompts)}"]
        words += ["score.prompts=2", "score.audit_prompts=1", f"score.replay_prompts={prompts}", f"out={out}"]
        done = foredraft("score", *words)
        if fails:
            return done
        done.succeeded()
        return read_scorecard(out), done

    return scored


@pytest.fixture(scope="session")
def reduced(tmp_path_factory) -> Path:
    """The EAGLE-3 with the draft vocabulary of the tokens of the training prompts."""
    folder = tmp_path_factory.mktemp("reduced")
    chat = Chat(load_tokenizer(str(ROOT / "data" / "pocket")))
    texts = (ROOT / "data" / "prompts" / "train.jsonl").read_text()
    ids = torch.tensor(sorted({*chat.tokenizer.encode(texts), *range(8)}))
    weights = load_file(FIXTURES / "eagle3" / "model.safetensors")
    weights |= {"lm_head.weight": weights["lm_head.weight"][ids], "d2t": ids}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((FIXTURES / "eagle3" / "config.json").read_text())
    config["settings"]["draft_vocab_size"] = len(ids)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def told(engine_row):
    """Adds what was served to the table."""

    def told(name: str, to: str, one: Served) -> None:
        here = f"{figures(one.scored_survival)}, tau {one.scored_tau:.2f}"
        there = f"{figures(one.survival)}, tau {one.tau:.2f}, ± {figures(one.noise)}"
        engine_row(name, to, one.engine, texts(one), here, there)

    return told


def check(one: Served, least: float = 1.5) -> None:
    """It drafts as was scored, much is accepted, and no text is another."""
    assert one.agrees, one.cause
    assert one.texts
    assert one.texts[2] == 0
    assert one.scored_tau >= least


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_drafter_drafts_in_vllm_as_it_was_scored(scored, told, vllm_version, name):
    (one,) = scored(FIXTURES / name)[0].served
    told(NAMES[name], "vllm", one)
    assert one.engine == vllm_version
    check(one)
    assert one.same_rounds == [PROMPTS, PROMPTS]  # in fp32; in bf16 24 of 27 were
    assert sum(one.texts) == PROMPTS
    assert one.rounds > 250
    assert one.speedup


@pytest.mark.proof
def test_a_reduced_vocabulary_is_drafted_from(scored, reduced, told):
    (one,) = scored(reduced)[0].served
    told("EAGLE-3, reduced vocabulary", "vllm", one)
    check(one)


@pytest.mark.proof
@pytest.mark.parametrize("name", OTHERS)
def test_a_drafter_of_every_kind_is_served_as_it_was_scored(scored, some, told, tmp_path, name):
    (settings, to), served = OTHERS[name], some(PROMPTS)
    words = [f"output_dir={served.parent}", f"hydra.run.dir={tmp_path}/run", f"prompts={served}"]
    words += [f"prompts.heldout={TRAIN}", "prompts.self=0", "score.enabled=false", "logger=csv"]
    words += ["rollout.temperature=0", "rollout.max_new_tokens=64", "max_tokens=160", "batch_size=4"]
    train([*words, "taps=cache", STEPS, *settings]).succeeded()
    (one,) = scored(tmp_path / "run" / "checkpoints" / "last")[0].served
    told(name, to, one)
    check(one, 0.0 if "DFlash" in name else 1.5)  # learns more slowly; test_vllm_drafts looks at its drafts


def permuted(layout: Layout) -> None:
    layout.tensors["fc.weight"] = torch.cat(layout.tensors["fc.weight"].chunk(3, 1)[::-1], 1)


def no_d2t(layout: Layout) -> None:
    """Draft ids are taken for the target's."""
    layout.tensors["d2t"].zero_()


def absolute_d2t(layout: Layout) -> None:
    """The target's ids, where the file has differences: some are beyond its vocabulary."""
    layout.tensors["d2t"] += torch.arange(len(layout.tensors["d2t"]))


def turned(layout: Layout) -> None:
    """Queries one position ahead of keys."""
    name = next(n for n in layout.tensors if n.endswith("q_proj.weight"))
    config, weight = layout.config, layout.tensors[name]
    dim = config["head_dim"]
    speed = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    first, second = weight.double().unflatten(0, (-1, dim)).chunk(2, 1)
    cos, sin = speed.cos()[:, None], speed.sin()[:, None]
    both = torch.cat([first * cos - second * sin, second * cos + first * sin], 1)
    layout.tensors[name] = both.flatten(0, 1).to(weight.dtype)


BROKEN = {  # cause: the mistake, and prompts that show it
    "taps in another order": (permuted, PROMPTS),
    "no d2t": (no_d2t, PROMPTS),
    "rotary positions of its queries off by": (turned, 2 * PROMPTS),  # changes half of the answers' rounds
}


@pytest.fixture
def broken(scored, reduced, monkeypatch):
    """Scores an export that was spoilt."""

    def broken(spoil, **options):
        write = engine_scores.formats.write_layout

        def spoilt(saved, target, to) -> Layout:
            layout = write(saved, target, to)
            spoil(layout)
            return layout

        monkeypatch.setattr(engine_scores.formats, "write_layout", spoilt)
        return scored(reduced, **options)

    return broken


@pytest.mark.proof
@pytest.mark.parametrize("cause", BROKEN)
def test_a_broken_export_is_found_and_its_cause_named(broken, reduced, cause):
    spoil, prompts = BROKEN[cause]
    card, said = broken(spoil, prompts=prompts)
    (one,) = card.served
    assert not one.agrees
    assert cause in one.cause
    assert one.texts
    assert one.texts[2] == 0
    assert one.cause in said.out
    page = passport.page(passport.passport(reduced, card, "eagle3", target_origin(reduced)), card)
    assert f"DIFFERS: {one.cause}" in page


@pytest.mark.proof
def test_export_that_crashes_the_engine_is_reported_with_its_fault(broken):
    done = broken(absolute_d2t, fails=True)
    done.refused("ended while it answered: ", "index", "d2t does not hold offsets")

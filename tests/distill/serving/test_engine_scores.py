"""score.engine: options, what is sent and counted, texts, a run's table, mistakes, and vLLM's settings."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import scorecard
from fake_engine import ALPHA, PROMPTS, TOKENS, Engine, a_card, a_row
from workbench import make_target, make_tokenizer, options_of

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.sampling import Sampler
from distill.options.commands import ScoreCommandOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.scoring import tables
from distill.serving import engine_scores, traffic
from distill.serving.broken_exports import CHANCE, Seen, rotate_queries
from distill.serving.engine_settings import ServedChain, lines, schedule, speculative_config
from distill.serving.served_texts import compare_texts, excess_of
from drafters.layers.decoder_layer import DecoderLayer, LayerShape, Rotary

COMMAND = {"cls": ScoreCommandOptions, "name": "score_checkpoint"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(make_target(tmp_path_factory.mktemp("engine") / "m"))


@pytest.fixture(scope="module")
def chat():
    return Chat(make_tokenizer())


def scoring(*more: str):
    words = ["checkpoint=/a", "score.engine=vllm", f"score.max_new_tokens={TOKENS}", *more]
    return options_of(*words, **COMMAND).score


@pytest.fixture
def measured(target, chat, tmp_path, monkeypatch):
    """Measures a running engine with EngineScorer."""
    monkeypatch.setattr(traffic, "READ_INTERVAL", 0.01)
    prompts = [Prompt.of(f"p{i}", [{"role": "user", "content": "x" * (i + 1)}]) for i in range(PROMPTS)]

    def measured(server: Engine, *more: str, rows=None, training=False) -> Scorecard:
        server.pages["/version"] = lambda: (200, '{"version": "1.2"}')
        options = scoring(f"score.engine_url={server.url}", f"score.replay_prompts={PROMPTS}", *more)
        measure = engine_scores.EngineScorer(options, chat, prompts, 0, tmp_path, training)
        card = Scorecard.from_json(a_card("m", rows or [a_row()]), "here")
        drafter = SimpleNamespace(taps=(), verifier=lambda target: target)
        try:
            found = measure(card, drafter, target, {})  # pyright: ignore[reportArgumentType]
        finally:
            server.kill()
        return replace(card, served=found)

    return measured


def test_engine_that_drafts_as_was_scored(measured, chat):
    server = Engine(chat)
    card = measured(server)
    (one,) = card.served
    assert (one.engine, one.decode, one.prompts, one.tokens) == ("vllm 1.2", "chain-3", PROMPTS, 2400)
    assert one.agrees
    assert (one.cause, one.texts, one.speedup) == ("", None, None)  # a running engine has no plain text
    assert all("prompt" in body and isinstance(body["prompt"], list) for body in server.asked)
    assert Scorecard.from_json(card.to_json(), "here").served == card.served
    assert f"{one.tau:.2f}" in tables.settings_table(card)
    assert "vllm tau" in tables.settings_table(card)


def test_difference_is_reported_with_its_cause(measured, chat, capsys):
    card = measured(Engine(chat, alpha=[0.02, 0.7, 0.6]))
    assert not card.served[0].agrees
    assert "as with random weights" in card.served[0].cause
    assert "likely cause: position 1 is almost never accepted" in capsys.readouterr().out
    assert "likely cause" in tables.settings_table(card)


def test_every_temperature_and_batch_size_is_measured(measured, chat):
    server = Engine(chat)
    rows = [a_row(), a_row(temperature=1.0)]
    card = measured(server, "score.temperatures=[0.0,1.0]", "score.batch_sizes=[1,4]", rows=rows)
    settings = [(one.temperature, one.batch_size) for one in card.served]
    assert settings == [(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)]
    assert len(server.asked) == 4 * (PROMPTS + 1)  # one to warm up
    greedy, drawn = card.served[0], card.served[2]
    assert (greedy.agrees, greedy.excess) == (True, None)
    assert not drawn.agrees, "one token, again and again, is not drawn from the target"
    assert drawn.excess is not None
    assert abs(drawn.excess[0]) > 4 * drawn.excess[1]
    assert "its answers are not drawn from the target" in drawn.cause
    assert Scorecard.from_json(card.to_json(), "here").served == card.served


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=5)], ids=["T=1", "T=0.7, top 5"])
def test_only_answers_of_another_distribution_are_found(target, sampler):
    prompts = [[1, 5, 9 + i] for i in range(24)]

    def excess(drawn: Sampler):
        run = generate(target, None, prompts, max_new_tokens=40, sampler=drawn, seed=3)
        return excess_of(target, prompts, [output.tokens for output in run.outputs], sampler)

    assert excess(sampler).by_chance
    assert excess(Sampler(2.0)).nats > 0
    for other in (Sampler(2.0), Sampler(0.0)):
        assert not excess(other).by_chance
    nothing = excess_of(target, prompts, [[]] * 24, sampler)
    assert nothing.by_chance


def test_engine_without_a_drafter_stops_no_run(measured, chat, capsys):
    server = Engine(chat)
    server.drafting = False
    with pytest.raises(UserError, match="drafted nothing"):
        measured(server)
    server = Engine(chat)
    server.drafting = False
    assert measured(server, training=True).served == []
    assert "step 7 is not measured in vllm: score.engine: vllm 1.2" in capsys.readouterr().out


def test_options_that_contradict_are_refused():
    url = "score.engine_url=http://h:1"
    for words, said, training in (
        (["score.engine=none", "score.engine_python=/a"], "needs an engine", False),
        ([], "give score.engine_python", False),
        (["score.engine_python=/a", url], "give score.engine_python", False),
        ([url, "score.engine_args=[--a]"], "leave out score.engine_url", False),
        (["score.engine_python=/no/python"], "no interpreter", False),
        ([url, "score.min_p=0.1"], "takes no score.min_p", False),
        ([url], "cannot load the checkpoints of a run", True),
    ):
        with pytest.raises(UserError, match=said):
            engine_scores.check(scoring(*words), training=training)


def test_texts_that_differ_at_a_tie_are_counted_apart(target):
    prompt = [1, 5, 9]
    logits = target.model(torch.tensor([prompt])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    counts = compare_texts(target, [prompt] * 3, [[first, 4]] * 3, [[first, 4], [second, 4], [first]])
    assert counts == (1, 0, 2)
    twin = load_target(target.model.name_or_path)
    with torch.no_grad():
        twin.head.weight[second] = twin.head.weight[first]
    assert compare_texts(twin, [prompt], [[first, 4]], [[second, 7]]) == (0, 1, 0)


def test_checkpoints_are_compared_by_the_chain_of_the_engine():
    tree, chain = a_row(), a_row(ALPHA[:2])
    tree["decode"] = "tree-16"
    card = Scorecard.from_json(scorecard([tree, chain]), "here")
    assert card.compared.decode == "tree-16"
    served = replace(card, conditions=replace(card.conditions, served_plan="chain-2"))
    assert served.compared.decode == "chain-2"
    assert "what the engine is asked for" in tables.headline(served)


def test_mistake_whose_rounds_are_nearer_is_likely():
    for own, spoilt, chance in (
        ([20.0] * 12, [25.0] * 12, 2**-12),  # each answer as with the mistake
        ([20.0] * 12, [26.0] * 12, 2**-12),  # nearer to it, if not equal
        ([20.0] * 6 + [25.0] * 6, [25.0] * 6 + [20.0] * 6, 1.0),  # as many one way as the other
        ([20.0] * 3 + [25.0] * 9, [25.0] * 12, 2**-3),  # answers that both explain tell nothing
    ):
        replays: list[Any] = [SimpleNamespace(counts=SimpleNamespace(rounds=r)) for r in (own, spoilt)]
        found = Seen([0.5], [0.1], [25] * 12).chance(*replays)
        assert found == pytest.approx(chance)
        assert (found < CHANCE) == (chance == 2**-12), "a dozen answers are enough"


@pytest.mark.parametrize("biased", [False, True])
def test_queries_are_rotated_with_their_biases(biased):
    sizes = {"hidden_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
    layer = DecoderLayer(LayerShape(**sizes, eps=1e-6, rope_theta=1e4), qkv_bias=biased).double()
    if biased:
        torch.nn.init.normal_(layer.qkv_proj.bias)
    rotary, x = Rotary(8, 1e4), torch.randn(3, 16, dtype=torch.float64)
    angles = rotary.table(8, x)
    with torch.no_grad():
        q, k, v = layer.split(layer.qkv_proj(x), angles[4:7])
        _, same_k, _ = layer.split(layer.qkv_proj(x), angles[3:6])
        rotate_queries(layer, rotary, 1)
        turned_q, turned_k, turned_v = layer.split(layer.qkv_proj(x), angles[3:6])
    torch.testing.assert_close(turned_q, q)
    assert turned_k.equal(same_k)
    assert turned_v.equal(v)
    assert not turned_k.allclose(k)


def test_schedule_begins_at_1_and_has_no_gap():
    chains = [ServedChain(32, 0), ServedChain(1, 4), ServedChain(8, 2), ServedChain(4, 4)]
    assert schedule(chains) == [[1, 4, 4], [5, 8, 2], [9, 32, 0]]


def test_one_length_needs_no_schedule():
    assert speculative_config([ServedChain(1, 3), ServedChain(8, 3)]) == {"num_speculative_tokens": 3}
    assert speculative_config([ServedChain(1, 0), ServedChain(8, 0)]) == {}
    (line,) = lines("eagle", 0.0, [ServedChain(1, 0)])
    assert "without --speculative-config" in line


def test_drawn_drafts_are_verified_as_a_block():
    config = speculative_config([ServedChain(1, 3, drawn=True), ServedChain(8, 1)])
    assert config["draft_sample_method"] == "probabilistic"
    assert config["rejection_sample_method"] == "block"
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 8, 1]]


def test_rates_are_those_of_the_longest_draft():
    chains = [ServedChain(1, 2, False, (0.61239, 0.3)), ServedChain(8, 1, False, (0.6,))]
    said = json.loads(list(lines("eagle", 0.0, chains))[1].partition("are: ")[2])
    assert said["synthetic_acceptance_rates"] == [0.6124, 0.3]
    assert (said["num_speculative_tokens"], said["rejection_sample_method"]) == (2, "synthetic")

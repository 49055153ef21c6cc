"""The default run's EAGLE and the bundled draft model, decoded and replayed: `make proofs`."""

from __future__ import annotations

import pytest
from workbench import ROOT, train

from decode.evaluation.acceptance import round_counts
from decode.evaluation.replay import Counts, Rollout, agreement, replay
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.scoring.tap_control import ShuffledTaps
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.models.lm import DraftLM

POCKET = str(ROOT / "data" / "pocket")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]  # a loaded machine trains slowly


@pytest.fixture(scope="module")
def chats() -> list[list[int]]:
    chat = Chat(load_tokenizer(POCKET))
    return [chat.encode(p.messages) for p in read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> dict[str, tuple[Target, Drafter]]:
    """The default run's EAGLE (about four minutes) and the companion, each with a target of its own."""
    out = tmp_path_factory.mktemp("trained")
    done = train(["drafter=eagle", "score.enabled=false", "logger=csv", f"output_dir={out}"]).succeeded()
    found = {}
    for name in ("eagle", "lm"):
        target = load_target(POCKET, "bfloat16")
        if name == "eagle":
            drafter = checkpoint_io.load(done.folder / "checkpoints" / "last", target)
        else:
            drafter = DraftLM.for_target(target, path=str(ROOT / "data" / "pocket-draft"))
            drafter = drafter.to(target.dtype).eval()
        target.tap(drafter.taps)
        found[name] = target, drafter
    return found


def answers(target, chats, sampler, new=64) -> list[Rollout]:
    options = {"max_new_tokens": new, "sampler": sampler, "stop": stop_tokens(target)}
    found = []
    for start in range(0, len(chats), 25):
        part = chats[start : start + 25]
        names = list(range(start, start + len(part)))
        run = generate(target, None, part, requests=names, **options)
        found += [Rollout(p, o.tokens) for p, o in zip(part, run.outputs, strict=True)]
    return found


def decoded(target, drafter, chats, plan, sampler, new=64, samples=1) -> Counts:
    """Tokens and rounds of each prompt, of all its samples together."""
    options = {"max_new_tokens": new, "sampler": sampler, "stop": stop_tokens(target), "plan": plan}
    tokens, rounds = [0] * len(chats), [0.0] * len(chats)
    for sample in range(samples):
        for start in range(0, len(chats), 25):
            part = chats[start : start + 25]
            names = list(range(start, start + len(part)))
            run = generate(target, drafter, part, requests=names, samples=[sample] * len(part), **options)
            one = round_counts(run.outputs)
            for row, name in enumerate(names):
                tokens[name] += one.tokens[row]
                rounds[name] += one.rounds[row]
    return Counts(tokens, rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["eagle", "lm"])
def test_replay_and_decoder_agree_on_the_pocket_target(drafters, chats, name, temperature):
    """18 intervals, with 99 % for all together: a false alarm in one of a hundred runs, not of six."""
    target, drafter = drafters[name]
    chats, sampler = chats[:48] * (4 if temperature else 1), Sampler(temperature)
    rollouts = answers(target, chats, sampler)
    plans = [Plan(3), Plan(3, proposal="sampled"), Plan(4, 4, 16)]
    for plan, replayed in zip(plans, replay(target, drafter, rollouts, plans, sampler), strict=True):
        decoder = decoded(target, drafter, chats, plan, sampler)
        low, high = agreement(decoder, replayed.counts, confidence=1 - 0.01 / 18)
        print(
            f"{name} T={temperature:g} {plan.name}: replay {replayed.counts.tau:.3f}, decoder "
            f"{decoder.tau:.3f}, interval of the difference {low:+.3f}..{high:+.3f}"
        )
        assert low <= 0 <= high


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shuffled_hidden_states_lower_acceptance(drafters, chats, temperature):
    """It reads the target, then."""
    target, eagle = drafters["eagle"]
    sampler = Sampler(temperature)
    rollouts = answers(target, chats[:48], sampler)
    (own,) = replay(target, eagle, rollouts, [Plan(4, 4, 16)], sampler)
    try:
        ShuffledTaps(target, chats[:48], 0)
        (strange,) = replay(target, eagle, rollouts, [Plan(4, 4, 16)], sampler)
    finally:
        target.tap_transform = None
    print(f"T={temperature:g}: replay {own.counts.tau:.3f}, with shuffled taps {strange.counts.tau:.3f}")
    low, _ = agreement(own.counts, strange.counts)
    assert low > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_hybrid_accepts_more_than_fixed_and_block_no_less_than_token(drafters, chats, temperature):
    target, eagle = drafters["eagle"]
    sampler = Sampler(temperature)
    chain = {"depth": 4, "proposal": "sampled"}
    plans = {
        "fixed": Plan(4, 4, 16),
        "hybrid": Plan(4, 3, 16, proposal="hybrid"),
        "token": Plan(**chain),
        "block": Plan(**chain, rule="block"),
    }
    counts = {name: decoded(target, eagle, chats, plan, sampler, samples=4) for name, plan in plans.items()}
    print(f"T={temperature:g} " + ", ".join(f"{name} {c.tau:.3f}" for name, c in counts.items()))
    low, _ = agreement(counts["hybrid"], counts["fixed"])
    assert low > 0, "more, and not by chance"
    _, high = agreement(counts["block"], counts["token"])
    assert high > 0, "not less; that it is never less is shown exactly in test_verify"

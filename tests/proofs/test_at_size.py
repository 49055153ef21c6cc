"""The bundled target and drafters of it at size, and 40,000 texts a plan of a tiny target: `make proofs`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from exact import target_probs
from scripted import Oracle
from workbench import ROOT, train

from decode.evaluation.acceptance import round_counts
from decode.evaluation.replay import Counts, Rollout, agreement, replay
from decode.generation.generate import generate
from decode.generation.types import Output
from decode.model.fused_forward import Fused
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from distill.scoring.tap_control import ShuffledTaps
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.models.eagle import Eagle
from drafters.models.lm import DraftLM

POCKET = str(ROOT / "data" / "pocket")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]  # a loaded machine trains slowly


def encoded(name: str) -> list[list[int]]:
    """Prompts of a bundled file."""
    chat = Chat(load_tokenizer(POCKET))
    return [chat.encode(p.messages) for p in read_prompts(ROOT / "data" / "prompts" / f"{name}.jsonl")]


@pytest.fixture(scope="module")
def chats() -> list[list[int]]:
    return encoded("heldout")


@pytest.mark.parametrize(("dtype", "temperature"), [("float64", 0.0), ("float64", 1.0), ("float32", 0.0)])
def test_all_400_prompts_decode_to_plain_text_token_for_token(dtype, temperature):
    target = load_target(POCKET, dtype)
    prompts = [prompt for name in ("heldout", "train") for prompt in encoded(name)]
    options = {"max_new_tokens": 64, "sampler": Sampler(temperature), "stop": stop_tokens(target), "seed": 7}
    accepted = rejected = 0
    for start in range(0, len(prompts), 40):
        part = prompts[start : start + 40]
        plain = generate(target, None, part, **options)
        texts = [p + o.tokens for p, o in zip(part, plain.outputs, strict=True)]
        oracle = Oracle(texts, target.vocab_size)
        drafted = generate(target, oracle, part, plan=Plan(depth=4, width=3, nodes=12), **options)
        for row, (a, b) in enumerate(zip(plain.outputs, drafted.outputs, strict=True)):
            if a.tokens != b.tokens:
                # In fp32 a draw may fall between two roundings of one CDF; nothing else may differ.
                # How often depends on all 4096 borders of a row, each moved a little.
                assert (dtype, temperature) == ("float32", 1.0)
                assert _distance(target, part[row], a.tokens, b.tokens, row, options) < 2e-5
        accepted += sum(sum(o.accepted) for o in drafted.outputs)
        rejected += sum(
            a < k for o in drafted.outputs for a, k in zip(o.accepted, o.draft_lengths, strict=True)
        )
    assert accepted > 1000
    assert rejected > 1000


def _distance(target, prompt, a, b, request, options) -> float:
    """How far the draw at the first difference lies from the border between the two tokens."""
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([prompt + a[:at]])).logits[0, -1:]
    cdf = options["sampler"].probs(logits)[0].double().cumsum(-1)
    coin = KeyedCoin(options["seed"], [request]).at(np.array([len(prompt) + at]), np.zeros(1))
    u = float(coin.uniform(Key(Purpose.TARGET, 0))[0]) * float(cdf[-1])
    low, high = sorted((a[at], b[at]))
    return max(abs(float(cdf[low]) - u), abs(float(cdf[high - 1]) - u))


PLANS = [Plan(2), Plan(2, proposal="sampled"), Plan(2, proposal="sampled", rule="block")]
PLANS += [Plan(2, 2, 4), Plan(2, 2, 4, proposal="hybrid")]
PLANS += [Plan(tree=((0,), (1,), (0, 0)), proposal="sampled", rule="traversal")]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_samples_of_the_keyed_coin_have_the_targets_distribution(tiny_target, plan):
    """Chi-square of 40,000 texts of three tokens: the enumerator shows the rules right, this the coin."""
    target = tiny_target(vocab=3)
    torch.manual_seed(3)
    eagle = Eagle.for_target(target, depth=2, feature_noise=0.0, feature_weight=1.0).double().eval()
    for weight in eagle.parameters():
        weight.data.normal_(std=0.5)
    target.tap(eagle.taps)
    sampler, counts = Sampler(0.7), Counter()
    for block in range(20):
        keys = {"requests": ["one request"] * 2000, "samples": list(range(2000 * block, 2000 * (block + 1)))}
        out = generate(target, eagle, [[1, 2]] * 2000, max_new_tokens=3, sampler=sampler, plan=plan, **keys)
        counts.update(tuple(output.tokens) for output in out.outputs)
    total = counts.total()
    probs = target_probs(target.model, [1, 2], 3, sampler)
    assert set(counts) <= set(probs)
    likely = {text: p for text, p in probs.items() if p * total >= 5}
    rest = total - sum(counts[text] for text in likely)
    expected_rest = total * (1 - sum(likely.values()))
    statistic = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in likely.items())
    statistic += (rest - expected_rest) ** 2 / max(expected_rest, 1.0)
    freedom = torch.tensor(float(len(likely)))
    # Wilson-Hilferty: a cube root of chi-square over its degrees is nearly normal; 4.75 is 1e-6.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)).sqrt()
    assert z < 4.75, f"chi-square {statistic:.1f} over {len(likely)} cells"


def test_a_compiled_target_decodes_the_same_text(chats):
    """In fp32, where a changed last bit seldom changes a token; drafts of several shapes and batches."""
    chats, options = chats[:4], {"max_new_tokens": 24, "sampler": Sampler(0.0)}
    plain, compiled = load_target(POCKET, "float32"), load_target(POCKET, "float32", compiled=True)
    fused = Fused.of(compiled.base, compiled.layers, compiled.config)
    assert fused is not None
    assert fused.compiled is not None
    want = [o.tokens for o in generate(plain, None, chats, **options).outputs]
    oracle = Oracle([p + w for p, w in zip(chats, want, strict=False)], plain.vocab_size)
    for drafter, plan in [(None, Plan()), (oracle, Plan(depth=4, width=3, nodes=12))]:
        for rows in (1, 4):
            run = generate(compiled, drafter, chats[:rows], plan=plan, **options)
            assert [o.tokens for o in run.outputs] == want[:rows]


# -- a trained EAGLE and the bundled draft model --------------------------------------------------


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> dict[str, tuple[Target, Drafter]]:
    """EAGLE, trained for a quarter of the default run, and the companion, each with its own target."""
    out = tmp_path_factory.mktemp("trained")
    less = ["trainer.max_steps=200", "prompts.self=100", "score.enabled=false", "logger=csv"]
    done = train(["drafter=eagle", *less, f"output_dir={out}"]).succeeded()
    for_eagle, for_lm = (load_target(POCKET, "bfloat16") for _ in range(2))
    eagle = checkpoint_io.load(done.folder / "checkpoints" / "last", for_eagle)
    lm = DraftLM.for_target(for_lm, path=str(ROOT / "data" / "pocket-draft")).to(for_lm.dtype).eval()
    for target, drafter in ((for_eagle, eagle), (for_lm, lm)):
        target.tap(drafter.taps)
    return {"eagle": (for_eagle, eagle), "lm": (for_lm, lm)}


def outputs(target, drafter, chats, plan, sampler, sample=0) -> list[Output]:
    options = {"max_new_tokens": 64, "sampler": sampler, "stop": stop_tokens(target), "plan": plan}
    found = []
    for start in range(0, len(chats), 25):
        part = chats[start : start + 25]
        names = list(range(start, start + len(part)))
        run = generate(target, drafter, part, requests=names, samples=[sample] * len(part), **options)
        found += run.outputs
    return found


def answers(target, chats, sampler) -> list[Rollout]:
    plain = outputs(target, None, chats, Plan(), sampler)
    return [Rollout(chat, output.tokens) for chat, output in zip(chats, plain, strict=True)]


def decoded(target, drafter, chats, plan, sampler, samples=1) -> Counts:
    """Tokens and rounds of each prompt, of all its samples together."""
    runs = [round_counts(outputs(target, drafter, chats, plan, sampler, n)) for n in range(samples)]
    tokens, rounds = ([sum(c) for c in zip(*columns, strict=True)] for columns in zip(*runs, strict=True))
    return Counts(tokens, rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
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


def test_hybrid_accepts_more_than_fixed_and_block_no_less_than_token(drafters, chats):
    target, eagle = drafters["eagle"]
    sampler = Sampler(0.7)
    chain = {"depth": 4, "proposal": "sampled"}
    plans = {
        "fixed": Plan(4, 4, 16),
        "hybrid": Plan(4, 3, 16, proposal="hybrid"),
        "token": Plan(**chain),
        "block": Plan(**chain, rule="block"),
    }
    counts = {name: decoded(target, eagle, chats, plan, sampler, samples=4) for name, plan in plans.items()}
    print(", ".join(f"{name} {c.tau:.3f}" for name, c in counts.items()))
    low, _ = agreement(counts["hybrid"], counts["fixed"])
    assert low > 0, "more, and not by chance"
    _, high = agreement(counts["block"], counts["token"])
    assert high > 0, "not less; that it is never less is shown exactly in test_verify"

"""All prompts of the bundled target, and 40,000 texts a plan of a tiny one, decoded: `make proofs`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from exact import target_law
from scripted import Oracle
from workbench import ROOT

from decode.generation.generate import generate
from decode.model.fused_forward import Fused
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.rng import Key, KeyedCoin, Purpose
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.models.eagle import Eagle

POCKET = str(ROOT / "data" / "pocket")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]  # a loaded machine trains slowly


def encoded(name: str) -> list[list[int]]:
    """Prompts of a bundled file."""
    chat = Chat(load_tokenizer(POCKET))
    return [chat.encode(p.messages) for p in read_prompts(ROOT / "data" / "prompts" / f"{name}.jsonl")]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
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
    law = target_law(target.model, [1, 2], 3, sampler)
    assert set(counts) <= set(law)
    likely = {text: p for text, p in law.items() if p * total >= 5}
    rest = total - sum(counts[text] for text in likely)
    expected_rest = total * (1 - sum(likely.values()))
    statistic = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in likely.items())
    statistic += (rest - expected_rest) ** 2 / max(expected_rest, 1.0)
    freedom = torch.tensor(float(len(likely)))
    # Wilson-Hilferty: a cube root of chi-square over its degrees is nearly normal; 4.75 is 1e-6.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)).sqrt()
    assert z < 4.75, f"chi-square {statistic:.1f} over {len(likely)} cells"


def test_a_compiled_target_decodes_the_same_text():
    """In fp32, where a changed last bit seldom changes a token; drafts of several shapes and batches."""
    chats, options = encoded("heldout")[:4], {"max_new_tokens": 24, "sampler": Sampler(0.0)}
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

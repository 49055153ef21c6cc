"""The bundled target, with real text: speculative decoding is plain decoding, token for token."""

import json

import pytest
from scripted import Oracle, rows_of
from workbench import ROOT

from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler

POCKET = str(ROOT / "data" / "pocket")
COUNT, SIZE, LENGTH = 32, 16, 20
CHAIN, TREE = Plan(depth=5), Plan(depth=4, width=3, nodes=9)
GREEDY = Sampler(0.0)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def prompts():
    """Chats of all categories, some cut in mid-sentence and some asked twice over."""
    tokenizer = load_tokenizer(POCKET)
    texts = []
    for name in ("heldout", "train"):
        for line in (ROOT / "data" / "prompts" / f"{name}.jsonl").read_text().splitlines():
            messages = json.loads(line)["messages"]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = [row for row in ids if len(row) <= 36]
    ids = ids[:: len(ids) // COUNT][:COUNT]
    assert len(ids) == COUNT
    ids[1::9] = [row[: len(row) // 2 + 1] for row in ids[1::9]]
    ids[2:SIZE:8] = [row + row for row in ids[2:SIZE:8]]
    assert len({len(row) for row in ids}) > 10, "rows are ragged"
    return ids


class Bench:
    """The pocket in one dtype, its plain texts, and its drafters."""

    def __init__(self, dtype, prompts, length):
        self.prompts, self.length = prompts, length
        self.target = load_target(POCKET, dtype)
        self.stop = stop_tokens(self.target)
        batches = (prompts[start : start + SIZE] for start in range(0, len(prompts), SIZE))
        self.plain = [output for batch in batches for output in self.run(None, batch)]

    def run(self, drafter, prompts, sampler=GREEDY, plan=None, seed=11):
        options = {"max_new_tokens": self.length, "stop": self.stop, "seed": seed}
        return generate(self.target, drafter, prompts, sampler=sampler, plan=plan, **options).outputs

    def oracle(self, prompts, plain, branches, right=0.8):
        texts = [p + o.tokens for p, o in zip(prompts, plain, strict=True)]
        return Oracle(texts, self.target.vocab_size, right=right, branches=branches)


@pytest.fixture(scope="module", params=["float64", pytest.param("float32", marks=pytest.mark.proof)])
def bench(request, prompts):
    if request.param == "float64":
        return Bench("float64", prompts, LENGTH)
    return Bench("float32", prompts[:SIZE], 48)  # longer texts, some of which end


def tokens(outputs):
    return [o.tokens for o in outputs]


def test_plain_is_the_models_own_text(bench):
    """Every token is the argmax of a pass over the whole text that knows no cache."""
    for prompt, output in zip(bench.prompts[::3], bench.plain[::3], strict=True):
        assert rows_of(bench.target.model, prompt, output.tokens).argmax(-1).tolist() == output.tokens
    answers = [tuple(o.tokens) for o in bench.plain]
    assert len(set(answers)) > len(answers) // 2, "prompts of one answer test little"


@pytest.mark.parametrize(("plan", "branches"), [(CHAIN, 0), (TREE, 5)], ids=["chain", "tree"])
@pytest.mark.ci("float64-chain")
def test_noisy_oracle_is_plain_decoding(bench, plan, branches):
    prompts, plain = bench.prompts[:SIZE], bench.plain[:SIZE]
    outputs = bench.run(bench.oracle(prompts, plain, branches), prompts, plan=plan)
    assert tokens(outputs) == tokens(plain)
    accepted = [a for o in outputs for a in o.accepted]
    offered = [f for o in outputs for f in o.draft_lengths]
    assert accepted.count(plan.depth) > SIZE, "drafts accepted whole"
    assert sum(a < f for a, f in zip(accepted, offered, strict=True)) > 2 * SIZE, "drafts rejected"
    assert {0, 1, 2, 3} <= set(accepted)


@pytest.mark.parametrize(
    "sampler",
    [Sampler(1.0), Sampler(0.7, top_k=50, top_p=0.95), Sampler(1.3, min_p=0.02, repetition_penalty=1.15)],
    ids=["plain", "nucleus", "penalty"],
)
@pytest.mark.parametrize("bench", ["float64"], indirect=True)  # roundings of fp32 may change a draw
@pytest.mark.ci("float64-penalty")
def test_matched_samples_are_plain_samples(bench, sampler):
    part = bench.prompts[:4]
    plain = bench.run(None, part, sampler)
    for branches, plan in ((0, CHAIN), (5, TREE)):
        outputs = bench.run(bench.oracle(part, plain, branches, right=0.7), part, sampler, plan)
        assert tokens(outputs) == tokens(plain)
        assert sum(sum(o.accepted) for o in outputs) > 5 * len(part)
    assert tokens(bench.run(None, part, sampler, seed=12)) != tokens(plain)

"""The bundled target, with real text: speculative decoding is plain decoding, token for token."""

import json

import pytest
import torch
from scripted import Oracle, Watch, rows_of
from workbench import ROOT

from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.eagle import Eagle

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
    """The pocket in one dtype, what it says plainly, and its drafters."""

    def __init__(self, dtype, prompts, length=LENGTH):
        self.prompts, self.length = prompts, length
        self.target = load_target(POCKET, dtype)
        self.stop = stop_tokens(self.target)
        torch.manual_seed(1)
        self.eagle = Eagle.for_target(self.target, depth=3, feature_noise=0.1, feature_weight=1.0)
        self.eagle.to(self.target.dtype).eval()
        self.target.tap(self.eagle.taps)
        self.plain = self.in_batches(None)
        self.texts = [p + o.tokens for p, o in zip(prompts, self.plain, strict=True)]

    def run(self, drafter, prompts, sampler=GREEDY, plan=None, **options):
        options = {"max_new_tokens": self.length, "stop": self.stop, "seed": 11} | options
        return generate(self.target, drafter, prompts, sampler=sampler, plan=plan, **options).outputs

    def in_batches(self, drafter, **options):
        outputs = []
        for start in range(0, len(self.prompts), SIZE):
            outputs += self.run(drafter, self.prompts[start : start + SIZE], **options)
        return outputs

    def oracle(self, branches):
        return Oracle(self.texts, self.target.vocab_size, right=0.8, branches=branches)


@pytest.fixture(scope="module")
def wide(prompts):
    return Bench("float64", prompts)


@pytest.fixture(scope="module")
def single(prompts):
    """Longer texts of fewer prompts: some of them end."""
    return Bench("float32", prompts[:SIZE], 48)


@pytest.fixture(scope="module", params=["float64", pytest.param("float32", marks=pytest.mark.proof)])
def bench(request):
    return request.getfixturevalue("wide" if request.param == "float64" else "single")


def tokens(outputs):
    return [o.tokens for o in outputs]


def test_plain_is_the_models_own_text(bench):
    """Every token is the argmax of a pass over the whole text that knows no cache."""
    for prompt, output in zip(bench.prompts[::3], bench.plain[::3], strict=True):
        assert rows_of(bench.target.model, prompt, output.tokens).argmax(-1).tolist() == output.tokens
    answers = [tuple(o.tokens) for o in bench.plain]
    assert len(set(answers)) > len(answers) // 2, "prompts of one answer test little"


@pytest.mark.parametrize(("branches", "plan"), [(0, CHAIN), (5, TREE)], ids=["chain", "tree"])
@pytest.mark.ci("float64-chain")
def test_noisy_oracle_is_plain_decoding(bench, branches, plan):
    outputs = bench.in_batches(bench.oracle(branches), plan=plan)
    assert tokens(outputs) == tokens(bench.plain)
    accepted = [a for o in outputs for a in o.accepted]
    offered = [f for o in outputs for f in o.draft_lengths]
    size = len(bench.prompts)
    assert accepted.count(plan.depth) > size, "drafts accepted whole"
    assert sum(a < f for a, f in zip(accepted, offered, strict=True)) > 2 * size, "drafts rejected"
    assert {0, 1, 2, 3} <= set(accepted)


@pytest.mark.parametrize(("plan", "start"), [(CHAIN, 0), (TREE, 8)], ids=["chain", "tree"])
@pytest.mark.ci("float64-tree")
def test_untrained_eagle_is_plain_decoding(bench, prompts, plan, start):
    part = slice(start, start + 8)
    outputs = bench.run(bench.eagle, prompts[part], plan=plan)
    assert tokens(outputs) == tokens(bench.plain[part])
    assert sum(len(o.draft_lengths) for o in outputs) > 5 * 8


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(1.0),
        Sampler(0.7, top_k=50, top_p=0.95),
        Sampler(1.3, min_p=0.02, repetition_penalty=1.15),
    ],
    ids=["plain", "nucleus", "penalty"],
)
@pytest.mark.ci("penalty")
def test_matched_samples_are_plain_samples(wide, prompts, sampler):
    part = prompts[:4]
    plain = wide.run(None, part, sampler)
    texts = [p + o.tokens for p, o in zip(part, plain, strict=True)]
    for branches, plan in ((0, CHAIN), (5, TREE)):
        outputs = wide.run(Oracle(texts, wide.target.vocab_size, branches=branches), part, sampler, plan)
        assert tokens(outputs) == tokens(plain)
        assert sum(sum(o.accepted) for o in outputs) > 5 * len(part)
    eagle = wide.run(wide.eagle, part[:2], sampler, TREE)
    assert tokens(eagle) == tokens(plain[:2])
    other = wide.run(None, part[:2], sampler, seed=12)
    assert tokens(other) != tokens(plain[:2])


@pytest.mark.parametrize("plan", [Plan(), CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.ci("tree")
def test_a_batch_gives_what_each_row_gives_alone(single, prompts, plan):
    rows = prompts[3:9]
    drafter = single.oracle(5 if plan is TREE else 0) if plan.depth else None
    together = single.run(drafter, rows, plan=plan, max_new_tokens=16)
    for row, output in zip(rows, together, strict=True):
        alone = single.run(drafter, [row], plan=plan, max_new_tokens=16)[0]
        assert output.tokens == alone.tokens
        assert (output.emitted, output.accepted, output.draft_lengths, output.drafted, output.stopped) == (
            alone.emitted,
            alone.accepted,
            alone.draft_lengths,
            alone.drafted,
            alone.stopped,
        )


@pytest.mark.parametrize(
    ("sampler", "plan"),
    [(GREEDY, TREE), (Sampler(0.9), TREE), (Sampler(0.9), Plan(depth=3, proposal="sampled"))],
    ids=["greedy", "match", "token"],
)
@pytest.mark.ci("token")
def test_order_in_a_batch_does_not_matter(wide, prompts, sampler, plan):
    rows = prompts[20:28]
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    names = "abcdefgh"
    first = wide.run(wide.eagle, rows, sampler, plan, requests=names, max_new_tokens=12)
    rows, names = [rows[i] for i in order], [names[i] for i in order]
    again = wide.run(wide.eagle, rows, sampler, plan, requests=names, max_new_tokens=12)
    assert tokens(again) == [first[i].tokens for i in order]


def test_rows_leave_when_they_end(single):
    """Text that ends is not decoded on, and the others are untouched by its going."""
    answers = single.plain
    ended = [o for o in answers if o.stopped]
    assert ended
    assert all(o.tokens[-1] in single.stop and not set(o.tokens[:-1]) & set(single.stop) for o in ended)
    watch = Watch(SIZE)
    oracle = Oracle(single.texts, single.target.vocab_size)
    again = generate(
        single.target,
        oracle,
        single.prompts,
        max_new_tokens=single.length,
        sampler=GREEDY,
        plan=TREE,
        stop=single.stop,
        on_round=watch,
    ).outputs
    assert tokens(again) == tokens(answers)
    sizes = [len(seen.requests) for seen in watch.rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    assert [o.stopped for o in again] == [o.stopped for o in answers]

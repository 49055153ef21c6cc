"""Real text: drafted texts are those of plain decoding; right decoders pass the audit and wrong ones fail."""

import json
from dataclasses import replace

import pytest
import torch
from scripted import Oracle, no_compaction, rows_of
from workbench import ROOT

from decode.draft import Draft
from decode.evaluation.audit import Audit, Rescorer, audit
from decode.evaluation.json_records import as_json
from decode.evaluation.sampling_tests import SampledRun
from decode.generation.generate import generate
from decode.model.cache import RowStore
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification import rule as verification
from decode.verification.descent import match

POCKET = str(ROOT / "data" / "pocket")
TREE, CHAIN = Plan(depth=4, width=3, nodes=8), Plan(depth=4)
LENGTH, ROWS = 16, 6
OF_DRAWS = {"sampled_tokens", "impossible", "pit_p", "surprisal_p", "surprisal_z"}


class Bench:
    def __init__(self, dtype):
        tokenizer = load_tokenizer(POCKET)
        lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines()
        chats = [json.loads(line)["messages"] for line in lines]
        texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.prompts = [row for row in ids if len(row) < 40][::3][:ROWS]
        self.target = load_target(POCKET, dtype)
        self.options = {"max_new_tokens": LENGTH, "stop": stop_tokens(self.target)}
        plain = generate(self.target, None, self.prompts, sampler=Sampler(0.0), **self.options).outputs
        self.texts = [p + o.tokens for p, o in zip(self.prompts, plain, strict=True)]

    def audit(self, plan=TREE, drafter=None, **options):
        oracle = Oracle(self.texts, self.target.vocab_size, branches=5 if plan is TREE else 0)
        options = {"also": []} | self.options | options  # only greedily, unless told otherwise
        return audit(self.target, drafter or oracle, self.prompts, plan=plan, **options)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def half():
    return Bench("bfloat16")


@pytest.fixture(scope="module")
def single():
    return Bench("float32")


DRAWN = {
    "greedy": Sampler(0.0),
    "plain": Sampler(1.0),
    "nucleus": Sampler(0.7, top_k=50, top_p=0.95),
    "penalty": Sampler(1.3, min_p=0.02, repetition_penalty=1.15),
}


@pytest.fixture(scope="module")
def exact():
    return Bench("float64")  # in which no rounding changes a draw


@pytest.mark.parametrize("sampler", DRAWN)
@pytest.mark.ci("greedy", "penalty")
def test_drafted_text_is_that_of_plain_decoding(exact, sampler):
    options, target = exact.options | {"sampler": DRAWN[sampler], "seed": 11}, exact.target
    plain = [o.tokens for o in generate(target, None, exact.prompts, **options).outputs]
    texts = [p + answer for p, answer in zip(exact.prompts, plain, strict=True)]
    for branches, plan in ((0, CHAIN), (5, TREE)):
        oracle = Oracle(texts, target.vocab_size, branches=branches)
        outputs = generate(target, oracle, exact.prompts, plan=plan, **options).outputs
        assert [o.tokens for o in outputs] == plain
        assert sum(sum(o.accepted) for o in outputs) > 5 * ROWS
    if sampler == "greedy":  # by passes over the whole text that know no cache
        for prompt, answer in zip(exact.prompts, plain, strict=True):
            assert rows_of(target.model, prompt, answer).argmax(-1).tolist() == answer


def counts_add_up(found: Audit):
    assert found.equal + found.near_ties + found.mismatches == found.tokens > 0
    assert 0 <= found.own_row <= found.tokens
    assert found.passed == (found.own_row == found.tokens and found.mismatches == 0)
    assert as_json(found)["passed"] is found.passed
    assert set(as_json(found)) == {*Audit.__slots__, *OF_DRAWS, "passed"}


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.ci("tree")
def test_bf16_passes(half, plan):
    before = half.target.head.weight.clone()
    found = half.audit(plan, also=None)
    assert half.target.dtype == torch.bfloat16
    assert torch.equal(half.target.head.weight, before), "rescoring in fp32 leaves the target"
    counts_add_up(found)
    assert found.passed
    assert found.sampled_tokens > ROWS * LENGTH / 3
    assert found.own_row == found.tokens > ROWS * LENGTH / 3
    assert found.mismatches == 0
    # Rounding in bf16 shows, but a near tie is still a small part of the logits' range.
    assert 0.05 < found.margin < 2
    assert found.rescored_in == "float32"


def test_fp32_margin_is_a_rounding(single):
    found = single.audit()
    counts_add_up(found)
    assert found.passed
    assert found.equal == found.tokens
    assert 0 < found.margin < 1e-3
    assert found.rescored_in == "float32"


@pytest.mark.parametrize("count", [ROWS, 0])
def test_plain_decoding_passes_unless_no_token_was_audited(half, count):
    found = audit(half.target, None, half.prompts[:count], plan=Plan(), **half.options)
    assert (found.tokens > 0) == found.passed == (count > 0)


RUN = SampledRun(1.0, "chain-4", 30, 0, {"free by p": 0.4, "free by id": 1e-3}, -1.5, 0.5)
GOOD = Audit(9, 9, 8, 1, 0, 0.1, "float32", (RUN,))


def test_passing_needs_every_count():
    assert GOOD.passed
    assert replace(GOOD, sampled=()).passed, "greedily"
    for harm in ({"own_row": 8}, {"mismatches": 1}, {"tokens": 0, "own_row": 0}):
        assert not replace(GOOD, **harm).passed
    pit = {"free by p": 0.4, "free by id": 1e-7}
    for harm in ({"tokens": 0}, {"impossible": 1}, {"pit": pit}, {"surprisal_p": 1e-7}):
        assert not replace(GOOD, sampled=(RUN, replace(RUN, **harm))).passed


def test_smallest_of_many_p_values_is_corrected():
    runs = RUN, SampledRun(0.7, "chain-4", 50, 0, {"free by p": 0.2}, 0.5, 0.01)
    report = as_json(replace(GOOD, sampled=runs))
    assert report["pit_p"] == pytest.approx(5 * 1e-3)
    assert report["surprisal_p"] == pytest.approx(5 * 0.01)
    assert report["surprisal_z"] == -1.5
    assert report["sampled_tokens"] == 80
    assert json.loads(json.dumps(report))["sampled"][1]["pit"] == {"free by p": 0.2}


# -- wrong decoders ------------------------------------------------------------------------------


def feed(monkeypatch, change):
    """Alter the positions that `extend` gives the model once the prompts are read."""
    real = Target.extend

    def extend(self, tokens, draft=None):
        if draft is None:
            return real(self, tokens)
        body = self._body
        self._body = lambda tokens, positions, *rest: body(tokens, change(positions), *rest)
        try:
            return real(self, tokens, draft)
        finally:
            del self._body

    monkeypatch.setattr(Target, "extend", extend)


def nodes_one_late(monkeypatch):
    feed(monkeypatch, lambda p: torch.cat([p[:, :1], p[:, 1:] + 1], 1))


def rejected_stay(monkeypatch):
    """One rejected node is settled with the accepted ones, at the end of its row."""
    real = RowStore.keep

    def keep(self, counts, slots=None):
        if slots is None and self.width > max(self.lengths) + 1:
            return real(self, [count + (count == 1) for count in counts])
        return real(self, counts, slots)

    monkeypatch.setattr(RowStore, "keep", keep)


def wrong_row(monkeypatch):
    def shifted(draft, rows, coin):
        best = rows.argmax(draft)  # (B, S)
        rows.argmax = lambda _: torch.cat([best[:, :1], best[:, :-1]], 1)
        return match(draft, rows, coin)

    monkeypatch.setattr(verification, "match", shifted)


def drafts_are_believed(monkeypatch):
    def believing(draft, rows, coin):
        result = match(draft, rows, coin)
        if draft.tokens.shape[1]:
            believed = (result.accepted == 0) & (draft.tokens[:, 0] >= 0)
            result.tokens[:, 0] = torch.where(believed, draft.tokens[:, 0], result.tokens[:, 0])
        return result

    monkeypatch.setattr(verification, "match", believing)


WRONG = {
    nodes_one_late: TREE,
    no_compaction: TREE,
    rejected_stay: CHAIN,
    wrong_row: TREE,
    drafts_are_believed: CHAIN,
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
@pytest.mark.ci("drafts_are_believed", "no_compaction")
def test_wrong_decoder_fails(wrong, half, monkeypatch):
    wrong(monkeypatch)
    found = half.audit(WRONG[wrong])
    counts_add_up(found)
    assert not found.passed
    from_own_row = found.own_row == found.tokens
    assert from_own_row == (wrong not in (wrong_row, drafts_are_believed)), "which of the two tests saw it"
    assert found.mismatches > 0


@pytest.mark.proof
def test_error_of_plain_decoding_is_no_excuse(single, monkeypatch):
    """All positions behind the prompt are late: wide gaps must not be taken for near ties."""
    feed(monkeypatch, lambda p: p + 1)
    found = single.audit()
    counts_add_up(found)
    assert found.mismatches > 0
    assert found.margin < 0.1


def test_nan_of_the_rescored_rows_is_a_mismatch(single, monkeypatch):
    real = Rescorer.__call__

    def spoilt(self, prompt, tokens):
        rows = real(self, prompt, tokens).clone()
        rows[1] = torch.nan
        return rows

    monkeypatch.setattr(Rescorer, "__call__", spoilt)
    found = single.audit()
    counts_add_up(found)
    assert found.mismatches == ROWS
    assert not found.passed


def test_drafts_of_padding_and_nonsense_pass(half):
    class Nonsense(Oracle):
        def propose(self, state, target, sampler, coin, plan):
            tokens = torch.full((len(state), 3), -1)
            tokens[::2] = 7
            return Draft(tokens, torch.tensor([[-1, 0, -1]]).expand(len(state), -1), depth=2)

    assert half.audit(drafter=Nonsense([], 61)).passed

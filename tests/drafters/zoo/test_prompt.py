"""Prompts in the verifying pass (prompt, tidar): what they see, ensembles, costs, training."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from drafter_checks import V, assert_decodes_as_trained, batch_of, both, random_texts
from exact import EXACT
from workbench import final

from decode.draft import Draft
from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.loop import Loop
from decode.model.fused_forward import Fused
from decode.model.load import load_target
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler
from distill.losses import divergences, weights
from distill.losses.objective import Objective
from distill.training.optim import hidden_matrices
from drafters.zoo.prompted_target import PromptedTarget

PARENTS = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 0, 1, 1]])
TEXTS = [[5, 9, 2, 7, 3], [4, 6]]
GREEDY = Sampler(0.0)


@pytest.fixture(
    params=[
        *("prompt", "prompt with ensembles", "tidar"),
        pytest.param("tidar with ensembles", marks=pytest.mark.proof),
    ]
)
def make(request, make_drafter):
    """Make, for a target, a drafter whose drafts come out of the pass that verifies."""
    name, *more = request.param.split()
    return partial(make_drafter, name, ensemble=3 if more else 1)


@pytest.fixture
def pair(tiny_target, make):
    target = tiny_target(vocab=V, layers=3, hidden=16)
    return target, make(target)


def drafts():
    tokens = torch.tensor([[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]])
    return {"tree": Draft(tokens, PARENTS, depth=3), "chain": Draft.chain(tokens[:, :3])}


def read_ahead(target, draft):
    """What a target makes of a draft behind texts of unlike lengths."""
    target.start(2, 40)
    tokens = torch.tensor([TEXTS[0], TEXTS[1] + [0] * 3])
    target.extend(tokens)
    target.keep([5, 2])
    return target.extend(torch.tensor([[22], [23]]), draft)


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("window", [None, 4])
def test_prompts_behind_a_node_are_those_behind_its_text_and_change_nothing(tiny_target, make, window, shape):
    """By the fused pass and, where windows slide, by transformers' code."""
    target = tiny_target(vocab=V, layers=3, hidden=16, window=window)
    verifier, draft = make(target).verifier(target), drafts()[shape]
    plain = Target(verifier.model)  # of the same weights
    got, want = read_ahead(verifier, draft), read_ahead(plain, draft)
    torch.testing.assert_close(got.last, want.last, rtol=0, atol=EXACT)
    tokens = torch.cat([torch.tensor([[22], [23]]), draft.tokens], 1)
    for row, text in enumerate(TEXTS):
        for slot, seen in enumerate(draft.ancestors().expand(2, -1, -1)[row]):
            path = torch.tensor([text + tokens[row, seen].tolist()])
            behind = verifier.read(path).taps[0, -1]
            torch.testing.assert_close(got.taps[row, slot], behind, rtol=0, atol=EXACT)
    for one in (verifier, plain):
        one.keep([3, 2], torch.tensor([[0, 1, 3], [0, 1, 2]]))
    after = torch.tensor([[7, 8], [9, 10]])
    torch.testing.assert_close(verifier.extend(after).last, plain.extend(after).last, rtol=0, atol=EXACT)


def test_long_texts_are_read_in_parts(pair, monkeypatch):
    target, drafter = pair
    verifier, texts = drafter.verifier(target), random_texts()
    whole = verifier.read(texts).taps
    monkeypatch.setattr("drafters.zoo.prompted_target.READ_TOGETHER", 7)
    torch.testing.assert_close(verifier.read(texts).taps, whole, rtol=0, atol=EXACT)


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_ensemble_is_the_mean_of_separate_members(tiny_target, make_drafter, shape):
    """In what is read behind drafts, behind a prefill and in training."""
    target = tiny_target(vocab=V, layers=3, hidden=16)
    verifier = make_drafter("prompt", target, ensemble=3).verifier(target)
    members = [PromptedTarget(target, verifier.prompts[:, number, None]) for number in range(3)]

    def mean(read):
        return torch.stack([read(member) for member in members]).mean(0)

    def ahead(reader):
        read_ahead(reader, drafts()[shape])
        reader.keep([1, 1])
        return reader.look_ahead()

    for read in (
        lambda reader: read_ahead(reader, drafts()[shape]).taps,
        ahead,
        lambda reader: reader.read(random_texts()).taps,
    ):
        got = read(verifier)
        torch.testing.assert_close(got, mean(read), rtol=0, atol=EXACT)
        assert (got - read(members[0])).abs().max() > 1e-3, "members differ"


def test_ensembles_decode_as_trained(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "prompt", ensemble=2)
    assert_decodes_as_trained(drafter, target, random_texts())


def read_sizes(target, monkeypatch) -> list[int]:
    """Slots of every pass from now on."""
    sizes, forward = [], target.forward

    def counted(tokens, *more, **named):
        sizes.append(tokens.shape[1])
        return forward(tokens, *more, **named)

    monkeypatch.setattr(target, "forward", counted)
    return sizes


@pytest.mark.parametrize("plan", [Plan(depth=2), Plan(depth=2, width=2, nodes=5)], ids=lambda p: p.name)
def test_round_is_one_pass_over_slots_and_prompts(pair, plan, monkeypatch):
    target, drafter = pair
    verifier = drafter.verifier(target)
    sizes = read_sizes(verifier, monkeypatch)
    run = generate(verifier, drafter, [TEXTS[0]], max_new_tokens=12, sampler=GREEDY, plan=plan)
    rounds, prompts = len(run.outputs[0].emitted), 3 * drafter.ensemble
    slots = (1 + plan.nodes) * (1 + prompts)
    assert sizes == [len(TEXTS[0]), prompts, *[slots] * rounds]
    assert verifier.slots(1 + plan.nodes) == slots
    assert verifier.cache.store.capacity == len(TEXTS[0]) + 12 + slots, "it did not grow"
    sizes.clear()
    generate(verifier, None, [TEXTS[0]], max_new_tokens=6, sampler=GREEDY)
    assert sizes == [len(TEXTS[0]), *[1] * 5], "plain decoding reads no prompts"


def test_rounds_without_a_draft_keep_the_next_one(pair):
    """As where rounds of several plans are timed in turns: prompts that were not read are read late."""
    target, drafter = pair
    verifier, plan = drafter.verifier(target), Plan(depth=2, width=2, nodes=4)
    parts = [30, 30], GREEDY, plan, KeyedCoin(1, range(2)), (), None
    loop, drafted = Loop(verifier, drafter, TEXTS, *parts), []
    loop.on_round = lambda seen: drafted.append(seen.draft)
    loop.admit()
    assert verifier.lengths == [5, 2]  # prompts behind a prefill are not kept
    for turn in range(4):
        loop.plan = Plan() if turn % 2 else plan
        state = loop.state.ahead
        for row, output in enumerate(loop.outputs):
            text = TEXTS[row] + output.tokens[:-1]
            want = verifier.read(torch.tensor([text])).taps[0, -1]
            torch.testing.assert_close(state[row], want, rtol=0, atol=EXACT)
        loop.round()
    assert [draft.depth for draft in drafted] == [0, 2, 0, 2, 0]


def test_verifier_shares_the_targets_weights(tiny_target, make_drafter):
    target = tiny_target(vocab=V, layers=3, hidden=16)
    drafter = make_drafter("prompt", target)
    verifier = drafter.verifier(target)
    assert isinstance(verifier, PromptedTarget)
    assert verifier.model is target.model
    assert verifier.fingerprint() == target.fingerprint()
    fused = Fused.of(target.base, target.layers, target.config)
    assert fused is not None
    assert Fused.of(verifier.base, verifier.layers, verifier.config) is fused


def test_original_target_as_verifier_is_refused(pair):
    target, drafter = pair
    with pytest.raises(UserError, match=r"decode with drafter"):
        generate(target, drafter, [[1, 2]], max_new_tokens=4, sampler=GREEDY, plan=Plan(depth=2))


def test_target_whose_layers_read_tokens_is_refused(tiny_target, make, monkeypatch):
    """As Gemma 3n's, which have embeddings of their own."""
    target = tiny_target(vocab=V, layers=3, hidden=16)
    forward = target.base.forward

    def with_more(input_ids=None, **named):
        out = forward(input_ids=input_ids, **named)
        out.last_hidden_state = out.last_hidden_state + (0 if input_ids is None else input_ids[..., None])
        return out

    monkeypatch.setattr(target.base, "forward", with_more)
    with pytest.raises(UserError, match="read more than embeddings"):
        make(target)


def test_prompting_twice_is_refused(pair):
    target, drafter = pair
    with pytest.raises(ValueError, match="twice"):
        drafter.verifier(drafter.verifier(target))


def test_prompts_are_no_hidden_matrices(pair):
    """Which Muon would train."""
    _, drafter = pair
    assert not any(weight is drafter.prompts.weight for weight in hidden_matrices(drafter))


def test_slow_dtype_is_read_in_fp32(tiny_target, make_drafter, monkeypatch):
    monkeypatch.setattr("drafters.hf.tuned_target.product_dtype", lambda *_: torch.float32)
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.bfloat16)
    drafter = make_drafter("prompt", target).float()
    steps = list(drafter.unroll(batch_of(target, random_texts()), target))
    assert all(step.hidden.dtype == torch.float32 for step in steps)
    assert drafter.verifier(target).read(random_texts()).taps.dtype == torch.bfloat16


def test_run_scores_on_the_targets_answers(bench):
    done = bench.train("drafter=prompt", "score.temperatures=[0.0,1.0]").succeeded()
    original = load_target(str(bench.target))
    held = (bench.root / "outputs" / "heldout").rglob("manifest.json")
    assert {json.loads(path.read_text())["plan"]["target"] for path in held} == {original.fingerprint()}
    for step in ("3", "6"):
        card = json.loads((done.folder / "checkpoints" / step / "score.json").read_text())
        assert (card["lossless_to"], card["target_drift"]) == ("target", None)
        assert card["audit_passed"] is card["replay_agrees"] is True
    weights = final(done.folder)
    assert set(weights) == {"prompts.weight"}


@pytest.mark.parametrize("drafts", [0.25, 3.0])
def test_tidar_weighs_prompts_by_drafts(tiny_target, make_drafter, drafts):
    """loss = divergence of the tuned target + drafts * that of the prompts, as its class says."""
    target = tiny_target(vocab=V, layers=3, hidden=16)
    batch, objective = batch_of(target, random_texts()), Objective(divergences.kl, weights.constant)

    def losses(drafter) -> tuple[float, float]:
        """Of the whole, and of the tuned target."""
        steps = list(drafter.unroll(batch, target))
        parts = steps, [step for step in steps if step.depth == 0]
        whole, tuned = (float(objective(part, batch.last, target.head, {})[0].detach()) for part in parts)
        return whole, tuned

    whole, tuned = losses(make_drafter("tidar", target, drafts=1.0))
    weighted, same = losses(make_drafter("tidar", target, drafts=drafts))
    assert same == tuned > 0
    assert whole - tuned > 0
    assert weighted - tuned == pytest.approx(drafts * (whole - tuned), rel=1e-12)

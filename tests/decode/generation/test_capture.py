"""Captured rounds: traced at one text, they decode others as the uncaptured loop does, token for token."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from captured import (
    CHAIN,
    DYNAMIC,
    PROMPTS,
    SAMPLED,
    STATIC,
    TREE,
    VOCAB,
    Until,
    assert_same,
    both,
    compare,
    decoded,
    small,
)
from ci_cases import STATES
from families import PROMPTS as FAMILY_PROMPTS
from families import WORKS, save

from decode.errors import UserError
from decode.generation.capture import fixed_store, rows
from decode.generation.capture.makers import Captured, CapturedRound, Captures, Key, Stage, captures_of
from decode.generation.capture.rows import Setup, bucket
from decode.generation.capture.state import NotCapturedError
from decode.generation.capture.trace import trace
from decode.generation.capture.verification import FixedVerification
from decode.generation.generate import generate, stream
from decode.model.fused_forward import Fused
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.layers.decoder_layer import Rotary

# What is said of drafters whose drafts are not captured; all other drafters' rounds are captured whole.
OUTSIDE = dict.fromkeys(("cascade", "hf_dllm", "ngram", "suffix", "union"), "keeps .* on the host")
OUTSIDE |= {"lookahead": "reads the target's answers on the host", "recycle": "has a state that grows"}
SAID = {name: f"verification is captured, drafting is not: .* {reason}" for name, reason in OUTSIDE.items()}
SAID["sparse"] = "decoding is not captured: Sparse keeps .* on the host, and drafts from the target's cache"

# The drafters of CI


@pytest.fixture
def target(tiny_target):
    return small(tiny_target)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.ci(*(f"{name}-tree-1.0" for name in STATES))
def test_every_drafter_decodes_as_uncaptured(target, make_drafter, drafter_name, shape, temperature, capsys):
    drafter = make_drafter(drafter_name, target)
    verifier = drafter.verifier(target)
    greedy = {"chain": CHAIN, "tree": DYNAMIC}
    drawn = {"chain": SAMPLED, "tree": STATIC}
    plan = (drawn if temperature and "sampled" in drafter.traits.proposals else greedy)[shape]
    texts = assert_same(verifier, drafter, plan, temperature)
    assert not temperature or any(any(accepted) for _, accepted, *_ in texts)
    said = [line for line in capsys.readouterr().err.splitlines() if "captured" in line]
    assert re.fullmatch(SAID.get(drafter_name, ""), "".join(said))
    assert bool(captures_of(verifier)._rounds) == (drafter_name != "sparse")


# -- plans, rules and options ---------------------------------------------------------------------

PLANS = {
    "plain": Plan(),
    "block": Plan(3, proposal="sampled", rule="block"),
    "hybrid tree": Plan(3, 3, 7, "hybrid"),
    "static hybrid": Plan(tree=TREE, proposal="hybrid"),
    "traversal": Plan(tree=TREE, proposal="sampled", rule="traversal"),
    "side by side": Plan(3, proposal="sampled", drafts=3),
    "selected": Plan(3, proposal="sampled", drafts=3, rule="select"),
    "confident": Plan(3, proposal="sampled", min_confidence=0.2),
    "typical": Plan(3, rule="typical", lossy=True),
    "lenience": Plan(3, proposal="sampled", rule="lenience", lossy=True),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.ci("plain", "hybrid tree", "confident")
def test_every_plan_and_rule_decodes_as_uncaptured(target, make_drafter, plan):
    drafter = make_drafter("eagle", target) if PLANS[plan].depth else None
    assert_same(target, drafter, PLANS[plan], 1.0)
    assert captures_of(target)._rounds


@pytest.mark.parametrize(
    "warp", [{"repetition_penalty": 1.3}, {"top_k": 5, "top_p": 0.8}], ids=["penalty", "top"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.ci("1.0-penalty")
def test_warped_texts_are_the_uncaptured_ones(target, make_drafter, temperature, warp):
    assert_same(target, make_drafter("eagle", target), CHAIN, temperature, warp=warp)


# Classes whose code reads the host in every pass.
UNCAPTURED = {
    "qwen3 experts": r"reads the device \(nonzero\) in transformers/",
    "gpt_oss, sinks, window 6": r"reads the device \(nonzero\) in transformers/",
    "llama, dynamic rope": r"reads the device \(is_nonzero\) in transformers/",
    "falcon, rotary": "uploads numbers in transformers/models/falcon/modeling_falcon.py",
}


@pytest.mark.filterwarnings("ignore:the drafter omits the scaling")
@pytest.mark.parametrize("kind", WORKS)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.ci("1.0-gpt2, context ends", "1.0-gemma3, window 6", "1.0-qwen3 experts")
def test_every_class_is_captured_or_its_line_is_named(kind, temperature, tmp_path, make_drafter, capsys):
    name, options, *seed = WORKS[kind]
    target = load_target(str(save(tmp_path, name, options, *seed)), "float64")
    drafter, plan = make_drafter("eagle", target), SAMPLED if temperature else DYNAMIC
    # Some classes round to single precision in a softmax.
    assert_same(target, drafter, plan, temperature, prompts=FAMILY_PROMPTS, atol=1e-5)
    said = capsys.readouterr().err
    if reason := UNCAPTURED.get(kind):
        assert re.search(reason, said), said
    else:
        assert "not captured" not in said, said
        assert captures_of(target)._rounds


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.ci("1.0")
def test_fused_pass_in_single_precision_is_captured(tiny_target, make_drafter, temperature):
    target = small(tiny_target, torch.float32)
    assert target.fused is not None
    plan = SAMPLED if temperature else DYNAMIC
    assert_same(target, make_drafter("eagle", target), plan, temperature, atol=1e-4)


def test_compiled_passes_are_not_part_of_a_round(tiny_target, capsys):
    target = small(tiny_target, torch.float32)
    expected = decoded(target, None, Plan(), 0.0, False)
    prefill = max(map(len, PROMPTS))
    target.fused.compiled = SimpleNamespace(most=prefill - 1)  # a call would fail
    assert decoded(target, None, Plan(), 0.0, True) == expected
    assert "not captured" not in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.ci("1.0")
def test_windows_and_sinks_of_a_drafter_are_captured(target, make_drafter, temperature):
    drafter, plan = make_drafter("eagle", target, window=4, sinks=2), SAMPLED if temperature else DYNAMIC
    prompts = [[*range(VOCAB)] * 5, [4, 6, 2], [1, 4, 5]]  # the first drops positions at once
    assert_same(target, drafter, plan, temperature, prompts=prompts)


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("until", [Until, None])
@pytest.mark.ci("Until-3")
def test_texts_are_the_uncaptured_ones_to_their_ends(target, make_drafter, until, size):
    """Rows end and join; when none waits, the others move to rounds with fewer places."""
    given = target, make_drafter("eagle", target), SAMPLED, 1.0
    plain = decoded(*given, False, size, until=until)
    assert decoded(*given, True, size, until=until) == plain
    assert len(captures_of(target)._rounds) >= (2 if size == 3 else 1)


# -- what is not captured, and what changes between rounds -----------------------------------------


def test_callbacks_are_not_captured(target, make_drafter, capsys):
    drafter, seen = make_drafter("eagle", target), []
    assert decoded(target, drafter, CHAIN, 0.0, True, on_round=seen.append) == decoded(
        target, drafter, CHAIN, 0.0, False
    )
    assert seen
    assert "decoding is not captured: `on_round` reads every round" in capsys.readouterr().err


def test_timed_rounds_are_captured_and_split(target, make_drafter):
    drafter, ticks = make_drafter("eagle", target), itertools.count()
    target.capture = True
    options = {"sampler": Sampler(0.0), "plan": CHAIN, "max_new_tokens": 12, "clock": lambda: next(ticks)}
    times = generate(target, drafter, PROMPTS[:1], **options).times
    assert captures_of(target)._rounds
    # Every stage lasts a tick; the drafter also advances, and rows settle.
    assert times.draft == 3 * times.verify > 0


@pytest.mark.parametrize("name", ["eagle", "ngram"])
@pytest.mark.ci("ngram")
def test_captures_are_not_counted_as_decoding(target, make_drafter, name, monkeypatch):
    drafter, ticks, make = make_drafter(name, target), itertools.count(), FixedVerification.__init__

    def slow(self, *given):
        for _ in range(1000):
            next(ticks)
        make(self, *given)

    monkeypatch.setattr(FixedVerification, "__init__", slow)
    target.capture, lengths = True, iter([3, 5, 24, 24])  # two rows move to a round with fewer places

    def until():
        tokens, length = itertools.count(1), next(lengths)
        return lambda _: next(tokens) == length

    options = {"sampler": Sampler(0.0), "plan": CHAIN, "max_new_tokens": 24, "clock": lambda: next(ticks)}
    out = generate(target, drafter, PROMPTS[:4], until=until, **options)
    assert len(captures_of(target)._rounds) > 1
    assert next(ticks) > 2000 > out.times.total


def test_buffers_have_room_for_what_a_target_reads_after_every_slot(target, make_drafter):
    drafter, prompt = make_drafter("prompt", target), PROMPTS[4]
    verifier = drafter.verifier(target)
    decoded(verifier, drafter, CHAIN, 0.0, True, 1, length=48, prompts=[prompt])
    (made,) = captures_of(verifier)._rounds.values()
    _, _, keys, *_ = made.state.tensors
    assert keys.shape[1] >= len(prompt) + 48 + verifier.slots(1 + CHAIN.nodes)


def test_new_weights_are_used(target, make_drafter):
    drafter = make_drafter("eagle", target)
    first = decoded(target, drafter, CHAIN, 0.0, True, 1)
    for weight in (target.model.lm_head.weight, *drafter.parameters()):
        weight.data = -weight.data
    expected = decoded(target, drafter, CHAIN, 0.0, False, 1)
    assert expected != first
    assert decoded(target, drafter, CHAIN, 0.0, True, 1) == expected
    assert len({key.weights for key in captures_of(target)._rounds}) == 1  # the old rounds are dropped


def test_two_streams_of_one_target_do_not_mix(target, make_drafter):
    target.capture, drafter = True, make_drafter("eagle", target)

    def pieces(prompt):
        return stream(target, drafter, prompt, max_new_tokens=20, sampler=Sampler(0.0), plan=CHAIN)

    first = pieces(PROMPTS[0])
    for _ in range(3):
        next(first)
    list(pieces(PROMPTS[1]))
    with pytest.raises(UserError, match="started another text"):
        list(first)


def test_a_round_that_reads_the_host_is_named_with_its_line(target):
    def reads(x):
        return x + int(x.sum())

    with pytest.raises(NotCapturedError, match=r"reads the device \(_local_scalar_dense\)"):
        trace(reads, [torch.ones(2)])
    with pytest.raises(NotCapturedError, match="uploads numbers"):
        trace(lambda x: x + torch.tensor([1.0, 2.0]), [torch.ones(2)])


@pytest.mark.parametrize("bound", [{"most": 2}, {"most_bytes": 2 * 400}])
def test_captured_rounds_are_bounded_in_number_and_memory(bound):
    def buffers(make, count=50):
        return Captured(SimpleNamespace(tensors=[torch.zeros(count, dtype=torch.int64)]), make)

    captures = Captures(lambda function, arguments: Stage(lambda: None, []), **bound)
    made = [captures.of(Key(None, (), (), number), buffers) for number in (1, 2, 1, 3)]
    assert made[0] is made[2]
    assert [key.rows for key in captures._rounds] == [1, 3]
    captures.of(Key(None, (), (), 4), lambda make: buffers(make, 1000))
    assert [key.rows for key in captures._rounds] == ([3, 4] if "most" in bound else [4])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 31, 33, 100, 1000, 4097])
def test_buckets_hold_the_count_and_waste_little(count):
    for least in (1, 64):
        size = bucket(count, least)
        assert size >= count
        assert size <= max(2 * count, least) if count <= 8 * least else size <= 1.25 * count


@pytest.mark.parametrize(("compiles", "capacities"), [(False, 8), (True, 3)])
def test_compiled_rounds_have_few_capacities(tiny_target, compiles, capacities):
    target = tiny_target(vocab=40)
    target.capture, target.compiles = True, compiles
    captures = captures_of(target)
    found = {Setup(captures, None, Plan(), Sampler(0.0), slots).capacity for slots in range(1, 1025)}
    assert len(found) == capacities
    assert max(found) == 1024


# -- seeded bugs ------------------------------------------------------------------------------------


def with_lengths(monkeypatch, lengths_of):
    """Masks are made for other lengths than the settled ones."""
    mask = fixed_store.FixedStore.visible

    def visible(self, *given):
        slots = self.slots
        self.slots = slots._replace(lengths=lengths_of(slots.lengths))
        try:
            return mask(self, *given)
        finally:
            self.slots = slots

    monkeypatch.setattr(fixed_store.FixedStore, "visible", visible)


def baked_length(monkeypatch):
    """The first text's lengths become constants of the graph."""
    with_lengths(monkeypatch, lambda lengths: torch.full_like(lengths, 9))


def stale_mask(monkeypatch):
    """The masks of the first replay are kept."""
    held, make = [], CapturedRound.__init__

    def lengths_of(lengths):
        if not held:
            held.append(torch.full_like(lengths, -1))
        return held[0].copy_(torch.where(held[0] < 0, lengths, held[0]))

    def made(self, *given):
        make(self, *given)
        held[0].fill_(-1)

    with_lengths(monkeypatch, lengths_of)
    monkeypatch.setattr(CapturedRound, "__init__", made)


def hidden_scratch(monkeypatch):
    """Nodes of a draft do not see the earlier ones."""
    mask = fixed_store.FixedStore.visible

    def visible(self, block, *given):
        hidden = block.clone()
        hidden[..., 1:-1].fill_(False)
        return mask(self, hidden, *given)

    monkeypatch.setattr(fixed_store.FixedStore, "visible", visible)


def unmasked_tail(monkeypatch):
    """Slots after the new ones are visible."""
    mask = fixed_store.FixedStore.visible

    def visible(self, block, *given):
        after = torch.arange(self.capacity) - self.slots.lengths[:, None]
        return mask(self, block, *given) | (after >= block.shape[-1])[:, None]

    monkeypatch.setattr(fixed_store.FixedStore, "visible", visible)


def slot_off_by_one(monkeypatch):
    """New slots are written one slot too late."""
    places = fixed_store.FixedStore._places
    monkeypatch.setattr(fixed_store.FixedStore, "_places", lambda self, steps: places(self, steps + 1))


def row_that_joins_late_is_not_loaded(monkeypatch):
    """A row that joins finds the keys of the row before it."""
    load = fixed_store.Slots.load

    def without_keys(self, store, row, source):
        if self.lengths[row]:
            self.lengths[row] = store.lengths[source]
        else:
            load(self, store, row, source)

    monkeypatch.setattr(fixed_store.Slots, "load", without_keys)


def slots_of_the_draft_missing(monkeypatch):
    """Slots are counted without those of a draft, and not rounded up."""
    monkeypatch.setattr(
        rows, "bucket", lambda count, least: bucket(count, 1) if least == 1 else count - 1 - SAMPLED.nodes
    )


def made_anew(monkeypatch, holder, name, forget):
    """After a capture, a table is made again, and the memory of the old one is given to others."""
    tables, make, capture = {}, getattr(holder, name), CapturedRound.__init__

    def table(self, *given):
        tables[self] = make(self, *given)
        return tables[self]

    def captured(self, *given):
        capture(self, *given)
        for owner, old in tables.items():
            old.fill_(1)
            forget(owner)

    monkeypatch.setattr(holder, name, table)
    monkeypatch.setattr(CapturedRound, "__init__", captured)


def angles_of_the_target_made_anew(monkeypatch):
    made_anew(monkeypatch, Fused, "angles", lambda fused: setattr(fused, "_angles", None))


def angles_of_the_drafter_made_anew(monkeypatch):
    made_anew(monkeypatch, Rotary, "table", lambda rotary: rotary._tables.clear())


def copy_of_old_weights(monkeypatch):
    """A round is kept that holds a copy of what the weights were."""
    monkeypatch.setattr(rows, "current_state", lambda weight: None)


BUGS = [baked_length, stale_mask, hidden_scratch, unmasked_tail, slot_off_by_one, slots_of_the_draft_missing]
BUGS += [row_that_joins_late_is_not_loaded, angles_of_the_drafter_made_anew, angles_of_the_target_made_anew]
BUGS += [copy_of_old_weights]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.ci("stale_mask", "row_that_joins_late_is_not_loaded", "copy_of_old_weights")
def test_seeded_bug_shows(bug, target, tiny_target, make_drafter, monkeypatch):
    if bug is angles_of_the_target_made_anew:  # which only a fused pass has
        target = small(tiny_target, torch.float32)
    drafter = make_drafter("lm" if bug is slots_of_the_draft_missing else "eagle", target)
    for module in (target.model, drafter):
        module.requires_grad_(False)  # so that copies are kept
    given = target, drafter, SAMPLED, 1.0
    prompts = PROMPTS[:1] if bug is slots_of_the_draft_missing else PROMPTS
    bug(monkeypatch)
    if bug is copy_of_old_weights:
        assert_same(*given)
        for weight in drafter.parameters():
            weight.data.add_(torch.randn_like(weight))
    found = both(*given, prompts=prompts)
    assert captures_of(target)._rounds
    with pytest.raises(AssertionError):
        compare(*found, 1e-4)

"""Random decisions are a function of their key and of nothing else."""

import itertools

import numpy as np
import pytest
import torch

from decode.rng import AHEAD, BLOCK, Key, KeyedCoin, Purpose, philox4x32, to_device

ALL = torch.ones(3, dtype=torch.bool)

# Random123 1.14, tests/kat_vectors: "philox4x32 10"
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, want):
    assert philox4x32(words(counter), words(key)) == tuple(words(want))


def coins(requests=("a", "b", "c"), position=(5, 9, 0), rounds=(2, 0, 7), seed=3) -> KeyedCoin:
    return KeyedCoin(seed, requests).at(np.array(position), np.array(rounds))


KEYS = [Key(p, slot, index) for p in Purpose for slot in (0, 1, BLOCK, BLOCK - 1, 21) for index in (0, 1)]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_draw_belongs_to_its_row_whatever_the_batch(key):
    whole = coins().uniform(key).tolist()
    assert coins(("c", "a", "b"), (0, 5, 9), (7, 2, 0)).uniform(key)[[1, 2, 0]].tolist() == whole
    assert coins(("b",), (9,), (0,)).uniform(key).tolist() == whole[1:2]
    assert coins().select([2, 0]).uniform(key).tolist() == [whole[2], whole[0]]


def test_selected_rows_do_not_read_what_others_made():
    """Though they come to the rounds that the others were in."""
    key, coin = Key(Purpose.ACCEPT, 3), coins(rounds=(2, 0, 7))
    coin.uniform(key)
    later = coin.select([2, 1, 0]).at(np.array([5, 9, 0]), np.array([2, 0, 7]))
    assert later.uniform(key).tolist() == coins(("c", "b", "a"), rounds=(2, 0, 7)).uniform(key).tolist()


def test_no_two_decisions_share_a_draw():
    seen: dict[float, tuple] = {}
    for seed, (request, sample) in itertools.product((0, 1), [("a", 0), ("a", 1), ("b", 0), (1, 0)]):
        for rounds, slot, index in itertools.product(range(3), range(BLOCK + 2), range(2)):
            coin = KeyedCoin(seed, [request], [sample]).at(np.array([40]), np.array([rounds]))
            for purpose in Purpose:
                if purpose == Purpose.TARGET and rounds:
                    continue  # the same position: see below
                where = (seed, request, sample, rounds, slot, index, purpose)
                value = float(coin.uniform(Key(purpose, slot, index))[0])
                assert value not in seen, f"{where} and {seen[value]} share a draw"
                seen[value] = where


def test_target_draws_belong_to_a_position_and_the_others_to_a_round():
    early = coins(position=(5, 9, 0), rounds=(2, 0, 7)).uniform(Key(Purpose.TARGET, 4))
    late = coins(position=(9, 13, 4), rounds=(3, 1, 9)).uniform(Key(Purpose.TARGET, 0))
    assert early.tolist() == late.tolist()
    for purpose in (Purpose.PROPOSE, Purpose.ACCEPT, Purpose.RESIDUAL):
        key = Key(purpose, 1)
        here, there = coins(position=(5, 9, 0)).uniform(key), coins(position=(6, 1, 3)).uniform(key)
        assert here.tolist() == there.tolist()
        assert not set(coins(rounds=(3, 1, 8)).uniform(key)) & set(here)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize(("first", "count"), [(0, 5), (BLOCK - 1, 2), (BLOCK, BLOCK), (7, 2 * BLOCK + 9)])
def test_draws_of_several_slots_at_once_are_those_of_each(first, count, purpose, index):
    weights = torch.rand(3, count, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = coins().draw(weights, Key(purpose, first, index), torch.ones(3, count, dtype=torch.bool))
    each = [coins().draw(weights[:, i], Key(purpose, first + i, index), ALL) for i in range(count)]
    assert together.equal(torch.stack(each, 1))


def test_two_passes_of_the_generator_serve_several_rounds(monkeypatch):
    """One for the target's positions, one for all else; a slot of another block costs another pass."""
    passes = []
    monkeypatch.setattr("decode.rng.philox4x32", lambda *a: passes.append(1) or philox4x32(*a))
    coin = coins()
    for step in range(AHEAD):
        later = coin.at(np.array([5, 9, 0]) + np.array([0, step, step // 2]), np.array([2, 0, 7]) + step)
        for purpose in Purpose:
            for slot in range(BLOCK):
                later.uniform(Key(purpose, slot))
    assert len(passes) == 2
    coin.uniform(Key(Purpose.ACCEPT, BLOCK))
    assert len(passes) == 3


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_draws_made_ahead_are_those_of_their_own_round(key):
    """Rows advance at their own pace, and may fall behind or run ahead of what was made."""
    dice, coin = np.random.default_rng(0), coins()
    position, rounds = np.array([5, 9, 0]), np.array([2, 0, 7])
    for _ in range(4 * AHEAD):
        position, rounds = position + dice.integers(0, 4, 3), rounds + dice.integers(0, 2, 3)
        expected = coins(position=position, rounds=rounds).uniform(key)
        assert coin.at(position, rounds).uniform(key).tolist() == expected.tolist()
    assert coin.uniform(key).tolist() == coins().uniform(key).tolist(), "back to the first"


def test_draws_are_uniform_below_one():
    coin = KeyedCoin(0, range(2000))
    values = np.concatenate([coin.uniform(Key(Purpose.ACCEPT, slot)) for slot in range(20)])
    assert 0 <= values.min() <= values.max() < 1
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 65  # chi-square with 19 degrees: 1e-6 above it


def test_largest_word_is_below_one_and_53_bits_wide(monkeypatch):
    top = np.full((3, AHEAD, len(Purpose) - 1, BLOCK), 0xFFFFFFFF, np.uint64)
    monkeypatch.setattr("decode.rng.philox4x32", lambda *_: (top, top, top, top))
    assert coins().uniform(Key(Purpose.ACCEPT, 0)).tolist() == [1 - 2**-53] * 3


def fixed(monkeypatch, value: float) -> KeyedCoin:
    def uniforms(self, key, n, device):
        return torch.full((len(self._key), n), value, dtype=torch.float64)

    monkeypatch.setattr(KeyedCoin, "_uniforms", uniforms)
    return coins()


@pytest.mark.parametrize("value", [0.0, 0.25, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_token_without_weight_is_drawn(monkeypatch, value, dtype):
    coin = fixed(monkeypatch, value)
    for mass in itertools.product([0.0, 0.1, 1e-30, 3.0], repeat=4):
        if sum(mass):
            drawn = coin.draw(torch.tensor([mass] * 3, dtype=dtype), Key(Purpose.TARGET, 0), ALL)
            assert all(mass[token] > 0 for token in drawn.tolist())


@pytest.mark.parametrize("value", [0.0, 0.5, 1 - 2**-53])
def test_flips_accept_what_has_mass_by_the_ratio(monkeypatch, value):
    coin = fixed(monkeypatch, value)
    accept = torch.tensor([0.0, 0.3, 0.9, 1e-30, 0.24, 0.25, 0.26])
    proposal = torch.tensor([0.5, 0.3, 0.2, 1e-30, 0.5, 0.5, 0.5])
    expected = [False, True, True, True, *[value < p / 0.5 for p in (0.24, 0.25, 0.26)]]
    for p, q, want in zip(accept, proposal, expected, strict=True):
        found = coin.flip(p.expand(3), q.expand(3), Key(Purpose.ACCEPT, 0), ALL)
        assert found.tolist() == [want] * 3


@pytest.mark.parametrize(("value", "want"), [(0.0, 0), (0.24, 0), (0.25, 2), (0.74, 2), (0.75, 3), (0.99, 3)])
def test_draw_inverts_the_distribution_of_unnormalised_weights(monkeypatch, value, want):
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]] * 3)
    assert fixed(monkeypatch, value).draw(weights, Key(Purpose.TARGET, 0), ALL).tolist() == [want] * 3


def test_the_far_tail_of_a_large_vocabulary_is_reachable(monkeypatch):
    """A cumulative sum in fp32 would stop growing long before the end."""
    weights = torch.full((3, 200_000), 1e-9)
    weights[:, 0] = 1.0
    drawn = fixed(monkeypatch, 1 - 1e-10).draw(weights, Key(Purpose.TARGET, 0), ALL)
    assert (drawn > 199_990).all()


def test_table_sent_with_the_draws_changes_none():
    here, table = torch.device("cpu"), np.array([[3, -1, 2**62], [0, 7, -(2**63)]])
    expected = [coins().uniform(key).tolist() for key in KEYS]
    coin = coins()
    for _ in range(2):  # the second knows what the first drew from
        assert coin.carry(table, here).tolist() == table.tolist()
        assert [coin.uniform(key).tolist() for key in KEYS] == expected
        coin = coin.at(np.array((5, 9, 0)), np.array((2, 0, 7)))
    assert to_device([[1, 2]], here, coin).tolist() == to_device([[1, 2]], here).tolist() == [[1, 2]]

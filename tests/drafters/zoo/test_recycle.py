"""Token recycling: which places of a row's text count, and long prompts in pieces."""

import pytest
import torch
from faces import TREE, Follower, assert_faces_agree, both, equal, random_rollouts

from drafters.zoo import recycle
from drafters.zoo.recycle import RECENT


@pytest.fixture
def made(tiny_target, make_drafter):
    return both(tiny_target, make_drafter, "recycle", pairs=False)


def test_newest_places_of_a_token_count_most(made):
    """Texts of three tokens, each of them more often in a text than places count."""
    target, drafter = made
    texts = torch.randint(3, (2, 60), generator=torch.Generator().manual_seed(0))
    assert all(texts[0].eq(token).sum() > RECENT for token in range(3))
    assert_faces_agree(drafter, target, texts, [(40, 12), (3, 20), (1, 4), (4, 1)])


def test_long_prompt_is_scored_in_pieces(made, monkeypatch):
    target, drafter = made
    texts = torch.randint(20, (2, 30), generator=torch.Generator().manual_seed(1))
    whole = Follower(drafter, target, texts, (25, 21)).propose(TREE)
    monkeypatch.setattr(recycle, "LOGITS", 2 * target.vocab_size * 4)  # four places at once
    widths, call = [], type(target.head).__call__
    monkeypatch.setattr(
        type(target.head), "__call__", lambda self, h: widths.append(h.shape[1]) or call(self, h)
    )
    assert equal(whole, Follower(drafter, target, texts, (25, 21)).propose(TREE))
    assert widths[:7] == [4] * 6 + [2]  # the prompt's longest row and one column of padding


def test_pairs_are_counted_only_if_asked(tiny_target, make_drafter, made):
    _, drafter = made
    assert not drafter.needs_fit
    assert drafter.fit(random_rollouts(40)) == "nothing is counted or trained"
    assert not drafter.seen.any()
    _, counting = both(tiny_target, make_drafter, "recycle")
    assert counting.needs_fit
    assert "pairs counted" in counting.fit(random_rollouts(40))

"""vLLM drafts with an exported window what our decoder drafts, at every place of a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_process import ask_script

from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats

RUN = Path(__file__).parents[1] / "support" / "vllm_drafts.py"
V, D, K, TOKENS = 64, 64, 3, 40
MASK = 0
PROMPTS = [[1, 2, 3, 5, 8, 13, 21, 34, 55, 26, 17, 43], [9, 4, 7]]
CASES = {
    "EAGLE": ("eagle", "vllm", {"window": 8}),
    "EAGLE-3": ("eagle3", "vllm", {"window": 4, "layers": 2, "taps": [2, 3, 4]}),
    "P-EAGLE": ("p_eagle", "speculators", {"window": 4, "layers": 2, "taps": [2, 3, 4], "fc_norm": False}),
    "DFlash": ("dflash", "vllm", {"window": 8, "taps": [2, 4]}),
    "DFlash, causal": ("dflash", "speculators", {"window": 8, "taps": [2, 4], "causal": True}),
}


@pytest.fixture
def target(random_llama):
    """A random Llama with a folder; its pad token stands for masks."""
    return random_llama(V, D, layers=0.2, rest=0.2)


def chains(drafter, target, text, places) -> list[list[int]]:
    """What we draft below a root behind each place, which are ascending."""
    taps, tokens = target.read(torch.tensor([text])).taps, torch.tensor([text])
    state, settled, found = drafter.new_state(1), 0, []
    for place in places:
        part, root = slice(settled, place + 1), tokens[:, place + 1]
        drafter.advance(state, target, tokens[:, part], taps[:, part], [place + 1 - settled], root)
        settled = place + 1
        draft = drafter.propose(state, target, Sampler(0.0), None, Plan(depth=K))
        found.append(draft.tokens[0].tolist())
    return found


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_vllm_drafts_with_a_window_what_we_draft(
    vllm_python, target, make_drafter, one_k_norm, engine_row, tmp_path, case
):
    name, to, options = CASES[case]
    with_window, without = (
        make_drafter(name, target, depth=K, draft_vocab_size=V, **options | more).requires_grad_(False)
        for more in ({}, {"window": None})
    )
    if name == "dflash":
        with_window, without = map(one_k_norm, (with_window, without))
    layout = formats.write_layout(checkpoint_io.as_saved(with_window), target, to)
    (tmp_path / "draft").mkdir()
    layout.write(tmp_path / "draft")
    model, speculative = tmp_path / "draft", None  # speculators' folders name their target and the method
    if to == "vllm":
        model = tmp_path / "target"
        speculative = {"method": name, "model": str(tmp_path / "draft"), "num_speculative_tokens": K}
    found = ask_script(vllm_python, RUN, model, speculative, PROMPTS, TOKENS)
    same, whole = [], []
    for prompt, given in zip(PROMPTS, found, strict=True):
        text = [*prompt, *given["answer"]]
        rounds = [one for one in given["rounds"] if one["place"] + 1 < len(text)]
        places, drafted = [one["place"] for one in rounds], [one["drafted"] for one in rounds]
        assert [text[place + 1] for place in places] == [one["root"] for one in rounds]
        with torch.inference_mode():
            mine, other = (chains(each, target, text, places) for each in (with_window, without))
        # A text with the token that stands for masks in P-EAGLE's files is drafted otherwise from there on.
        count = sum(name != "p_eagle" or MASK not in text[: place + 2] for place in places)
        same += map(list.__eq__, mine[:count], drafted)
        whole += map(list.__eq__, other[:count], drafted)
    drafts = f"{sum(same)} of {len(same)} drafts equal, token by token"
    engine_row(f"{case}, random, a window", to, "vllm 0.32.0", "", drafts, "")
    assert len(same) > 40
    assert all(same)
    assert sum(whole) < len(same) / 2  # the window has an effect

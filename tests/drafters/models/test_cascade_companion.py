"""The bundled draft model with and without a lookup that guesses for it: the figures of its page."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from workbench import ROOT

from decode.evaluation.acceptance import round_counts
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.base import Drafter, Text
from drafters.drafting.read_ahead import ReadNodes
from drafters.models.cascade import Cascade
from drafters.models.lm import DraftLM
from drafters.models.ngram import Ngram
from drafters.models.suffix import Suffix

pytestmark = pytest.mark.proof
POCKET, COMPANION, PROMPTS = (ROOT / "data" / name for name in ("pocket", "pocket-draft", "prompts"))
ALONE = "alone"
REPEATS, TOKENS, EACH = 2, 48, 4  # EACH: prompts of a category


class Counted:
    """Passes of draft models, and guesses."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for owner, name in ((DraftLM, "read_settled"), (DraftLM, "read_drafted"), (Cascade, "_guess")):
            patch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            found = method(*arguments, **options)
            if name == "read_drafted":
                self.counts["slots"] += arguments[3].shape[1]
            self.counts[name] += len(found) if name == "_guess" else 1
            return found

        return counting

    def take(self) -> Counter[str]:
        found, self.counts = self.counts, Counter()
        return found


class Setting(NamedTuple):
    target: Any
    options: dict[str, Any]
    held: list[tuple[str, list[int]]]  # category and prompt
    suffix: Suffix


@pytest.fixture(scope="module")
def setting() -> Setting:
    """The bundled target in bf16, held-out prompts, and a lookup in answers to the others, drawn at T=1."""
    target = load_target(str(POCKET))
    chat = Chat(load_tokenizer(str(POCKET)))
    options = {"max_new_tokens": TOKENS, "stop": stop_tokens(target)}
    seen, held = Counter[str](), []
    for prompt in read_prompts(PROMPTS / "heldout.jsonl"):
        seen[prompt.category] += 1
        if seen[prompt.category] <= EACH:
            held.append((prompt.category, chat.encode(prompt.messages)))
    train = [chat.encode(prompt.messages) for prompt in read_prompts(PROMPTS / "train.jsonl")]
    texts = []
    for start in range(0, len(train), 50):
        part, names = train[start : start + 50], list(range(start, start + 50))
        outputs = generate(target, None, part, sampler=Sampler(1.0), requests=names, **options).outputs
        for prompt, output in zip(part, outputs, strict=True):
            texts.append(Text([*prompt, *output.tokens], [0] * len(prompt) + [1] * len(output.tokens)))
    suffix = Suffix(8, 0.02, 1_000_000, target.vocab_size)
    print(suffix.fit(texts))
    return Setting(target, options, held, suffix)


def draft_model(target: Any, path: Any) -> DraftLM:
    return DraftLM.for_target(target, path=str(path), train=False).to(target.dtype).eval()


@pytest.mark.parametrize("depth", [4, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_draft_model_is_sped_up(setting, monkeypatch, temperature, depth):
    """Run with -s for the figures of docs/drafters/cascade.md; times are CPU time."""
    first = draft_model(setting.target, COMPANION)
    plan = Plan(depth, proposal="sampled" if temperature else "fixed")
    arms = {
        ALONE: (first, plan),
        "ngram": (Cascade(first, Ngram(1, 3)), plan),
        "suffix": (Cascade(first, setting.suffix), plan),
        "suffix, first_depth=2": (Cascade(first, setting.suffix, None, 2), plan),
        "alone, 2 tokens": (first, Plan(2, proposal=plan.proposal)),
    }
    Race(setting, arms, Sampler(temperature), Counted(monkeypatch)).show()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_the_bundled_draft_model_is_sped_up(setting, monkeypatch, temperature):
    """As above, of the tree of 16; the draft model's passes are over 4 nodes where it is alone."""
    first = draft_model(setting.target, COMPANION)
    plan = Plan(4, 4, 16, proposal="hybrid" if temperature else "fixed")
    arms = {ALONE: (first, plan)}
    for length in (None, 4):
        told = "" if length is None else f", {length} guesses"
        arms[f"ngram{told}"] = (Cascade(first, Ngram(1, 3), length, trees=True), plan)
        arms[f"suffix{told}"] = (Cascade(first, setting.suffix, length, trees=True), plan)
    Race(setting, arms, Sampler(temperature), Counted(monkeypatch)).show()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_rounds_are_those_of_the_draft_model_alone(setting, temperature):
    """In fp64: where passes of another shape round otherwise, a draw near a boundary falls elsewhere."""
    target = load_target(str(POCKET), "float64")
    first, sampler = draft_model(target, COMPANION), Sampler(temperature)
    plan = Plan(6, proposal="sampled" if temperature else "fixed")
    for number, (_, prompt) in enumerate(setting.held):
        rounds = []
        for drafter in (first, Cascade(first, Ngram(1, 3)), Cascade(first, setting.suffix)):
            run = generate(
                target, drafter, [prompt], plan=plan, sampler=sampler, requests=[number], **setting.options
            )
            rounds.append((run.outputs[0].tokens, run.outputs[0].accepted, run.outputs[0].draft_lengths))
        assert rounds[1:] == rounds[:1] * 2


def test_a_draft_model_of_twelve_layers_is_sped_up(setting, monkeypatch):
    """The target's own weights, whose passes take most of the time of a draft."""
    first, plan = draft_model(setting.target, POCKET), Plan(4)
    arms = {
        ALONE: (first, plan),
        "ngram": (Cascade(first, Ngram(1, 3)), plan),
        "suffix": (Cascade(first, setting.suffix), plan),
    }
    Race(setting, arms, Sampler(0.0), Counted(monkeypatch)).show()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_which_nodes_of_a_tree_were_guessed(setting, monkeypatch, temperature):
    """Shares of the expanded nodes of a level, the best first, that had been read before their turn."""
    first, found, have = draft_model(setting.target, COMPANION), [], ReadNodes.have

    def noted(self, paths):
        found.append([have(self, [[path]]) for path in paths[0]])
        return have(self, paths)

    monkeypatch.setattr(ReadNodes, "have", noted)
    for width, nodes, depth in ((4, 16, 4), (2, 8, 4)):
        plan = Plan(depth, width, nodes, proposal="hybrid" if temperature else "fixed")
        for second in (Ngram(1, 3), setting.suffix):
            found.clear()
            drafter = Cascade(first, second, 48, trees=True)
            for number, (_, prompt) in enumerate(setting.held):
                options = {"plan": plan, "sampler": Sampler(temperature), "requests": [number]}
                generate(setting.target, drafter, [prompt], **options, **setting.options)
            hits = np.array(found).reshape(-1, depth - 1, width)  # (rounds, levels, width)
            told = "; ".join(" ".join(f"{share:.2f}" for share in level) for level in hits.mean(0))
            every = " ".join(f"{share:.2f}" for share in hits.all(-1).mean(0))
            print(f"\n{plan.name}, T={temperature:g}, {type(second).__name__}, {len(hits)} rounds: {told}")
            print(f"all of a level: {every}")


class Race:
    """Decoders on all prompts, prompt by prompt in turns."""

    def __init__(
        self, setting: Setting, arms: dict[str, tuple[Drafter, Plan]], sampler: Sampler, counted: Counted
    ) -> None:
        self.title = f"{arms[ALONE][1].name}, T={sampler.temperature:g}"
        self.kinds = sorted({kind for kind, _ in setting.held})
        self.outputs: dict[str, list] = {name: [] for name in arms}
        self.draft, self.total = ({name: np.zeros(REPEATS) for name in arms} for _ in range(2))
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # of an arm, and of it in a category
        jobs = [(repeat, *job) for repeat in range(REPEATS) for job in enumerate(setting.held)]
        for repeat, number, (kind, prompt) in [(-1, 0, setting.held[0]), *jobs]:  # the first warms up
            for name in list(arms) if (repeat + number) % 2 else list(arms)[::-1]:
                drafter, plan = arms[name]
                counted.take()
                decode = partial(generate, setting.target, drafter, [prompt], plan=plan, **setting.options)
                run = decode(sampler=sampler, requests=[number], clock=time.process_time)
                if repeat < 0:
                    continue
                self.draft[name][repeat] += run.times.draft
                self.total[name][repeat] += run.times.total
                if not repeat:
                    self.outputs[name] += run.outputs
                    found = counted.take() + Counter(rounds=len(run.outputs[0].emitted), texts=1)
                    self.counts[name] += found
                    self.counts[f"{name}: {kind}"] += found

    def show(self) -> None:
        print(f"\n{self.title}, {len(self.outputs[ALONE])} prompts")
        for name, outputs in self.outputs.items():
            rounds, tau = self.counts[name]["rounds"], round_counts(outputs).tau
            share = self.draft[name] / self.draft[ALONE] * self.counts[ALONE]["rounds"] / rounds
            speed = self.total[ALONE] / self.total[name]
            same = sum(a.tokens == b.tokens for a, b in zip(outputs, self.outputs[ALONE], strict=True))
            counts = self.counts[name]
            print(
                f"{name}: tau {tau:.3f}; draft {1e3 * median(self.draft[name]) / rounds:.2f} ms a round, "
                f"{_spread(share)} of alone; speed {_spread(speed)}; passes {_passes(counts):.2f}, slots of "
                f"passes below the root {counts['slots'] / rounds:.2f} and guesses "
                f"{counts['_guess'] / rounds:.2f} a round; texts as alone {same}"
            )
        for name in ("ngram", "suffix"):
            shares = {kind: _passes(self.counts[f"{name}: {kind}"]) for kind in self.kinds}
            print(f"passes, {name}: " + ", ".join(f"{kind} {n:.2f}" for kind, n in shares.items()))


def _spread(values: np.ndarray) -> str:
    return f"{median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def _passes(counts: Counter[str]) -> float:
    """Passes of the draft model a round, without that over the prompt."""
    return (counts["read_settled"] - counts["texts"] + counts["read_drafted"]) / counts["rounds"]


@torch.inference_mode()
def test_what_a_pass_over_several_tokens_costs(setting):
    """CPU time behind a text of 200 tokens, in turns, head included."""
    tokens = torch.tensor([setting.held[0][1] * 200])[:, :200]
    for path in (COMPANION, POCKET):
        first, taken = draft_model(setting.target, path), defaultdict(list)
        state = first.new_state(1)
        taps = torch.empty(*tokens.shape, 0, 1)
        first.advance(state, setting.target, tokens, taps, [tokens.shape[1]], tokens[:, 0])
        for _ in range(300 if path == COMPANION else 50):
            for m in (1, 2, 3, 4, 6, 8, 12, 16):
                begin = time.process_time()
                first.read_drafted(state, setting.target, tokens[:, :m], 0)
                taken[m].append(time.process_time() - begin)
        told = ", ".join(f"{m}: {1e3 * median(seconds):.2f}" for m, seconds in taken.items())
        print(f"\n{path.name}, ms of a pass: {told}")

"""Random cases: the loop writes what a decoder without batch, cache, mask and tensors writes."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from plain_decoder import BLOCK, PAIRS, SEEN, TARGETS, Answer, Case, Model, Reference, Script, cases

from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan

WHAT = {  # of what a run of cases has to hold some, or it proves nothing
    "an end token inside a draft": lambda a: a.stopped and a.cut,
    "the limit inside a draft": lambda a: not a.stopped and a.cut,
    "an end token before any draft": lambda a: a.stopped and not a.emitted,
    "a round with nothing drafted": lambda a: 0 in a.drafted,
    "three accepted": lambda a: max(a.accepted, default=0) >= 3,
    "three rounds": lambda a: len(a.emitted) >= 3,
}
TOGETHER, APART = "several rows end at once", "rows end in three different rounds"


def note(case: Case, answers: list[Answer]) -> None:
    SEEN["cases"] += 1
    for what, holds in WHAT.items():
        SEEN[what] += any(map(holds, answers))
    rounds = {len(a.emitted) for a in answers}
    SEEN[TOGETHER] += len(answers) > 1 == len(rounds) and rounds != {0}
    SEEN[APART] += len(rounds) >= 3
    SEEN[f"{case.drafts} {case.rule} accepts"] += any(sum(a.accepted) for a in answers)
    SEEN[f"{case.drafts} {case.rule} rejects"] += any(sum(a.accepted) < sum(a.offered) for a in answers)


class Bench:
    """Compares, with targets made once."""

    def __init__(self, tiny_target) -> None:
        self.make = tiny_target
        self.models: dict[tuple[str, int], tuple[Target, Model]] = {}

    def compare(self, case: Case) -> None:
        key = case.target, case.vocab
        if key not in self.models:
            target = self.make(vocab=case.vocab, **TARGETS[case.target])
            self.models[key] = target, Model(target)
        target, model = self.models[key]
        reference = Reference(case, model)
        want = [reference.decode(row) for row in range(len(case.rows))]
        path = tuple((0,) * level for level in range(1, reference.depth + 1))
        proposal = "fixed" if "chosen" in case.drafts else "sampled"
        outputs = generate(
            target,
            Script(reference),
            reference.prompts,
            max_new_tokens=case.limit,
            sampler=case.sampler,
            plan=Plan(tree=path, proposal=proposal, rule=case.rule),
            seed=reference.seed,
            requests=[request for request, _ in reference.names],
            samples=[sample for _, sample in reference.names],
            stop=sorted(reference.stop),
        ).outputs
        got = [
            Answer(o.tokens, o.emitted, o.accepted, o.draft_lengths, o.drafted, o.stopped) for o in outputs
        ]
        assert got == want
        note(case, want)

    def run(self, count: int, *phases: Phase) -> None:
        """As many cases of each pair of drafts and a rule as of any other."""
        SEEN.clear()
        known = settings(
            max_examples=BLOCK,
            phases=phases or (Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        for block in range(count // BLOCK):
            drafts, rule = PAIRS[block % len(PAIRS)]
            drawn = cases(block=st.just(block), drafts=st.just(drafts), rule=st.just(rule))
            seed(block)(known(given(drawn)(lambda case: self.compare(case))))()


@pytest.fixture(scope="module")
def bench(tiny_target) -> Bench:
    return Bench(tiny_target)


def test_300_random_cases_give_the_reference_texts(bench):
    bench.run(300)
    assert SEEN["cases"] == 300
    assert min(SEEN[what] for what in (*WHAT, TOGETHER, APART)) >= 10


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_10_000_random_cases_give_the_reference_texts(bench):
    bench.run(10_000)
    assert SEEN["cases"] == 10_000
    assert SEEN["cases left out"] <= 10
    assert min(SEEN[what] for what in (*WHAT, TOGETHER, APART)) >= 500
    for drafts, rule in PAIRS:
        assert min(SEEN[f"{drafts} {rule} {does}"] for does in ("accepts", "rejects")) >= 100

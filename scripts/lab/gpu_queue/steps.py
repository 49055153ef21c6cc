"""The queue: every measurement that needs a card, in order of value.

A new measurement is one more `Step` in the list of its group.
"""

from __future__ import annotations

import json

import yaml

from distill.utils.paths import CONF
from gpu_queue.step import OUT, Step

BENCHMARK = "scripts/lab/benchmark.py"
# Acceptance at each depth of synthetic drafts: EAGLE's on the bundled target (scripts/lab/results/h200)
RATES = "acceptance=[0.86,0.88,0.76,0.72]"
EIGHT_B = "like=meta-llama/Llama-3.1-8B"
SMALL = "like=HuggingFaceTB/SmolLM2-135M"
# A random target that decodes on a CPU in seconds, with layers enough for EAGLE-3's taps
TINY = (
    "sizes={hidden_size:32,intermediate_size:64,num_hidden_layers:7,num_attention_heads:2,"
    "num_key_value_heads:1,head_dim:16,vocab_size:128}"
)
TINY_ROUNDS = ("trainer.accelerator=cpu", "score.prompts=1", "score.repeats=1", "score.max_new_tokens=16")
LONG = (TINY, "prompt_tokens=40")
TINY_STEP = (
    "trainer.accelerator=cpu",
    TINY,
    "drafter.depth=2",
    "rows=2",
    "tokens=16",
    "steps=1",
    "repeats=1",
)
_SHORT = (
    *("prompts.limit=8", "prompts.self=0", "rollout.max_new_tokens=12", "batch_size=2", "try_largest=false"),
    *("score.replay_prompts=2", "score.prompts=1", "score.audit_prompts=1", "score.max_new_tokens=8"),
    *("score.temperatures=[0]", "trainer.log_every_n_steps=1"),
)


def _also(*words: str) -> str:
    """Words of a training run, as one option."""
    return f"also=[{','.join(json.dumps(word) for word in words)}]"


CAPTURED = "target.capture=true"
TIMED = ("score.prompts=24", "score.repeats=3")  # from which the tables show a speedup (claims.tables.TIMED)
UNSCORED = ("score.enabled=false", "trainer.log_every_n_steps=10")  # as conf/lab/fit.yaml has it
TINY_RUN = ("device=cpu", "steps=2", _also(CAPTURED, *_SHORT))
TINY_FIT = ("device=cpu", "steps=4", _also(*_SHORT, "score.enabled=false"))
# Arms of the field that were fastest on a card, first; `union` reads the run of `eagle`
FASTEST = ("eagle", "union", "prism", "suffix", "hass", "mtp", "eagle3")


def _rounds(
    name: str,
    shows: str,
    minutes: float,
    *words: str,
    tiny: tuple[str, ...] = (TINY,),
    group: str = "decoding",
) -> Step:
    command = (BENCHMARK, "rounds", "trainer.accelerator=gpu", f"out={OUT}", *words)
    return Step(name, group, shows, minutes, command, (*TINY_ROUNDS, *tiny))


def _training(name: str, shows: str, minutes: float, *words: str) -> Step:
    command = (BENCHMARK, "step", "trainer.accelerator=gpu", f"out={OUT}", EIGHT_B, "drafter=eagle3")
    return Step(name, "training", shows, minutes, (*command, *words), TINY_STEP)


TESTS = [
    Step(
        "tests",
        "tests",
        "tests marked gpu",
        6,
        (BENCHMARK, "tests", f"out={OUT}"),
        ("marker=not gpu", "tests=[tests/decode/test_plan.py]"),
    ),
]
DECODING = [
    _rounds(
        "rounds-smollm2",
        "SmolLM2-135M's shape, captured: plain, and EAGLE's drafts at synthetic rates",
        3,
        *(SMALL, "drafter=eagle", "drafter.draft_vocab_size=null", RATES, CAPTURED),
    ),
    _rounds(
        "rounds-llama-8b",
        "Llama-3.1-8B's shape, captured: plain, and EAGLE-3's drafts at synthetic rates",
        5,
        *(EIGHT_B, "drafter=eagle3", RATES, "score.prompts=2", CAPTURED),
    ),
    _rounds(
        "rounds-pocket",
        "bundled target, captured: plain, and EAGLE's drafts at synthetic rates",
        2,
        *("drafter=eagle", "drafter.draft_vocab_size=null", RATES, CAPTURED),
        tiny=(),
    ),
    _rounds(
        "rounds-pocket-draft-model",
        "bundled target with its draft model, captured: chain and tree",
        2,
        *("drafter=lm_given", CAPTURED),
        tiny=(),
    ),
    _rounds(
        "rounds-smollm2-uncaptured",
        "SmolLM2-135M's shape, uncaptured",
        3,
        *(SMALL, "drafter=eagle", "drafter.draft_vocab_size=null", RATES),
    ),
    _rounds(
        "rounds-llama-8b-uncaptured",
        "Llama-3.1-8B's shape, uncaptured",
        5,
        *(EIGHT_B, "drafter=eagle3", RATES, "score.prompts=2"),
    ),
]
TRAINING = [
    Step(
        "fit-pocket-eagle",
        "training",
        "a training run of EAGLE for the bundled target: time of a step",
        5,
        (BENCHMARK, "fit", "arm=eagle", "device=gpu", f"out={OUT}"),
        TINY_FIT,
    ),
    _training(
        "step-llama-8b",
        "EAGLE-3 for Llama-3.1-8B's shape, 7 depths at all places, 8,192 tokens a step",
        4,
        *("drafter.depth=7", "drafter.anchors=0"),
    ),
    _training(
        "step-llama-8b-5",
        "the same with 5 depths",
        4,
        *("drafter.depth=5", "drafter.anchors=0"),
    ),
    _training(
        "step-llama-8b-compiled",
        "7 depths, objective and attention compiled",
        6,
        *("drafter.depth=7", "drafter.anchors=0", "compiled=true"),
    ),
    _training(
        "step-llama-8b-compiled-5",
        "the same with 5 depths",
        6,
        *("drafter.depth=5", "drafter.anchors=0", "compiled=true"),
    ),
    *(
        Step(
            f"fit-pocket-eagle-{name}",
            "training",
            f"EAGLE's run with the target read in every step, {shows}",
            5,
            (BENCHMARK, "fit", "arm=eagle", "device=gpu", f"out={OUT}", _also(*UNSCORED, *words)),
            TINY_FIT,
        )
        for name, shows, words in (
            ("online", "before it", ["taps=online"]),
            ("ahead", "ahead on a second stream", ["taps=online", "taps_ahead=true"]),
        )
    ),
    _training(
        "step-llama-8b-rows",
        "7 depths, with logits of 128 places at a time",
        4,
        *("drafter.depth=7", "drafter.anchors=0", "logits_rows=128"),
    ),
    *(
        _training(
            f"step-llama-8b-{tokens // 1024}k",
            f"one text of {tokens:,} tokens, 5 depths at all places in a window of 2,048, compiled",
            6,
            *("drafter.depth=5", "drafter.anchors=0", "drafter.window=2048", "drafter.sinks=4"),
            *("compiled=true", "rows=1", f"tokens={tokens}", "steps=1"),
        )
        for tokens in (8192, 32768)
    ),
]
CONTEXT = [
    Step(
        "attention",
        "context",
        "attention of a draft over a bucket of 512, 4,096 and 32,768 keys, by several kernels",
        4,
        (BENCHMARK, "attention", "trainer.accelerator=gpu", f"out={OUT}"),
        (
            *(
                "trainer.accelerator=cpu",
                "widths=[64]",
                "queries=[1,3]",
                "heads=4",
                "kv_heads=2",
                "head_dim=16",
            ),
            *("repeats=1", "kernels=[decoder,folded,repeated,products]"),
        ),
    ),
    _rounds(
        "context-llama-8b-4k",
        "Llama-3.1-8B's shape after 4,096 tokens: plain, and EAGLE-3's drafts, of which none is accepted",
        4,
        *(EIGHT_B, "drafter=eagle3", "prompt_tokens=4096", "score.prompts=1", CAPTURED),
        tiny=LONG,
        group="context",
    ),
    _rounds(
        "context-llama-8b-32k",
        "the same after 32,768 tokens",
        7,
        *(EIGHT_B, "drafter=eagle3", "prompt_tokens=32768", "score.prompts=1", "score.repeats=3", CAPTURED),
        tiny=LONG,
        group="context",
    ),
]


def _field() -> list[Step]:
    """A step for each arm of the field, the fastest first."""
    arms = yaml.safe_load((CONF / "lab" / "drafters.yaml").read_text())["arms"]
    assert set(FASTEST) <= set(arms)
    return [
        Step(
            f"field-{arm}",
            "field",
            f"field: {arm} of the bundled target, trained and scored by itself",
            5 if arm == FASTEST[0] else 4,  # the first writes the answers that all read
            (BENCHMARK, "field", f"arm={arm}", "device=gpu", f"out={OUT}", _also(CAPTURED, *TIMED)),
            TINY_RUN,
        )
        for arm in (*FASTEST, *(name for name in arms if name not in FASTEST))
    ]


def steps() -> list[Step]:
    """All steps, in order of value."""
    return [*TESTS, *DECODING, *TRAINING, *CONTEXT, *_field()]

"""foredraft plan before any run: from a target's shape and a card's data sheet."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from workbench import CONF, ROOT, Bench, foredraft

from decode.errors import UserError
from distill.cli.main import rewrite
from distill.commands.plan import read_arguments
from distill.commands.planning.before_run import DEFAULT, BeforeRun, Work
from distill.commands.planning.constants import CARDS, EAGLE3, GIB, Card
from distill.commands.planning.expected_tau import eagle3_range
from distill.commands.planning.known_models import known, known_names
from distill.commands.planning.large_run import plan
from distill.commands.planning.shape import (
    DrafterShape,
    TargetShape,
    empty_target,
    target_config,
    target_shape,
)
from distill.commands.planning.sharing import EVERY, named
from distill.config.choices import options
from distill.config.compose import compose
from distill.config.plan_options import drafter_choice
from distill.config.validate import check_ranges

QWEN, LLAMA = "Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct"
# EAGLE-3 for Qwen3-8B
DRAFTER = DrafterShape("eagle3", 399_536_128, True, 399_536_128, 32_000, True, 3, 3, 64, 4, 1)
WORK = Work(
    prompts=10_000,
    written=0,
    samples=1,
    answers="vllm",
    prompt_tokens=200,
    answer_tokens=800,
    row_tokens=2048,
    gpus=4,
    card=CARDS["h100"],
    batch=5,
    accumulate=1,
    rollout_batch=256,
    steps=None,
    saves=None,
    taps="auto",
    taps_memory=GIB,
    disk=2000.0 * GIB,
    network=None,
    scored=True,
)


def settings(name: str) -> dict[str, Any]:
    found = known(name)
    assert found
    return found


def shape(name: str) -> TargetShape:
    config = AutoConfig.for_model(**settings(name))
    return target_shape(empty_target(config, name), name, "table")


@pytest.fixture(scope="module")
def qwen() -> TargetShape:
    return shape(QWEN)


def words(*given: str):
    return plan(*read_arguments(given))


@pytest.mark.parametrize("experiment", options(CONF, "experiment"))
def test_drafter_of_an_experiment_is_the_one_that_it_trains(experiment):
    name = drafter_choice([f"experiment={experiment}"])
    made = compose([f"drafter={name}"], CONF).drafter._target_
    assert made == compose([f"experiment={experiment}"], CONF).drafter._target_


def test_shapes_have_the_published_numbers_of_weights():
    """In billions, as the models' cards have them."""
    published = {
        "Qwen/Qwen3-0.6B": 0.596,
        QWEN: 8.19,
        "Qwen/Qwen3-32B": 32.76,
        "Qwen/Qwen3-30B-A3B": 30.53,
        "Qwen/Qwen2.5-7B-Instruct": 7.62,
        LLAMA: 70.55,
        "meta-llama/Llama-3.1-8B-Instruct": 8.03,
        "meta-llama/Llama-3.2-1B": 1.236,
        "mistralai/Mistral-7B-v0.3": 7.25,
        "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
        "google/gemma-2-9b-it": 9.24,
        "microsoft/phi-4": 14.66,
    }
    found = {name: shape(name).parameters / 1e9 for name in published}
    assert found == pytest.approx(published, rel=3e-3)
    experts = shape("Qwen/Qwen3-30B-A3B")
    assert experts.active + 2 * experts.hidden * experts.vocabulary == pytest.approx(3.35e9, rel=0.01)
    assert all(known(name) for name in known_names())


def test_keys_values_and_hidden_states_have_their_public_sizes(qwen):
    assert shape("meta-llama/Llama-3.1-8B").kv_bytes == 128 * 1024  # 131,072 bytes a token
    # speculators: about 1.6 TB for 50,000 texts of 1,024 tokens of an 8B target
    texts = replace(WORK, prompts=50_000, prompt_tokens=24, answer_tokens=1000, disk=inf, taps="cache")
    assert BeforeRun(qwen, DRAFTER, texts).estimate().disk["hidden states"] * GIB == pytest.approx(
        1.6e12, rel=0.06
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", QWEN, "Qwen/Qwen3-32B"])
def test_depths_of_eagle3_come_with_what_the_others_cost(name):
    """For a target of any size: the default, and what the paper's depths would take."""
    work = replace(WORK, gpus=8, taps="online")
    paper = replace(DRAFTER, depth=7, passes=7, anchors=0)
    few, many = (BeforeRun(shape(name), drafter, work).estimate() for drafter in (DRAFTER, paper))
    hours = [next(p.hours for p in plan.parts if p.name == "training") for plan in (few, many)]
    lines = [next(line for line in plan.choices if line.startswith("depths: ")) for plan in (few, many)]
    assert "depths: 3, the deeper ones at 64 places of a text" in lines[0]
    assert "drafter.depth=7 drafter.anchors=0 drafter.depth_weight=1" in lines[0]
    assert "depths: 7 at all places of a text, as in the paper's code" in lines[1]
    default = compose(["drafter=eagle3"], CONF).drafter
    assert (default.depth, default.anchors) == DEFAULT
    for line in lines:
        (times,) = re.findall(r"([\d.]+) times", line)
        assert float(times) == pytest.approx(hours[1] / hours[0], abs=0.06)
    other = BeforeRun(shape(name), replace(DRAFTER, name="eagle"), work).estimate()
    assert not [line for line in other.choices if line.startswith("depths")]


def tokens_a_second(
    target: TargetShape, card: Card, tokens: tuple[int, int], together: int, gpus: int = 1
) -> float:
    """Output tokens a second of all cards, in vLLM."""
    sizes = {"prompt_tokens": tokens[0], "answer_tokens": tokens[1], "prompts": together, "gpus": gpus}
    work = replace(WORK, card=card, **sizes)
    made = next(part for part in BeforeRun(target, DRAFTER, work).estimate().parts if part.name == "answers")
    return together * tokens[1] / made.hours / 3600


def test_answers_are_as_fast_as_public_figures_of_vllm_within_a_factor_of_two(qwen):
    llama, big = shape("meta-llama/Llama-3.1-8B"), shape("Qwen/Qwen3-32B")
    nvl = Card("H100 NVL 94 GB", 94e9, 3.9e12, 835e12, 450e9)
    checks = {
        "vllm#16937: Llama-3.1-8B, H100, one request": (
            133,
            tokens_a_second(llama, CARDS["h100"], (60, 256), 1),
        ),
        "vllm#4702: Llama-3-8B, A6000": (2163, tokens_a_second(llama, CARDS["a6000"], (128, 128), 1000)),
        "vllm#17788: Qwen3-32B, H100 NVL, 32 at once": (654, tokens_a_second(big, nvl, (217, 200), 32)),
    }
    a100 = tokens_a_second(shape(LLAMA), CARDS["a100"], (217, 215), 200, gpus=4)
    checks["vllm#12315: Llama-3.3-70B, 4 A100, 200 prompts"] = (714, a100)
    for name, (published, estimated) in checks.items():
        assert 0.5 < estimated / published < 2, f"{name}: {estimated / published:.2f}"


def test_training_takes_what_speculators_report_within_a_factor_of_two(qwen):
    """5,000 texts, 5 passes, 3 depths at all places, two cards that train: 942 s, hidden states included."""
    work = replace(WORK, prompts=5_000, answers="given", gpus=2, prompt_tokens=24, answer_tokens=1000)
    work = replace(work, steps=5 * 5_000 // 10, scored=False, taps="cache")
    estimate = BeforeRun(qwen, replace(DRAFTER, anchors=0), work).estimate()
    took = {part.name: 3600 * part.hours for part in estimate.parts}
    assert 0.5 < (took["training"] + took["gradients"]) / 942 < 2


def test_training_takes_what_a_recorded_run_of_a_card_took_within_a_half():
    """EAGLE-3 of 2,400 steps on SmolLM2, among other runs on the card."""
    file = ROOT / "scripts/lab/results/h200/smollm2/eagle3-more-2400-0.json"
    recorded, card = json.loads(file.read_text()), "h200"
    assert recorded["hardware"].lower().startswith(f"nvidia {card}")
    name, size = "HuggingFaceTB/SmolLM2-135M", recorded["parameters"]
    drafter = DrafterShape("eagle3", size, True, size, 32_000, True, 3, 3, 64, 4, 1)
    work = replace(WORK, prompts=2986, answers="own", gpus=1, card=CARDS[card], steps=2400, taps="cache")
    work = replace(work, prompt_tokens=80, answer_tokens=150)
    parts = {part.name: part.hours for part in BeforeRun(shape(name), drafter, work).estimate().parts}
    assert 0.5 < 3600 * parts["training"] / recorded["train_seconds"] < 1.5


def test_every_number_is_positive_and_grows_with_prompts_and_shrinks_with_devices(qwen):
    def totals(**sizes) -> tuple[float, float, float]:
        found = BeforeRun(qwen, DRAFTER, replace(WORK, **sizes)).estimate()
        assert all(part.hours > 0 for part in found.parts)
        assert all(size >= 0 for size in (*found.disk.values(), *found.memory.values()))
        return found.hours, sum(found.disk.values()), sum(found.memory.values())

    for gpus in (1, 8):
        growing = [totals(prompts=n, gpus=gpus) for n in (1_000, 30_000, 300_000, 3_000_000)]
        assert sorted(growing) == growing
        assert len({hours for hours, *_ in growing}) == 4
    falling = [totals(prompts=500_000, gpus=n)[0] for n in (1, 2, 4, 8)]
    assert sorted(falling, reverse=True) == falling


def test_hidden_states_are_stored_where_that_is_cheaper_and_fits(qwen):
    def choice(**sizes) -> str:
        choices = BeforeRun(qwen, DRAFTER, replace(WORK, **sizes)).estimate().choices
        return next(line for line in choices if line.startswith("hidden states"))

    assert "taps=cache" in choice(gpus=1)
    assert "taps=online" in choice(gpus=1, disk=GIB)
    assert "taps=online), as given" in choice(taps="online")
    with pytest.raises(UserError, match="does not fit"):
        choice(taps="cache", disk=GIB)


def test_target_that_one_card_does_not_hold_is_shared_or_refused():
    large, card = shape(LLAMA), CARDS["h100"]
    found = BeforeRun(large, DRAFTER, replace(WORK, gpus=8, prompts=500_000)).estimate()
    assert "tensor-parallel-size=4" in found.choices[0]
    assert "placement=sharded" in found.choices[1]
    assert sum(found.memory.values()) * GIB < card.memory
    with pytest.raises(UserError, match=r"141 GB of .* do not fit .*; give gpus=4"):
        BeforeRun(large, DRAFTER, replace(WORK, gpus=2))


def test_drafter_that_one_card_does_not_hold_is_shared_or_refused():
    """Weights, gradients and moments of fp32: 16 bytes of a weight."""
    large, small = shape(LLAMA), replace(WORK, gpus=8, card=CARDS["a100_40"], prompts=500_000)
    drafter = replace(DRAFTER, parameters=1_800_000_000, own=1_800_000_000)
    found = BeforeRun(large, drafter, small)
    assert found.chosen().trainer == "fsdp"
    estimate = found.estimate()
    assert sum(estimate.memory.values()) * GIB < small.card.memory
    assert estimate.memory["drafter and optimizer"] * GIB == 1.8e9 * (4 + 16 / 8)
    assert estimate.sent * GIB == pytest.approx(3 * 7 / 8 * 4 * 1.8e9)
    (said,) = (line for line in estimate.choices if line.startswith("drafter and optimizer"))
    assert "(trainer=fsdp); 26.82 with ddp" in said
    given = BeforeRun(
        large, DRAFTER, replace(WORK, gpus=8, sharing=named({"_target_": "a.DeepSpeed", "stage": 2}))
    )
    assert given.chosen().trainer == "deepspeed_2"
    assert given.estimate().memory["drafter and optimizer"] * GIB == pytest.approx(
        DRAFTER.parameters * (4 + 12 / 8)
    )
    with pytest.raises(UserError, match="does not fit"):
        BeforeRun(large, replace(drafter, parameters=9_000_000_000), small).chosen()


@pytest.mark.parametrize("name", [one.trainer for one in EVERY])
def test_every_trainer_of_several_processes_is_known(name):
    cfg: Any = compose([f"trainer={name}"], CONF)
    sharing = named(cfg.trainer.strategy)
    assert sharing is not None
    assert sharing.trainer == name


def test_tau_is_between_its_public_figures():
    low, high, source = eagle3_range(100_000)
    assert EAGLE3[1].low < low < EAGLE3[2].low
    assert low < high < EAGLE3[2].high
    assert "SpecForge#128" in source
    assert "speculators#563" in source
    assert eagle3_range(1_000)[:2] == (0.0, 1.45)
    assert eagle3_range(10**7)[:2] == (2.35, 2.95)
    assert [eagle3_range(a.prompts)[:2] for a in EAGLE3] == [(a.low, a.high) for a in EAGLE3]


def test_command_plans_before_any_run(tmp_path):
    out = tmp_path / "plan.json"
    done = foredraft(
        "plan", f"target={QWEN}", "prompts=500000", "--gpus", "8", "drafter=eagle3", f"out={out}"
    )
    text = done.succeeded().out
    for part in ("8.19 B weights", "2.35 to 2.95", "speculators#563", "8 x NVIDIA H100", "an estimate"):
        assert part in text
    card = json.loads(out.read_text())
    assert card["hours"] == pytest.approx(sum(part["hours"] for part in card["parts"]))
    assert card["hours"] > 0


def test_prompts_of_a_file_are_counted_and_a_folder_has_its_own_shape(tmp_path):
    bench = Bench(tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    found = words(f"target={bench.target}", f"prompts={file}", "gpus=2")
    assert found.parts[0].amount == "3 prompts"
    assert "its config.json" in found.choices[0]


def test_config_of_the_hub_comes_before_the_table(fake_hub):
    text = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    fake_hub.give(QWEN, {"config.json": json.dumps(text | sizes).encode()})
    config, source = target_config(QWEN, None, False)
    assert (config.num_hidden_layers, source) == (8, "its config.json")
    assert not [path for _, path in fake_hub.asked if "safetensors" in path]


def test_known_model_has_a_plan_at_once_where_the_hub_does_not_answer(fake_hub):
    fake_hub.cut = "/"  # every request is cut off
    config, source = target_config(QWEN, None, False)
    assert (config.num_hidden_layers, "known models" in source) == (36, True)
    assert len(fake_hub.asked) <= 2
    with pytest.raises(UserError, match="give a folder"):
        target_config("nobody/unknown", None, False)


def test_processor_is_measured_where_there_is_no_card():
    found = words("experiment=quick", "gpus=0")
    assert "this machine's processor" in found.choices[0]
    assert all(part.hours > 0 for part in found.parts if part.name != "prompts")


@pytest.mark.parametrize(
    ("given", "text"),
    {
        "target=nobody/unknown prompts=5": "give a folder with its config.json",
        "target=no/such/folder prompts=5": "no such folder",
        f"target={QWEN} prompts=5 gpus=-1": "give 0 or more",
        f"target={QWEN} prompts=-5": "give 1 or more",
        f"target={QWEN} prompts=5 gpus=x": "gpus=x: must be a whole number",
        f"target={QWEN} prompts=5 card=h1": "choose one of h100",
        f"target={QWEN} prompts=gsm8k": "give their number",
        f"target={QWEN} prompts=5 drafter=auto": "name a drafter",
        f"target={QWEN} prompts=5 drafter=dflash": "train a small run",
        f"target={QWEN} prompts=5 gpu=8": "write gpus=8",
        f"target={QWEN} prompts=5 gpu=h100": "write card=h100",
        f"target={QWEN} prompts=5 sample=2": "did you mean samples?",
        f"target={QWEN} prompts=5 --gpu 8": "write gpus=8",
        f"target={QWEN} prompts=5 drafter=lm_given": "drafter.path=data/pocket-draft",
        f"target={LLAMA} prompts=5": "give gpus=4",
    }.items(),
)
def test_mistake_is_one_line(given, text):
    foredraft("plan", *given.split()).refused(text)


@pytest.mark.parametrize(
    "given",
    [
        f"target={QWEN} prompts=1000 gpus=8 drafter=eagle3 samples=2 steps=100 saves=5",
        "experiment=qwen3_8b prompts=100000 gpus=16",
        "experiment=llama31_8b taps=auto prompts=5000 gpus=8",
        f"target={QWEN} prompts=1000 drafter=lm",
        f"target={LLAMA} prompts=2000 gpus=8 drafter=eagle3 taps=engine",
        "experiment=quick gpus=0",
    ],
)
def test_printed_command_trains_what_was_planned(given):
    estimate = words(*given.split())
    command = shlex.split(estimate.command)
    start = command.index("train") + 1
    cfg = compose(rewrite(command[start:], CONF), CONF)
    check_ranges(cfg)
    planned = read_arguments(given.split())[0]
    taps = re.search(r" taps=(\w+)", estimate.purpose)
    assert taps
    assert cfg.taps == taps[1]
    assert cfg.taps_gb >= estimate.disk.get("hidden states", 0)
    if planned.prompts:
        assert (cfg.prompts.path, cfg.prompts.limit) == ("/path/to/prompts.jsonl", planned.prompts)
    gpus = 1 if planned.gpus is None else planned.gpus
    assert cfg.trainer.devices * cfg.trainer.num_nodes == max(1, gpus)
    assert (cfg.trainer.accelerator == "cpu") == (not gpus)
    if planned.samples:
        assert cfg.rollout.samples == planned.samples
        assert (cfg.trainer.max_steps, cfg.score.every) == (planned.steps, 20)
    assert f"drafter.depth={cfg.drafter.get('depth')}" in estimate.purpose or "cut from the target" in (
        estimate.purpose
    )


def test_option_is_refused_before_torch_is_imported():
    code = "import sys; from distill.cli.main import one_line_errors; from distill.commands import plan\n"
    code += "sys.argv = ['plan', 'prompts=0']\ntry:\n    plan.main()\nexcept BaseException as e: print(e)\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "prompts=0: give 1 or more\nFalse\n"


def test_no_weights_are_made(qwen):
    target = empty_target(AutoConfig.for_model(**settings(QWEN)), QWEN)
    assert {weight.device for _, weight in target.tensors()} == {torch.device("meta")}

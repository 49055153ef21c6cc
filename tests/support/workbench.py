"""Whole runs in seconds: a tiny chat target in a folder, and `train.py` in this process or a forked one."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.model.load import load_target
from distill.cli.main import main, rewrite
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.main import run
from distill.options.run import TrainOptions
from distill.training.checkpointing import TrainingBar
from drafters.checkpoint.io import save
from drafters.hf import lora_files
from drafters.models.eagle import Eagle
from foredraft import cli

Options = TypeVar("Options")
ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A run of six steps with two save points, in the same precision on every machine.
_QUICK = """
    prompts.self=0 logger=csv optimizer.optimizer.lr=2e-3 decode=chain decode.depth=2 drafter.depth=2
    batch_size=2 try_largest=false trainer.max_steps=6 trainer.precision=bf16-mixed
    trainer.log_every_n_steps=1 score.every=3 score.alternatives=[] score.prompts=2 score.audit_prompts=1
    score.max_new_tokens=6 score.temperatures=[0.0] rollout.max_new_tokens=10 rollout.shard_size=4
    rollout.samples=1
"""
QUICK = tuple(_QUICK.split())


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes, and four special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|user|>", eos_token="<|end|>"
    )
    fast.chat_template = template
    return fast


def make_target(folder: Path, template: str | None = TEMPLATE, seed: int = 0, layers: int = 2) -> Path:
    """A random Llama of few layers with its tokenizer, as a model folder."""
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends))
    enlarge(model, 6)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return folder


def enlarge(model: torch.nn.Module, factor: float) -> None:
    """Enlarge all matrices: default inits give rows that are all alike."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(factor)


def write_prompts(path: Path, count: int, first: int = 0) -> Path:
    """A JSONL file of short prompts, numbered from `first`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i} " + "x" * (i % 7)}]}
        for i in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def options_of(
    *overrides: str, cls: type[Options] = TrainOptions, name: str = "config", **changes: Any
) -> Options:
    """A command's options by its overrides, and `changes` of its configuration, with __ for the dot."""
    return changed(compose(rewrite(overrides, CONF), CONF, name), cls, **changes)


def changed(cfg: DictConfig, cls: type[Options] = TrainOptions, **changes: Any) -> Options:
    """The options of a configuration, some of whose values are replaced."""
    return checked_options(cls, updated(cfg, changes))


def updated(cfg: DictConfig, changes: dict[str, Any], force_add: bool = False) -> DictConfig:
    """A copy with other values; keys have __ for the dot."""
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=force_add)
    return cfg


@dataclass
class Outcome:
    """What a command left: exit code, text, and when it ended where that was noted."""

    code: int
    out: str
    err: str
    ended: float = 0.0

    @property
    def folder(self) -> Path:
        """The run's folder, printed last."""
        return Path(self.out.strip().splitlines()[-1])

    def succeeded(self) -> Self:
        """Itself, if the exit code is 0."""
        assert self.code == 0, self.err
        return self

    def refused(self, *said: str) -> None:
        """A user's mistake: exit code 2 and one line, in which all this is said."""
        assert (self.code, len(self.err.splitlines())) == (2, 1), self.out + self.err
        assert self.err.startswith("error: ")
        assert all(text in self.err for text in said), self.err


@dataclass
class Bench:
    """A target, prompts and a place for outputs, with the command line that uses them."""

    root: Path

    def __post_init__(self) -> None:
        self.target = make_target(self.root / "target")
        self.prompts = write_prompts(self.root / "prompts.jsonl", 12)
        self.heldout = write_prompts(self.root / "heldout.jsonl", 4, first=100)
        self.base = compose(rewrite(self.command, CONF), CONF)

    @property
    def command(self) -> list[str]:
        """Overrides of the quick run."""
        prompts = [f"prompts={self.prompts}", f"prompts.heldout={self.heldout}"]
        return [f"target={self.target}", *prompts, f"output_dir={self.root / 'outputs'}", *QUICK]

    def train(self, *more: str) -> Outcome:
        """`python train.py` with the quick run's overrides and more, in this process."""
        return train([*self.command, *more])

    def run(self, folder: Path, **changes: Any) -> str:
        """The quick run in a folder, resumed if it was interrupted there; returns what it printed.

        `changes` are of the configuration, with __ for the dot.
        """
        folder.mkdir(parents=True, exist_ok=True)
        printed = io.StringIO()
        with redirect_stdout(printed):
            run(updated(self.base, changes, force_add=True), folder)
        return printed.getvalue()

    def fork(self, *more: str, before: Callable[[], Any] = lambda: None) -> int:
        """The same in a forked process, after `before`; returns its wait status."""
        return fork(lambda: (before(), self.train(*more))[1].code)

    def untrained_eagle(self) -> Path:
        """Folder of an EAGLE for the target that nobody trained."""
        target = load_target(str(self.target))
        torch.manual_seed(0)
        folder = self.root / "eagle"
        folder.mkdir()
        save(Eagle.for_target(target, depth=1, feature_noise=0.0, feature_weight=1.0), target, folder)
        return folder

    def benchmark(self, name: str, *more: str) -> Outcome:
        """`scripts/lab/benchmark.py name` for the bench's target and prompts, in this process."""
        import benchmark

        given = [word for word in self.command if word.startswith(("target=", "prompts"))]
        kept = given if name == "rollout" else [word for word in given if word != "prompts.self=0"]
        return command(benchmark.run, ["benchmark.py", name, *kept, *more])

    def runs(self) -> list[Path]:
        """Run folders."""
        return sorted(p.parent for p in (self.root / "outputs").glob("*/*/run.json"))


def train(argv: Iterable[str]) -> Outcome:
    """`python train.py argv` in this process."""
    return command(lambda: main(run, CONF), ["train.py", *argv])


def foredraft(*argv: str) -> Outcome:
    """`foredraft argv` in this process."""
    return command(cli.main, ["foredraft", *argv])


def command(body: Callable[[], Any], argv: list[str]) -> Outcome:
    """Run `body` as a program with these arguments, and keep what it prints."""
    before, sys.argv = sys.argv, argv
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            body()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return Outcome(code, out.getvalue(), err.getvalue())


def fork(body: Callable[[], int]) -> int:
    """Exit status of `body`, run in a child process."""
    return os.waitpid(spawn(body), 0)[1]


def fresh(body: Callable[..., None], *arguments: Any) -> int:
    """Exit code of `body`, a function of a module, in a new interpreter: none of this one's memory."""
    process = multiprocessing.get_context("spawn").Process(target=body, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def spawn(body: Callable[[], int]) -> int:
    """The same, without waiting for it: its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    # A shell's background jobs ignore it, and so would the child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# -- several ranks -------------------------------------------------------------------------------


def torchrun(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a process on one machine."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    return {name: str(value) for name, value in told.items()}


class Ranks:
    """`python train.py argv` in forked processes, in the environment that a launcher would give them.

    `before` is called in each process with its rank; `launcher` takes rank, count and a free port.
    """

    def __init__(
        self,
        count: int,
        argv: Iterable[str],
        before: Callable[[int], Any] = lambda rank: None,
        launcher: Callable[[int, int, int], dict[str, str]] = torchrun,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        argv = ["train.py", *argv]
        self.pids = [self._start(rank, argv, before, launcher(rank, count, port)) for rank in range(count)]
        self._ended: dict[int, tuple[int, float]] = {}

    def _start(self, rank: int, argv: list[str], before, environment: dict[str, str]) -> int:
        def body() -> int:
            # Lightning would take more threads, and those of OpenMP do not survive a fork.
            os.environ.update(environment, OMP_NUM_THREADS="1")
            rank_zero_only.rank = rank  # Lightning reads it from the environment when it is imported
            before(rank)
            # Files of the process itself: libraries write to them as well, and a kill leaves them.
            out, err = (self._file(rank, name).open("w", buffering=1) for name in ("out", "err"))
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = argv
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    main(run, CONF)
                except SystemExit as stop:
                    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                except BaseException:
                    traceback.print_exc()
                    return 1
            return 0

        return spawn(body)

    def _file(self, rank: int, name: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{name}"

    def wait(self, seconds: float = 120.0) -> list[Outcome]:
        """Until all have ended, those killed that have not by then; a signal is a negative code."""
        end = time.monotonic() + seconds
        while len(self._ended) < len(self.pids):
            late = time.monotonic() > end
            for rank, pid in enumerate(self.pids):
                if rank in self._ended:
                    continue
                if late:
                    os.kill(pid, signal.SIGKILL)
                found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if found:
                    self._ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
            time.sleep(0.01)
        found = []
        for rank, (code, ended) in sorted(self._ended.items()):
            out, err = (self._file(rank, name).read_text() for name in ("out", "err"))
            found.append(Outcome(code, out, err, ended))
        return found


def ranks(count: int, argv: Iterable[str], **options: Any) -> list[Outcome]:
    """Run `Ranks` to its end."""
    return Ranks(count, argv, **options).wait()


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint folder, adapters among them."""
    return load_file(checkpoint / "model.safetensors") | lora_files.read_adapters(checkpoint)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints are bit for bit the same."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a quick run's last checkpoint."""
    return weights(folder / "checkpoints" / "6")


def tau(checkpoint: Path) -> float:
    """A scored checkpoint's acceptance length."""
    return json.loads((checkpoint / "score.json").read_text())["headline"]["tau"]


def leftovers(folder: Path) -> list[Path]:
    """What a killed writer would leave."""
    return [p for p in folder.rglob("*") if p.name.endswith(".tmp")]


def kill_in_training(monkeypatch):
    """After step 3, between the save points of steps 2 and 4."""
    end = TrainingBar.on_train_batch_end

    def die(self, trainer, *rest):
        if trainer.global_step == 3:
            os.kill(os.getpid(), 9)
        end(self, trainer, *rest)

    monkeypatch.setattr(TrainingBar, "on_train_batch_end", die)

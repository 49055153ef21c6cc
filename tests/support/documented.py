"""Commands of the documents: found, filled in with small things, and run in forked processes.

CONTRIBUTING.md says which text is a command, and which placeholders stand for the reader's own.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import hydra
import yaml
from omegaconf import OmegaConf
from workbench import CONF, ROOT, Outcome, command, foredraft, fork, make_target, write_prompts

from foredraft.cli import command_of

# Programs that a document may call, whether this machine has them or not.
PROGRAMS = {"foredraft", "python", "python3", "pip", "pytest", "ray", "make", "git", "docker"}
PROGRAMS |= {"torchrun", "srun", "sbatch", "scontrol", "accelerate", "deepspeed", "tensorboard"}
PROGRAMS |= {"vllm", "sglang", "transformers"}
SHELL = {"if", "then", "fi", "for", "do", "done", "exit", "code=$?"}
VARIABLE = re.compile(r"[A-Z_]+=")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(\w*)")
INLINE = re.compile(r"`(python (?:train|scripts/\w+)\.py [^`]*[^`.])`")


class Documented(NamedTuple):
    """One command of a document."""

    text: str  # as it stands there, continued lines joined
    where: str  # file:line


# -- finding them --------------------------------------------------------------------------------


def documents() -> list[Path]:
    """All that tell a user what to do; docs/proofs.md is the output of a program."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p for p in pages if p.name != "proofs.md")]


def commands() -> list[Documented]:
    """Every command of every document, parts of one line apart."""
    found = []
    for path in documents():
        name = str(path.relative_to(ROOT))
        for number, line in lines(path.read_text()):
            found += [Documented(part, f"{name}:{number}") for part in parts(line)]
    return found


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of indented blocks and shell fences with numbers, continued ones joined, and inline code."""
    fence, block, joined, first, blank = "", False, "", 0, True
    for number, line in enumerate(text.splitlines(), 1):
        if joined or block or not fence:
            for inline in INLINE.findall(line) if not fence else ():
                yield number, inline
        if (mark := FENCE.match(line)) and (not fence or mark[1] == fence):
            fence, block = ("" if fence else mark[1]), not fence and mark[2] in ("bash", "sh", "shell")
            continue
        shown = block if fence else line.startswith("    ") and (blank or bool(first))
        blank = not line.strip() if not fence else blank
        if not shown:
            joined, first = "", 0 if line.strip() else first
            continue
        first = first or number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        yield number, joined
        joined = ""


def parts(line: str) -> list[str]:
    """The commands of a line: what `&&` and `;` join, without comments and shell syntax."""
    found: list[list[str]] = [[]]
    lexer = shlex.shlex(line, posix=False)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # an apostrophe: no command
        return []
    for token in tokens:
        if token in ("&&", "||", "|"):
            found.append([])
        elif token.endswith(";"):
            found[-1].append(token[:-1])
            found.append([])
        else:
            found[-1].append(token)
    texts = [" ".join(part).removeprefix("do ").removeprefix("then ") for part in found]
    if not is_command(texts[0]) and texts[0].partition(" ")[0] not in SHELL:
        return []
    return [text for text in texts if is_command(text)]


def is_command(text: str) -> bool:
    """Whether its first word, variables aside, is a program."""
    word = next((w for w in _words(text) if not VARIABLE.match(w)), "")
    plain = re.fullmatch(r"[\w./-]+", word) and word not in SHELL
    return bool(plain) and (Path(word).name in PROGRAMS or shutil.which(word) is not None)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return []


# -- filling them in -----------------------------------------------------------------------------

# Whatever a command says, it is run at these sizes, where its configuration has such a key.
_SIZES = """
    prompts.self=0 rollout.max_new_tokens=10 rollout.shard_size=6 rollout.samples=1 batch_size=4
    try_largest=false trainer.max_steps=2 trainer.log_every_n_steps=1 trainer.enable_progress_bar=false
    score.every=2 score.prompts=1 score.replay_prompts=2 score.audit_prompts=1 score.max_new_tokens=5
    score.temperatures=[0.0] score.repeats=1 max_new_tokens=6 starts=4 nodes=[4,8] compiled=false repeats=1
    count=8 sample=2 threads=1 contexts=[16,32] new_tokens=[8,4]
"""
SIZES = dict(word.split("=") for word in _SIZES.split())
# Of drafter=auto, which trains by the clock.
AUTO = ["drafter.plans=[{depth: 2}]", "drafter.answers=2", "drafter.tokens=4", "score.replay_prompts=4"]
# Of which runs are compared, at two temperatures.
COMPARED = ["eagle", "bigram", "mlp", "medusa"]
# And with these choices, where the command makes none and they are there.
CHOICES = {"logger": "csv"}
SERVED = "decode=chain decode.depth=3"  # as engines draft: what a run is scored with whose drafter is served


@dataclass
class Places:
    """A folder in which commands run, and what their placeholders become.

    Attributes:
        root: the working directory.
        server: address of something that answers as an engine does.
    """

    root: Path
    server: str = ""
    done: dict[str, Outcome] = field(default_factory=dict)  # what was run, by its command line

    def __post_init__(self) -> None:
        self.target = make_target(self.root / "target", layers=8)
        self.masked = self.root / "masked"
        shutil.copytree(self.target, self.masked)
        config = json.loads((self.masked / "config.json").read_text())
        (self.masked / "config.json").write_text(json.dumps(config | {"mask_token_id": 0}))
        self.prompts = write_prompts(self.root / "prompts.jsonl", 12)
        self.more = write_prompts(self.root / "more.jsonl", 12, first=50)
        lines = [json.loads(line) for line in self.prompts.read_text().splitlines()]
        for number, line in enumerate(lines):
            line["messages"].append({"role": "assistant", "content": f"said {number}, as it was asked"})
        self.answered = self.root / "answered.jsonl"
        self.answered.write_text("".join(json.dumps(line) + "\n" for line in lines))
        shutil.copy(ROOT / "README.md", self.root)  # that one command writes into
        self.heldout = write_prompts(self.root / "heldout.jsonl", 8, first=100)

    def run_of(self, drafter: str, options: str = "") -> str:
        """Folder of a run that trained this drafter."""
        done = self.execute(f"python train.py drafter={drafter} {options}")
        assert done.code == 0, done.err
        return str(self.root / done.folder)

    def fill(self, text: str) -> str:
        """A command with everything that stands for the reader's own replaced."""
        drafter = m[1] if (m := re.search(r"train\b.* drafter=(\w+)", text)) else "eagle"
        options = SERVED if "verify-served" in text else ""
        trained = "lyanna" if "benchmark.py lyanna" in text else "eagle"
        trained = "lm" if drafter == "cascade" else trained
        prompts = self.answered if "rollout=given" in text else self.prompts

        def best(drafter: str) -> str:
            return f"{self.run_of(drafter)}/checkpoints/best"

        fillings: list[tuple[str, Callable[[], str]]] = [
            (r"(?<=drafter\.init_from=)(<[^>]*>|\S*<date>\S*)", lambda: best(drafter)),
            (r"outputs/<date>/<time>|\bRUN\b", lambda: self.run_of(trained, options)),
            (r"(?<=checkpoint=)(<[^>]*>|\.\.\.)", lambda: best("eagle")),
            (r"store=<[^>]*>", lambda: f"store={self.store}"),
            (r"(?<=\bdrafter\.path=)(/path/or/hub-id|data/pocket-draft|<[^>]*>)", lambda: str(self.masked)),
            (r"/path/or/hub-id|<its target>", lambda: str(self.target)),
            (r"(/path/to|/a|/data)/(prompts|file)\.jsonl", lambda: str(prompts)),
            (r"/a\.jsonl,/b\.jsonl", lambda: f"{self.prompts},{self.more}"),
            (r"/ckpt/step_\*", lambda: str(self.target)),
            (r"\$depth", lambda: "2"),
            (r"row=gsm8k-17", lambda: "row=p1"),
            (r"http://host:8000", lambda: self.server or "http://127.0.0.1:8000"),
        ]
        if "compare" in text:  # of several runs each is another
            several = iter(COMPARED)
            text = re.sub(r"outputs/<date>/<time>", lambda _: self.run_of(next(several)), text)
        for pattern, become in fillings:
            if re.search(pattern, text):
                text = re.sub(pattern, become(), text)
        return text

    @property
    def store(self) -> Path:
        """Rollouts of a run."""
        self.run_of("eagle")
        return next(iter(sorted((self.root / "outputs" / "rollouts").iterdir())))

    def execute(self, text: str) -> Outcome:
        """Run a filled-in command, once."""
        line = " ".join(sized(text, self))
        if line not in self.done:
            self.done[line] = self._forked(sized(text, self))
        return self.done[line]

    def _forked(self, argv: list[str]) -> Outcome:
        note = self.root / "outcome.json"
        note.unlink(missing_ok=True)

        def body() -> int:
            os.chdir(self.root)
            if argv[0] == "foredraft":
                ended = foredraft(*argv[1:])
            else:
                ended = command(lambda: runpy.run_path(str(ROOT / argv[0]), run_name="__main__"), argv)
            note.write_text(json.dumps([ended.code, ended.out, ended.err]))
            return 0

        status = fork(body)
        return Outcome(*json.loads(note.read_text())) if note.exists() else Outcome(status or 70, "", "died")


def program(text: str) -> list[str]:
    """A command's script and arguments; none if it is not one of this repository's."""
    words = _words(text)
    for place, word in enumerate(words):
        before = words[place - 1] if place else "-m"
        installed = word == "foredraft" and (before == "-m" or "=" in before)  # or behind a variable
        if installed or word == "train.py" or re.fullmatch(r"scripts/(lab/)?\w+\.py", word):
            return words[place:]
    return []


def configuration(argv: list[str]) -> tuple[str, list[str]]:
    """Name of a command's configuration, "" where it has none, and the overrides among its arguments."""
    script, *given = argv
    if script == "foredraft":
        return command_of(given[0], given[1:]).config, given[1:]
    if script == "train.py":
        return "config", given
    if script == "scripts/lab/benchmark.py":
        return f"lab/{given[0]}", given[1:]
    named = re.search(r'main\(.*"([\w/]+)"\)', (ROOT / script).read_text())
    return (named[1] if named else ""), given


@cache
def keys(name: str) -> dict:
    """The configuration of this name as it is."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(name), resolve=False)  # pyright: ignore[reportReturnType]


def has(name: str, key: str) -> bool:
    """Whether a configuration has such a key."""
    node = keys(name)
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def sized(text: str, places: Places) -> list[str]:
    """Script and arguments of a filled-in command, at the sizes at which it is run here."""
    argv = program(text)
    name, given = configuration(argv)
    head, given = argv[: len(argv) - len(given)], few(given)
    if not name or any(g.startswith("--") for g in given if g != "--multirun"):
        if argv[1:2] != ["follow"]:
            return argv
        sizes = [f"{key}={value}" for key, value in (SIZES | CHOICES).items() if has("config", key)]
        return [*argv, *sizes, f"prompts.heldout={places.heldout}", "--updates", "1"]
    said = dict(g.partition("=")[::2] for g in given)
    more = [f"{key}={value}" for key, value in SIZES.items() if has(name, key)]
    uploads = said.keys() & {"push_to", "export.push_to"}
    more += [f"{key.replace('push_to', 'dry_run')}=true" for key in uploads]  # there is no token here
    if said.get("decode") == "auto":
        more += ["decode.repeats=1", "decode.prompts=1"]
    if said.get("drafter") == "auto":
        more += ["drafter.minutes=0.8", "drafter.families=[eagle,bigram]", *AUTO]
    if name == "lab/auto":  # whose runs are told the same
        tiny = [f"{k}={v}" for k, v in SIZES.items() if has("config", k)]
        more += ["minutes=0.8", "families=[eagle,bigram]", f"overrides={json.dumps([*tiny, *AUTO])}"]
    if said.get("drafter") in COMPARED:
        more += ["score.temperatures=[0.0,1.0]"]
    if name == "config":
        more += [f"{key}={value}" for key, value in CHOICES.items() if key not in said]
    if has(name, "target") and has(name, "target.dtype") and "target" not in said:
        more += [f"target={places.target}"]
    if has(name, "prompts.heldout"):
        more += [] if "prompts" in said else [f"prompts={places.prompts}"]
        more += [f"prompts.heldout={places.heldout}"]
    # Drafters that are models as they are: their vocabulary is to be the tiny target's.
    given_models = [key for key in ("drafter", "drafter.first") if said.get(key) in ("hf_dllm", "lm_given")]
    given_models = ["drafter"] if name == "lab/decode" else given_models
    more += [f"{key}.path={places.masked}" for key in given_models if f"{key}.path" not in said]
    return [*head, *given, *more]


def few(given: list[str]) -> list[str]:
    """Two jobs of a sweep: the first thing that is swept keeps two values, all others one."""
    if "experiment=sweep_depth_objective" in given:
        return [*given, "objective=kl"]
    if "-m" not in given:
        return given
    kept, left = [], 2
    for argument in given:
        key, _, values = argument.partition("=")
        if "," in values and values[0] not in "[{'\"":
            argument, left = f"{key}={','.join(values.split(',')[:left])}", 1
        kept.append(argument)
    return kept


def drafters_with(option: str) -> list[str]:
    """Names of the drafters that have this setting."""
    names = sorted(path.stem for path in (CONF / "drafter").glob("*.yaml"))
    return [name for name in names if option in drafter_options(name)]


def drafter_options(name: str) -> dict:
    """Settings of conf/drafter/<name>.yaml and of those that it is based on."""
    options = yaml.safe_load((CONF / "drafter" / f"{name}.yaml").read_text())
    for base in options.pop("defaults", []):
        if isinstance(base, dict):  # a drafter inside
            options |= {place.partition("@")[2]: choice for place, choice in base.items()}
        elif base != "_self_":
            options = drafter_options(base) | options
    return options

"""Every command of the README and the docs: CI composes it, `make docs-test` runs it at a tiny size.

One table says which are slow (`make proofs`), one which are not run at all, and why.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import CONF, ROOT, SERVED, Places, commands, configuration, program
from fake_engine import Engine, a_card, a_row

from decode.model.load import load_tokenizer
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.prompts.chat_template import Chat

FOUND = commands()
LOADED = (
    "distill.train",
    "distill.scoring.compare",
    "distill.scoring.scorer",
    "benchmarks.decode",
    "distill.serving.verify",
)
# Slow: run by `make proofs`. What a pattern matches, and why.
SLOW = {
    r"hydra/launcher=(joblib|submitit_local)": "starts interpreters",
    r"benchmark\.py scaling": "starts ranks",
    r"benchmark\.py train case=memory": "a step at a vocabulary of 131072",
    r"rollout=ray ": "starts a Ray cluster",
    r"train\.py trainer=ddp trainer\.devices=2$": "starts ranks",
    r"train\.py experiment=sweep_depth_objective$": "a third sweep; test_multirun composes it",
    r"target=<its target> drafter\.init_from": "as the one of docs/recipes.md, with a target named",
    r"drafter=auto|benchmark\.py auto": "train by the clock; tests/distill/search/test_auto.py does too",
}
# Not run at all, and why; the part that is this repository's is composed and checked like any other.
UNRUN = {
    r"^python3? -m venv |^(\.venv/bin/|spec/bin/|vllm/bin/)?pip install": "the network; .ci/run installs",
    r"-m pytest\b|^pytest ": "the tests themselves",
    r"^git clone|^cd ": "the clone that this runs in",
    r"benchmark\.py (distillspec|drafters|objectives|sweep)": "hours; test_drafter_table.py, test_sweeps.py",
    r"benchmark\.py scale$": "ten minutes; tests/lab/test_sweeps.py",
    r"^make ": "what it runs are the tests, installs or proofs; `make -n` is asked for the target",
    r"^vllm ": "no engine is installed",
    r"scripts/gpu\.py (run|page|pack)": "a GPU, or a clone without changes; tests/scripts/test_gpu.py",
    r"taps=engine": "an environment with vLLM; tests/engines/test_taps_engine.py has one",
    r"^torchrun |^srun |^scontrol ": "other machines, GPUs or a SLURM cluster",
    r"\b(engine_python|llama_cpp)=": "an environment with an engine; tests/engines",
    r"advise engine=transformers": "answers longer than a draft; commands/test_advise_engine.py",
    r"hydra/launcher=submitit_slurm": "a SLURM cluster",
    r"trainer=gpu|trainer\.accelerator=gpu|trainer\.devices=8": "GPUs",
    r"judge\.script=": "a checkpoint of drafter=lm; tests/distill/commands/test_answer.py",
    r"experiment=(qwen3|llama31)_8b": "a model of the Hub; tests/distill/training/test_your_gpus.py",
    r"prompts=gsm8k score\.judge": "a dataset of the Hub; tests/distill/scoring/test_script_judge.py",
    r"objective=focal|drafter=tiny": "a package of one's own; tests/foredraft/test_installed.py",
    r"smollm2": "a model of the Hub, or of a package of 98 MB",
    r"qwen_coder": "models of the Hub, of 1 GB and more",
    r"scripts/targets/fetch\.py": "parts of 0.5 GB from a package index; tests/scripts/test_fetch.py",
    r"scripts/targets/stubs\.py": "reads a data set; tests/scripts/test_stubs.py",
    r"prompts=humaneval": "a dataset of the Hub; tests/distill/prompts/test_sources.py",
    r"llama_cpp|to=gguf": "a GGUF file of the target; tests/engines/test_llama_cpp.py",
    r"speculators=|check_speculators\.py": "an environment with the package speculators",
}


def reason(text: str, table: dict[str, str]) -> str:
    """Why a table says that a command is not run; "": it does not."""
    return next((why for pattern, why in table.items() if re.search(pattern, text)), "")


# Not whole as they stand: `make docs-test` fills in the checkpoint, the prompt or the files, and runs them.
PARTIAL = re.compile(
    r" \.\.\. |score control=|score score\.batch_sizes=\[1,8\]$|checkpoint=user/repo$|prompts=/a\.jsonl,/b"
    r"|=focal$|=tiny$"
)


def configured(text: str) -> bool:
    """Whether a command of this repository is whole and has a configuration that its options belong to."""
    words = program(text)
    whole = not PARTIAL.search(text) and len(words) > (words[:1] == ["foredraft"])
    return whole and bool(configuration(words)[0])


RUN = sorted({text for text, _ in FOUND if not reason(text, UNRUN | SLOW)})
LATER = sorted({text for text, _ in FOUND if reason(text, SLOW) and not reason(text, UNRUN)})
LISTED = sorted({text for text, _ in FOUND if reason(text, UNRUN | SLOW)})
COMPOSED = sorted({text for text, _ in FOUND if configured(text)})


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[Places]:
    """Where they run, with an engine of this machine."""
    for module in LOADED:  # once, before the forks
        importlib.import_module(module)
    places = Places(tmp_path_factory.mktemp("documented"))
    # A scorecard that was made on as many rounds as it takes, and an engine that keeps as much.
    best = Path(places.run_of("eagle", SERVED)) / "checkpoints" / "best"
    (best / "score.json").write_text(json.dumps(a_card(places.target, [a_row()])))
    engine = Engine(Chat(load_tokenizer(str(places.target))), models=(str(places.target),))
    places.server = engine.url.removesuffix("/v1")
    yield places
    engine.kill()


ALL = [pytest.param(text, marks=pytest.mark.docs) for text in RUN]
ALL += [pytest.param(text, marks=pytest.mark.proof) for text in LATER]


@pytest.mark.parametrize("text", ALL, ids=str)
def test_documented_command_runs(places, text):
    assert program(text), f"{text}: not a command of this repository; say in UNRUN why it is not run"
    done = places.execute(places.fill(text))
    assert done.code == 0, done.err[-3000:]


def overrides(text: str) -> tuple[str, list[str]]:
    """Name of a command's configuration and its options, the first value where a sweep has several."""
    text = re.sub(r"<[^>]*>", "x", text.replace("$depth", "2"))
    name, given = configuration(program(text))
    argv = [word for word in rewrite(given, CONF) if word not in ("-m", "--multirun")]
    # What a sweep chooses from, and Hydra's launchers, are checked choice by choice: distill.cli.sweep.
    argv = [word for word in argv if not word.startswith(("hydra.", "hydra/"))]
    return name, [re.sub(r"=([^,\[{']*),.*", r"=\1", word) for word in argv]


def together(texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Options of all commands in as few configurations as have room for them.

    Commands share one where both say the same of a group, or one of them nothing: no option of one is then
    looked up in the other's choice, and none that must be given is given by the other.
    """
    found: list[tuple[str, dict[str, list[str]]]] = []
    for text in texts:
        name, given = overrides(text)
        groups: dict[str, list[str]] = {"experiment": []}
        for word in sorted(given):
            groups.setdefault(re.split("[.=@]", word.lstrip("+~"))[0], []).append(word)
        for other, shared in found:
            if other == name and all(shared.get(group, own) == own for group, own in groups.items()):
                shared.update(groups)
                break
        else:
            found.append((name, groups))
    for name, groups in found:
        yield name, [word for own in groups.values() for word in own]


@pytest.mark.parametrize(("name", "given"), together(COMPOSED))
def test_options_compose(name, given):
    """They exist, and have values of the right kind."""
    assert compose(given, CONF, name)


def test_what_is_installed_and_made_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [name for text in LISTED for name in re.findall(r"pip install.*(?:\.|foredraft)\[(\w+)\]", text)]
    assert set(asked) >= {"dev"}
    assert set(asked) <= set(extras)
    wanted = [shlex.split(text)[1:] for text in LISTED if text.startswith("make ")]
    assert wanted
    for targets in wanted:
        made = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr


def test_the_tables_name_nothing_that_is_gone():
    for pattern in UNRUN | SLOW:
        assert any(re.search(pattern, text) for text, _ in FOUND), f"{pattern}: no such command"

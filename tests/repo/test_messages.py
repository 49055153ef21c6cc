"""Options that messages name exist: a reader who types them is not refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import signature

import pytest
import yaml
from transformers import GenerationConfig, GenerationMixin
from workbench import CONF, ROOT

import foredraft
from distill.config.compose import MOVED
from foredraft.arguments import Decoding

SRC = ROOT / "src"
DOTTED = re.compile(r"(?<![\w./-])[a-z]\w*(?:\.[a-z]\w*)+(?![\w/(*])")
PLAIN = re.compile(r"(?<![\w./-])([a-z]\w*)=")
FILE = re.compile(r"\.(?:json|jsonl|lock|log|gguf|safetensors|bin)$")
NESTED = re.compile(r"^drafter\.(?:first|second)(?=\.|$)")  # settings of another drafter
SPOKEN = ("UserError", "FollowUpError", "RemoteError", "TooLargeError", "say", "print")
# Python functions whose arguments messages of foredraft name
CALLS = (
    foredraft.load_target,
    foredraft.assist,
    foredraft.generate,
    foredraft.train,
    GenerationMixin.generate,
)
# Words before = that are no options: runs in `foredraft compare`, its arguments, keys of other programs
NO_OPTIONS = {"a", "b", "against", "option", "inner_dim", "n_predict", "by"}


def _options(node: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, value in node.items():
            path = f"{name}.{key}" if name else str(key)
            yield path, value
            yield from _options(value, path)


class Known:
    """Every option of every choice and command, named as on a command line, with its default."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}
        for path in CONF.rglob("*.yaml"):
            group = list(path.relative_to(CONF).parts[:-1])
            if group[:1] != ["lab"]:
                self._add(path.read_text(), group)
        self.groups = {name.partition(".")[0] for name in self.options if "." in name}
        self.words = {name.rpartition(".")[2] for name in self.options} | NO_OPTIONS

    def _add(self, text: str, group: list[str]) -> None:
        place = "" if text.startswith("# @package _global_") else ".".join(group)
        values = yaml.safe_load(text) or {}
        values = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
        self.options |= dict(_options(values, place)) | ({".".join(group): values} if group else {})

    def __contains__(self, name: str) -> bool:
        """Also a name below an option that takes a mapping, such as drafter.lora.r."""
        name = NESTED.sub("drafter", name)
        parent = name.rpartition(".")[0]
        return name in self.options or (parent in self.options and self.options[parent] in (None, {}))


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


def _strings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """String constants of a module, without docstrings and with each f-string's parts."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node, node.value


def _is_code(name: str) -> bool:
    """Whether a dotted name is a module of ours, or something in one."""
    first, second, *_ = name.split(".")
    return (SRC / first / second).is_dir() or (SRC / first / f"{second}.py").is_file()


def unknown_options(tree: ast.AST, known: Known) -> list[str]:
    """Names in a module's messages that look like options and are none."""
    wrong: list[str] = []
    for _, text in _strings(tree):
        for name in DOTTED.findall(text):
            looks = name.partition(".")[0] in known.groups and not FILE.search(name) and name[-1] != "_"
            if looks and not _is_code(name) and name not in known and name not in MOVED:
                wrong.append(name)
    for call in ast.walk(tree):
        function = call.func if isinstance(call, ast.Call) else None
        if getattr(function, "id", getattr(function, "attr", "")) in SPOKEN:
            wrong += [
                f"{n}=" for _, text in _strings(call) for n in PLAIN.findall(text) if n not in known.words
            ]
    return wrong


@pytest.mark.parametrize("text", ["lower optimizer.lr", "set score.replay=3", "set dept=2"])
def test_name_of_no_option_is_found(text, known):
    assert unknown_options(ast.parse(f"raise UserError({text!r})"), known)


def test_every_option_in_a_message_exists(known):
    arguments = {*GenerationConfig().to_dict(), "padding_side"}.union(
        *(signature(f).parameters for f in CALLS)
    )
    arguments |= Decoding.__annotations__.keys()
    wrong = {}
    for path in sorted(SRC.rglob("*.py")):
        names = set(unknown_options(ast.parse(path.read_text()), known))
        if path.parent.name == "foredraft":  # whose callers write Python
            names -= {f"{name}=" for name in arguments}
        if names:
            wrong[str(path.relative_to(ROOT))] = names
    assert wrong == {}

"""Do the tests of verification, decoding and drafting notice a bug? One operator at a time is changed.

Functions are addressed by name and changed in their syntax tree, so renames inside them need no edit here.
"""

import ast
import importlib
import inspect
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FunctionType

import pytest
from rule_cases import LOSSY, RULES
from workbench import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.long]

PER_FUNCTION = 4  # changes tried, spread over the function
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider"]
LIMIT = 20  # a changed loop that takes so many times longer than the tests without a change never ends
RULE_MODULES = {  # most rules are too short to be judged each by itself
    f"{kind} rules": [rule.__module__ for name, rule in RULES.items() if (name in LOSSY) == (kind == "lossy")]
    for kind in ("lossless", "lossy")
}
# A module, or a kind of rules -> tests that have to notice a change of it; the quickest first.
TESTS = {
    "decode.sampling": ["tests/decode/test_sampling.py", "tests/decode/generation/test_generate.py"],
    "decode.verification.descent": ["tests/decode/verification"],
    "decode.lossy.accepting": ["tests/decode/lossy/test_lossy_rules.py"],
    "decode.verification.result": ["tests/decode/verification"],
    "decode.verification.rule": ["tests/decode/verification"],
    "decode.verification.target_probs": ["tests/decode/verification"],
    "lossless rules": ["tests/decode/verification"],
    "lossy rules": ["tests/decode/lossy/test_lossy_rules.py", "tests/decode/verification"],
    "decode.generation.loop": ["tests/decode/generation"],
    "decode.draft": ["tests/decode/verification/test_rules.py", "tests/drafters/drafting"],
    "drafters.drafting.chain": ["tests/drafters/drafting"],
    "drafters.drafting.tree": ["tests/drafters/drafting"],
}
PAIRS = [(ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub), (ast.And, ast.Or)]
SWAPS: dict[type, type] = {a: b for pair in [*PAIRS, (ast.BitAnd, ast.BitOr)] for a, b in (pair, pair[::-1])}
SWAPS |= {ast.Mult: ast.Add, ast.Div: ast.Mult}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "cumsum": "cumprod", "cumprod": "cumsum"}


def functions(module: str) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods of a module by qualified name, decorators taken off."""
    there = importlib.import_module(module)
    for thing in vars(there).values():
        if getattr(thing, "__module__", "") != module:
            continue
        for member in vars(thing).values() if inspect.isclass(thing) else [thing]:
            function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
            # What dataclasses write has no source; a cell of a closure cannot be given to other code.
            written = isinstance(function, FunctionType) and function.__code__.co_filename == there.__file__
            if written and not function.__code__.co_freevars:
                yield function.__qualname__, function


class Change(ast.NodeTransformer):
    """Changes the node with number `wanted` among those that can be; counts them all."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.count, self.where = wanted, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        new = self.changed(node)
        if new is not None:
            self.count += 1
            if self.count - 1 == self.wanted:
                self.where = f"{ast.unparse(node)} -> {ast.unparse(new)}"
                return ast.copy_location(new, node)
        return self.generic_visit(node)

    @staticmethod
    def changed(node: ast.AST) -> ast.AST | None:
        """The node with another operator, name or number; None where there is nothing to change."""
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(SWAPS[type(node.op)](), node.values)
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            return ast.Attribute(node.value, NAMES[node.attr], node.ctx)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
            return node.operand
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return ast.Constant(node.value + 1)
        return None


def mutants(function: FunctionType) -> list[tuple[str, Callable[[], None]]]:
    """Changes of a function: what each is, and what makes it in place."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    source = ast.unparse(tree)
    counter = Change(-1)
    counter.visit(ast.parse(source))
    step = max(1, counter.count // PER_FUNCTION)
    return [_mutant(function, source, number) for number in range(0, counter.count, step)][:PER_FUNCTION]


def _mutant(function: FunctionType, source: str, number: int) -> tuple[str, Callable[[], None]]:
    change = Change(number)
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))

    def make() -> None:
        namespace: dict = {}
        exec(compile(tree, "mutant", "exec"), function.__globals__, namespace)  # noqa: S102  our own source
        (made,) = (value for value in namespace.values() if isinstance(value, FunctionType))
        function.__code__ = made.__code__

    return change.where, make


def outcome(make: Callable[[], None], tests: list[str], seconds: int) -> str:
    """What the tests do in a fork with the change: `passed`, `failed`, or `endless` after so many seconds."""
    child = os.fork()
    if not child:
        signal.alarm(seconds)  # ends the fork
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            make()
            code = pytest.main([*OPTIONS, f"--rootdir={ROOT}", *tests])
        os._exit(int(code))
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return "endless"
    return "failed" if status else "passed"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("part", TESTS)
def test_most_changes_of_one_operator_are_noticed(part, monkeypatch):
    """What survives is printed: an equal program, or a test that is missing."""
    monkeypatch.chdir(ROOT)
    begin = time.monotonic()
    assert outcome(lambda: None, TESTS[part], 300) == "passed"
    seconds = 10 + LIMIT * int(time.monotonic() - begin)
    outcomes = {
        f"{name}: {what}": outcome(make, TESTS[part], seconds)
        for module in RULE_MODULES.get(part, [part])
        for name, function in functions(module)
        for what, make in mutants(function)
    }
    survivors = [change for change, result in outcomes.items() if result == "passed"]
    endless = sum(result == "endless" for result in outcomes.values())
    noticed = len(outcomes) - len(survivors)
    print(f"{part}: {noticed} of {len(outcomes)} noticed, {endless} of them by a loop that did not end")
    print(*survivors, sep="\n")
    assert len(outcomes) >= 10
    assert endless <= 0.15 * len(outcomes), outcomes
    assert len(survivors) <= 0.15 * len(outcomes), survivors

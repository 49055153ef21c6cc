"""Render chat templates within limits of work and size: they are untrusted programs.

A conversation is rendered here before transformers renders it. The template is compiled in transformers' own
environment, extended by counters of loops, calls, filters and operators. Counts do not depend on the machine,
so the same prompts are refused everywhere; a time limit exists in addition.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, wraps
from threading import RLock
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils
from typing_extensions import override

SIZE = 2**24  # characters of a text, entries of a list
STEPS = 2**21  # iterations, calls, and pieces of text
PIECE = 64  # characters per step
CALL = 8  # steps of a call
CONSTANT = 2**16  # characters or entries of a compile-time constant
BITS = 2**20  # maximum bits of a number
SECONDS = 5.0
TICK, MADE = "foredraft_tick", "foredraft_made"  # our own filters
# They make texts or lists of a given length.
SIZED = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson", "truncate"}
WIDTH = re.compile(r"\d{7}|\*|\{[^{}]*\{")  # a width in a format that is large, or given by an argument


class TooMuchWork(jinja2.TemplateError):
    """A rendering exceeds a limit."""


class Budget:
    """Remaining work of a rendering.

    Args:
        given: characters of the conversation, which may be long.
    """

    def __init__(self, given: int = 0) -> None:
        self.steps = STEPS + given
        self.end = time.monotonic() + SECONDS
        self.exceeded: TooMuchWork | None = None

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            TooMuchWork: there were too many steps, or they took too long.
        """
        self.steps -= steps
        if self.steps < 0:
            self._refuse(f"it takes more than {STEPS:,} steps")
        if time.monotonic() > self.end:
            self._refuse(f"it takes more than {SECONDS:g} seconds")

    def made(self, value: Any) -> Any:
        """Count a new value, and return it."""
        if isinstance(value, str | bytes):
            self._fits(len(value))
            self.spend(1 + len(value) // PIECE)
        elif isinstance(value, list | tuple | dict | set):
            self._fits(len(value))
            self.spend(1 + len(value))
        else:
            if isinstance(value, int):
                self._number(value.bit_length())
            self.spend(1)
        return value

    def before_call(self, name: str, value: Any, given: tuple[Any, ...]) -> None:
        """Count a call of a method or filter, and check it if it can make a large value."""
        entries = len(value) if isinstance(value, list | tuple | dict | range) else 0
        self.spend(CALL + entries)
        numbers = [one for one in given if isinstance(one, int)]
        if name in SIZED:
            for number in numbers:
                self._fits(number)
        elif name == "replace" and isinstance(value, str) and len(given) > 1:
            old, new = str(given[0]), str(given[1])
            self._fits(len(value) + value.count(old) * len(new))
        elif name == "join":
            between, parts = (value, given[0]) if isinstance(value, str) and given else (given[:1], value)
            if isinstance(parts, list | tuple):
                width = len(between) if isinstance(between, str) else sum(len(str(one)) for one in between)
                self._fits(sum(len(one) + width for one in parts if isinstance(one, str)))
        elif name in ("format", "format_map") and isinstance(value, str):
            self._format(value)

    def before_operator(self, operator: str, left: Any, right: Any) -> None:
        """Check an operation that can make a large value."""
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                    self._fits(len(one) * times)
            if isinstance(left, int) and isinstance(right, int):
                self._number(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() * right if abs(left) > 1 else 0)
        elif operator == "%" and isinstance(left, str):
            self._format(left)

    def _format(self, pattern: str) -> None:
        if WIDTH.search(pattern):
            self._refuse(f"it has a format of an unknown or large width, {pattern[:20]!r}")

    def _fits(self, size: int) -> None:
        if size > SIZE:
            self._refuse(f"it makes a text or list of {size:,}, and {SIZE:,} is the most")

    def _number(self, bits: int) -> None:
        if bits > BITS:
            self._refuse(f"it makes a number of {bits:,} bits")

    def _refuse(self, why: str) -> NoReturn:
        self.exceeded = TooMuchWork(why)
        raise self.exceeded


class _Counted(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    budget: Budget

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.before_operator(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    @override
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget: Budget = __self.budget
        bound = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `str.format`
        value = getattr(bound, "__self__", None)
        budget.before_call(getattr(__obj, "__name__", ""), value, (*args, *kwargs.values()))
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Inserts counting filters into a parsed template, and checks constants computed at compile time.

    Jinja computes constants while it compiles, and transformers compiles without a budget.
    """

    def __init__(self, environment: _Counted) -> None:
        self._environment = environment
        self._context = nodes.EvalContext(environment)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        operator = getattr(node, "operator", None)
        if isinstance(node, nodes.BinExpr) and operator in _Counted.intercepted_binops:
            return self._constant(node, lambda: self._operate(node))
        if isinstance(node, nodes.Filter):
            return self._constant(node, lambda: node.as_const(self._context))
        return node

    def _operate(self, node: nodes.BinExpr) -> Any:
        left, right = node.left.as_const(self._context), node.right.as_const(self._context)
        self._environment.budget.before_operator(node.operator, left, right)
        return self._environment.binop_table[node.operator](left, right)

    def _constant(self, node: nodes.Expr, compute: Callable[[], Any]) -> nodes.Node:
        """The node, or its value if it is constant.

        Raises:
            TooMuchWork: the value is too large.
        """
        budget = self._environment.budget
        try:
            value = compute()
        except Exception:  # not constant, or failing
            if budget.exceeded:
                raise budget.exceeded from None
            return node
        if isinstance(value, str | list | tuple) and len(value) > CONSTANT:
            raise TooMuchWork(f"it makes a constant of {len(value):,}, and {CONSTANT:,} is the most")
        return nodes.Const(value, lineno=node.lineno) if isinstance(value, str | int | float) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  the names are Jinja's
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_tick(node.lineno, result=True), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, MADE)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        parts = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, MADE) for part in node.nodes
        ]
        node.nodes = [*parts, _tick(node.lineno, 1 + literal // PIECE, "")]
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _tick(line: int, steps: int = 1, result: Any = None) -> nodes.Filter:
    return _filtered(nodes.Const(result, lineno=line), TICK, nodes.Const(steps, lineno=line))


_LOCK = RLock()  # the environment is shared, its budget is per rendering


@cache
def _environment() -> _Counted:
    # private API: transformers has no public name for the environment of chat templates
    base = chat_template_utils._compile_jinja_template("").environment
    counted: Any = base.overlay()
    counted.__class__ = _Counted
    counted.budget = Budget()
    counted.filters = {name: _counted(counted, name, known) for name, known in base.filters.items()}
    counted.filters |= {"random": _random, TICK: _ticks, MADE: _makes}
    counted.globals = {**base.globals, "lipsum": _random}
    return counted


def _counted(environment: _Counted, name: str, known: Callable[..., Any]) -> Callable[..., Any]:
    """A counting version of a filter; keeps Jinja's marks, which determine its arguments."""
    first = int(hasattr(known, "jinja_pass_arg"))

    @wraps(known)
    def counts(*args: Any, **kwargs: Any) -> Any:
        value = args[first] if len(args) > first else None
        environment.budget.before_call(name, value, (*args[first + 1 :], *kwargs.values()))
        return environment.budget.made(known(*args, **kwargs))

    return counts


def _random(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise jinja2.TemplateError("it draws at random, so renderings of a prompt differ")


@jinja2.pass_context  # keeps Jinja from calling it at compile time
def _ticks(context: Context, value: Any, steps: int) -> Any:
    context.environment.budget.spend(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return value


@jinja2.pass_context
def _makes(context: Context, value: Any) -> Any:
    return context.environment.budget.made(value)  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    environment.budget = Budget()
    parsed = environment.parse(template)
    return environment.from_string(_Counting(environment).visit(parsed))


def render_within_limits(
    template: str, variables: Mapping[str, Any], strftime_now: Callable[[str], str]
) -> str:
    """Render a template in transformers' environment, within the limits.

    Args:
        template: source of the template.
        variables: variables of the template.
        strftime_now: formats the date and the time.

    Raises:
        TooMuchWork: a limit is exceeded.
        jinja2.TemplateError: an invalid template, or it refuses the conversation.
    """
    with _LOCK:
        compiled, environment = _compiled(template), _environment()
        environment.globals["strftime_now"] = strftime_now
        environment.budget = Budget(len(str(variables.get("messages"))))
        return environment.budget.made(compiled.render(**variables))

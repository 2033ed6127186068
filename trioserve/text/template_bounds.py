"""Bounds within which a chat template is rendered in the server's own process.

Most chats are short, and their templates only join texts. That takes microseconds here, and a
hundred times as long through a pipe. So each chat is rendered here first, within bounds that hold
for any template and any input. Beyond them :class:`BeyondBounds` is raised, and the chat is
rendered in another process (:mod:`~trioserve.text.template_processes`), with the same result.

Why the bounds hold: every text that the template gets or builds has at most ``longest`` characters,
in proportion to the input. Lists and maps aren't built from values, so none contains itself. Each
node of the template's syntax tree then takes time and memory at most linear in ``longest``.
Filters, methods and functions that may take more are beyond the bounds. Nodes are charged before
they run: each once, and those of a loop or macro again in each iteration or call. The price grows
with ``longest``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.utils

from trioserve.text.template_sandbox import TemplateEnvironment, raise_exception, strftime_now

MAX_INPUT = 20_000
"""Most characters of all variables together, with a few added for each item."""
MAX_NODES = 10_000
"""Most nodes of the syntax tree that may run for a short input; each run counts."""
CHARACTERS_PER_NODE = 10_000
"""Characters of the longest text at which the price of a node is doubled."""
MAX_DEPTH = 16
"""Deepest nesting of lists and maps that are printed with an indentation."""
MAX_INDENT = 8
MAX_RANGE = 1000
MAX_SHORT = 64
"""Most characters of an argument that is searched for each character of a text."""
MAX_NUMBER = 2**63

_PLAIN_FILTERS = frozenset(("count", "d", "default", "first", "items", "last", "length"))
"""Filters that take nearly no time, or return an existing value."""
_TEXT_FILTERS = frozenset(
    ("capitalize", "float", "int", "lower", "replace", "string", "trim", "upper")
)
_TEXT_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit"),
        *("islower", "isnumeric", "isspace", "isupper", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
        *("rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"),
    )
)
_MAP_METHODS = frozenset(("get", "items", "keys", "values"))
_STRIPPING = frozenset(("lstrip", "rstrip", "strip", "trim"))
_PRINTED = (str, int, float, list, tuple, dict, jinja2.Undefined)
_FUNCTIONS = (jinja2.utils.Namespace, raise_exception, range)


class BeyondBounds(Exception):
    """The rendering may take too much time or memory for the server's process."""


class _Generator(jinja2.compiler.CodeGenerator):
    """Generator of code that charges nodes, counts texts, and builds no lists and maps."""

    def buffer(self, frame: jinja2.compiler.Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.printed()")

    def visit_Call(
        self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
    ) -> None:
        if isinstance(node.node, jinja2.nodes.EnvironmentAttribute):  # by _charge
            self.write(f"environment.spend({node.args[0].as_const()})")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concatenated((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._visit_literal(node, frame, super().visit_Dict)

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._visit_literal(node, frame, super().visit_List)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx == "store":
            super().visit_Tuple(node, frame)
        else:
            self._visit_literal(node, frame, super().visit_Tuple)

    def _visit_literal(
        self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, visit: Callable[..., None]
    ) -> None:
        try:
            node.as_const(frame.eval_ctx)
        except jinja2.nodes.Impossible:
            self.write("environment.beyond()")
        else:
            visit(node, frame)


class BoundedEnvironment(TemplateEnvironment):
    """jinja2 environment with bounded time and memory; templates raise BeyondBounds."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__()
        self.finalize = self.plain
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(self, name, function)
        self._bounds = threading.local()

    def printer(self, source: str) -> Callable[[dict[str, Any]], str]:
        """Compile ``source``, and return a function that renders it with variables.

        The function raises :class:`BeyondBounds`; nothing of the template runs before.
        """
        tree = self.parse(source)
        num_nodes = _charge(tree)
        tree.set_environment(self)
        template = self.from_string(tree)

        def render(variables: dict[str, Any]) -> str:
            characters, depth = measure(variables)
            self._bounds.longest = longest = 4 * characters + len(source) + 1000
            self._bounds.indents = depth <= MAX_DEPTH
            self._bounds.price = 1 + longest / CHARACTERS_PER_NODE
            self._bounds.left = MAX_NODES
            self.spend(num_nodes)
            printed = self.printed()
            printed.extend(template.generate(variables))
            return "".join(printed)

        return render

    def spend(self, num_nodes: int) -> bool:
        """Charge the nodes that are about to run; return True."""
        self._bounds.left -= num_nodes * self._bounds.price
        if self._bounds.left < 0:
            raise BeyondBounds
        return True

    def beyond(self) -> None:
        """Raise BeyondBounds, in place of an unbounded operation."""
        raise BeyondBounds

    def check_length(self, length: int) -> None:
        """Raise BeyondBounds before a text of this length is built."""
        if length > self._bounds.longest:
            raise BeyondBounds

    def checked(self, result: Any) -> Any:
        """Return ``result`` if its size is within the bounds."""
        if isinstance(result, str):
            self.check_length(len(result))
        elif isinstance(result, list):
            self.spend(len(result))
        elif isinstance(result, int) and not _is_small(result):
            raise BeyondBounds
        return result

    def plain(self, value: Any) -> Any:
        """Return ``value`` if its printed size is known, unlike that of a namespace."""
        if value is not None and not isinstance(value, _PRINTED):
            raise BeyondBounds
        return value

    def check_indent(self, indent: object) -> None:
        """Raise BeyondBounds if printing with this indentation takes more than linear time."""
        if indent is not None and not (
            isinstance(indent, int) and indent <= MAX_INDENT and self._bounds.indents
        ):
            raise BeyondBounds

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute with small numbers, and join texts; refuse other operations."""
        if operator == "+" and (isinstance(left, str) or isinstance(right, str)):
            if isinstance(left, str) and isinstance(right, str):  # anything else is a TypeError
                self.check_length(len(left) + len(right))
        elif operator == "**" or not (_is_small(left) and _is_small(right)):
            raise BeyondBounds
        return super().call_binop(context, operator, left, right)

    def concatenated(self, parts: Iterable[Any]) -> str:
        """Return the joined texts of the operator ``~``."""
        return "".join(_Printed(self, (str(self.plain(part)) for part in parts)))

    def printed(self) -> _Printed:
        """Return a buffer for a block with captured text: a macro, or ``{% set x %}``."""
        return _Printed(self)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose time is known to be linear."""
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            if obj.__name__ not in _TEXT_METHODS:
                raise BeyondBounds
            self.check_text(obj.__name__, obj.__self__, args, kwargs)
        elif isinstance(obj, BuiltinMethodType):
            if not isinstance(obj.__self__, Mapping) or obj.__name__ not in _MAP_METHODS:
                raise BeyondBounds
        elif obj is strftime_now:
            if not all(isinstance(each, str) and len(each) <= MAX_SHORT for each in args):
                raise BeyondBounds
        elif not isinstance(obj, (jinja2.runtime.Macro, jinja2.Undefined)) and not any(
            obj is function for function in _FUNCTIONS
        ):
            raise BeyondBounds
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, range) and len(result) > MAX_RANGE:
            raise BeyondBounds
        return self.checked(result)

    def check_text(
        self, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise BeyondBounds before a filter or method that would take or return too much."""
        values = (*args, *kwargs.values())
        if name in _STRIPPING and any(isinstance(v, str) and len(v) > MAX_SHORT for v in values):
            raise BeyondBounds
        if name == "replace":
            if kwargs or not all(isinstance(value, str) for value in args[:2]) or len(args) < 2:
                raise BeyondBounds
            self.check_length(len(text) + text.count(args[0]) * len(args[1]))


class _Printed(list[str]):
    """Buffer of texts with a limited total length."""

    def __init__(self, environment: BoundedEnvironment, texts: Iterable[str] = ()) -> None:
        super().__init__()
        self._environment = environment
        self._length = 0
        self.extend(texts)

    def append(self, text: str) -> None:
        self._length += len(text)
        self._environment.check_length(self._length)
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


def _charge(tree: jinja2.nodes.Template) -> int:
    """Charge each iteration of a loop and call of a macro; return the number of nodes."""
    repeated: Any = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
    found = [(node, _num_nodes(node)) for node in tree.find_all(repeated)]
    num_nodes = _num_nodes(tree)
    for node, count in found:
        node.body.insert(0, jinja2.nodes.ExprStmt(_spend(node, count), lineno=node.lineno))
        if isinstance(node, jinja2.nodes.For) and node.test is not None:
            # Filtered iterations don't reach the body.
            node.test = jinja2.nodes.And(_spend(node, count), node.test, lineno=node.lineno)
    return num_nodes


def _num_nodes(node: jinja2.nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(jinja2.nodes.Node))


def _spend(node: jinja2.nodes.Node, count: int) -> jinja2.nodes.Call:
    attribute = jinja2.nodes.EnvironmentAttribute("spend", lineno=node.lineno)
    args: list[jinja2.nodes.Expr] = [jinja2.nodes.Const(count, lineno=node.lineno)]
    return jinja2.nodes.Call(attribute, args, [], None, None, lineno=node.lineno)


def measure(variables: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of characters in ``variables``, and their nesting depth.

    Raises:
        BeyondBounds: They are too large, or have types that JSON doesn't have.
    """
    characters, depth = 0, 0
    level: list[Any] = [*variables.values()]
    while level:
        depth += 1
        characters += 4 * len(level)
        if characters > MAX_INPUT:
            raise BeyondBounds
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, (list, tuple)):
                below += item
            elif item is not None and not _is_small(item):
                raise BeyondBounds
        level = below
    if characters > MAX_INPUT:
        raise BeyondBounds
    return characters, depth


def _is_small(value: object) -> bool:
    """Return True if ``value`` is a number that is fast to compute with."""
    return isinstance(value, float) or (isinstance(value, int) and -MAX_NUMBER < value < MAX_NUMBER)


def _bounded_filter(
    environment: BoundedEnvironment, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``function`` with a check of its arguments.

    It takes the context, so that jinja2 doesn't evaluate it while it compiles a template.
    """
    kind = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "tojson":
            _check_json(environment, args, kwargs)
        elif name in _TEXT_FILTERS:
            if isinstance(value, (list, tuple, dict)) and name != "string":
                raise BeyondBounds
            environment.plain(value)
            if isinstance(value, str):
                environment.check_text(name, value, args, kwargs)
        elif name == "list":
            if not isinstance(value, (str, list, tuple, dict)):
                raise BeyondBounds
        elif name not in _PLAIN_FILTERS:
            raise BeyondBounds
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (environment,),
        }
        passed = first.get(getattr(kind, "name", ""), ())
        return environment.checked(function(*passed, value, *args, **kwargs))

    return bounded


def _check_json(
    environment: BoundedEnvironment, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise BeyondBounds for JSON options that make the text much longer than the value."""
    indent = kwargs.get("indent", args[1] if len(args) > 1 else None)
    environment.check_indent(indent)
    separators = kwargs.get("separators", args[2] if len(args) > 2 else None) or ()
    if any(not isinstance(each, str) or len(each) > MAX_INDENT for each in separators):
        raise BeyondBounds

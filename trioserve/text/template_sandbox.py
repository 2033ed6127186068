"""The sandbox in which chat templates run: what they may reach, and how much they may take.

A template is a program that came with a model. jinja2's own sandbox keeps it from attributes that
lead out of it, and from changing what it is given. This one also bounds what it takes: processor
time, looked at in every round of a loop, every macro and every call; and the length of what it
builds by operators, by filters, by methods of texts and by printing into a block. It isn't
airtight: a value that holds itself many times over can still be printed, which nothing here sees
coming.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

__all__ = ["MAX_CHARACTERS", "MAX_SECONDS", "BoundedEnvironment"]

MAX_CHARACTERS = 64 << 20
"""Of a text, also of one that is only used on the way."""
MAX_ITEMS = 1 << 20
"""Of a list that an operator makes; and the largest number that a filter or method is given."""
MAX_BITS = 4096
"""Of an integer."""
MAX_SECONDS = 2.0
"""Of processor time, for one text. Usual ones take less than a thousandth of that."""
_EVENTS_PER_LOOK = 32

_TOO_LONG = f"it builds a text of over {MAX_CHARACTERS} characters, or as large a list or number"


class _Generator(jinja2.compiler.CodeGenerator):
    """Code in which ``~`` and a block's buffer are the environment's, which count."""

    def buffer(self, frame: jinja2.compiler.Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.printed()")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concatenated((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates take bounded time and memory.

    Whatever runs one calls :meth:`begin` first, in the same thread. Nothing of a template is
    computed before that.
    """

    code_generator_class = _Generator
    # Those whose result can be much larger than what they are given.
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(filters)
        del self.globals["lipsum"]
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(self, name, function)
        self._used = threading.local()

    def begin(self) -> None:
        """Start to count for another text."""
        self._used.events = 0
        self._used.until = time.thread_time() + MAX_SECONDS

    def tick(self) -> str:
        """One round, macro or call more.

        Raises:
            jinja2.TemplateError: the time is over.
        """
        self._used.events += 1
        if self._used.events % _EVENTS_PER_LOOK == 0 and time.thread_time() > self._used.until:
            raise jinja2.TemplateError(f"it takes more than {MAX_SECONDS:g} s")
        return ""

    def bounded(self, source: str) -> jinja2.nodes.Template:
        """The template's tree, with a :meth:`tick` in every loop and macro."""
        tree = self.parse(source)
        repeated: Any = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
        for node in tree.find_all(repeated):
            attribute = jinja2.nodes.EnvironmentAttribute("tick")
            call = jinja2.nodes.Call(attribute, [], [], None, None, lineno=node.lineno)
            node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What an operator gives, unless it would be too long."""
        if operator == "*":
            left, right = (left, right) if isinstance(right, int) else (right, left)
        if not _is_small(operator, left, right):
            raise jinja2.TemplateError(_TOO_LONG)
        return super().call_binop(context, operator, left, right)

    def concatenated(self, parts: Iterable[Any]) -> str:
        """What ``~`` gives."""
        return "".join(_counted(map(str, parts)))

    def printed(self) -> _Printed:
        """What a block prints that is kept: of a macro, of ``{% set x %}``, of a filter's."""
        return _Printed()

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a call gives, unless it takes too long or is a text's method that gives too much."""
        self.tick()
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            _check_size(obj.__name__, obj.__self__, args, kwargs)
            if obj.__name__ == "join" and args:
                args = (_counted(args[0], len(obj.__self__)), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What a text's ``format`` is for a template, None for anything else."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_size(value.__name__, value.__self__, args, kwargs)
            return function(*args, **kwargs)

        return bounded


class _Printed(list[str]):
    """Texts that can't be too long together."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def append(self, text: str) -> None:
        self._length += len(text)
        if self._length > MAX_CHARACTERS:
            raise jinja2.TemplateError(_TOO_LONG)
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


def _is_small(operator: str, left: Any, right: Any) -> bool:
    if operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            return len(left) + len(right) <= MAX_CHARACTERS
        both_lists = isinstance(left, list) and isinstance(right, list)
        return not both_lists or len(left) + len(right) <= MAX_ITEMS
    if operator == "%":
        return not isinstance(left, str) or _is_small_format(left, (right,))
    if not isinstance(right, int):
        return True
    if operator == "**":
        return not isinstance(left, int) or left.bit_length() * right <= MAX_BITS
    if isinstance(left, str):
        return len(left) * right <= MAX_CHARACTERS
    if isinstance(left, (list, tuple)):
        return len(left) * right <= MAX_ITEMS
    return not isinstance(left, int) or left.bit_length() + right.bit_length() <= MAX_BITS


def _is_small_format(text: str, values: Iterable[Any]) -> bool:
    """Whether ``text`` asks for no wide field, and what is put into it can't be too long."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 4:
            return False
    longest = sum(len(value) for value in values if isinstance(value, str))
    fields = text.count("%") + text.count("{")
    return "*" not in text and len(text) + fields * longest <= MAX_CHARACTERS


def _counted(texts: Iterable[Any], between: int = 0) -> Iterator[Any]:
    """``texts``, with so many characters between them, until they are too long together."""
    length = 0
    for text in texts:
        length += between + (len(text) if isinstance(text, str) else 1)
        if length > MAX_CHARACTERS:
            raise jinja2.TemplateError(_TOO_LONG)
        yield text


def _check_size(name: str, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a filter or a text's method that would give too much.

    Raises:
        jinja2.TemplateError: it would.
    """
    values = (*args, *kwargs.values())
    numbers = [value for value in values if isinstance(value, int)]
    length = len(text) if isinstance(text, str) else 0
    small = all(number <= MAX_ITEMS for number in numbers)
    if name in ("expandtabs", "indent"):  # for every tab, every line
        small = small and all((length + 1) * number <= MAX_CHARACTERS for number in numbers)
    elif name == "replace":
        longest = max((len(value) for value in values[1:2] if isinstance(value, str)), default=0)
        small = small and (length + 1) * longest <= MAX_CHARACTERS
    elif name in ("format", "format_map"):
        small = small and isinstance(text, str) and _is_small_format(text, values)
    if not small:
        raise jinja2.TemplateError(_TOO_LONG)


def _bounded_filter(
    environment: BoundedEnvironment, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A filter that looks at the time and the size first.

    It takes the context, so that jinja2 doesn't compute it while a template is compiled.
    """
    kind = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        environment.tick()
        _check_size(name, value, args, kwargs)
        if name == "join" and not isinstance(value, str):
            between = next((len(each) for each in args if isinstance(each, str)), 0)
            value = _counted(value, between)
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (environment,),
        }
        return function(*first.get(getattr(kind, "name", ""), ()), value, *args, **kwargs)

    return bounded

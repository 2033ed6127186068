"""The rules of the project's sentences, as far as a program can hold them.

Docstrings don't begin with a question word, a function's begins with a verb, and requests, pages
and tasks aren't spoken of as people, in code, comments, messages and documentation alike.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import attrs

PEOPLE = re.compile(r"\b(who|whom|whoever|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
"""Words for people, which stand in for things where no person is meant."""
NO_BEGINNING = re.compile(
    r"(What|Who|Whom|Whose|Whether|Which|Where|When|How|Of|The same|That|Those|Nothing)\b"
)
"""Beginnings of fragments, and of sentences whose subject comes late."""
NO_VERB = re.compile(r"(The|A|An|All|Each|Every|Its|Their|Some|One|It|This|These|Is|Are|As|If)\b")
"""Beginnings of a function's docstring that are no verb."""
CODE_FENCE = "```"


@attrs.frozen
class Finding:
    """A line that breaks a rule."""

    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        """Return it as errors show it."""
        return f"{self.line}: {self.rule}: {self.text.strip()[:80]}"


@attrs.frozen
class Docstring:
    """A docstring: its first line's number, its text, and the kind of thing it is about."""

    line: int
    text: str
    kind: str


def docstrings_in(tree: ast.Module) -> Iterator[Docstring]:
    """Yield the docstrings of modules, classes, functions, properties and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.body and (text := _text_of(node.body[0])) is not None:
                yield Docstring(text.lineno, str(text.value), _kind_of(node))
            for statement, after in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(statement, (ast.Assign, ast.AnnAssign))
                    and (text := _text_of(after)) is not None
                ):
                    yield Docstring(text.lineno, str(text.value), "field")


def findings_in_python(source: str, *, messages: bool = True) -> Iterator[Finding]:
    """Yield what breaks a rule in a Python source; ``messages`` are its other string literals."""
    tree = ast.parse(source)
    seen: set[int] = set()
    for each in docstrings_in(tree):
        lines = each.text.split("\n")
        seen.update(range(each.line, each.line + len(lines)))
        first = lines[0].strip()
        if NO_BEGINNING.match(first):
            yield Finding(each.line, f"beginning of a {each.kind}'s docstring", first)
        elif each.kind == "function" and NO_VERB.match(first):
            yield Finding(each.line, "a function's docstring begins with a verb", first)
        for number, line in enumerate(lines, each.line):
            yield from _people(number, line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _people(token.start[0], token.string)
    if messages:
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and node.lineno not in seen and " " in node.value:
                yield from _people(node.lineno, node.value)


def findings_in_markdown(text: str) -> Iterator[Finding]:
    """Yield what breaks a rule in a page of the documentation, outside of its code blocks."""
    is_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(CODE_FENCE):
            is_code = not is_code
        elif not is_code:
            yield from _people(number, line)


def findings_in_c(source: str) -> Iterator[Finding]:
    """Yield what breaks a rule in the line comments of a C++ or CUDA source."""
    for number, line in enumerate(source.split("\n"), 1):
        yield from _people(number, line.partition("//")[2])


def _people(number: int, line: str) -> Iterator[Finding]:
    for match in PEOPLE.finditer(line):
        yield Finding(number, f"a word for people, {match[0]!r}", line)


def _text_of(statement: ast.stmt) -> ast.Constant | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value if isinstance(statement.value.value, str) else None
    return None


def _kind_of(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
        if node.name.startswith("test_"):
            return "test"
        return "property" if re.search("property|fixture|setter", decorators) else "function"
    return "module"

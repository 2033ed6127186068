"""A parser of PTX text: the entries of a module, as instructions with resolved operands."""

from __future__ import annotations

import re

import attrs

__all__ = [
    "Address",
    "Entry",
    "Immediate",
    "Instruction",
    "Operand",
    "PtxError",
    "Register",
    "Symbol",
    "Vector",
    "parse",
]

_ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)[^{]*?\n\{\n(.*?)\n\}", re.DOTALL)
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\]")
_LABEL = re.compile(r"(\$\w+):")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


class PtxError(Exception):
    """PTX that the interpreter doesn't know, or that breaks a rule of the machine."""


@attrs.frozen
class Register:
    """A register, or a special one such as ``%tid.x``."""

    name: str


@attrs.frozen
class Immediate:
    """A constant: its bits, negative numbers in two's complement of 64 bits."""

    bits: int


@attrs.frozen
class Symbol:
    """The name of a variable or label."""

    name: str


@attrs.frozen
class Address:
    """``[base + offset]``."""

    base: Register | Symbol
    offset: int


@attrs.frozen
class Vector:
    """``{a, b, ...}``, or the two results ``a|b`` of an instruction."""

    parts: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@attrs.frozen
class Instruction:
    """One instruction with the predicate that guards it."""

    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None = None
    negated: bool = False


@attrs.frozen
class Entry:
    """A kernel."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: dict[str, tuple[int, int]]
    """Alignment and bytes of each shared variable; 0 bytes for the dynamic one."""


def parse(text: str) -> dict[str, Entry]:
    """Return the entries of a module by name."""
    text = re.sub(r"//[^\n]*", "", text)
    first = text.find(".entry")
    dynamic = _shared_variables(text[:first])
    entries = {}
    for name, _, body in _ENTRY.findall(text):
        instructions, labels = _statements(body)
        shared = _shared_variables(body) | dynamic
        entries[name] = Entry(name, tuple(instructions), labels, shared)
    return entries


def _shared_variables(text: str) -> dict[str, tuple[int, int]]:
    return {
        name: (int(alignment), int(size or 0)) for alignment, name, size in _SHARED.findall(text)
    }


def _statements(body: str) -> tuple[list[Instruction], dict[str, int]]:
    """Split ``body`` into instructions and labels; registers of an inner scope get a new name."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    num_scopes = at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        if rest[0] == "{":
            scopes.append({})
            num_scopes += 1
            at += 1
        elif rest[0] == "}":
            scopes.pop()
            at += 1
        elif label := _LABEL.match(rest):
            labels[label[1]] = len(instructions)
            at += label.end()
        else:
            statement, _, _ = rest.partition(";")
            at += len(statement) + 1
            if statement.startswith(".reg"):
                if scopes:
                    names = statement.split(None, 2)[2].split(",")
                    scopes[-1].update({x.strip(): f"{x.strip()}@{num_scopes}" for x in names})
            elif not statement.startswith((".shared", ".pragma")):
                instructions.append(_instruction(statement.strip(), scopes))
    return instructions, labels


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        raise PtxError(f"no instruction: {statement}")
    negation, predicate, opcode, operands = match.groups()
    local = {name: renamed for scope in scopes for name, renamed in scope.items()}
    return Instruction(
        opcode,
        tuple(_operand(each, local) for each in _split(operands)),
        local.get(predicate, predicate),
        bool(negation),
    )


def _split(operands: str) -> list[str]:
    """Split at the commas outside of braces and brackets."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands)]


def _operand(text: str, local: dict[str, str]) -> Operand:
    if text[0] == "{" or "|" in text:
        parts = re.split(r"[,|]", text.strip("{}"))
        return Vector(tuple(_operand(part.strip(), local) for part in parts))
    if text[0] == "[":
        base, _, offset = text[1:-1].partition("+")
        register = _operand(base.strip(), local)
        if not isinstance(register, Register | Symbol):
            raise PtxError(f"no address: {text}")
        return Address(register, int(offset or 0))
    if text in local:
        return Register(local[text])
    if text[0] == "%":
        return Register(text)
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", text):
        return Immediate(int(text, 0) % 2**64)
    return Symbol(text)

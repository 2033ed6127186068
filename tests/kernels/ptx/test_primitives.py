"""Each primitive of ``hardware.cuh``: its PTX, interpreted, against its C++ twin, emulated."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from gpu.kernels import FOLDER, KernelLoader
from gpu.kernels.emulation import ROUGH
from tests.kernels.ptx.cases import CASES, PRIMITIVES, agree
from tests.kernels.ptx.loader import InterpretedLoader
from tests.kernels.ptx.text import PtxError
from tests.kernels.test_conformance import FILE

NOT_EXECUTED: frozenset[str] = frozenset()
"""Primitives with a body of PTX that no case executes yet."""


@cache
def interpreted(name: str) -> tuple[torch.Tensor, frozenset[str]]:
    """Return the result of a case, and the opcodes that were executed."""
    loader = InterpretedLoader(together=CASES[name].together)
    return CASES[name].run(loader), frozenset(loader.executed)


@pytest.mark.parametrize("name", [name for name in CASES if name != "approximate"])
def test_ptx_gives_what_its_twin_gives(loader: KernelLoader, name: str) -> None:
    result, _ = interpreted(name)
    assert agree(CASES[name], CASES[name].run(loader), result)


@pytest.mark.parametrize("name", [name for name in CASES if "e4m3" in name])
def test_conversions_without_instructions_of_their_own(loader: KernelLoader, name: str) -> None:
    """sm_80 has none for e4m3."""
    older = InterpretedLoader(target="compute_80", together=True)
    assert agree(CASES[name], CASES[name].run(loader), CASES[name].run(older))
    assert not [opcode for opcode in older.executed if "e4m3" in opcode]


@pytest.mark.parametrize("arithmetic", [ROUGH], indirect=True)
def test_approximations_are_near_those_of_the_twin(loader: KernelLoader) -> None:
    """Rough arithmetic flushes subnormal numbers as PTX does."""
    result, _ = interpreted("approximate")
    assert agree(CASES["approximate"], CASES["approximate"].run(loader), result)


def _replaced(pattern: str, replacement: str) -> Callable[[str], str]:
    """Return an edit that must change something."""

    def edit(ptx: str) -> str:
        edited, changes = re.subn(pattern, replacement, ptx)
        assert changes, f"no {pattern} in the PTX"
        return edited

    return edit


MISTAKES = [
    ("load_matrices-1", r"x4\.trans\.", "x4."),
    ("load_matrices-0", r"x4\.shared", "x4.trans.shared"),
    ("multiply-bfloat16", r"f32\.bf16\.bf16", "f32.f16.f16"),
    ("multiply-float16", r"f32\.f16\.f16", "f32.bf16.bf16"),
    ("multiply_first-bfloat16", r"f32\.bf16\.bf16", "f32.f16.f16"),
    ("multiply_first-float16", r"(%r\d+),(%r\d+)\}, \{%f", r"\2,\1}, {%f"),
    ("copy_groups", r"wait_group 1", "wait_group 2"),
    ("copy_groups", r"wait_group 0", "wait_group 1"),
    ("copy_groups", r"cp\.async\.commit_group;", ""),
    ("copy_groups", r"(xor\.b32.*), 16;", r"\1, 32;"),
    ("copy_groups", r"bar\.warp\.sync.*;", ""),
    ("copy_async-20", r"16, %r\d+;", "16, 16;"),
    ("copy_async-20", r"cp\.async\.wait_group 0;", ""),
    ("pack_pairs-bfloat16", r"cvt\.rn\.bf16x2", "cvt.rn.f16x2"),
    ("pack_pairs-float16", r"(cvt\.rn\.f16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    ("narrow-float16", r"cvt\.rn\.f16\.f32", "cvt.rn.bf16.f32"),
    ("pack_e4m3", r"\{l, h\}", "{h, l}"),
    ("unpack_e4m3-float16", r"\{l, h\}", "{h, l}"),
    ("exchange-96", r"shfl\.sync\.bfly", "shfl.sync.idx"),
    ("exchange-96", r"bar\.sync\s+0;", ""),
    ("exchange-33", r"atom\.shared\.add\.u32", "atom.shared.max.s32"),
    ("multiply-bfloat16-special", r"f32\.bf16\.bf16", "f32.f16.f16"),
    ("votes-11", r"shfl\.sync\.idx", "shfl.sync.bfly"),
    ("words", r"0x3120", "0x3210"),
    ("approximate", r"rsqrt\.approx", "rcp.approx"),
    ("approximate", r"lg2\.approx", "ex2.approx"),
]


@pytest.mark.parametrize(("name", "pattern", "replacement"), MISTAKES)
def test_a_mistake_in_the_ptx_is_noticed(name: str, pattern: str, replacement: str) -> None:
    case = CASES[name]
    loader = InterpretedLoader(edit=_replaced(pattern, replacement), together=case.together)
    right, _ = interpreted(name)
    assert not agree(case, case.run(loader), right)


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "message"),
    [
        ("narrow-bfloat16", r"cvt\.rn\.bf16", "cvt.rz.bf16", r"unknown opcode cvt\.rz\.bf16\.f32"),
        ("approximate", r"ex2\.approx\.ftz", "ex2.approx", r"unknown opcode ex2\.approx\.f32"),
        ("exchange-33", r"bar\.sync\s+0;", "@%p1 bra $L__BB9_6; bar.sync 0;", "wait for others"),
        ("exchange-33", r"(bar\.sync\s+0;)", r"@%p1 \1", r"bar\.sync with a predicate"),
        ("load_matrices-0", r"(add\.s64.*%rd7), %rd6;", r"\1, 8;", "no multiple of 16"),
        ("load_matrices-0", r"(add\.s64.*%rd7), %rd6;", r"\1, 512;", "outside of shared memory"),
        ("votes-11", r"mov\.u32.*%tid\.x;", "", "is read before it is written"),
    ],
)
def test_what_no_machine_allows_is_an_error(
    name: str, pattern: str, replacement: str, message: str
) -> None:
    loader = InterpretedLoader(edit=_replaced(pattern, replacement), together=CASES[name].together)
    with pytest.raises(PtxError, match=message):
        CASES[name].run(loader)


def _functions() -> dict[str, str]:
    """Return the functions of hardware.cuh by name, with the text of all their bodies."""
    functions: dict[str, str] = {}
    text = re.sub(r"//[^\n]*|^#define[^\n]*", "", (FOLDER / "hardware.cuh").read_text(), flags=re.M)
    for part in re.split(r"\bDEVICE\b", text)[1:]:
        name = re.match(r"[^(]*?(\w+)(?:<\w+>)?\(", part)
        assert name is not None, part
        functions[name[1]] = functions.get(name[1], "") + part[name.end() :]
    return functions


def _calls(text: str, names: set[str]) -> set[str]:
    return names & set(re.findall(r"(\w+)(?:<[^<>()]*>)?\(", text))


def test_every_primitive_is_called() -> None:
    """Check that the kernels of the cases call all functions with a body of PTX."""
    functions = _functions()
    with_ptx = {name for name, body in functions.items() if re.search(r"\basm\b", body)}
    assert {"mma", "mma_first", "ldmatrix", "copy_async_wait", "pack", "settled"} <= with_ptx
    reached: set[str] = set()
    new = _calls(FILE.read_text() + PRIMITIVES.read_text(), set(functions))
    while new:
        reached |= new
        new = {call for name in new for call in _calls(functions[name], set(functions))} - reached
    assert with_ptx - reached == NOT_EXECUTED


def test_every_opcode_of_the_header_is_executed() -> None:
    """Check opcodes: a call may be of another template argument, but then its opcode is missing."""
    strings = re.findall(r'\basm(?: volatile)?\("([^"]*)"', (FOLDER / "hardware.cuh").read_text())
    assert len(strings) > 25
    opcodes = {
        opcode
        for each in strings
        for opcode in re.findall(r"(?:^|[;{]) *([a-z]\w*\.[\w.:]+)", each)
    }
    assert {"prmt.b32", "cp.async.commit_group", "cvt.rn.f16x2.e4m3x2"} <= opcodes
    executed = {opcode for name in CASES for opcode in interpreted(name)[1]}
    assert opcodes - executed == set()

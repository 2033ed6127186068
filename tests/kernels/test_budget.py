"""Violations of a budget, with made-up costs."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from gpu.kernels import KernelSource, parameters
from gpu.kernels.__main__ import explain
from gpu.kernels.budget import Budget, MeasuredKernel, replace_costs
from gpu.kernels.nvrtc import KernelUsage
from gpu.kernels.sass import Instructions
from gpu.kernels.targets import TARGETS, GpuTarget

BY_HAND = """\
# A comment that stays.
[instructions]
attention = ["HMMA", "LDGSTS.128"]

[[excuse]]
kernel = "attention"
defines = ["HEAD_DIM=256"]
promise = "local"
targets = ["sm_80"]
reason = "Rare."
"""
DIGESTS = {"attention": "a1"}
CODE = Instructions({"HMMA.16816.F32.BF16": 8, "LDGSTS.E.BYPASS.LTC128B.128.ZFILL": 4})


def attention(head_dim: int = 128) -> KernelSource:
    return KernelSource(
        name="attention",
        parameters=parameters(("x", "u8")),
        num_threads=128,
        defines=(("HEAD_DIM", head_dim), ("TYPE", "bf16")),
        shared_bytes=1 << 15,
    )


def measured(
    target: str = "sm_80",
    head_dim: int = 128,
    *,
    registers: int = 100,
    stack: int = 0,
    static_shared: int = 0,
) -> MeasuredKernel:
    usage = KernelUsage(registers=registers, stack=stack, spills=stack, static_shared=static_shared)
    return MeasuredKernel(source=attention(head_dim), target=target, usage=usage, instructions=CODE)


def everywhere(head_dim: int) -> Iterator[MeasuredKernel]:
    return (measured(target, head_dim) for target in TARGETS)


@pytest.fixture(scope="module")
def budget() -> Budget:
    rows = [*everywhere(128), *everywhere(256)]
    return Budget.read(replace_costs(BY_HAND, rows, DIGESTS, "NVRTC 1.2.3", all_of=True))


def problems(budget: Budget, each: MeasuredKernel) -> list[str]:
    return [found.problem for found in budget.violations(each)]


def test_the_same_costs_and_lower_ones_are_within_it(budget: Budget) -> None:
    for each in (*everywhere(128), *everywhere(256), measured(registers=8)):
        assert problems(budget, each) == []
    assert list(budget.stale([attention(128), attention(256)])) == []
    assert budget.compiler == "NVRTC 1.2.3"


def test_costs_that_grow_break_it(budget: Budget) -> None:
    assert problems(budget, measured(registers=101)) == ["101 registers, the budget says 100"]
    assert problems(budget, measured(static_shared=16)) == [
        "32784 bytes of shared memory, the budget says 32768"
    ]
    unknown = measured(head_dim=64)
    assert problems(budget, unknown) == ["not in the budget; --write-budget adds it"]


def test_spilled_registers_break_it_even_where_they_were_measured() -> None:
    spilled = [measured(target, stack=8) for target in TARGETS]
    budget = Budget.read(replace_costs(BY_HAND, spilled, DIGESTS, "", all_of=True))
    (problem,) = problems(budget, spilled[0])
    assert problem.startswith("8 bytes of local memory")


def test_an_excuse_counts_for_its_targets_and_variants_only() -> None:
    rows = [measured(target, size, stack=8) for size in (128, 256) for target in TARGETS]
    budget = Budget.read(replace_costs(BY_HAND, rows, DIGESTS, "", all_of=True))
    assert problems(budget, measured("sm_80", 256, stack=8)) == []
    assert problems(budget, measured("sm_90a", 256, stack=8)) != []
    assert problems(budget, measured("sm_80", 128, stack=8)) != []
    grown = problems(budget, measured("sm_80", 256, stack=9))
    assert grown == ["9 bytes of local memory, the budget says 8"]


def test_common_sizes_are_never_excused() -> None:
    budget = Budget.read(BY_HAND.replace("=256", "=128"))
    (found,) = budget.stale([attention(128)])
    assert str(found) == "attention HEAD_DIM=128: sizes that common models use can't be excused"
    everything = Budget.read(BY_HAND.replace('["HEAD_DIM=256"]', "[]"))
    assert len(list(everything.stale([attention(64), attention(256)]))) == 1


def test_a_kernel_that_fits_no_multiprocessor_breaks_it(budget: Budget) -> None:
    source = attrs.evolve(attention(), shared_bytes=120 << 10)
    rows = [attrs.evolve(measured(target), source=source) for target in TARGETS]
    budget = Budget.read(replace_costs(BY_HAND, rows, DIGESTS, "", all_of=True))
    broken = [found.target for row in rows for found in budget.violations(row)]
    assert broken == ["sm_86", "sm_89", "sm_120"]


def test_a_missing_instruction_breaks_it(budget: Budget) -> None:
    scalar = attrs.evolve(measured(), instructions=Instructions({"LDGSTS.E.64": 3, "FFMA": 9}))
    assert problems(budget, scalar) == [
        "has no HMMA instruction",
        "has no LDGSTS.128 instruction",
    ]


def test_what_the_file_says_of_no_kernel_is_stale(budget: Budget) -> None:
    assert [str(found) for found in budget.stale([attention(128)])] == [
        "attention<HEAD_DIM=256 TYPE=bf16>: in the budget, but no kernel",
        "attention HEAD_DIM=256: excused, but no kernel",
    ]
    assert "attention: must have instructions, but is no kernel" in map(str, budget.stale([]))


def test_writing_keeps_what_people_wrote_and_other_kernels() -> None:
    other = [
        attrs.evolve(each, source=attrs.evolve(each.source, name="other"))
        for each in everywhere(128)
    ]
    first = replace_costs(BY_HAND, [*everywhere(128), *other], DIGESTS, "NVRTC 1", all_of=True)
    second = replace_costs(first, list(everywhere(256)), DIGESTS, "NVRTC 2", all_of=False)
    assert second.startswith(BY_HAND)
    titles = {attention(256).title, other[0].source.title}
    assert set(Budget.read(second).costs) == titles  # a variant that is no more went away
    third = replace_costs(second, list(everywhere(256)), DIGESTS, "NVRTC 2", all_of=True)
    assert set(Budget.read(third).costs) == {attention(256).title}
    assert replace_costs(third, list(everywhere(256)), DIGESTS, "NVRTC 2", all_of=True) == third


def test_problems_are_told_by_kernel_and_targets(budget: Budget) -> None:
    rows = [measured("sm_80", registers=101), measured("sm_90a", registers=101)]
    broken = [found for row in rows for found in budget.violations(row)]
    assert explain([*broken, *budget.stale([attention(128)])]) == [
        "attention<HEAD_DIM=128 TYPE=bf16>",
        "  sm_80, sm_90a: 101 registers, the budget says 100",
        "attention<HEAD_DIM=256 TYPE=bf16>",
        "  in the budget, but no kernel",
        "attention HEAD_DIM=256",
        "  excused, but no kernel",
    ]


@pytest.mark.parametrize(
    ("target", "num_threads", "registers", "shared", "blocks"),
    [
        ("sm_90a", 128, 32, 0, 16),  # 64 warps
        ("sm_86", 32, 32, 0, 16),  # the most blocks
        ("sm_86", 128, 32, 0, 12),  # 48 warps
        ("sm_89", 32, 32, 0, 24),
        ("sm_89", 128, 32, 99 << 10, 1),
        ("sm_89", 128, 32, (99 << 10) + 1, 0),
        ("sm_90a", 32, 32, 0, 32),  # the most blocks
        ("sm_90a", 128, 128, 0, 4),  # 65536 registers of 128 * 128
        ("sm_90a", 128, 168, 0, 3),  # registers again
        ("sm_90a", 256, 255, 0, 1),
        ("sm_90a", 128, 32, 75 << 10, 3),  # 3 * (75 + 1) KiB are all of 228
        ("sm_90a", 128, 32, (75 << 10) + 1, 2),
        ("sm_90a", 128, 32, 227 << 10, 1),
        ("sm_90a", 128, 32, (227 << 10) + 1, 0),
        ("sm_80", 128, 32, 163 << 10, 1),
        ("sm_120", 128, 32, 0, 12),  # 48 warps
        ("sm_120", 128, 32, 100 << 10, 0),
        ("sm_120", 1024, 80, 0, 0),  # a block of 1024 has 64 registers a thread at most
    ],
)
def test_blocks_on_a_multiprocessor(
    target: str, num_threads: int, registers: int, shared: int, blocks: int
) -> None:
    found: GpuTarget = TARGETS[target]
    assert found.blocks_per_multiprocessor(num_threads, registers, shared) == blocks


def test_what_has_changed_since_it_was_measured_is_told() -> None:
    measured_then = {"attention": "a1", "other": "b1"}
    text = replace_costs(BY_HAND, [*everywhere(128)], measured_then, "", all_of=True)
    budget = Budget.read(text)
    assert list(budget.outdated(measured_then)) == []
    assert [each.title for each in budget.outdated({"attention": "a1", "other": "b2"})] == ["other"]
    assert [each.title for each in budget.outdated({"new": "c1"})] == ["new"]
    again = replace_costs(text, [*everywhere(128)], {"attention": "a2"}, "", all_of=False)
    assert Budget.read(again).digests == {"attention": "a2", "other": "b1"}

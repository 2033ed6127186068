"""The emulation itself: what it catches, what it lets vary, and that it keeps count.

These tests need no GPU and say nothing about one, so they run in the emulation whatever
``--kernels-on`` says.
"""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.kernels import KernelSource, parameters
from gpu.kernels.emulation import (
    ARITHMETICS,
    FORWARD,
    FUSED,
    RANDOM,
    REVERSE,
    EmulatedKernel,
    EmulatedLoader,
    EmulationError,
    build,
)
from gpu.kernels.emulation.build import BuildError, BuildWarning, build_kernel
from tests.kernels.memory import place, poisoned

pytestmark = pytest.mark.thorough

FILE = Path(__file__).parent / "rules.cu"
PARAMETERS = parameters(("out", "u8"), ("num", "i4"))
ORDERS = [(FORWARD, 0), (REVERSE, 0), *((RANDOM, seed) for seed in range(6))]
MOST_SHARED = 227 * 1024


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> EmulatedLoader:
    return EmulatedLoader(sanitizer=request.config.getoption("--kernels-sanitizer"))


def source(name: str, *, num_threads: int = 64, shared_bytes: int = 0) -> KernelSource:
    return KernelSource(
        name=name,
        parameters=PARAMETERS,
        num_threads=num_threads,
        shared_bytes=shared_bytes,
        file=str(FILE),
    )


def run(
    loader: EmulatedLoader,
    name: str,
    out: torch.Tensor,
    num: int = 0,
    *,
    num_blocks: int = 1,
    num_threads: int = 64,
    shared_bytes: int = 0,
) -> EmulatedKernel:
    """Launch ``name`` of rules.cu on ``out``."""
    kernel = loader.load(source(name, num_threads=num_threads, shared_bytes=shared_bytes))
    arguments = np.zeros(1, PARAMETERS)
    arguments["out"], arguments["num"] = out.data_ptr(), num
    kernel.launch((num_blocks, 1, 1), arguments)
    assert isinstance(kernel, EmulatedKernel)
    return kernel


@pytest.mark.parametrize(
    ("name", "num_threads", "message"),
    [
        ("deadlock", 64, r"deadlock, of 64 threads 32 wait at a barrier, 31 in a warp operation"),
        ("divergent_operations", 32, r"divergent warp: some lanes are in (shuffle|vote)"),
        ("divergent_barrier", 32, r"divergent barrier: lanes of one warp wait at line \d+"),
        ("shuffle_from_an_absent_lane", 32, r"lane 0 reads lane 16, which mask 0000ffff lacks"),
        ("absent_caller", 32, r"__syncwarp with mask fffffffe, which lacks lane 0"),
        # The upper half either meets the lower one or has gone when that waits for lane 16.
        (
            "overlapping_masks",
            32,
            r"(mask \w+ while lanes of mask \w+ are in|deadlock.*) __syncwarp",
        ),
        (
            "half_a_warp_multiplies",
            32,
            r"deadlock.* mma<bf16> by lanes ffffffff, of which 0000ffff",
        ),
        ("exit_with_copies", 32, r"exits with copies in flight"),
        ("too_many_static_bytes", 32, r"49156 bytes of static shared memory, of at most 49152"),
    ],
)
def test_broken_rules(emulated: EmulatedLoader, name: str, num_threads: int, message: str) -> None:
    out = poisoned((64,), torch.int32, emulated)
    for emulated.order, emulated.seed in ORDERS:
        with pytest.raises(EmulationError, match=f"^{name}: block .*{message}"):
            run(emulated, name, out, num_threads=num_threads)


def test_a_launch_after_a_broken_rule_starts_afresh(emulated: EmulatedLoader) -> None:
    out = poisoned((32,), torch.int32, emulated)
    with pytest.raises(EmulationError):
        run(emulated, "exit_with_copies", poisoned((64,), torch.int32, emulated), num_threads=32)
    run(emulated, "neighbor", out, 1, num_threads=32)
    assert out.tolist() == [lane ^ 1 for lane in range(32)]


@pytest.mark.parametrize("name", ["past_a_static_array", "past_dynamic_memory"])
@pytest.mark.parametrize("distance", [1, 16])
def test_stores_past_shared_memory(name: str, distance: int) -> None:
    """Store a little past an array: there is a gap, which must stay as it was."""
    loader = EmulatedLoader()
    out = poisoned((1,), torch.int32, loader)
    run(loader, name, out, 0, shared_bytes=1000)
    with pytest.raises(EmulationError, match=r"a thread wrote past the end of (a static|dynamic)"):
        run(loader, name, out, distance, shared_bytes=1000)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_products_and_sums_are_fused_where_that_is_asked_for(arithmetic: str) -> None:
    """Multiply numbers like 4097 and 4099: their squares are odd, too long for float32."""
    loader = EmulatedLoader(arithmetic=arithmetic)
    out = poisoned((2,), torch.int32, loader)
    run(loader, "multiply_add", out, 4097)
    assert out.tolist() == [int(arithmetic == FUSED), 0]


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (1 << 31, 1, 1)])
def test_more_blocks_than_a_grid_may_have(
    emulated: EmulatedLoader, grid: tuple[int, int, int]
) -> None:
    kernel = emulated.load(source("all_shared_memory"))
    with pytest.raises(EmulationError, match="larger than 2147483647 x 65535 x 65535"):
        kernel.launch(grid, np.zeros(1, PARAMETERS))


def test_more_than_a_block_can_have(emulated: EmulatedLoader) -> None:
    out = poisoned((1024,), torch.int32, emulated)
    with pytest.raises(EmulationError, match="232449 bytes of shared memory, of at most 232448"):
        run(emulated, "all_shared_memory", out, shared_bytes=MOST_SHARED + 1)
    with pytest.raises(EmulationError, match="1056 threads in a block, of at most 1024"):
        run(emulated, "all_shared_memory", out, num_threads=1056)


def test_all_shared_memory_and_as_many_threads_as_there_can_be(emulated: EmulatedLoader) -> None:
    out = poisoned((1024,), torch.int32, emulated)
    run(
        emulated,
        "all_shared_memory",
        out,
        MOST_SHARED,
        num_threads=1024,
        num_blocks=2,
        shared_bytes=MOST_SHARED,
    )
    per_thread = MOST_SHARED // 4 // 1024
    assert out.tolist() == [(thread + 1) % 1024 * per_thread for thread in range(1024)]


def test_large_frames(emulated: EmulatedLoader) -> None:
    out = poisoned((64,), torch.float32, emulated)
    run(emulated, "large_frames", out)
    assert out.tolist() == list(range(64))


def test_what_depends_on_the_order_varies_with_it(emulated: EmulatedLoader) -> None:
    seen: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for ordered, results in seen.items():
        for emulated.order, emulated.seed in ORDERS:
            out = poisoned((3,), torch.int32, emulated)
            run(emulated, "last_writer", out, ordered, num_blocks=3)
            results.add(tuple(out.tolist()))
    assert seen[1] == {(64, 64, 64)}
    assert {(63, 63, 63), (0, 0, 0)} <= seen[0]
    assert len(seen[0]) > 4


def test_an_order_can_be_repeated(emulated: EmulatedLoader) -> None:
    outs = []
    for workers in (1, 1, 2):
        emulated.seed, emulated.workers = 5, workers
        out = poisoned((40,), torch.int32, emulated)
        run(emulated, "last_writer", out, num_blocks=40)
        outs.append(out.tolist())
    assert outs[0] == outs[1] == outs[2]
    assert len(set(outs[0])) > 10


def test_unwritten_shared_memory_is_nan_in_each_block(emulated: EmulatedLoader) -> None:
    out = torch.zeros(128)
    run(emulated, "unwritten", out, num_blocks=3, shared_bytes=256)
    assert out.isnan().all()


def test_copies_land_before_or_after_they_are_read(emulated: EmulatedLoader) -> None:
    memory = torch.zeros(36, 4, dtype=torch.int32)
    memory[32] = 7
    memory = place(memory, emulated)
    run(emulated, "early_read", memory, num_threads=32)
    assert set(memory[:32].flatten().tolist()) == {0, 7}


@pytest.mark.parametrize(("stride", "conflicts"), [(16, 0), (80, 0), (128, 28), (64, 24), (32, 16)])
def test_bank_conflicts(emulated: EmulatedLoader, stride: int, conflicts: int) -> None:
    """Count a conflict for each of eight rows beyond those in different banks."""
    out = poisoned((32,), torch.int32, emulated)
    kernel = run(
        emulated, "load_rows", out, stride, num_threads=32, shared_bytes=32 * stride, num_blocks=2
    )
    assert kernel.bank_conflicts == 2 * conflicts


def test_threads_meet_between_atomic_operations(emulated: EmulatedLoader) -> None:
    counts = []
    for num in (1, 0):
        out = torch.zeros(1, dtype=torch.int32)
        run(emulated, "lost_update", out, num, num_blocks=4)
        counts.append(int(out))
    assert counts[0] == 256
    assert 0 < counts[1] < 256


def test_fences_and_the_last_block(emulated: EmulatedLoader) -> None:
    out = torch.zeros(12, dtype=torch.int32)
    run(emulated, "last_block", out, 1, num_blocks=10)
    assert out[:2].tolist() == [10, 55]


def test_functions_of_bits_and_lanes(emulated: EmulatedLoader) -> None:
    out = poisoned((32, 16), torch.int32, emulated)
    run(emulated, "bit_functions", out, 3, num_threads=32)
    mask = (1 << 32) - 1
    xs = [(3 * 0x9E3779B9 + lane * 0x85EBCA6B) & mask for lane in range(32)]
    for lane, x in enumerate(xs):
        inverse = ~x & mask
        both, wide = inverse << 32 | x, x << 32 | inverse
        binary = f"{x:032b}"
        low_bytes = [x >> 8 & 255, x >> 24, inverse >> 8 & 255, inverse >> 24]
        expected = [
            binary.count("1"),
            32 - x.bit_length(),
            (x & -x).bit_length(),
            int(binary[::-1], 2),
            x * inverse >> 32,
            wide * wide >> 64 & mask,
            sum(byte << 8 * i for i, byte in enumerate(low_bytes)),
            both << 7 >> 32 & mask,
            both >> 7 & mask,
            sum(xs) & mask,
            max(xs),
            sum(1 << other for other in range(32) if xs[other] % 3 == x % 3),
            xs[lane - 3] if lane >= 3 else x,
            xs[lane + 3] if lane % 8 < 5 else x,
            xs[lane ^ 5],
            sum((xs[other] & 1) << other for other in range(32)),
        ]
        assert [number & mask for number in out[lane].tolist()] == expected, lane


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text('#include "hardware.cuh"\nint kernel() { return nothing; }')
    shutil.copy(FILE.parents[2] / "gpu" / "kernels" / "hardware.cuh", tmp_path)
    broken = KernelSource(name="kernel", parameters=PARAMETERS, num_threads=32, file="broken.cu")
    with pytest.raises(BuildError, match=r"nothing.* was not declared"):
        EmulatedLoader(folder=tmp_path).load(broken)


def test_a_remark_of_the_compiler_is_a_warning(tmp_path: Path) -> None:
    text = FILE.read_text() + '\nextern "C" int unclear() { int x; return x; }\n'
    (tmp_path / "remarked.cu").write_text(text)
    shutil.copy(FILE.parents[2] / "gpu" / "kernels" / "hardware.cuh", tmp_path)
    remarked = KernelSource(
        name="neighbor", parameters=PARAMETERS, num_threads=32, file="remarked.cu"
    )
    with pytest.raises(BuildWarning, match="uninitialized"):
        EmulatedLoader(folder=tmp_path).load(remarked)


@pytest.mark.parametrize("version", ["", "11.4.0"])
def test_a_missing_or_an_old_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    if version:
        (tmp_path / "g++").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if version else str(tmp_path))
    monkeypatch.setattr(build, "_compiler", build._compiler.__wrapped__)
    with pytest.raises(BuildError, match=r"g\+\+ 12 or newer, not 11.4.0|which is not installed"):
        EmulatedLoader().load(source("neighbor"))


def test_a_sanitizer_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    other = {"thread": "address"}.get(request.config.getoption("--kernels-sanitizer"), "thread")
    with pytest.raises(EmulationError, match="in LD_PRELOAD"):
        EmulatedLoader(sanitizer=other)


def test_processes_build_the_same_kernel_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=build_kernel, args=[source("neighbor")]) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    libraries = [path.name for path in (tmp_path / "trioserve" / "emulation").glob("*.so")]
    assert sorted(name.split("-")[0] for name in libraries) == ["emulator", "neighbor"]

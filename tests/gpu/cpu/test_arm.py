"""The kernels for ARM under emulation, and AVX2's in the same program without it.

They are cross-compiled, and QEMU runs them on a processor that has their instructions and no later
ones. NEON's results have the bits of AVX2's. Nothing relies on that, but it is the sharpest test.
With WHEEL_KERNELS the kernels of a wheel for ARM are tested in place of g++'s.
"""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from gpu.cpu.build import OPTIONS, build
from gpu.cpu.isa import ISAS, CpuInstructions
from gpu.cpu.products import Kind
from gpu.cpu.sampling import _DRAW as DRAW
from gpu.models.operations.torch_ops import TorchOperations
from tests.gpu.cpu.attention_stage import Case, Stage, Step, exact
from tests.gpu.cpu.remote_kernels import (
    SOURCE,
    Program,
    RemoteAttention,
    RemoteKernels,
    RemoteProduct,
)
from tests.gpu.cpu.test_elementwise import check_rounded
from tests.gpu.cpu.test_products import activations, blocks_of, check, meant, random
from tests.gpu.cpu.test_symbols import shared_names
from trioserve.protocol.machine import ARCHITECTURES, Machine
from trioserve.protocol.shipped_kernels import library_name

ARM = ARCHITECTURES["AArch64"]
COMPILER = "aarch64-linux-gnu-g++"
PROCESSORS = {"neon": "neoverse-n1", "neon_bf16": "max"}
"""Processors that QEMU plays; the first has neither products of bfloat16 nor i8mm."""
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WHEEL_KERNELS = os.environ.get("WHEEL_KERNELS")
"""The folder of a wheel's kernels for ARM; None to test g++'s."""
NATIVE = "avx2"
SHAPES = {
    (17, 64): (1, 2, 3, 4, 5, 6, 7, 32, 33, 130, 600),
    (100, 576): (1, 2, 6, 33),
    (33, 4096 + 32): (1, 9),
}
"""Outputs and inputs of products, and numbers of rows. An emulated processor is slow."""
CASES = (
    Case(lengths=(1, 17, 258), kv_heads=1, norm=True),
    Case(lengths=(5, 270), head_dim=96, kv_heads=1, group=2, rotate=False, page_size=4),
    Case(lengths=(33, 290), kv_heads=2, group=1, head_dim=32, page_size=1, window=100),
)
EPS = 1e-5
Results = dict[str, torch.Tensor]

pytestmark = pytest.mark.thorough


def emulator() -> str:
    """Return the command that runs ARM's programs; fail where something is missing."""
    emulator = shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(COMPILER) is None:
        pytest.fail(
            "ARM's kernels are tested under emulation: apt install g++-aarch64-linux-gnu qemu-user"
        )
    return emulator


def compiled(
    compiler: str, isas: tuple[str, ...], folder: Path, options: tuple[str, ...] = OPTIONS
) -> tuple[Path, Path]:
    """Return the program and the library that it is to load, which is kept for the next time."""
    program = folder / "remote_kernels"
    strict = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*shlex.split(compiler), *strict, str(SOURCE), "-o", str(program)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        patch.setattr("gpu.cpu.build.OPTIONS", options)
        return program, build(isas)


def emulated(isa: str, program: Path, library: Path) -> Program:
    """Return the program on a processor with the instruction set."""
    environment = {
        "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu",
        # Leaks are found by a debugger's means, which QEMU doesn't have.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    return Program([emulator(), "-cpu", PROCESSORS[isa], str(program)], library, isa, environment)


@pytest.fixture(scope="module")
def cross_compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the program for ARM, and one library that has both instruction sets."""
    emulator()
    return compiled(COMPILER, ARM, tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module")
def arm(cross_compiled: tuple[Path, Path]) -> dict[str, Program]:
    """Return a program for each instruction set of ARM, with the library that is tested."""
    program, library = cross_compiled
    libraries = dict.fromkeys(ARM, library)
    if WHEEL_KERNELS is not None:
        libraries = {isa: Path(WHEEL_KERNELS) / library_name(isa) for isa in ARM}
    return {isa: emulated(isa, program, libraries[isa]) for isa in ARM}


@pytest.fixture(scope="module", params=ARM)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return a program that ends at the first error that a sanitizer finds.

    It isn't optimized: a compiler would take minutes for the unrolled loops with their checks.
    """
    emulator()
    compiler, options = shlex.join([COMPILER, *SANITIZERS]), (*OPTIONS, "-O0")
    folder = tmp_path_factory.mktemp("sanitized")
    return emulated(request.param, *compiled(compiler, (request.param,), folder, options))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Program:
    if NATIVE not in Machine().kernel_isas():
        pytest.skip("the processor has no AVX2")
    program, library = compiled("g++", (NATIVE,), tmp_path_factory.mktemp("native"))
    return Program([str(program)], library, NATIVE)


@pytest.fixture(scope="module", params=[NATIVE, *ARM])
def kernels(request: pytest.FixtureRequest) -> Iterator[RemoteKernels]:
    """Kernels in a process: AVX2 as it is, and each instruction set of ARM."""
    if request.param == NATIVE:
        program = request.getfixturevalue("native")
    else:
        program = request.getfixturevalue("arm")[request.param]
    with program.start() as started:
        yield started


def product_of(
    kernels: RemoteKernels, kind: Kind, weight: torch.Tensor, bias: torch.Tensor | None
) -> RemoteProduct:
    source = weight.bfloat16() if kind is Kind.BF16 else blocks_of(weight, kind)
    return RemoteProduct(kernels, kind, source, weight.shape, bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_products_are_exact_to_within_their_roundings(
    kernels: RemoteKernels, kind: Kind, shape: tuple[int, int]
) -> None:
    weight, bias = random(*shape, spread=0.05), random(shape[0], seed=1)
    product = product_of(kernels, kind, weight, bias)
    for rows in SHAPES[shape]:
        x = activations(rows, shape[1])
        dtype = torch.bfloat16 if rows % 2 else torch.float32
        check(product.multiply(x, dtype), x, meant(weight, kind), kind, bias)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    kernels: RemoteKernels, kind: Kind
) -> None:
    product = product_of(kernels, kind, random(50, 576), random(50))
    x = activations(60, 576)
    together = product.multiply(x, threads=1)
    assert torch.equal(product.multiply(x, threads=2), together)
    assert torch.equal(product.multiply(x, torch.bfloat16), together.bfloat16())
    for threads, first, last in ((1, 0, 1), (2, 1, 3), (1, 3, 8), (2, 8, 19), (1, 19, 60)):
        alone = product.multiply(x[first:last], threads=threads)
        assert torch.equal(alone, together[first:last])


def attend(kernels: RemoteKernels, case: Case, steps: list[Step], threads: int) -> torch.Tensor:
    stage = Stage(case, compiled=False)
    stage.attention = attention = RemoteAttention(
        kernels,
        case.shape(sum(-(-length // case.page_size) for length in case.lengths) + 3),
        case.heads,
        case.cos_sin(),
        max_tokens=sum(case.lengths),
        threads=threads,
    )
    outs = stage.run(steps)
    attention.close()
    return torch.cat(outs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_float64_in_any_steps(kernels: RemoteKernels, case: Case) -> None:
    whole: list[Step] = [[(i, length)] for i, length in enumerate(case.lengths)]
    last = len(case.lengths) - 1
    cut: list[Step] = [
        [(i, length - 2 * (i == last)) for i, length in enumerate(case.lengths)],
        [(last, 1)],
        [(last, 1)],
    ]
    out = attend(kernels, case, whole, threads=1)
    assert torch.equal(out, attend(kernels, case, cut, threads=2))
    references = [exact(case, qkv) for qkv in case.sequences()]
    expected, error = (torch.cat(parts) for parts in zip(*references, strict=True))
    assert ((out.double() - expected).abs() <= error).all()


def elementwise(kernels: RemoteKernels, rows: int, width: int, threads: int) -> Results:
    """Return norms and the gate, and what the largest numbers are."""
    put, like = kernels.put_array, torch.empty(rows, width, dtype=torch.bfloat16)
    x, residual = random(rows, width, spread=3).bfloat16(), random(rows, width, seed=1).bfloat16()
    weight, gate_up = random(width, seed=2).bfloat16(), random(rows, 2 * width, seed=3).bfloat16()
    pool = kernels.call("elementwise_pool", threads)
    added, y, best = put(residual), put(like), kernels.allocate(4 * rows)
    size = (rows, width, y)
    results = {}
    kernels.call("elementwise_rms_norm", pool, put(x), put(weight), EPS, *size)
    results["norm"] = kernels.get_tensor(y, like)
    kernels.call("elementwise_add_rms_norm", pool, put(x), added, put(weight), EPS, *size)
    results["norm of sum"] = kernels.get_tensor(y, like)
    results["sum"] = kernels.get_tensor(added, like)
    kernels.call("elementwise_silu_mul", pool, put(gate_up), *size)
    results["gate"] = kernels.get_tensor(y, like)
    kernels.call("elementwise_argmax_rows", pool, put(x.float()), rows, width, best)
    results["largest"] = kernels.get_tensor(best, torch.empty(rows, dtype=torch.int32))
    kernels.call("elementwise_free", pool)
    return results


@pytest.mark.parametrize("width", [1, 17, 576, 1536])
def test_small_operations_match_float64(kernels: RemoteKernels, width: int) -> None:
    results = elementwise(kernels, 5, width, 1)
    again = elementwise(kernels, 5, width, 2)
    assert all(torch.equal(x, again[name]) for name, x in results.items())
    x, residual = random(5, width, spread=3).bfloat16(), random(5, width, seed=1).bfloat16()
    weight, gate_up = random(width, seed=2).bfloat16(), random(5, 2 * width, seed=3).bfloat16()

    def norm(x: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
        return x.double() * root * weight.double()

    check_rounded(results["norm"], norm(x))
    assert torch.equal(results["sum"], x + residual)
    check_rounded(results["norm of sum"], norm(results["sum"]))
    gate, expected = results["gate"], TorchOperations().silu_mul(gate_up)
    assert torch.allclose(gate.float(), expected.float(), rtol=2**-7, atol=1e-30)
    assert torch.equal(results["largest"].long(), x.float().argmax(-1))


def draws(kernels: RemoteKernels, threads: int) -> Results:
    """Return tokens of rows that ask for different cuts, and the first log-probabilities."""
    vocab, asked = 3000, [(1, 0), (0.9, 0), (1, 40), (0.95, 100), (1, 0)]
    logits = random(len(asked), vocab, seed=5, spread=3)
    rows = [
        (1000 + i, top_p, 0.0 if i == 4 else 0.8, 0.05 if i == 0 else 0.0, top_k, i, 0, -1, 0)
        for i, (top_p, top_k) in enumerate(asked)
    ]
    handle = kernels.call("sampler_create", vocab, threads)
    put, count, most = kernels.put_array, len(asked), 10
    at, tokens = put(logits), kernels.allocate(4 * count)
    kernels.call(
        *("sampler_draw", handle, at, count, put(np.array(rows, dtype=DRAW))),
        *(0, kernels.put(bytes(24)), tokens),
    )
    reports = kernels.put(b"".join(struct.pack("<ii", i, most) for i in range(count)))
    normalizers, found = kernels.allocate(4 * count), kernels.allocate(4 * count)
    ids, logprobs = kernels.allocate(4 * count * most), kernels.allocate(4 * count * most)
    kernels.call(
        *("sampler_report", handle, at, reports, count, most, normalizers, ids, logprobs, found)
    )
    results = {
        "tokens": kernels.get_tensor(tokens, torch.empty(count, dtype=torch.int32)),
        "normalizers": kernels.get_tensor(normalizers, torch.empty(count)),
        "logprobs": kernels.get_tensor(logprobs, torch.empty(count, most)),
    }
    kernels.call("sampler_destroy", handle)
    expected = logits.double().log_softmax(-1).topk(most).values
    assert torch.allclose(results["logprobs"].double(), expected, atol=1e-5)
    assert results["tokens"][4] == logits[4].argmax()
    return results


def test_draws_are_the_same_on_any_number_of_threads(kernels: RemoteKernels) -> None:
    results, again = draws(kernels, 1), draws(kernels, 2)
    assert all(torch.equal(x, again[name]) for name, x in results.items())


def everything(program: Program) -> Results:
    """Return a little of all that the kernels compute."""
    results: Results = {}
    with program.start() as kernels:
        for kind in Kind:
            product = product_of(kernels, kind, random(49, 96 + 4096), random(49))
            for rows in (1, 9):
                results[f"{kind.name} {rows}"] = product.multiply(activations(rows, 96 + 4096))
        for i, case in enumerate(CASES):
            whole: list[Step] = [[(i, length) for i, length in enumerate(case.lengths)]]
            results[f"attention {i}"] = attend(kernels, case, whole, 2)
        results |= elementwise(kernels, 3, 100, 2)
        results |= draws(kernels, 2)
    return results


@pytest.fixture(scope="module")
def results(arm: dict[str, Program]) -> dict[str, Results]:
    """Return the results of each instruction set of ARM."""
    return {isa: everything(program) for isa, program in arm.items()}


def different(one: Results, other: Results) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, x in one.items() if not torch.equal(x, other[name])]


def test_neon_has_the_bits_of_avx2(native: Program, results: dict[str, Results]) -> None:
    assert different(everything(native), results["neon"]) == []


def test_sums_of_whole_numbers_are_the_same_everywhere(
    native: Program, results: dict[str, Results]
) -> None:
    """Products of w8a8 are such sums with the same scales, so each has the same bits."""
    expected = everything(native)
    for found in results.values():
        changed = different(expected, found)
        assert not any(name.startswith(Kind.W8A8.name) for name in changed)


def test_sanitizers_find_nothing_and_change_no_result(
    sanitized: Program, results: dict[str, Results]
) -> None:
    assert different(everything(sanitized), results[sanitized.isa]) == []


def test_a_sanitizer_would_say_so(sanitized: Program) -> None:
    """Have a norm read more than there is."""
    with (
        pytest.raises(AssertionError, match="heap-buffer-overflow"),
        sanitized.start() as kernels,
    ):
        pool, memory = kernels.call("elementwise_pool", 1), kernels.allocate(64)
        kernels.call("elementwise_rms_norm", pool, memory, memory, EPS, 1, 33, memory)


@pytest.mark.parametrize(
    ("processor", "found"),
    [
        ("cortex-a72", CpuInstructions(0)),
        ("neoverse-n1", CpuInstructions.NEON),
        ("max", CpuInstructions.NEON | CpuInstructions.NEON_BF16),
    ],
)
def test_the_library_finds_what_an_arm_processor_has(
    arm: dict[str, Program], processor: str, found: CpuInstructions
) -> None:
    program = arm["neon"]
    command = [processor if word in PROCESSORS.values() else word for word in program.command]
    with attrs.evolve(program, command=command).start() as kernels:
        assert kernels.call_shared("detected_instructions") & 0xFFFFFFFF == found


def test_all_symbols_name_their_instruction_set(cross_compiled: tuple[Path, Path]) -> None:
    """No function of one instruction set is the other's, as in test_symbols."""
    _, library = cross_compiled
    shared = set.intersection(*(shared_names(library, ISAS[isa].kernels) for isa in ARM))
    assert {name for name in shared if "9trioserve9detection" not in name} <= {
        *("detected_instructions", "_init", "_fini"),
    }

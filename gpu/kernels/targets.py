"""Targets of kernels, and the resources of a multiprocessor of each."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from gpu.kernels.nvrtc import KernelBuildError

OLDEST = (8, 0)
"""Kernels need bf16 tensor cores and asynchronous copies."""

_REGISTERS = 64 * 1024
_PARTITIONS = 4
"""A multiprocessor is four schedulers, each with its warps and a quarter of the registers."""
_RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA keeps of every block."""


@attrs.frozen
class GpuTarget:
    """One kind of GPU, with the limits of a multiprocessor.

    From the table "Technical Specifications per Compute Capability" of the CUDA C++ Programming
    Guide, as are the rules of :meth:`blocks_per_multiprocessor`.
    """

    name: str
    """The compiler's name for it; an ``a`` at the end adds instructions that no other GPU has."""
    shared: int
    """Bytes of shared memory; a block may have all but the KiB that CUDA keeps."""
    warps: int
    blocks: int

    @property
    def shared_per_block(self) -> int:
        """Bytes of static and dynamic shared memory that one block may have."""
        return self.shared - _RESERVED_SHARED

    def blocks_per_multiprocessor(self, num_threads: int, registers: int, shared: int) -> int:
        """Return how many blocks run side by side on one multiprocessor; 0: the kernel can't run.

        ``registers`` are a thread's; ``shared`` is static and dynamic bytes of a block.
        """
        warps = -(-num_threads // 32)
        per_warp = -(-registers * 32 // 256) * 256
        warps_by_registers = _REGISTERS // _PARTITIONS // per_warp * _PARTITIONS
        per_block = -(-(shared + _RESERVED_SHARED) // 128) * 128
        return min(
            self.blocks, self.warps // warps, warps_by_registers // warps, self.shared // per_block
        )


TARGETS = {
    target.name: target
    for target in (
        GpuTarget("sm_80", shared=164 << 10, warps=64, blocks=32),
        GpuTarget("sm_86", shared=100 << 10, warps=48, blocks=16),
        GpuTarget("sm_89", shared=100 << 10, warps=48, blocks=24),
        GpuTarget("sm_90a", shared=228 << 10, warps=64, blocks=32),
        GpuTarget("sm_100", shared=228 << 10, warps=64, blocks=32),
        GpuTarget("sm_120", shared=100 << 10, warps=48, blocks=24),
    )
}
"""Targets of the tests: A100; A10, A40, RTX 30; L4, L40S, RTX 40; H100 and H200; B200; consumer
Blackwell. A GPU in between gets code of its own, see target_for."""


def target_for(capability: tuple[int, int], known: Sequence[int]) -> str:
    """Return the target to compile for on a GPU of ``capability``.

    ``known`` are the capabilities that the compiler has, ``90`` for 9.0. A GPU runs code for its
    own capability, or for a lower one of the same major number. All GPUs of 9.0 run sm_90a.

    Raises:
        KernelBuildError: there is none; the message names the capability.
    """
    major, minor = capability
    name = f"{major}.{minor}"
    if capability < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise KernelBuildError(f"compute capability {name} is too old: {oldest} or newer is needed")
    fitting = [each for each in known if each // 10 == major and each % 10 <= minor]
    if not known:
        raise KernelBuildError("kernels can't be built here")
    if not fitting:
        newest = max(known)
        raise KernelBuildError(
            f"the installed NVRTC compiles for compute capability {newest // 10}.{newest % 10} at "
            f"most, this GPU has {name}: install a newer CuPy and NVRTC"
        )
    return _name(max(fitting))


def targets_of(known: Sequence[int]) -> list[str]:
    """Return all targets that kernels can be compiled for by a compiler that has ``known``."""
    return [_name(each) for each in sorted(known) if divmod(each, 10) >= OLDEST]


def _name(capability: int) -> str:
    return "sm_90a" if capability == 90 else f"sm_{capability}"

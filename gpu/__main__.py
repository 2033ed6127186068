"""``python -P -m gpu --connect URL`` runs a worker; ``--doctor`` reports what it would use."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from trioserve.protocol.gc_tuning import without_gc


def examine() -> dict[str, Any]:
    """Return the versions, devices and kernels found on this machine, for ``trioserve doctor``."""
    import torch

    from gpu.loading.loaded_model import choose_num_threads
    from gpu.models.linear import prepacks

    kernels, targets = _examine_kernels()

    report: dict[str, Any] = {
        "torch": str(torch.__version__),
        "threads": choose_num_threads(0),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_products": prepacks(torch.bfloat16, torch.device("cpu")),
        "compiled_cpu_kernels": _examine_cpu_kernels(),
        "cuda_available": torch.cuda.is_available(),
        "cuda_devices": [],
        "cupy": None,
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "kernels_for": targets(properties.major, properties.minor),
        }
        report["cuda_devices"].append(device)
    if importlib.util.find_spec("cupy") is not None:
        try:
            cupy = importlib.import_module("cupy")
        except Exception as error:  # a CuPy for another CUDA may raise anything
            report["cupy_error"] = str(error).strip().partition("\n")[0]
        else:
            report["cupy"] = cupy.__version__
    return {**report, **kernels}


def _examine_cpu_kernels() -> str:
    """Return the path of the compiled CPU kernels, or the reason why torch computes instead."""
    from gpu.cpu.build import LibraryBuildError, built
    from gpu.cpu.isa import ISAS
    from trioserve.protocol.machine import CPU_ISA_VARIABLE, Machine

    machine, isa = Machine(), os.environ.get(CPU_ISA_VARIABLE, "auto")
    if (obstacle := machine.obstacle_to_kernels(isa)) is not None:
        return f"none, torch computes: {obstacle}" if isa == "auto" else f"none: {obstacle}"
    try:
        library = built([ISAS[machine.kernel_isa(isa)].kernels])
    except LibraryBuildError as error:
        return f"none, torch computes: {error}"
    if library is None:
        return "not built yet: compiled when a model is first served"
    return str(library)


def _examine_kernels() -> tuple[dict[str, Any], Callable[[int, int], str]]:
    """Return a report on CUDA kernels, and a function from compute capability to target."""
    from gpu.kernels import nvrtc, targets
    from gpu.kernels.cubins import CubinCache

    cache = CubinCache()
    number, size = cache.statistics()
    folder = str(cache.folder)
    report: dict[str, Any] = {
        "nvrtc": None,
        "kernel_targets": [],
        "kernel_cache": {"folder": folder, "kernels": number, "size_bytes": size},
    }
    known: tuple[int, ...] = ()
    try:
        report["nvrtc"] = nvrtc.compiler().removeprefix("NVRTC ")
        known = nvrtc.capabilities()
        report["kernel_targets"] = targets.targets_of(known)
    except nvrtc.KernelBuildError as error:
        report["nvrtc_error"] = str(error)

    def target_of(major: int, minor: int) -> str:
        try:
            return targets.target_for((major, minor), known)
        except nvrtc.KernelBuildError as error:
            return f"none: {error}"

    return report, target_of


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line; run the worker or print the report."""
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--connect", metavar="URL", help="serve the engine that listens at URL")
    action.add_argument(
        "--rank", action="store_true", help="compute a part of a model for the parent process"
    )
    action.add_argument(
        "--node", action="store_true", help="run ranks of another host's worker here"
    )
    action.add_argument(
        "--tower", action="store_true", help="compute a model's tower for the parent process"
    )
    action.add_argument("--doctor", action="store_true", help="print what there is, as JSON")
    options = parser.parse_args(arguments)
    if options.doctor:
        sys.stdout.write(msgspec.json.encode(examine()).decode() + "\n")
        return
    if options.rank:
        from gpu.cpu import following

        following.run()
        return
    if options.tower:
        from gpu.models.transformers_models import tower_process

        tower_process.run()
        return
    if options.node:
        from gpu.cpu import node

        node.run()
        return
    with without_gc():
        from gpu import worker
    worker.run(options.connect)


if __name__ == "__main__":
    main()

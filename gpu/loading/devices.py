"""Choice of the device and the number format."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence

from trioserve.protocol.devices import cores_text
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine, extra_advice
from trioserve.protocol.shipped_kernels import kernels_obstacle

LOWEST_CAPABILITY = (8, 0)
"""Lowest compute capability served: the kernels need asynchronous copies and bfloat16."""

_log = logging.getLogger("gpu.devices")


def choose_device(name: str, num_gpus: int = 1) -> str:
    """Return ``cpu`` or ``cuda:N``. ``auto`` prefers a usable GPU, and logs why one isn't usable.

    A number behind the name, as in ``auto:1``, chooses a GPU: the current one without. If it is a
    GPU, there are ``num_gpus`` from it on.

    Raises:
        ModelLoadError: ``name`` is cuda and no GPU is usable, or there are too few.
    """
    name, _, number = name.partition(":")
    # Importing torch is slow, and without a driver there is no GPU to ask it for.
    if name == "cpu" or (name == "auto" and not _has_driver()):
        return "cpu"
    import torch

    obstacle = _obstacle_here()
    if obstacle is None:
        first, count = int(number or torch.cuda.current_device()), torch.cuda.device_count()
        last = first + num_gpus - 1
        if last >= count:
            needs = "a GPU of its own"
            if num_gpus > 1:
                options = "--tensor-parallel-size times --pipeline-parallel-size"
                needs = f"{num_gpus} GPUs ({options}) of its own"
            raise ModelLoadError(
                f"each worker needs {needs}, and there is no cuda:{last}: there are {count} GPUs"
            )
        torch.cuda.set_device(first)
        return f"cuda:{first}"
    if name == "cuda":
        raise ModelLoadError(f"--device cuda can't be used: {obstacle}")
    if torch.cuda.is_available():
        _log.warning("computing on the CPU although there is a GPU: %s", obstacle)
    return "cpu"


def bind_to_cores(cores: Sequence[int]) -> None:
    """Bind this thread, and the threads that it starts from now on, to ``cores``, if there are any.

    Linux then places the memory that they touch first on the NUMA node of these cores.

    Raises:
        ModelLoadError: This process may not use all of them.
    """
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(cores):
        raise ModelLoadError(
            f"a worker can't have the cores {cores_text(cores)}: this process may use "
            f"{cores_text(sorted(allowed))}"
        )
    if cores:
        os.sched_setaffinity(0, cores)


def gpu_obstacle(
    *,
    cuda_version: str | None,
    capability: tuple[int, int] | None,
    cupy_error: str | None,
) -> str | None:
    """Return one line on why no GPU can be used and how to fix it; None if one can be used.

    Args:
        cuda_version: the CUDA version of torch; None if it was built without.
        capability: the compute capability of the GPU; None if torch finds no GPU.
        cupy_error: the error when importing CuPy, empty if it isn't installed; None for no error.
    """
    if cuda_version is None:
        return "this torch was built without CUDA: install one that was built with it"
    if capability is None:
        return "torch finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    if capability < LOWEST_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, LOWEST_CAPABILITY))
        return f"the GPU has compute capability {found} and {needed} is needed"
    if cupy_error == "":
        return f"CuPy is missing: {extra_advice('cuda' + cuda_version.partition('.')[0])}"
    if cupy_error is not None:
        return f"CuPy can't be imported: {cupy_error}"
    return None


def choose_dtype(name: str, device: str, compiled: bool = True) -> str:
    """Return ``bfloat16``, ``float16`` or ``float32``, for a device of :func:`choose_device`.

    ``auto`` is bfloat16 on a GPU, on a CPU with bfloat16 instructions, and where compiled kernels
    compute the model; else float32. ``compiled`` says if there are kernels for such a model.

    Raises:
        ModelLoadError: the format isn't supported on the device.
    """
    if device != "cpu":
        if name == "float32":
            raise ModelLoadError(
                "float32 is not served on a GPU: use --dtype bfloat16 or float16, or --device cpu"
            )
        return "bfloat16" if name == "auto" else name
    if name == "auto":
        fast = {"avx512_bf16", "amx_bf16", "bf16"} & set(Machine().cpu_features())
        return "bfloat16" if fast or (compiled and kernels_obstacle() is None) else "float32"
    if name not in ("bfloat16", "float32"):
        raise ModelLoadError(f"{name} is not served on a CPU: use --dtype bfloat16 or float32")
    return name


def _has_driver() -> bool:
    """Return whether NVIDIA's driver is installed; it may still not work."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _obstacle_here() -> str | None:
    import torch

    available = torch.cuda.is_available()
    return gpu_obstacle(
        cuda_version=torch.version.cuda,
        capability=torch.cuda.get_device_capability() if available else None,
        cupy_error=_cupy_error(),
    )


def _cupy_error() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return ""
    try:
        importlib.import_module("cupy")
    except Exception as error:  # a CuPy for another CUDA may raise anything
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None

"""Loading a model on the CPU: compiled kernels where they can compute it, else torch.

The compiled kernels compute in bfloat16 and take weights in 4 or 8 bits; torch computes everything
else, float32 above all, and everything where there is no compiler or not the instructions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.adjustments import Adjuster
from gpu.attention import CacheShape
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.compiled import CompiledModel, obstacle_in, read_as
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.library import BuildError, load_library
from gpu.cpu.model import CpuModel, TorchModel
from gpu.cpu.sampling import CompiledSampler
from gpu.loading import Loaded, OnProgress
from gpu.memory import choose_num_pages
from gpu.models import build_model
from gpu.rope import cos_sin_table
from gpu.sampler import Sampler
from gpu.slots import SlotTable
from gpu.weights import load_weights, read_weights
from trioserve.errors import ModelLoadError
from trioserve.machine import Machine
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.wire import Start

__all__ = ["load_on_cpu"]

ROUNDING = ("int8", "int4", "w8a8")
"""The quantizations that only the compiled kernels have."""


def load_on_cpu(
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model and give it a KV cache.

    Args:
        start: limits, all chosen but the number of pages.
        files: of the model.
        dtype: bfloat16 or float32.
        on_progress: called often, with a stage, how much of it is done and of how much.
        adjuster: says what is done to logits before a token is drawn.

    Raises:
        ModelLoadError: the model can't be served so; one line says why and what to do.
    """
    if start.kv_cache_dtype != "auto":
        raise ModelLoadError(
            f"a KV cache in {start.kv_cache_dtype} is not served on a CPU: "
            "leave --kv-cache-dtype at auto"
        )
    config = files.config
    processed = start.logprobs_mode == "processed"
    try:
        compiled = _compiled(start, config, dtype, on_progress)
    except _NotCompiled as reason:
        _check_torch_will_do(start, str(reason))
        model, num_pages = _load_torch(start, files, dtype, on_progress)
        computing = f"torch ({reason})"
        sampler = Sampler(config.vocab_size, "cpu", processed_logprobs=processed)
    else:
        num_pages = _load_compiled(compiled, start, files, on_progress)
        model = compiled
        sampler = CompiledSampler(
            load_library(),
            config.vocab_size,
            torch.get_num_threads(),
            processed_logprobs=processed,
        )
        computing = f"compiled kernels, weights in {compiled.describe_weights()}"
    slots = SlotTable(
        num_pages=num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=config.vocab_size,
    )
    return Loaded(
        executor=CpuExecutor(model, sampler, slots, adjuster),
        slots=slots,
        num_pages=num_pages,
        device_name=Machine().cpu_name(),
        computing=computing,
    )


class _NotCompiled(Exception):
    """Why the compiled kernels don't compute a model."""


def _compiled(
    start: Start, config: ModelConfig, dtype: torch.dtype, on_progress: OnProgress
) -> CompiledModel:
    """A model that wants its weights.

    Raises:
        _NotCompiled: torch has to compute it.
    """
    if dtype != torch.bfloat16:
        raise _NotCompiled("the compiled kernels compute in bfloat16 only")
    obstacle = obstacle_in(config)
    if obstacle is not None:
        raise _NotCompiled(f"the compiled kernels aren't made for {obstacle}")
    try:
        library = load_library(lambda done, total: on_progress("kernels", done, total))
    except BuildError as error:
        raise _NotCompiled(str(error)) from error
    quantization = start.quantization
    if quantization == "auto" and start.dtype != "auto":
        quantization = "none"
    return CompiledModel(library, config, quantization, torch.get_num_threads())


def _check_torch_will_do(start: Start, reason: str) -> None:
    if start.quantization in ROUNDING:
        raise ModelLoadError(f"--quantization {start.quantization} can't be had: {reason}")
    if start.deterministic:
        raise ModelLoadError(f"--deterministic can't be had: {reason}")


def _load_compiled(
    model: CompiledModel, start: Start, files: ModelFiles, on_progress: OnProgress
) -> int:
    """Give ``model`` its weights and its cache; the number of pages that this has."""
    dtype, keep = read_as(model.quantization)
    progress = _of_weights(on_progress)
    model.load(read_weights(files, dtype, progress, keep))
    num_pages = _num_pages(start, files.config, torch.bfloat16)
    table = _cos_sin_table(start, files.config, num_pages)
    model.finish(
        table,
        page_size=start.page_size,
        num_pages=num_pages,
        max_tokens=start.max_num_batched_tokens,
    )
    return num_pages


def _load_torch(
    start: Start, files: ModelFiles, dtype: torch.dtype, on_progress: OnProgress
) -> tuple[CpuModel, int]:
    config = files.config
    decoder = build_model(config, load_weights(files, dtype, _of_weights(on_progress)))
    num_pages = _num_pages(start, config, dtype)
    attention = TorchCpuAttention(
        _cache_shape(start, config, dtype, num_pages),
        config.num_heads,
        _cos_sin_table(start, config, num_pages),
        config.windows,
    )
    return TorchModel(decoder, attention), num_pages


def _num_pages(start: Start, config: ModelConfig, dtype: torch.dtype) -> int:
    bytes_per_page = _cache_shape(start, config, dtype, 1).bytes_per_page
    available = Machine().memory()[1]
    return choose_num_pages(start, bytes_per_page, start.max_model_len, available)


def _cache_shape(
    start: Start, config: ModelConfig, dtype: torch.dtype, num_pages: int
) -> CacheShape:
    return CacheShape(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=start.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def _cos_sin_table(start: Start, config: ModelConfig, num_pages: int) -> torch.Tensor:
    rows = min(start.max_model_len, num_pages * start.page_size)
    return cos_sin_table(config, start.max_model_len, rows)


def _of_weights(on_progress: OnProgress) -> Callable[[int, int], None]:
    return lambda done, total: on_progress("weights", done, total)

"""Loading a model on a GPU: weights first, then a step to see what it needs, then the KV cache.

The cache gets what the budget of ``--gpu-memory-utilization`` leaves beside the weights, the
largest step's activations and the CUDA graphs. The largest step is run to measure it, over a cache
that is just large enough; graphs are estimated, for they can only be captured over the real one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator

import attrs
import torch

from gpu.attention import CacheShape
from gpu.attention.kv_cache import bytes_per_page
from gpu.cuda.assembly import ServingLimits, assemble, attention_limits, cache_shape
from gpu.cuda.device import CudaDevice, Gpu, is_out_of_memory
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.graphs import ladder, sharing_ladder
from gpu.cuda.model_kernels import model_kernels
from gpu.cuda.speculation import SpeculativeExecutor
from gpu.executor import Executor
from gpu.kernels import MOST_BLOCKS
from gpu.kernels.attention_tile import PAGE_SIZES, check_attention_arguments
from gpu.kernels.nvrtc import KernelBuildError
from gpu.loading.loaded_model import (
    Loaded,
    OnProgress,
    choose_num_threads,
    of_weights,
    unseen,
    warm_up,
)
from gpu.loading.memory import (
    GRAPHS_DONT_FIT,
    GpuMemory,
    cache_doesnt_fit,
    choose_num_gpu_pages,
    choose_num_host_pages,
    graph_bytes,
    step_doesnt_fit,
)
from gpu.loading.step_measuring import measure_steps
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.registry import build_model
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.prompt_logprobs import peak_bytes
from gpu.slots import SlotTable
from gpu.weights.expected import expected_tensors
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Start

# Norms, projections, attention with its merge, gate: what a layer launches, rounded up.
LAUNCHES_PER_LAYER = 14
# Two for each of a layer's four products.
LAUNCHES_OF_ADAPTERS = 8
# Tokens are the second dimension of some grids, which goes no further.
MOST_BATCHED_TOKENS = MOST_BLOCKS[1]
# How long a new worker waits for the memory of the one that it replaces: half a minute.
MEMORY_LOOKS = 150
MEMORY_LOOK_SECONDS = 0.2
# What others that use the GPU may have taken meanwhile without being waited for.
MEMORY_SLACK = 64 << 20

_log = logging.getLogger("gpu.loading")


def load_on_gpu(
    start: Start,
    files: ModelFiles,
    dtype: str,
    device: str,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model on ``device``, such as ``cuda:0``; see :func:`load_model`."""
    torch.set_num_threads(choose_num_threads(start.num_threads))
    torch.set_float32_matmul_precision("highest")
    try:
        gpu = CudaDevice(torch.device(device))
    except KernelBuildError as error:
        raise ModelLoadError(f"the GPU can't be used: {error}") from error
    return load_model(gpu, start, files, getattr(torch, dtype), on_progress, adjuster)


def load_model(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    on_progress: OnProgress,
    adjuster: Adjuster | None = None,
) -> Loaded:
    """Load a model and give it all that it may have of the GPU's memory.

    Args:
        gpu: where to.
        start: limits, all chosen but the number of pages.
        files: of the model.
        dtype: bfloat16 or float16.
        on_progress: called often, with a stage, how much of it is done and of how much.
        adjuster: says what is done to logits before a token is drawn; nothing if it is None.

    Raises:
        ModelLoadError: the model can't be served so; one line says why and what to do.
    """
    _check_limits(start)
    config = files.native
    free, total = _wait_for_memory(gpu, start.free_memory, on_progress)
    memory = GpuMemory(total=total, free=free, utilization=start.gpu_memory_utilization)
    memory.check_weights(_weight_bytes(config, dtype))
    limits = _limits(start, num_pages=0)
    with _refusing_shapes():
        _build_kernels(gpu, config, limits, dtype, on_progress, start.max_lora_rank > 0)
    with _explaining(lambda: memory.weights_dont_fit(_weight_bytes(config, dtype))):
        model = _load_weights(gpu, files, dtype, on_progress)
    with _refusing_shapes():
        in_use, activations = _measure(gpu, model, limits, free, on_progress)
    # How many tokens an expert gets is known on the device only, and a graph's products have fixed
    # numbers of rows: a step with experts is launched product by product.
    captures = not start.enforce_eager and config.experts is None
    if captures:
        in_use += _graph_bytes(config, limits, activations, start.max_lora_rank > 0)
    limits = _with_pages(start, memory, model, limits, in_use)
    with _explaining(lambda: cache_doesnt_fit(limits.num_pages)):
        loras = _adapter_slots(gpu, model, start)
        executor, slots = assemble(gpu.loader, model, limits, gpu.timeline(), adjuster, loras)
    if captures:
        _capture(gpu, executor, limits, on_progress)
    return Loaded(
        executor=_drafting(executor, slots, start, _max_decode_rows(limits)),
        slots=slots,
        num_pages=limits.num_pages,
        num_host_pages=limits.num_host_pages,
        device_name=gpu.name,
        computing=f"CUDA kernels, weights in {str(dtype).removeprefix('torch.')}",
        free_memory=free,
        read_weights=lambda files: _read_again(model, files, dtype),
        adapters=None if loras is None else loras.store,
        max_row_tokens=slots.max_row_tokens,
    )


def _capture(
    gpu: Gpu, executor: CudaExecutor, limits: ServingLimits, on_progress: OnProgress
) -> None:
    with _explaining(lambda: GRAPHS_DONT_FIT):
        executor.capture(
            gpu.capturer(),
            _max_decode_rows(limits),
            lambda done, total: on_progress("CUDA graphs", done, total),
        )


def _drafting(executor: CudaExecutor, slots: SlotTable, start: Start, max_rows: int) -> Executor:
    """Return an executor that drafts tokens over ``executor``, if ``start`` asks for drafts."""
    if start.speculative is None:
        return executor
    slots.max_row_tokens = start.speculative.max_row_tokens
    times = measure_steps(executor, slots, start.page_size, max_rows)
    return SpeculativeExecutor(executor, Drafter(start.speculative, times), max_rows)


def _with_pages(
    start: Start, memory: GpuMemory, model: Decoder, limits: ServingLimits, in_use: int
) -> ServingLimits:
    """Return ``limits`` with the pages that fit beside ``in_use`` bytes and the adapters."""
    in_use += AdapterSlots.device_bytes(
        model.config,
        start.max_lora_rank,
        model.dtype,
        start.max_loras,
        max_tokens=limits.max_num_batched_tokens,
    )
    page_bytes = bytes_per_page(_cache_shape(model, limits))
    return attrs.evolve(
        limits,
        num_pages=choose_num_gpu_pages(
            start,
            memory,
            in_use=in_use,
            bytes_per_page=page_bytes,
            max_model_len=start.max_model_len,
        ),
        num_host_pages=choose_num_host_pages(start, page_bytes, Machine().memory()[1]),
    )


def _adapter_slots(gpu: Gpu, model: Decoder, start: Start) -> AdapterSlots | None:
    """Return room for the adapters of a step; None if none are served."""
    if start.max_lora_rank == 0:
        return None
    return AdapterSlots(
        model.config, start.max_lora_rank, model.dtype, gpu.loader.device, start.max_loras
    )


def _read_again(model: Decoder, files: ModelFiles, dtype: torch.dtype) -> Callable[[], None]:
    """Read all weights into the host's memory: on the GPU there is room for one set only."""
    weights = list(load_weights(files, dtype, of_weights(unseen)))

    def swap() -> None:
        model.overwrite(weights)
        # Steps to come are launched from other streams than the copies.
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return swap


def _wait_for_memory(gpu: Gpu, expected: int, on_progress: OnProgress) -> tuple[int, int]:
    """Bytes free and in all, once about ``expected`` of them are free, or the wait is over.

    The driver frees the memory of a killed worker with a delay. A worker that loads earlier finds
    no room, or makes do with a smaller cache.
    """
    for look in range(MEMORY_LOOKS):
        free, total = gpu.memory()
        if free >= expected - MEMORY_SLACK:
            return free, total
        on_progress("freeing memory", look, MEMORY_LOOKS)
        time.sleep(MEMORY_LOOK_SECONDS)
    _log.warning("%d MiB of the GPU's memory aren't free again", (expected - free) >> 20)
    return gpu.memory()


def _check_limits(start: Start) -> None:
    if start.page_size not in PAGE_SIZES:
        raise ModelLoadError(
            f"--block-size {start.page_size} is not served on a GPU: use 16, 32 or 64"
        )
    if start.max_num_batched_tokens > MOST_BATCHED_TOKENS:
        raise ModelLoadError(
            f"--max-num-batched-tokens {start.max_num_batched_tokens} is more than a step on a GPU "
            f"may have: use at most {MOST_BATCHED_TOKENS}"
        )


def _limits(start: Start, *, num_pages: int) -> ServingLimits:
    drafting = 1 if start.speculative is None else start.speculative.max_row_tokens
    return ServingLimits(
        max_model_len=start.max_model_len,
        # Drafts are rows of their own: there is room for those of one sequence at least.
        max_num_seqs=max(start.max_num_seqs, drafting),
        max_num_batched_tokens=start.max_num_batched_tokens,
        page_size=start.page_size,
        num_pages=num_pages,
        kv_cache_dtype=start.kv_cache_dtype,
        max_logprobs=start.max_logprobs,
        logprobs_mode=start.logprobs_mode,
        batch_invariant_attention=start.deterministic,
        drafts=start.speculative is not None,
    )


def _build_kernels(
    gpu: Gpu,
    config: ModelConfig,
    limits: ServingLimits,
    dtype: torch.dtype,
    on_progress: OnProgress,
    serves_adapters: bool,
) -> None:
    shape = cache_shape(config, limits, dtype, gpu.loader.device)
    check_attention_arguments(
        dtype=dtype,
        cache_dtype=shape.dtype,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=limits.page_size,
    )
    may_share = attention_limits(config, limits, gpu.loader.num_multiprocessors).may_share
    sources = model_kernels(
        config,
        dtype=dtype,
        cache_dtype=shape.dtype,
        may_share=may_share,
        serves_adapters=serves_adapters,
    )
    try:
        gpu.build(sources, lambda done, total: on_progress("kernels", done, total))
    except KernelBuildError as error:
        raise ModelLoadError(f"the kernels can't be built: {error}") from error


def _load_weights(
    gpu: Gpu, files: ModelFiles, dtype: torch.dtype, on_progress: OnProgress
) -> Decoder:
    """Return the model, each of its tensors moved to the GPU as it is read."""
    with _refusing_shapes():
        operations = CudaOperations(
            gpu.loader,
            hidden_size=files.native.hidden_size,
            mlp_sizes=files.native.mlp_sizes,
            dtype=dtype,
        )
    weights = load_weights(files, dtype, of_weights(on_progress))
    on_gpu = ((name, tensor.to(gpu.loader.device)) for name, tensor in weights)
    return build_model(files.native, on_gpu, operations)


def _measure(
    gpu: Gpu, model: Decoder, limits: ServingLimits, free: int, on_progress: OnProgress
) -> tuple[int, int]:
    """Run the largest step over a cache that just holds it.

    ``free`` is what was free before the weights. Returns the bytes in use then, without the cache
    and with the step's activations, and the activations alone.
    """
    num_rows = _max_decode_rows(limits)
    length = min(limits.max_num_batched_tokens // num_rows, limits.max_model_len)
    num_pages = num_rows * -(-length // limits.page_size)
    limits = attrs.evolve(limits, num_pages=num_pages)
    on_progress("memory", 0, 1)
    with _explaining(lambda: step_doesnt_fit(limits.max_num_batched_tokens)):
        executor, slots = assemble(gpu.loader, model, limits, gpu.timeline())
        activations = gpu.peak_of(
            lambda: warm_up(executor, slots, [length] * num_rows, limits.page_size)
        )
    # Prompts are reported on when the activations of the forward pass are free again.
    scoring = peak_bytes(model.config.vocab_size, limits.max_num_batched_tokens)
    activations = max(activations, scoring)
    held = free - gpu.memory()[0] - num_pages * bytes_per_page(_cache_shape(model, limits))
    on_progress("memory", 1, 1)
    return held + activations, activations


def _cache_shape(model: Decoder, limits: ServingLimits) -> CacheShape:
    return cache_shape(model.config, limits, model.dtype, model.device)


def _graph_bytes(
    config: ModelConfig, limits: ServingLimits, activations: int, serves_adapters: bool
) -> int:
    num_rows = _max_decode_rows(limits)
    plain = len(ladder(num_rows))
    sizes = plain + len(sharing_ladder(num_rows)) + (plain if serves_adapters else 0)
    of_layer = LAUNCHES_PER_LAYER + (LAUNCHES_OF_ADAPTERS if serves_adapters else 0)
    return graph_bytes(2 * sizes, of_layer * config.num_layers, activations)


def _max_decode_rows(limits: ServingLimits) -> int:
    """Return the most rows of one token that a step may have."""
    return min(limits.max_num_seqs, limits.max_num_batched_tokens)


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(config).values()) * dtype.itemsize


@contextlib.contextmanager
def _explaining(line: Callable[[], str]) -> Iterator[None]:
    """Running out of the GPU's memory in the block is an error of this one line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(line()) from error


@contextlib.contextmanager
def _refusing_shapes() -> Iterator[None]:
    """Yield a kernel that isn't made for the model says so in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ModelLoadError(
            f"this model is not served so on a GPU: {error}; --device cpu may serve it"
        ) from error

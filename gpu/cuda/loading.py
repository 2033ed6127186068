"""Loading a model on a GPU: weights first, then a step to see what it needs, then the KV cache.

The cache gets what the budget of ``--gpu-memory-utilization`` leaves beside the weights, the
largest step's activations and the CUDA graphs. The largest step is run to measure it, over a cache
that is just large enough; graphs are estimated, for they can only be captured over the real one.
All of this is done for a draft model, too, whose cache has as many pages.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import attrs
import torch

from gpu.cuda.assembly import ServingLimits, assemble
from gpu.cuda.device import CudaDevice, Gpu
from gpu.cuda.draft_model import CudaDraftModel
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.model_to_load import ModelToLoad, build_kernels, explaining, measure
from gpu.cuda.speculation import SpeculativeExecutor
from gpu.executor import PagedExecutor
from gpu.kernels import MOST_BLOCKS
from gpu.kernels.attention_tile import PAGE_SIZES
from gpu.kernels.nvrtc import KernelBuildError
from gpu.loading.draft_files import open_draft_files
from gpu.loading.loaded_model import Loaded, OnProgress, choose_num_threads, of_weights, unseen
from gpu.loading.memory import (
    GRAPHS_DONT_FIT,
    GpuMemory,
    cache_doesnt_fit,
    choose_num_gpu_pages,
    choose_num_host_pages,
)
from gpu.loading.step_measuring import measure_steps
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.draft_model import MAX_CAUGHT_UP, DraftModelSource
from gpu.sampling.drafting.drafter import Drafter
from gpu.slots import SlotTable
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Start

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
    served = ModelToLoad(
        files=files, limits=_limits(start), dtype=dtype, serves_adapters=start.max_lora_rank > 0
    )
    models = [served, *_draft_models(start, served)]
    free, total = _wait_for_memory(gpu, start.free_memory, on_progress)
    memory = GpuMemory(total=total, free=free, utilization=start.gpu_memory_utilization)
    weight_bytes = sum(each.weight_bytes for each in models)
    memory.check_weights(weight_bytes)
    build_kernels(gpu, models, on_progress)
    with explaining(lambda: memory.weights_dont_fit(weight_bytes)):
        decoders = [each.load(gpu.loader, on_progress) for each in models]
    in_use, activations = measure(gpu, models, decoders, free, on_progress)
    captured = [each for each in models if each.captures and not start.enforce_eager]
    # The graphs of all models share one pool of activations.
    in_use += sum(each.graph_bytes(activations if each is captured[0] else 0) for each in captured)
    models = _with_pages(start, memory, models, in_use, gpu.loader.device)
    executors, slots, loras = _assemble(gpu, start, models, decoders, adjuster)
    if captured:
        _capture(gpu, models, executors, on_progress)
    return Loaded(
        executor=_drafting(start, models, executors, slots),
        slots=slots,
        num_pages=models[0].limits.num_pages,
        num_host_pages=models[0].limits.num_host_pages,
        device_name=gpu.name,
        computing=f"CUDA kernels, weights in {str(dtype).removeprefix('torch.')}",
        free_memory=free,
        read_weights=lambda files: _read_again(decoders[0], files, dtype),
        adapters=None if loras is None else loras.store,
        max_row_tokens=slots.max_row_tokens,
    )


def _draft_models(start: Start, served: ModelToLoad) -> list[ModelToLoad]:
    """Return the draft model, if there is one."""
    files = open_draft_files(start)
    if files is None:
        return []
    limits = attrs.evolve(
        served.limits,
        max_num_batched_tokens=min(served.limits.max_num_batched_tokens, MAX_CAUGHT_UP),
        drafts=False,
    )
    return [
        ModelToLoad(
            files=files,
            limits=limits,
            dtype=served.dtype,
            serves_adapters=False,
            is_draft_model=True,
        )
    ]


def _assemble(
    gpu: Gpu,
    start: Start,
    models: Sequence[ModelToLoad],
    decoders: Sequence[Decoder],
    adjuster: Adjuster | None,
) -> tuple[list[CudaExecutor], SlotTable, AdapterSlots | None]:
    """Return an executor for each model, and the slots and the adapters of the first one."""
    limits = models[0].limits
    with explaining(lambda: cache_doesnt_fit(limits.num_pages)):
        loras = _adapter_slots(gpu, decoders[0], start)
        timeline = gpu.timeline()
        executor, slots = assemble(gpu.loader, decoders[0], limits, timeline, adjuster, loras)
        others = [
            assemble(gpu.loader, decoder, each.limits, timeline, slots=slots)[0]
            for each, decoder in zip(models[1:], decoders[1:], strict=True)
        ]
    return [executor, *others], slots, loras


def _capture(
    gpu: Gpu,
    models: Sequence[ModelToLoad],
    executors: Sequence[CudaExecutor],
    on_progress: OnProgress,
) -> None:
    """Capture the graphs of ``models`` that have any."""
    with explaining(lambda: GRAPHS_DONT_FIT):
        capturer = gpu.capturer()
        for each, executor in zip(models, executors, strict=True):
            stage = "CUDA graphs of the draft model" if each.is_draft_model else "CUDA graphs"
            if each.captures:
                executor.capture(
                    capturer, each.max_decode_rows, functools.partial(on_progress, stage)
                )


def _drafting(
    start: Start,
    models: Sequence[ModelToLoad],
    executors: Sequence[CudaExecutor],
    slots: SlotTable,
) -> PagedExecutor:
    """Return an executor that drafts tokens, if ``start`` asks for drafts; else the only one."""
    if start.speculative is None:
        return executors[0]
    slots.max_row_tokens = start.speculative.max_row_tokens
    sizes = [each.max_decode_rows for each in models]
    times = [
        measure_steps(executor, slots, start.page_size, size)
        for executor, size in zip(executors, sizes, strict=True)
    ]
    if len(models) == 1:
        return SpeculativeExecutor(executors[0], Drafter(start.speculative, times[0]), sizes[0])
    draft_model, limits = CudaDraftModel(executors[1], sizes[1]), models[1].limits
    source = DraftModelSource(
        draft_model,
        slots,
        vocab_size=min(each.config.vocab_size for each in models),
        page_size=limits.page_size,
        num_pages=limits.num_pages + limits.num_host_pages,
        max_tokens=limits.max_num_batched_tokens,
        step_times=times[1],
    )
    drafter = Drafter(start.speculative, times[0], source)
    return SpeculativeExecutor(executors[0], drafter, sizes[0], draft_model)


def _with_pages(
    start: Start,
    memory: GpuMemory,
    models: Sequence[ModelToLoad],
    in_use: int,
    device: torch.device,
) -> list[ModelToLoad]:
    """Return ``models`` with the pages that fit beside ``in_use`` bytes and the adapters.

    A page has room in the cache of each model.
    """
    in_use += AdapterSlots.device_bytes(
        models[0].config,
        start.max_lora_rank,
        models[0].dtype,
        start.max_loras,
        max_tokens=start.max_num_batched_tokens,
    )
    page_bytes = sum(each.page_bytes(device) for each in models)
    num_pages = choose_num_gpu_pages(
        start,
        memory,
        in_use=in_use,
        bytes_per_page=page_bytes,
        max_model_len=start.max_model_len,
    )
    num_host_pages = choose_num_host_pages(start, page_bytes, Machine().memory()[1])
    return [
        attrs.evolve(
            each,
            limits=attrs.evolve(each.limits, num_pages=num_pages, num_host_pages=num_host_pages),
        )
        for each in models
    ]


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


def _limits(start: Start) -> ServingLimits:
    drafting = 1 if start.speculative is None else start.speculative.max_row_tokens
    return ServingLimits(
        max_model_len=start.max_model_len,
        # Drafts are rows of their own: there is room for those of one sequence at least.
        max_num_seqs=max(start.max_num_seqs, drafting),
        max_num_batched_tokens=start.max_num_batched_tokens,
        page_size=start.page_size,
        num_pages=0,
        kv_cache_dtype=start.kv_cache_dtype,
        max_logprobs=start.max_logprobs,
        logprobs_mode=start.logprobs_mode,
        batch_invariant_attention=start.deterministic,
        drafts=start.speculative is not None,
    )

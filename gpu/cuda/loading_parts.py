"""Loading what a rank has of a model on its GPU; with one rank that is the whole model.

Weights come first, then a step to see what it needs, then the KV cache. The cache gets what the
budget of ``--gpu-memory-utilization`` leaves beside the weights, the largest step's activations and
the CUDA graphs. The largest step is run to measure it, over a cache that is just large enough;
graphs are estimated, for they can only be captured over the real one. All of this is done for a
draft model, too, whose cache has as many pages. Ranks have as many pages as fit on each of them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

import attrs
import torch

from gpu.cuda.assembly import ServingLimits
from gpu.cuda.device import CudaDevice, Gpu
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.forward import ForwardPass
from gpu.cuda.model_to_load import ModelToLoad, PrepareStep, build_kernels, explaining, measure
from gpu.cuda.ranks import SoleRank
from gpu.kernels import MOST_BLOCKS
from gpu.kernels.attention_tile import PAGE_SIZES
from gpu.kernels.nvrtc import KernelBuildError
from gpu.loading.draft_files import open_draft_files
from gpu.loading.loaded_model import OnProgress
from gpu.loading.memory import (
    GRAPHS_DONT_FIT,
    GpuMemory,
    choose_num_gpu_pages,
    choose_num_host_pages,
)
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.ranks import Alone, Ranks
from gpu.sampling.drafting.draft_model import MAX_CAUGHT_UP
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


def open_gpu(device: str, threads: int) -> Gpu:
    """Return the GPU of this process, which works with so many threads from now on.

    Raises:
        ModelLoadError: It can't be used.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    try:
        return CudaDevice(torch.device(device))
    except KernelBuildError as error:
        raise ModelLoadError(f"the GPU can't be used: {error}") from error


def join_group(start: Start, number: int, rendezvous: str, device: str) -> Ranks:
    """Return the ranks of the stage of rank ``number``, whose GPU is ``device``.

    Block until all ranks of the worker are there, if a stage has several.
    """
    size = start.tensor_parallel_size
    if size == 1:
        return Alone()
    gpu = torch.device(device)
    return RankGroup(rendezvous, number, size, start.pipeline_parallel_size, gpu=gpu)


def load_parts(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    rank: SoleRank,
    on_progress: OnProgress,
    prepare: PrepareStep,
) -> tuple[list[ModelToLoad], list[Decoder], int]:
    """Load what ``rank`` has of a model, and of its draft model; choose the number of pages.

    ``prepare`` prepares the largest step, with which memory is measured. Also return the bytes that
    were free before on each rank.

    Raises:
        ModelLoadError: as :func:`load_model` does, on all ranks.
    """
    rank.check_alike(gpu.loader.num_multiprocessors, "multiprocessors")
    models, decoders, memory = rank.agreed(
        lambda: _load_weights(gpu, start, files, dtype, rank, on_progress)
    )
    with rank.in_step():
        in_use, activations = measure(gpu, models, decoders, memory.free, on_progress, prepare)
    captured = [each for each in models if each.captures and not start.enforce_eager]
    # The graphs of all models share one pool of activations.
    in_use += sum(each.graph_bytes(activations if each is captured[0] else 0) for each in captured)
    models = _with_pages(start, memory, models, in_use, gpu.loader.device, rank)
    return models, decoders, rank.least(memory.free)


def _load_weights(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    rank: SoleRank,
    on_progress: OnProgress,
) -> tuple[list[ModelToLoad], list[Decoder], GpuMemory]:
    """Return the models, those without a number of pages yet, and the memory before loading."""
    _check_limits(start)
    served = ModelToLoad(
        files=files,
        limits=_limits(start),
        dtype=dtype,
        serves_adapters=start.max_lora_rank > 0,
        rank=rank,
    )
    models = [served, *_draft_models(start, served)]
    free, total = _wait_for_memory(gpu, start.free_memory, on_progress)
    memory = GpuMemory(total=total, free=free, utilization=start.gpu_memory_utilization)
    weight_bytes = sum(each.weight_bytes for each in models)
    memory.check_weights(weight_bytes)
    build_kernels(gpu, models, on_progress)
    with explaining(lambda: memory.weights_dont_fit(weight_bytes)):
        return models, [each.load(gpu.loader, on_progress) for each in models], memory


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


def _with_pages(
    start: Start,
    memory: GpuMemory,
    models: Sequence[ModelToLoad],
    in_use: int,
    device: torch.device,
    rank: SoleRank,
) -> list[ModelToLoad]:
    """Return ``models`` with the pages that fit beside ``in_use`` bytes and the adapters.

    A page has room in the cache of each model. The ranks have as many as fit on each of them.
    """
    in_use += AdapterSlots.device_bytes(
        models[0].config,
        start.max_lora_rank,
        models[0].dtype,
        start.max_loras,
        max_tokens=start.max_num_batched_tokens,
    )
    page_bytes = sum(each.page_bytes(device) for each in models)
    of_ranks = sum(each.page_bytes_of_ranks(device) for each in models)
    num_pages, num_host_pages = rank.agreed(
        lambda: (
            choose_num_gpu_pages(
                start,
                memory,
                in_use=in_use,
                bytes_per_page=page_bytes,
                bytes_of_ranks=of_ranks,
                max_model_len=start.max_model_len,
            ),
            choose_num_host_pages(start, of_ranks, Machine().memory()[1]),
        )
    )
    num_pages, num_host_pages = rank.least(num_pages), rank.least(num_host_pages)
    return [
        attrs.evolve(
            each,
            limits=attrs.evolve(each.limits, num_pages=num_pages, num_host_pages=num_host_pages),
        )
        for each in models
    ]


def make_adapter_slots(
    gpu: Gpu, model: Decoder, start: Start, rank: SoleRank
) -> AdapterSlots | None:
    """Return room for the adapters of a step; None if none are served."""
    if start.max_lora_rank == 0:
        return None
    return AdapterSlots(
        model.config,
        start.max_lora_rank,
        model.dtype,
        gpu.loader.device,
        start.max_loras,
        rank.adapter_store,
    )


def capture(
    gpu: Gpu,
    models: Sequence[ModelToLoad],
    executors: Sequence[CudaExecutor | ForwardPass],
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

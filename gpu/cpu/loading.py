"""Loading a model on the CPU: compiled kernels where they can compute it, else torch.

The compiled kernels compute in bfloat16 and take weights in 4 or 8 bits; torch computes everything
else, float32 above all, and everything where there is no compiler or not the instructions. It is
imported where it is needed and nowhere else: that takes a second and 150 MiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import attrs

from gpu._util.page_format import PageFormat
from gpu.cpu.cache_pages import bytes_per_page, choose_cpu_pages
from gpu.cpu.cached_model import CachedModel
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import (
    NoKernels,
    NotCompiled,
    give_cache,
    load_compiled,
    make_compiled,
    read_other,
)
from gpu.cpu.draft_model import CpuDraftModel
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.library import load_library
from gpu.cpu.memory_limit import StoredModel, stored_by_torch, within_limit
from gpu.cpu.model import CpuSampler
from gpu.cpu.page_format import CompiledPages
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cpu.rank_loading import lead_compiled, threads_of_rank
from gpu.cpu.rank_weights import LeadingWeights
from gpu.cpu.sampling import CompiledSampler
from gpu.loading.draft_files import cannot_draft, open_draft_files
from gpu.loading.loaded_model import Loaded, OnProgress, option_that_moves_pages
from gpu.loading.step_measuring import measure_steps
from gpu.loading.weight_swap import ModelWeights, ReadWeights
from gpu.models.kv_prefix import PlainPages
from gpu.models.parallel.model_part import parts_in_words, stages_of_worker
from gpu.models.parallel.stage_times import StageTimes
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.draft_model import DraftModelSource
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import SlotTable
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.protocol.embeddings import NUMPY_DTYPES
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.number_formats import ROUNDING
from trioserve.protocol.wire import Start

_SLOWER = "torch computes in place of the compiled kernels, which are 2 to 4 times as fast"


def load_on_cpu(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model and give it a KV cache.

    Args:
        start: limits, all chosen but the number of pages.
        dtype: bfloat16 or float32.
        on_progress: called often, with a stage, how much of it is done and of how much.
        adjuster: says what is done to logits before a token is drawn.

    Raises:
        ModelLoadError: the model can't be served so; one line says why and what to do.
    """
    refuse_cache_format(start)
    draft_files = open_draft_files(start)
    if start.logits_processors:
        import torch  # which these are written for; it is to share the cores as all else does

        torch.set_num_threads(threads)
    of_rank = threads_of_rank(start, threads)
    try:
        compiled = make_compiled(start, files.native, dtype, of_rank, on_progress)
    except NotCompiled as reason:
        start = within_limit(start, stored_by_torch(files, dtype))
        whole = _by_torch(start, files, dtype, threads, on_progress, reason)
    else:
        stored = StoredModel(files=files, number_bytes=2, quantization=compiled.quantization)
        start = within_limit(start, stored)
        whole = _by_kernels(compiled, start, files, dtype, threads, on_progress, draft_files)
    cached = whole.cached
    slots = _slot_table(start, files, whole)
    executor = _executor(whole, slots, start, files.native, adjuster)
    if start.speculative is not None:
        drafts: DraftModelSource | None = None
        if draft_files is not None:
            drafts = _draft_model(start, draft_files, dtype, threads, on_progress, whole, slots)
        times = _measure_steps(executor, slots, start)
        executor.drafter = Drafter(start.speculative, times, drafts)
    return Loaded(
        executor=executor,
        slots=slots,
        num_pages=cached.num_pages,
        num_host_pages=cached.num_host_pages,
        device_name=Machine().cpu_name(),
        computing=whole.computing,
        arithmetic=whole.arithmetic,
        lends_pages=whole.lends_pages,
        read_weights=cached.exchange(executor),
        make_weights=_weights_type(cached),
        warning=whole.warning,
        adapters=cached.model.adapters,
        max_row_tokens=slots.max_row_tokens,
        num_stages=start.pipeline_parallel_size,
    )


def _weights_type(
    cached: CachedModel,
) -> Callable[[Callable[[Path], ModelFiles], ReadWeights], ModelWeights[ModelFiles]]:
    if cached.link is None:
        return ModelWeights
    return functools.partial(LeadingWeights, cached.link)


def _slot_table(start: Start, files: ModelFiles, whole: _Whole) -> SlotTable:
    cached = whole.cached
    slots = SlotTable(
        num_pages=cached.num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=files.native.vocab_size,
        num_host_pages=cached.num_host_pages,
        embedding_width=files.native.hidden_size,
        max_row_tokens=1 if start.speculative is None else start.speculative.max_row_tokens,
    )
    if cached.model.adapters is not None:
        slots.adapters = cached.model.adapters
    if files.native.takes_keys:
        slots.kv_format = whole.page_format
    return slots


def _executor(
    whole: _Whole, slots: SlotTable, start: Start, config: ModelConfig, adjuster: Adjuster
) -> CpuExecutor:
    model, sampler, link = whole.cached.model, whole.sampler, whole.cached.link
    if link is None or link.stages is None:
        return CpuExecutor(model, sampler, slots, adjuster)
    times = StageTimes(stages_of_worker(start, config))
    size = config.hidden_size
    return PipelinedExecutor(model, sampler, slots, link, size, adjuster, times.add)


@attrs.frozen(kw_only=True)
class _Whole:
    """A model, and what draws from its logits."""

    cached: CachedModel
    sampler: CpuSampler
    computing: str
    """Field of :class:`~gpu.loading.loaded_model.Loaded`, as the next two."""
    arithmetic: str
    lends_pages: bool = True
    page_format: PageFormat | None = None
    """Format of the pages of one process; None if there are several."""
    warning: str = ""
    """Field of :class:`~trioserve.protocol.wire.Ready`."""


def _by_kernels(
    model: CompiledModel,
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    draft_files: ModelFiles | None,
) -> _Whole:
    """Return a compiled model. A draft model's keys and values count in the size of its cache."""
    config = files.native
    library = load_library(start.cpu_isa)
    draft_bytes = 0
    page_format: PageFormat | None = None
    if draft_files is not None:
        draft_bytes = bytes_per_page(_draft_start(start), draft_files.native, dtype)
    if start.num_ranks > 1:
        cached = lead_compiled(model, start, files, dtype, on_progress, draft_bytes)
    else:
        load_compiled(model, files, on_progress)
        of_page = bytes_per_page(start, config, dtype) + draft_bytes
        num_pages, num_host_pages = choose_cpu_pages(start, of_page)
        give_cache(model, start, num_pages, num_host_pages)
        cached = CachedModel(model, num_pages, num_host_pages, _exchange)
        page_format = CompiledPages(shape=config.kv_shape, page_size=start.page_size)
    slices = 0 if model.part is None else model.part.slices
    arithmetic = f"compiled kernels ({library.isa.name}), weights in {model.describe_weights()}"
    whole_experts = " of whole experts" if start.enable_expert_parallel else ""
    return _Whole(
        cached=cached,
        sampler=CompiledSampler(
            library,
            config.vocab_size,
            _threads_of_stage(start, threads),  # the other stages of this host compute meanwhile
            processed_logprobs=start.logprobs_mode == "processed",
        ),
        computing=arithmetic + parts_in_words(start, config, slices),
        arithmetic=arithmetic + (f", {slices} slices{whole_experts}" if slices else ""),
        page_format=page_format,
    )


def _threads_of_stage(start: Start, threads: int) -> int:
    return max(threads // start.pipeline_parallel_size, 1)


def _exchange(executor: CpuExecutor) -> ReadWeights:
    def read(files: ModelFiles) -> Callable[[], None]:
        assert isinstance(executor.model, CompiledModel)
        other = read_other(executor.model, files)
        return lambda: executor.replace_model(other)

    return read


def _by_torch(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    reason: NotCompiled,
) -> _Whole:
    """Return what the compiled kernels don't compute, for that ``reason``."""
    _check_torch_will_do(start, str(reason))
    computing = f"torch ({reason})" + parts_in_words(start, files.native)
    from gpu.cpu import torch_loading

    config = files.native
    page_format: PageFormat | None = None
    if start.num_ranks > 1:
        of_rank = threads_of_rank(start, threads)
        cached = torch_loading.lead_torch(start, files, dtype, of_rank, on_progress)
    else:
        decoder = torch_loading.load_decoder(files, dtype, threads, on_progress)
        num_pages, num_host_pages = choose_cpu_pages(start, bytes_per_page(start, config, dtype))
        attention = torch_loading.make_attention(start, decoder, num_pages, num_host_pages)
        model = torch_loading.make_model(decoder, attention, start.max_lora_rank)
        read = torch_loading.torch_exchange(model, dtype, threads)
        cached = CachedModel(model, num_pages, num_host_pages, lambda _: read)
        numbers = NUMPY_DTYPES["bfloat16" if dtype == "bfloat16" else "float32"]
        page_format = PlainPages(shape=config.kv_shape, page_size=start.page_size, numbers=numbers)
    return _Whole(
        cached=cached,
        sampler=torch_loading.make_sampler(start, config.vocab_size),
        computing=computing,
        arithmetic=computing,
        lends_pages=start.num_ranks == 1,
        page_format=page_format,
        warning=f"{_SLOWER}: {reason}" if isinstance(reason, NoKernels) else "",
    )


def _draft_model(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    whole: _Whole,
    slots: SlotTable,
) -> DraftModelSource:
    """Return the drafts of the model of ``files`` for the model of ``slots``, which are empty.

    Of several ranks, rank 0 has the draft model alone. It has the threads of a stage, because the
    other stages compute meanwhile.
    """
    slots.kv_format = None  # It would lack an adapter's keys and values.
    threads = _threads_of_stage(start, threads)
    start = _draft_start(start)
    try:
        model = make_compiled(start, files.native, dtype, threads, on_progress)
    except NotCompiled as reason:
        raise cannot_draft(files, str(reason)) from reason
    load_compiled(model, files, on_progress)
    give_cache(model, start, whole.cached.num_pages, whole.cached.num_host_pages)
    steps = _measure_steps(CpuExecutor(model, whole.sampler, slots), slots, start)
    return DraftModelSource(
        CpuDraftModel(model, slots),
        slots,
        vocab_size=min(whole.sampler.vocab_size, files.native.vocab_size),
        page_size=start.page_size,
        num_pages=whole.cached.num_pages + whole.cached.num_host_pages,
        max_tokens=start.max_num_batched_tokens,
        step_times=steps,
    )


def _draft_start(start: Start) -> Start:
    """Return what a draft model is loaded by."""
    assert start.speculative is not None
    return attrs.evolve(
        start,
        max_lora_rank=0,
        quantization=start.speculative.quantization,
        dtype="auto",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        num_nodes=1,
        pipeline_parallel_layers=[],
        tensor_parallel_slices=1,
        enable_expert_parallel=False,
    )


def _measure_steps(executor: CpuExecutor, slots: SlotTable, start: Start) -> StepTimes:
    max_rows = start.max_num_batched_tokens
    return measure_steps(executor, slots, start.page_size, max_rows, reported=True)


def refuse_cache_format(start: Start) -> None:
    """Refuse a KV cache in another format than the model's, which is for a GPU.

    Raises:
        ModelLoadError: one was asked for.
    """
    if start.kv_cache_dtype != "auto":
        raise ModelLoadError(
            f"a KV cache in {start.kv_cache_dtype} is not served on a CPU: "
            "leave --kv-cache-dtype at auto"
        )


def _check_torch_will_do(start: Start, reason: str) -> None:
    if start.quantization in ROUNDING:
        raise ModelLoadError(f"--quantization {start.quantization} can't be had: {reason}")
    if start.deterministic:
        raise ModelLoadError(f"--deterministic can't be had: {reason}")
    if start.speculative is not None:
        raise ModelLoadError(f"--speculative-config can't be had: {reason}")
    if start.tensor_parallel_slices > 1:
        slices = start.tensor_parallel_slices
        raise ModelLoadError(f"--tensor-parallel-slices {slices} can't be had: {reason}")
    if start.num_ranks > 1 and (option := option_that_moves_pages(start)):
        raise ModelLoadError(f"{option} can't be had with several ranks: {reason}")
    if start.cpu_isa != "auto":
        raise ModelLoadError(f"--cpu-isa {start.cpu_isa} can't be had: {reason}")

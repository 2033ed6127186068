"""Loading a model on the CPU: compiled kernels where they can compute it, else torch.

The compiled kernels compute in bfloat16 and take weights in 4 or 8 bits; torch computes everything
else, float32 above all, and everything where there is no compiler or not the instructions. It is
imported where it is needed and nowhere else: that takes a second and 150 MiB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel, obstacle_in, read_as
from gpu.cpu.draft_model import CpuDraftModel
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel, CpuSampler
from gpu.cpu.sampling import CompiledSampler
from gpu.loading.draft_files import cannot_draft, open_draft_files
from gpu.loading.loaded_model import Loaded, OnProgress, of_weights, unseen
from gpu.loading.memory import choose_num_host_pages, choose_num_pages, kv_bytes_per_page
from gpu.loading.step_measuring import measure_steps
from gpu.loading.weight_swap import ReadWeights
from gpu.models.rope import cos_sin_table_for
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.draft_model import DraftModelSource
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import SlotTable
from gpu.weights import read_weights
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.protocol.number_formats import ROUNDING
from trioserve.protocol.shipped_kernels import kernels_obstacle
from trioserve.protocol.wire import Start

_log = logging.getLogger("gpu.loading")

SLOWER = "torch computes in place of the compiled kernels, which are 2 to 4 times as fast"


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
        files: of the model.
        dtype: bfloat16 or float32.
        threads: how many compute.
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
    try:
        compiled = _compiled(start, files.native, dtype, threads, on_progress)
    except _NotCompiled as reason:
        whole = _by_torch(start, files, dtype, threads, on_progress, reason)
    else:
        whole = _by_kernels(compiled, start, files, dtype, threads, on_progress, draft_files)
    slots = _slot_table(start, files, whole)
    adapters = whole.model.adapters
    if adapters is not None:
        slots.adapters = adapters
    executor = CpuExecutor(whole.model, whole.sampler, slots, adjuster)
    if start.speculative is not None:
        drafts: DraftModelSource | None = None
        if draft_files is not None:
            drafts = _draft_model(start, draft_files, dtype, threads, on_progress, whole, slots)
        times = _measure_steps(executor, slots, start)
        executor.drafter = Drafter(start.speculative, times, drafts)
    return Loaded(
        executor=executor,
        slots=slots,
        num_pages=whole.num_pages,
        num_host_pages=whole.num_host_pages,
        device_name=Machine().cpu_name(),
        computing=whole.computing,
        read_weights=whole.exchange(executor),
        warning=whole.warning,
        adapters=adapters,
        max_row_tokens=slots.max_row_tokens,
    )


def _slot_table(start: Start, files: ModelFiles, whole: _Whole) -> SlotTable:
    return SlotTable(
        num_pages=whole.num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=files.native.vocab_size,
        num_host_pages=whole.num_host_pages,
        max_row_tokens=1 if start.speculative is None else start.speculative.max_row_tokens,
    )


@attrs.frozen(kw_only=True)
class _Whole:
    """A model that has its weights and its cache, and what draws from its logits."""

    model: CpuModel
    sampler: CpuSampler
    num_pages: int
    num_host_pages: int
    computing: str
    """Field of :class:`~gpu.loading.loaded_model.Loaded`."""
    exchange: Callable[[CpuExecutor], ReadWeights]
    """Returns the function that reads other weights for an executor, for a weight swap."""
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
    _load_weights(model, files, on_progress)
    bytes_per_page = _bytes_per_page(start, config, dtype)
    if draft_files is not None:
        bytes_per_page += _bytes_per_page(start, draft_files.native, dtype)
    num_pages, num_host_pages = choose_cpu_pages(start, bytes_per_page)
    _give_cache(model, start, num_pages, num_host_pages)

    def exchange(executor: CpuExecutor) -> ReadWeights:
        def read_again(files: ModelFiles) -> Callable[[], None]:
            # With a cache of its own: what is in the old one was computed with the old weights.
            other = _compiled(start, config, dtype, threads, unseen)
            _load_weights(other, files, unseen)
            _give_cache(other, start, num_pages, num_host_pages)
            return lambda: executor.replace_model(other)

        return read_again

    return _Whole(
        model=model,
        sampler=CompiledSampler(
            library,
            config.vocab_size,
            threads,
            processed_logprobs=start.logprobs_mode == "processed",
        ),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        computing=f"compiled kernels ({library.isa.name}), weights in {model.describe_weights()}",
        exchange=exchange,
    )


def _by_torch(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    reason: _NotCompiled,
) -> _Whole:
    """Return what the compiled kernels don't compute, for that ``reason``."""
    _check_torch_will_do(start, str(reason))
    from gpu.cpu import torch_loading

    config, size = files.native, start.tensor_parallel_size
    if size > 1:
        return _by_ranks(start, files, dtype, max(threads // size, 1), on_progress, reason)
    decoder = torch_loading.load_decoder(files, dtype, threads, on_progress)
    num_pages, num_host_pages = choose_cpu_pages(start, _bytes_per_page(start, config, dtype))
    attention = torch_loading.make_attention(start, decoder, num_pages, num_host_pages)
    model = torch_loading.make_model(decoder, attention, start.max_lora_rank)
    return _Whole(
        model=model,
        sampler=torch_loading.make_sampler(start, config.vocab_size),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        computing=f"torch ({reason})",
        exchange=lambda _: torch_loading.torch_exchange(model, dtype, threads),
        warning=f"{SLOWER}: {reason}" if isinstance(reason, _NoKernels) else "",
    )


def _by_ranks(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    reason: _NotCompiled,
) -> _Whole:
    """Return a model of which this process and those that it starts have a part each."""
    from gpu.cpu import torch_loading
    from gpu.cpu.rank_processes import start_ranks
    from gpu.models.parallel.model_part import ModelPart
    from gpu.models.parallel.steps import GiveCache, encode_step

    size = start.tensor_parallel_size
    part = ModelPart(files.native, 0, size, start.enable_expert_parallel)
    group = start_ranks(start, dtype, threads)
    decoder = torch_loading.load_part(files, dtype, threads, on_progress, part, group)
    bytes_per_page = size * _bytes_per_page(start, decoder.config, dtype)
    num_pages, num_host_pages = choose_cpu_pages(start, bytes_per_page)
    group.send(encode_step(GiveCache(num_pages, num_host_pages)))
    attention = torch_loading.make_attention(start, decoder, num_pages, num_host_pages)
    return _Whole(
        model=torch_loading.make_leading_model(
            decoder, attention, start.max_lora_rank, part, group
        ),
        sampler=torch_loading.make_sampler(start, files.native.vocab_size),
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        computing=f"torch ({reason}), {size} ranks",
        exchange=lambda _: _keep_weights,
        warning=f"{SLOWER}: {reason}" if isinstance(reason, _NoKernels) else "",
    )


def _keep_weights(_: ModelFiles) -> Callable[[], None]:
    raise ModelLoadError("the weights of several ranks can't be exchanged: restart the server")


def _draft_model(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    whole: _Whole,
    slots: SlotTable,
) -> DraftModelSource:
    """Return the drafts of the model of ``files`` for the model of ``slots``, which are empty."""
    assert start.speculative is not None
    quantization = start.speculative.quantization
    start = attrs.evolve(start, max_lora_rank=0, quantization=quantization, dtype="auto")
    try:
        model = _compiled(start, files.native, dtype, threads, on_progress)
    except _NotCompiled as reason:
        raise cannot_draft(files, str(reason)) from reason
    _load_weights(model, files, on_progress)
    _give_cache(model, start, whole.num_pages, whole.num_host_pages)
    steps = _measure_steps(CpuExecutor(model, whole.sampler, slots), slots, start)
    return DraftModelSource(
        CpuDraftModel(model, slots),
        slots,
        vocab_size=min(whole.sampler.vocab_size, files.native.vocab_size),
        page_size=start.page_size,
        num_pages=whole.num_pages + whole.num_host_pages,
        max_tokens=start.max_num_batched_tokens,
        step_times=steps,
    )


def _measure_steps(executor: CpuExecutor, slots: SlotTable, start: Start) -> StepTimes:
    return measure_steps(executor, slots, start.page_size, start.max_num_batched_tokens)


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


class _NotCompiled(Exception):
    """Why the compiled kernels don't compute a model."""


class _NoKernels(_NotCompiled):
    """Why there are no compiled kernels on this machine, which could compute the model."""


def _compiled(
    start: Start, config: ModelConfig, dtype: str, threads: int, on_progress: OnProgress
) -> CompiledModel:
    """Return a model that wants its weights.

    Raises:
        _NotCompiled: torch has to compute it.
    """
    obstacle = obstacle_in(config)
    if obstacle is not None:
        raise _NotCompiled(f"the compiled kernels aren't made for {obstacle}")
    if dtype != "bfloat16":
        lacking = kernels_obstacle()
        if start.dtype == "auto" and lacking is not None:
            raise _NoKernels(lacking)
        raise _NotCompiled("the compiled kernels compute in bfloat16 only")
    if start.tensor_parallel_size > 1:
        raise _NoKernels("the compiled kernels compute whole models")
    try:
        library = load_library(
            start.cpu_isa, lambda done, total: on_progress("kernels", done, total)
        )
    except LibraryBuildError as error:
        raise _NoKernels(str(error)) from error
    quantization = start.quantization
    if quantization == "auto" and start.dtype != "auto":
        quantization = "none"
    return CompiledModel(library, config, quantization, threads, max_rank=start.max_lora_rank)


def _check_torch_will_do(start: Start, reason: str) -> None:
    if start.quantization in ROUNDING:
        raise ModelLoadError(f"--quantization {start.quantization} can't be had: {reason}")
    if start.deterministic:
        raise ModelLoadError(f"--deterministic can't be had: {reason}")
    if start.speculative is not None:
        raise ModelLoadError(f"--speculative-config can't be had: {reason}")
    if start.cpu_isa != "auto":
        raise ModelLoadError(f"--cpu-isa {start.cpu_isa} can't be had: {reason}")


def _load_weights(model: CompiledModel, files: ModelFiles, on_progress: OnProgress) -> None:
    dtype, keep = read_as(model.quantization)
    model.load(read_weights(files, dtype, of_weights(on_progress), keep))


def _give_cache(model: CompiledModel, start: Start, num_pages: int, num_host_pages: int) -> None:
    model.finish(
        cos_sin_table_for(model.config, start.max_model_len, num_pages * start.page_size),
        page_size=start.page_size,
        num_pages=num_pages + num_host_pages,
        max_tokens=start.max_num_batched_tokens,
    )


def _bytes_per_page(start: Start, config: ModelConfig, dtype: str) -> int:
    return kv_bytes_per_page(config, start.page_size, 2 if dtype == "bfloat16" else 4)


def choose_cpu_pages(start: Start, bytes_per_page: int) -> tuple[int, int]:
    """Pages of the cache, and those behind them that stand for the host's memory elsewhere.

    To be asked when the weights are there: the cache gets a share of what is left.

    Raises:
        ModelLoadError: there is no room for them.
    """
    available = Machine().memory()[1] // start.num_sharing
    num_pages = choose_num_pages(start, bytes_per_page, start.max_model_len, available)
    if num_pages * bytes_per_page > available:
        # No more than that, since what is free now says little of when the cache will be full.
        _log.warning(
            "the KV cache may grow to %d MiB, and %d MiB of memory are free",
            num_pages * bytes_per_page >> 20,
            available >> 20,
        )
    return num_pages, choose_num_host_pages(start, bytes_per_page, available)

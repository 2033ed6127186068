"""Everything that serves one model with kernels: step buffer, state, cache, attention, sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch

from gpu._util.page_format import PageFormat
from gpu.attention import CacheShape
from gpu.attention.kv_cache import FP8, KvCache
from gpu.cuda.adapters import CudaAdapters
from gpu.cuda.attention import CudaAttention
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.forward import ForwardPass
from gpu.cuda.ranks import SoleRank
from gpu.cuda.sampler import DeviceSampler
from gpu.cuda.stage_forward import StageForward
from gpu.cuda.state import DeviceState
from gpu.cuda.step_buffer import StepBuffer
from gpu.cuda.timeline import Timeline
from gpu.kernels import KernelLoader
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.models.kv_prefix import PlainPages
from gpu.models.parallel.model_part import ModelPart
from gpu.models.rope import cos_sin_table
from gpu.models.rotary_positions import axes_of
from gpu.sampling.adjustments import Adjuster
from gpu.slots import SlotTable
from trioserve.model_files import ModelConfig
from trioserve.protocol.embeddings import NUMPY_DTYPES


@attrs.frozen(kw_only=True)
class ServingLimits:
    """Limits of an executor; the options of the same names explain them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    kv_cache_dtype: str
    max_logprobs: int
    logprobs_mode: str
    batch_invariant_attention: bool
    num_host_pages: int = 0
    """Pages of the KV cache in the host's memory."""
    drafts: bool = False
    """Rows may have drafts; each step is then finished before the next one."""


def cache_shape(
    config: ModelConfig, limits: ServingLimits, dtype: torch.dtype, device: torch.device
) -> CacheShape:
    """Return the KV cache of a model that computes in ``dtype``."""
    return CacheShape(
        num_layers=config.num_layers,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=FP8 if limits.kv_cache_dtype == "fp8" else dtype,
        device=device,
    )


def attention_limits(
    config: ModelConfig,
    limits: ServingLimits,
    num_multiprocessors: int,
    part: ModelPart | None = None,
) -> AttentionLimits:
    """Return what the limits mean for attention on a device with so many multiprocessors.

    ``config`` is that of a ``part`` of a model, or of the whole. A step is packed once for all
    stages, so each of them has the windows of all layers.
    """
    return AttentionLimits(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=config.windows if part is None else part.whole.windows,
        max_rows=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_multiprocessors=num_multiprocessors,
        batch_invariant=limits.batch_invariant_attention,
        has_mrope=bool(config.mrope_section),
    )


def assemble(
    loader: KernelLoader,
    model: Decoder,
    limits: ServingLimits,
    timeline: Timeline,
    adjuster: Adjuster | None = None,
    adapter_slots: AdapterSlots | None = None,
    slots: SlotTable | None = None,
    rank: SoleRank | None = None,
) -> tuple[CudaExecutor, SlotTable]:
    """Return an executor for ``model``, and the slots with the block tables that it reads.

    ``adjuster`` adjusts logits before a token is drawn, ``adapter_slots`` hold the adapters that
    sequences may have; None for none. ``slots`` are another executor's; None makes new ones.
    ``rank`` is rank 0 of several; None for the only one.

    Raises:
        ValueError: the kernels aren't made for the model's shape.
    """
    rank = rank or SoleRank()
    forward = assemble_forward(loader, model, limits, rank, adapter_slots)
    sampler = DeviceSampler(
        loader,
        vocab_size=model.vocab_size,
        num_slots=limits.max_num_seqs,
        max_rows=limits.max_num_seqs,
        history=forward.state.history,
        max_logprobs=limits.max_logprobs,
        processed_logprobs=limits.logprobs_mode == "processed",
        appends=not limits.drafts,
    )
    if slots is None:
        width = model.config.hidden_size if rank.part is None else 0
        slots = slot_table(limits, model.vocab_size, width)
        if rank.part is None:
            slots.kv_format = _page_format(model.config, limits, model.dtype)
    if adapter_slots is not None:
        slots.adapters = adapter_slots.store
    executor = CudaExecutor(
        forward, sampler=sampler, slots=slots, timeline=timeline, rank=rank, adjuster=adjuster
    )
    return executor, slots


def assemble_forward(
    loader: KernelLoader,
    model: Decoder,
    limits: ServingLimits,
    rank: SoleRank,
    adapter_slots: AdapterSlots | None = None,
) -> ForwardPass:
    """Return the forward pass of ``model``, or of the part of it that ``rank`` has.

    Raises:
        ValueError: the kernels aren't made for the model's shape.
    """
    config = model.config
    max_rows, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    part = rank.part
    of_attention = attention_limits(config, limits, loader.num_multiprocessors, part)
    buffer = _step_buffer(loader, limits, of_attention, adapter_slots)
    state = DeviceState(
        loader,
        buffer,
        num_slots=max_rows,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
    )
    attention = _attention(loader, model, limits, of_attention, buffer, state)
    adapters = None
    if adapter_slots is not None:
        adapters = CudaAdapters(loader, buffer, adapter_slots, config)
    stage = None if part is None else part.stage
    make: Callable[..., ForwardPass] = ForwardPass
    if stage is not None:
        make = functools.partial(StageForward, stage=stage)
    return make(
        loader,
        model=model,
        attention=attention,
        state=state,
        buffer=buffer,
        ranks=rank.ranks,
        max_rows=max_rows if stage is None else 0,
        max_tokens=max_tokens,
        adapters=adapters,
    )


def slot_table(limits: ServingLimits, vocab_size: int, embedding_width: int = 0) -> SlotTable:
    """Return the slots of an executor with ``limits``."""
    return SlotTable(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        vocab_size=vocab_size,
        num_host_pages=limits.num_host_pages,
        embedding_width=embedding_width,
    )


def _page_format(
    config: ModelConfig, limits: ServingLimits, dtype: torch.dtype
) -> PageFormat | None:
    """Return the format of the pages; None if no keys and values are taken for them."""
    if limits.kv_cache_dtype == "fp8" or not config.takes_keys:
        return None
    numbers = {f"torch.{name}": each for name, each in NUMPY_DTYPES.items()}[str(dtype)]
    return PlainPages(shape=config.kv_shape, page_size=limits.page_size, numbers=numbers)


def _step_buffer(
    loader: KernelLoader,
    limits: ServingLimits,
    of_attention: AttentionLimits,
    adapter_slots: AdapterSlots | None,
) -> StepBuffer:
    """Return a buffer with room for everything that a step uploads."""
    max_tokens = limits.max_num_batched_tokens
    regions = {
        **ForwardPass.regions(limits.max_num_seqs, max_tokens),
        **of_attention.regions(),
        **DeviceState.regions(),
    }
    if adapter_slots is not None:
        regions |= CudaAdapters.regions(max_tokens, adapter_slots.count)
    return StepBuffer(loader.device, regions)


def _attention(
    loader: KernelLoader,
    model: Decoder,
    limits: ServingLimits,
    of_attention: AttentionLimits,
    buffer: StepBuffer,
    state: DeviceState,
) -> CudaAttention:
    """Return the model's attention over a KV cache of its own."""
    config, device = model.config, loader.device
    rows = limits.max_model_len
    if config.mrope_section:
        rows += limits.max_num_batched_tokens  # of the tokens of a step
    return CudaAttention(
        loader,
        buffer=buffer,
        block_tables=state.block_tables,
        cache=KvCache(cache_shape(config, limits, model.dtype, device), limits.num_host_pages),
        limits=of_attention,
        dtype=model.dtype,
        cos_sin=torch.from_numpy(cos_sin_table(config, limits.max_model_len, rows)).to(device),
        axes=axes_of(config),
    )

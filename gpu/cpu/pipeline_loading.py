"""Loading a model whose layers several processes compute one after the other, by torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.cpu import torch_loading
from gpu.cpu.cache_pages import choose_cpu_pages
from gpu.cpu.loading import (
    SLOWER,
    check_torch_will_do,
    keep_weights,
    refuse_cache_format,
)
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cpu.rank_processes import start_ranks
from gpu.cpu.torch_model import TorchModel
from gpu.loading.loaded_model import Loaded, OnProgress
from gpu.loading.memory import kv_bytes_per_page
from gpu.models.parallel.adapters import LeadingAdapters
from gpu.models.parallel.leading import LeadingAttention, LeadingDecoder
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.pipeline import LeadingStage, PipelineGroup
from gpu.models.parallel.stages import stages_of
from gpu.models.parallel.steps import GiveCache, encode_step
from gpu.sampling.adjustments import Adjuster
from gpu.slots import SlotTable
from trioserve.model_files import ModelFiles
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Start

_REASON = "the compiled kernels have all layers"


def load_pipeline(
    start: Start,
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model as :func:`gpu.cpu.loading.load_on_cpu` does, with the processes of all stages.

    Raises:
        ModelLoadError: the model can't be served so; one line says why and what to do.
    """
    refuse_cache_format(start)
    check_torch_will_do(start, _REASON)
    config, size = files.native, start.tensor_parallel_size
    stages = stages_of(config, start.pipeline_parallel_size)
    part = ModelPart(config, 0, size, start.enable_expert_parallel, stages[0])
    threads = max(threads // start.num_ranks, 1)
    link, group = _start_group(start, dtype, threads)
    ranks = group if size > 1 else None
    decoder = agreed(
        link,
        lambda: torch_loading.load_decoder(files, dtype, threads, on_progress, part, ranks),
    )
    whole = ModelPart(config, 0, size).config()
    bytes_per_page = size * kv_bytes_per_page(whole, start.page_size, decoder.dtype.itemsize)
    num_pages, num_host_pages = choose_cpu_pages(start, bytes_per_page)
    link.send(encode_step(GiveCache(num_pages, num_host_pages)))
    attention = torch_loading.make_attention(start, decoder, num_pages, num_host_pages)
    adapters = LeadingAdapters(part, link, start.max_lora_rank, decoder.dtype)
    model = TorchModel(
        LeadingStage(LeadingDecoder(decoder, link), link, group),
        LeadingAttention(attention, link),
        adapters,
    )
    slots = SlotTable(
        num_pages=num_pages,
        page_size=start.page_size,
        max_model_len=start.max_model_len,
        vocab_size=config.vocab_size,
        num_host_pages=num_host_pages,
    )
    slots.adapters = adapters.store
    sampler = torch_loading.make_sampler(start, config.vocab_size)
    layers = " + ".join(str(stage.stop - stage.first) for stage in stages)
    return Loaded(
        executor=PipelinedExecutor(
            model, sampler, slots, link, group, config.hidden_size, adjuster
        ),
        slots=slots,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        device_name=Machine().cpu_name(),
        computing=f"torch ({_REASON}), stages of {layers} layers, {start.num_ranks} ranks",
        read_weights=keep_weights,
        warning=f"{SLOWER}: {_REASON}",
        adapters=adapters.store,
        num_stages=len(stages),
    )


def _start_group(start: Start, dtype: str, threads: int) -> tuple[RankLink, PipelineGroup]:
    with tempfile.TemporaryDirectory(prefix="trioserve-ranks-") as folder:
        rendezvous = Path(folder) / "rendezvous"
        link = start_ranks(start, dtype, threads, rendezvous=rendezvous)
        size, num_stages = start.tensor_parallel_size, start.pipeline_parallel_size
        return link, PipelineGroup(rendezvous, 0, size, num_stages)

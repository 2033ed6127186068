"""Loading a model that torch computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.attention import Attention, CacheShape
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.cache_pages import bytes_per_page, choose_cpu_pages
from gpu.cpu.cached_model import CachedModel
from gpu.cpu.rank_processes import open_rendezvous, start_ranks
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.loading.loaded_model import OnProgress, of_weights, unseen
from gpu.loading.weight_swap import ReadWeights
from gpu.lora.torch_adapters import TorchAdapters
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import LeadingAdapters
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.leading import LeadingAttention, LeadingDecoder
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.model_part import ModelPart, part_of_rank
from gpu.models.parallel.ranks import Ranks
from gpu.models.parallel.steps import GiveCache, encode_step
from gpu.models.registry import build_model
from gpu.models.rope import cos_sin_table_for
from gpu.models.rotary_positions import axes_of
from gpu.sampling.sampler import Sampler
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelFiles
from trioserve.protocol.wire import Start


def load_decoder(
    files: ModelFiles,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    part: ModelPart | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """Return the model with its weights, in bfloat16 or float32, or a ``part`` of it.

    From here on torch computes with ``threads`` threads.

    Raises:
        ModelLoadError: the files are damaged, or another model's.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    weights = load_weights(
        files,
        getattr(torch, dtype),
        of_weights(on_progress),
        lambda name: part is None or part.has(name),
    )
    return build_model(files.native, weights, part=part, ranks=ranks)


def make_attention(
    start: Start, decoder: Decoder, num_pages: int, num_host_pages: int
) -> TorchCpuAttention:
    """Return the decoder's attention, with a KV cache of ``num_pages``.

    The ``num_host_pages`` behind them stand for the host's memory elsewhere.
    """
    config = decoder.config
    table = cos_sin_table_for(config, start.max_model_len, num_pages * start.page_size)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_pages=num_pages + num_host_pages,
        page_size=start.page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    return TorchCpuAttention(
        shape, config.num_heads, torch.from_numpy(table), config.windows, axes_of(config)
    )


def make_model(decoder: Decoder, attention: Attention, max_rank: int) -> TorchModel[Attention]:
    """Return the model; ``max_rank`` is the largest of its adapters, 0 for none."""
    adapters = TorchAdapters(decoder.config, max_rank, decoder.dtype)
    return TorchModel(decoder, attention, adapters, has_mrope=bool(decoder.config.mrope_section))


def lead_torch(
    start: Start, files: ModelFiles, dtype: str, threads: int, on_progress: OnProgress
) -> CachedModel:
    """Return a model of which this process and those that it starts have a part each.

    Raises:
        ModelLoadError: The model can't be split so, or a rank can't load its part.
    """
    part = part_of_rank(start, files.native, 0)
    with open_rendezvous(start, files.checksum) as rendezvous:
        link = start_ranks(start, dtype, threads, rendezvous=rendezvous)
        group = join_group(start, link, rendezvous.url)

    def load(files: ModelFiles, on_progress: OnProgress = unseen) -> Decoder:
        return load_decoder(files, dtype, threads, on_progress, part, group)

    decoder = agreed(link, lambda: load(files, on_progress))
    of_page = bytes_per_page(start, files.native, dtype)
    num_pages, num_host_pages = choose_cpu_pages(start, of_page)
    link.send(encode_step(GiveCache(num_pages, num_host_pages)))
    attention = make_attention(start, decoder, num_pages, num_host_pages)
    model = TorchModel(
        LeadingDecoder(decoder, link),
        LeadingAttention(attention, link),
        LeadingAdapters(part, link, start.max_lora_rank, decoder.dtype),
        has_mrope=bool(decoder.config.mrope_section),
    )

    def read(files: ModelFiles) -> Callable[[], None]:
        other = LeadingDecoder(load(files), link)
        return lambda: model.replace_decoder(other)

    return CachedModel(model, num_pages, num_host_pages, lambda _: read, link)


def join_group(start: Start, link: RankLink, rendezvous: str) -> RankGroup | None:
    """Return the group of a rank's stage once all ranks are there; None if it is alone."""
    size = start.tensor_parallel_size
    if size == 1:
        return None
    return RankGroup(rendezvous, link.rank, size, start.pipeline_parallel_size)


def torch_exchange(model: TorchModel[Attention], dtype: str, threads: int) -> ReadWeights:
    """Return how ``model``, which has its cache already, comes by other weights."""

    def read(files: ModelFiles) -> Callable[[], None]:
        decoder = load_decoder(files, dtype, threads, unseen)
        return lambda: model.replace_decoder(decoder)

    return read


def make_sampler(start: Start, vocab_size: int) -> TorchSampler:
    """Draws and reports as ``start`` wants it."""
    processed = start.logprobs_mode == "processed"
    return TorchSampler(Sampler(vocab_size, "cpu", processed_logprobs=processed))

"""Loading a model of which several processes have a part each, as rank 0."""

from __future__ import annotations

import contextlib

from gpu.cpu.cache_pages import bytes_per_page, choose_cpu_pages
from gpu.cpu.cached_model import CachedModel
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import give_cache, load_compiled
from gpu.cpu.compiled_ranks import LeadingCompiledModel
from gpu.cpu.rank_memory import RankMemory, open_shared_file
from gpu.cpu.rank_processes import Rendezvous, meet_nodes, start_ranks
from gpu.loading.loaded_model import OnProgress
from gpu.models.parallel.link import agreed
from gpu.models.parallel.model_part import parts_of_worker
from gpu.models.parallel.steps import GiveCache, encode_step
from trioserve.model_files import ModelFiles
from trioserve.protocol.wire import Start


def threads_of_rank(start: Start, threads: int) -> int:
    """Return the threads of each rank of a worker that has so many on this host."""
    return max(threads * start.num_nodes // start.num_ranks, 1)


def lead_compiled(
    model: CompiledModel,
    start: Start,
    files: ModelFiles,
    dtype: str,
    on_progress: OnProgress,
    draft_bytes: int,
) -> CachedModel:
    """Return the model of which ``model`` is rank 0's part.

    The other ranks are started. Until it returns, all have their weights and their cache. A draft
    model has ``draft_bytes`` in each page.

    Raises:
        ModelLoadError: A rank can't load its part.
    """
    with contextlib.ExitStack() as stack:
        memories, size = [], 0
        if start.tensor_parallel_size > 1:
            size = model.shared_bytes(start.max_num_batched_tokens)
            here = range(start.pipeline_parallel_size // start.num_nodes)
            memories = [stack.enter_context(open_shared_file(size)) for _ in here]
        memory = RankMemory.of_file(memories[0]) if memories else None
        link = start_ranks(
            *(start, dtype, model.threads),
            memories=memories,
            memory_bytes=size,
            rendezvous=Rendezvous(nodes=meet_nodes(start, files.checksum)),
        )
    agreed(link, lambda: load_compiled(model, files, on_progress))
    of_page = bytes_per_page(start, files.native, dtype) + draft_bytes
    num_pages, num_host_pages = choose_cpu_pages(start, of_page)
    link.send(encode_step(GiveCache(num_pages, num_host_pages)))
    agreed(link, lambda: give_cache(model, start, num_pages, num_host_pages, memory))
    leading = LeadingCompiledModel(model, link, parts_of_worker(start, files.native))
    read = leading.read_weights
    return CachedModel(leading, num_pages, num_host_pages, lambda _: read, link)

"""Number of pages of a KV cache on the CPU."""

from __future__ import annotations

import logging

from gpu.loading.memory import choose_num_host_pages, choose_num_pages, kv_bytes_per_page
from gpu.models.parallel.model_part import ModelPart
from trioserve.model_files import ModelConfig
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import Start

_log = logging.getLogger("gpu.loading")


def bytes_per_page(start: Start, config: ModelConfig, dtype: str) -> int:
    """Return the bytes of a page on all ranks: keys and values of all layers of ``config``."""
    size = start.tensor_parallel_size
    of_rank = ModelPart(config, 0, size, start.enable_expert_parallel).config()
    return size * kv_bytes_per_page(of_rank, start.page_size, 2 if dtype == "bfloat16" else 4)


def choose_cpu_pages(start: Start, bytes_per_page: int, reserved: int = 0) -> tuple[int, int]:
    """Pages of the cache, and those behind them that stand for the host's memory elsewhere.

    To be asked when the weights are there: the cache gets a share of what is left besides
    ``reserved`` bytes.

    Raises:
        ModelLoadError: there is no room for them.
    """
    # The hosts of several nodes are taken to be alike.
    available = Machine().memory()[1] * start.num_nodes // start.num_sharing - reserved
    num_pages = choose_num_pages(start, bytes_per_page, start.max_model_len, available)
    if num_pages * bytes_per_page > available:
        # No more than that, since what is free now says little of when the cache will be full.
        _log.warning(
            "the KV cache may grow to %d MiB, and %d MiB of memory are free",
            num_pages * bytes_per_page >> 20,
            available >> 20,
        )
    return num_pages, choose_num_host_pages(start, bytes_per_page, available)

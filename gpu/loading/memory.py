"""The memory budget: what weights and a step need; the KV cache gets the rest.

These are pure functions of numbers. None of them queries a device.
"""

from __future__ import annotations

import attrs

from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start

DEFAULT_CACHE_BYTES = 2 << 30
# Shares of the memory available after loading the weights: a quarter if one sequence of full length
# fits into it, else what that sequence needs, up to the largest share.
DEFAULT_CACHE_SHARE = 0.25
LARGEST_CACHE_SHARE = 0.9
# Driver memory for one captured launch: its parameters and its node in the graph.
BYTES_PER_LAUNCH = 8 << 10

GRAPHS_DONT_FIT = (
    "no memory is left for the CUDA graphs: lower --gpu-memory-utilization or --max-num-seqs, "
    "or use --enforce-eager"
)


def kv_bytes_per_page(config: ModelConfig, page_size: int, number_bytes: int) -> int:
    """Return the bytes of a page: keys and values of all layers, ``number_bytes`` each."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * number_bytes
    return per_token * page_size


def choose_num_pages(start: Start, bytes_per_page: int, max_model_len: int, available: int) -> int:
    """Return the number of KV pages on a CPU with ``available`` bytes of memory.

    A number of pages in ``start`` is used as it is. Otherwise one sequence of ``max_model_len``
    tokens has to fit.

    Raises:
        ModelLoadError: it doesn't.
    """
    if start.num_pages:
        return start.num_pages
    needed = -(-max_model_len // start.page_size)
    if start.kv_cache_memory_bytes:
        most = start.kv_cache_memory_bytes // bytes_per_page
        pages, remedy = most, f"raise --kv-cache-memory-bytes to {needed * bytes_per_page}"
    else:
        most = int(available * LARGEST_CACHE_SHARE) // bytes_per_page
        wanted = min(DEFAULT_CACHE_BYTES, int(available * DEFAULT_CACHE_SHARE)) // bytes_per_page
        pages, remedy = max(wanted, needed), "free some memory"
    _check_one_sequence_fits(most, start.page_size, max_model_len, remedy)
    return pages


def choose_num_host_pages(start: Start, bytes_per_page: int, available: int) -> int:
    """Return the number of KV pages in host memory, of which ``available`` bytes are free.

    Raises:
        ModelLoadError: ``kv_offloading_bytes`` is more than that, or less than a page.
    """
    asked = start.kv_offloading_bytes
    if asked > available:
        raise ModelLoadError(
            f"--kv-offloading-bytes asks for {_gib(asked)} of the host's memory and "
            f"{_gib(available)} are available: lower it"
        )
    if 0 < asked < bytes_per_page:
        raise ModelLoadError(
            f"--kv-offloading-bytes is {asked} and one page of the KV cache has {bytes_per_page} "
            "bytes: raise it"
        )
    return asked // bytes_per_page


@attrs.frozen(kw_only=True)
class GpuMemory:
    """A GPU's memory in bytes before loading, and the share of it that may be used.

    Memory of other processes counts as used, so the share ``1 - utilization`` stays free.
    """

    total: int
    free: int
    utilization: float

    @property
    def budget(self) -> int:
        """Bytes that this engine may take."""
        return max(int(self.total * self.utilization) - (self.total - self.free), 0)

    def check_weights(self, num_bytes: int) -> None:
        """Refuse weights of ``num_bytes`` before they are read if they don't fit.

        Raises:
            ModelLoadError: they don't fit.
        """
        if num_bytes > self.budget:
            raise ModelLoadError(self.weights_dont_fit(num_bytes))

    def weights_dont_fit(self, num_bytes: int) -> str:
        """Return the error text for weights of ``num_bytes`` that don't fit."""
        others = self.total - self.free
        remedy = "take a smaller model or a larger GPU"
        if num_bytes <= self.total * self.utilization:
            remedy = f"end what else uses this GPU ({_gib(others)} of it)"
        elif num_bytes <= self.free:
            remedy = f"raise --gpu-memory-utilization above {self.utilization:g}"
        return (
            f"the weights take {_gib(num_bytes)} and this engine may use {_gib(self.budget)} "
            f"of the GPU's {_gib(self.total)}: {remedy}"
        )


def choose_num_gpu_pages(
    start: Start,
    memory: GpuMemory,
    *,
    in_use: int,
    bytes_per_page: int,
    bytes_of_ranks: int,
    max_model_len: int,
) -> int:
    """Return the number of KV pages on a GPU.

    A number of pages in ``start`` is used as it is. Otherwise the cache gets the bytes in
    ``start``, which are for all ranks, or what the budget leaves, and one sequence of
    ``max_model_len`` tokens has to fit.

    Args:
        in_use: bytes of weights, CUDA graphs and the activations of the largest step.
        bytes_per_page: those of one rank.
        bytes_of_ranks: those of a page on all ranks together.

    Raises:
        ModelLoadError: it doesn't.
    """
    if start.num_pages:
        return start.num_pages
    needed = -(-max_model_len // start.page_size)
    if start.kv_cache_memory_bytes:
        pages = start.kv_cache_memory_bytes // bytes_of_ranks
        remedy = f"raise --kv-cache-memory-bytes to {needed * bytes_of_ranks}"
    else:
        pages = max(memory.budget - in_use, 0) // bytes_per_page
        remedy = f"raise --gpu-memory-utilization above {memory.utilization:g}"
        if start.kv_cache_dtype == "auto":
            remedy += ", or use --kv-cache-dtype fp8"
    _check_one_sequence_fits(pages, start.page_size, max_model_len, remedy)
    return pages


def graph_bytes(num_graphs: int, launches_per_graph: int, activation_bytes: int) -> int:
    """Return the bytes of CUDA graphs: one shared pool of activations, and the driver's memory.

    ``activation_bytes`` is what a step of the largest captured batch allocates.
    """
    return activation_bytes + num_graphs * launches_per_graph * BYTES_PER_LAUNCH


def step_doesnt_fit(max_num_batched_tokens: int) -> str:
    """Return the error text for a step that doesn't fit beside the weights."""
    return (
        f"no memory is left for a step of {max_num_batched_tokens} tokens beside the weights: "
        "lower --max-num-batched-tokens or --max-num-seqs, or raise --gpu-memory-utilization"
    )


def cache_doesnt_fit(num_pages: int) -> str:
    """Return the error text for a KV cache that can't be allocated."""
    return (
        f"a KV cache of {num_pages} pages doesn't fit beside the weights: lower "
        "--gpu-memory-utilization, or what was asked for with --num-gpu-blocks-override or "
        "--kv-cache-memory-bytes"
    )


def _check_one_sequence_fits(
    num_pages: int, page_size: int, max_model_len: int, remedy: str
) -> None:
    room = num_pages * page_size
    if room < max_model_len:
        raise ModelLoadError(
            f"the KV cache has room for {room} tokens and one sequence may have {max_model_len}: "
            f"lower --max-model-len or {remedy}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"

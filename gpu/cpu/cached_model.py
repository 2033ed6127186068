"""A model of the CPU as loaders return it, of one process or of rank 0 of several."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from gpu.cpu.executor import CpuExecutor
from gpu.cpu.model import CpuModel
from gpu.loading.weight_swap import ReadWeights
from gpu.models.parallel.link import RankLink


@attrs.frozen
class CachedModel:
    """A model that has its weights and its KV cache."""

    model: CpuModel
    num_pages: int
    num_host_pages: int
    exchange: Callable[[CpuExecutor], ReadWeights]
    """Returns the function that reads other weights for an executor, for a weight swap."""
    link: RankLink | None = None
    """The messages to the other ranks; None if there are none."""

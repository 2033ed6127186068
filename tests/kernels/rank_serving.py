"""A model on several ranks, which are threads with an emulated GPU each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from gpu.cuda.following import follow_model
from gpu.cuda.loading import load_model
from gpu.cuda.ranks import CudaRank
from gpu.loading.loaded_model import Loaded, unseen
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Ranks
from gpu.runner import Runner
from gpu.sampling.adjustments import Adjuster
from tests.kernels.tape import TapedRanks
from tests.kernels.test_cuda_loading import FakeGpu, start
from tests.support.plans import PlanMaker
from tests.support.thread_ranks import links_of, on_ranks
from trioserve.model_files import open_model

__all__ = ["RankServer", "serve_on_ranks"]

NUM_PAGES = 64
T = TypeVar("T")


@attrs.frozen
class RankServer:
    """A model as rank 0 has loaded it, and the GPUs of all ranks."""

    loaded: Loaded
    gpus: Sequence[FakeGpu]
    runner: Runner
    maker: PlanMaker

    @classmethod
    def of(cls, loaded: Loaded, gpus: Sequence[FakeGpu], max_tokens: int) -> RankServer:
        """Return a runner with a maker of its plans."""
        runner = Runner(loaded.executor, loaded.slots, max_num_batched_tokens=max_tokens)
        maker = PlanMaker(runner.step, page_size=16, num_pages=loaded.num_pages)
        return cls(loaded, gpus, runner, maker)


def serve_on_ranks(
    folder: Path,
    size: int,
    use: Callable[[RankServer], T],
    *,
    gpus: Sequence[FakeGpu] = (),
    adjuster: Adjuster | None = None,
    **changes: Any,
) -> T:
    """Load a model on ``size`` ranks with options as ``changes`` say; return what ``use`` returns.

    ``use`` is called in the thread of rank 0, while the others follow.
    """
    files = open_model(folder)
    gpus = gpus or [FakeGpu() for _ in range(size)]
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_pages": NUM_PAGES, **changes}
    message = start(folder, tensor_parallel_size=size, **options)
    links = links_of(size)

    found: list[T] = []

    def run(number: int, ranks: Ranks) -> None:
        gpu = gpus[number]
        part = ModelPart(files.native, number, size, message.enable_expert_parallel)
        rank = CudaRank(links[number], TapedRanks(ranks, gpu.loader), part)
        try:
            if number:
                with contextlib.suppress(EOFError):
                    follow_model(gpu, message, files, torch.bfloat16, rank)
            else:
                loaded = load_model(gpu, message, files, torch.bfloat16, unseen, adjuster, rank)
                found.append(use(RankServer.of(loaded, gpus, message.max_num_batched_tokens)))
        finally:
            links[number].close()

    on_ranks(size, run)
    return found[0]

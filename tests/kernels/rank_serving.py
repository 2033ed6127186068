"""A model on several ranks, which are threads with an emulated GPU each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from gpu.cpu.torch_model import TorchSampler
from gpu.cuda.following import follow_model
from gpu.cuda.loading import load_model
from gpu.cuda.ranks import CudaRank
from gpu.cuda.stage_loading import load_stages
from gpu.loading.loaded_model import Loaded, unseen
from gpu.models.parallel.model_part import part_of_rank
from gpu.models.parallel.ranks import Ranks
from gpu.runner import Runner
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.sampler import Sampler
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
    sampler: Sampler | None = None,
    **changes: Any,
) -> T:
    """Load a model with options as ``changes`` say; return what ``use`` returns.

    There are ``size`` ranks, or as many in each stage if ``changes`` ask for stages. ``use`` is
    called in the thread of rank 0, while the others follow. Stages draw by ``sampler``.
    """
    files = open_model(folder)
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_pages": NUM_PAGES, **changes}
    message = start(folder, tensor_parallel_size=size, **options)
    num_stages = message.pipeline_parallel_size
    gpus = gpus or [FakeGpu() for _ in range(message.num_ranks)]
    links = links_of(size, num_stages)
    found: list[T] = []

    def lead(gpu: FakeGpu, rank: CudaRank) -> Loaded:
        common = (gpu, message, files, torch.bfloat16, unseen, adjuster, rank)
        if num_stages == 1:
            return load_model(*common)
        drawing = sampler or Sampler(files.native.vocab_size, "cpu")
        return load_stages(*common, TorchSampler(drawing))

    def run(number: int, ranks: Ranks) -> None:
        gpu = gpus[number]
        part = part_of_rank(message, files.native, number)
        rank = CudaRank(links[number], TapedRanks(ranks, gpu.loader), part)
        try:
            if number:
                with contextlib.suppress(EOFError):
                    follow_model(gpu, message, files, torch.bfloat16, rank)
            else:
                loaded = lead(gpu, rank)
                found.append(use(RankServer.of(loaded, gpus, message.max_num_batched_tokens)))
        finally:
            links[number].close()

    on_ranks(size, run, num_stages)
    return found[0]

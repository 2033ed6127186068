"""The stages of a model as threads of one process, for tests without processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from gpu.cpu.model import CpuModel
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cpu.torch_following import FollowingTorchModel
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import LeadingAdapters
from gpu.models.parallel.leading import LeadingAttention, LeadingDecoder
from gpu.models.parallel.link import RankLink, connect_ranks
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.stages import stages_of
from gpu.models.registry import build_model
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.sampler import Sampler
from gpu.slots import SlotTable
from gpu.weights.tensors import load_weights
from tests.support.compiled_ranks import compiled_stages
from tests.support.following_threads import followed
from tests.support.plans import make_attention
from trioserve.model_files import ModelFiles, open_model

__all__ = ["ThreadStages", "torch_stages"]


@attrs.frozen
class ThreadStages:
    """The executor of a model of which each stage but the first runs in a thread."""

    model: CpuModel
    executor: PipelinedExecutor
    slots: SlotTable
    num_stages: int

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        folder: Path,
        num_stages: int,
        *,
        page_size: int,
        num_pages: int,
        num_host_pages: int = 0,
        adjuster: Adjuster | None = None,
        compiled: bool = False,
    ) -> Iterator[ThreadStages]:
        """Open the stages of the model in ``folder``, by torch in float32 or ``compiled``."""
        config = open_model(folder).native
        slots = SlotTable(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            num_host_pages=num_host_pages,
        )
        open_stages = compiled_stages if compiled else torch_stages
        pages = num_pages + num_host_pages
        with open_stages(folder, num_stages, page_size=page_size, num_pages=pages) as opened:
            model, link = opened
            assert model.adapters is not None
            slots.adapters = model.adapters
            sampler = TorchSampler(Sampler(config.vocab_size, "cpu"))
            executor = PipelinedExecutor(model, sampler, slots, link, config.hidden_size, adjuster)
            yield cls(model, executor, slots, num_stages)


@contextlib.contextmanager
def torch_stages(
    folder: Path, num_stages: int, *, page_size: int, num_pages: int
) -> Iterator[tuple[CpuModel, RankLink]]:
    """Open the model in ``folder`` in stages of one rank; yield that of rank 0, and its link."""
    files = open_model(folder)
    parts = [
        ModelPart(files.native, 0, 1, stage=each) for each in stages_of(files.native, num_stages)
    ]
    models = []
    for part in parts:
        load = functools.partial(_load, part)
        decoder = load(files)
        attention = make_attention(decoder, page_size=page_size, num_pages=num_pages)
        models.append((part, decoder, attention, load))
    others = [FollowingTorchModel(*each) for each in models[1:]]
    with followed(connect_ranks(num_stages, 1), others, files) as link:
        part, decoder, attention, _ = models[0]
        leading = LeadingAdapters(part, link, 8, decoder.dtype)
        model = TorchModel(
            LeadingDecoder(decoder, link), LeadingAttention(attention, link), leading
        )
        yield model, link


def _load(part: ModelPart, files: ModelFiles) -> Decoder:
    weights = load_weights(files, torch.float32, lambda *_: None)
    return build_model(files.native, weights, None, part)

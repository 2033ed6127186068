"""A rank behind rank 0 that torch computes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import Attention
from gpu.cpu.following_steps import FollowingSteps
from gpu.cpu.rank_processes import RankOrder
from gpu.cpu.torch_loading import join_group, load_decoder, make_attention
from gpu.cpu.torch_model import TorchModel
from gpu.loading.loaded_model import unseen
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters
from gpu.models.parallel.layouts import layout_of
from gpu.models.parallel.leading import raw
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.model_part import ModelPart, part_of_rank
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    GiveCache,
    LoadOnRanks,
    Step,
    UnloadOnRanks,
    decode_step,
)
from trioserve.model_files import ModelFiles


class FollowingTorchModel:
    """:class:`gpu.cpu.following_steps.FollowingModel` of torch.

    ``load`` returns its ``decoder`` with other weights.
    """

    def __init__(
        self,
        part: ModelPart,
        decoder: Decoder,
        attention: Attention,
        load: Callable[[ModelFiles], Decoder],
    ) -> None:
        self.model = TorchModel(decoder, attention)
        self._load = load
        self._part = part
        self._decoder = decoder
        self._attention = attention
        self._adapters = FollowingAdapters(part, decoder.dtype)
        self._before: torch.Tensor | None = None
        """States that the next step begins with; None on the first stage."""

    def read_weights(self, files: ModelFiles) -> Callable[[], None]:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.read_weights`."""
        decoder = self._load(files)

        def swap() -> None:
            self._decoder = decoder
            self.model.replace_decoder(decoder)

        return swap

    def load(self, step: LoadOnRanks) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.load`."""
        self._adapters.load(step)

    def unload(self, step: UnloadOnRanks) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.unload`."""
        self._adapters.unload(step)

    def states_before(self, step: Step) -> npt.NDArray[Any]:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.states_before`."""
        decoder, count = self._decoder, len(_tokens(step))
        self._before = torch.empty(count, decoder.config.hidden_size, dtype=decoder.dtype)
        return raw(self._before)

    @torch.inference_mode()
    def compute(self, step: Step) -> Any:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.compute`."""
        assert isinstance(step, Compute)
        self._attention.begin(layout_of(step))
        adapted = self._adapters.groups(step.adapted)
        if self._before is None:
            embedded = None if step.embedded is None else step.embedded.received()
            hidden = self._decoder.forward(_tokens(step), self._attention, adapted, embedded)
        else:
            hidden = self._decoder.go_on(self._before, self._attention, adapted)
        return hidden if self._part.is_last else raw(hidden)

    @torch.inference_mode()
    def compute_logits(self, step: Step, hidden: Any) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.compute_logits`."""
        assert isinstance(step, ComputeLogits)
        given = torch.frombuffer(bytearray(step.hidden), dtype=self._decoder.dtype)
        self._decoder.logits(given.view(step.num_rows, -1))


def serve_torch(order: RankOrder, link: RankLink, files: ModelFiles) -> None:
    """Load this rank's part of the model, and do what rank 0 does, until the worker ends.

    Raises:
        ModelLoadError: A rank can't load its part.
    """
    start = order.start
    group = join_group(start, link, order.rendezvous)
    part = part_of_rank(start, files.native, order.rank)

    def load(files: ModelFiles) -> Decoder:
        return load_decoder(files, order.dtype, order.num_threads, unseen, part, group)

    decoder = agreed(link, lambda: load(files))
    given = decode_step(link.receive())
    assert isinstance(given, GiveCache)
    attention = make_attention(start, decoder, given.num_pages, given.num_host_pages)
    model = FollowingTorchModel(part, decoder, attention, load)
    FollowingSteps(link, model, files).follow()


def _tokens(step: Step) -> torch.Tensor:
    assert isinstance(step, Compute)
    return torch.from_numpy(np.frombuffer(step.tokens, dtype=np.int64).copy())

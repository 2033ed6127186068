"""A rank behind rank 0 on a GPU: it launches the steps that rank 0 has packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu._util.upload import upload
from gpu.cpu.model import Floats
from gpu.cpu.rank_processes import RankOrder
from gpu.cpu.stage_steps import ModelHead, StageSteps
from gpu.cuda.assembly import ServingLimits, assemble_forward
from gpu.cuda.device import Gpu
from gpu.cuda.forward import ForwardPass
from gpu.cuda.loading_parts import (
    capture,
    join_group,
    load_parts,
    make_adapter_slots,
    open_gpu,
)
from gpu.cuda.model_to_load import explaining
from gpu.cuda.ranks import CudaRank, EndSteps, LaunchStep, decode_rank_step
from gpu.cuda.stage_forward import StageForward
from gpu.loading.loaded_model import unseen
from gpu.loading.memory import cache_doesnt_fit
from gpu.lora.adapter_slots import AdapterSlots, PackedAdapter
from gpu.lora.store import AdapterStore
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapter_parts import adapter_of
from gpu.models.parallel.leading import raw
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.model_part import part_of_rank
from gpu.models.parallel.steps import CopyPages, LoadOnRanks, ReturnResults, UnloadOnRanks
from gpu.sampling.prompt_logprobs import rows_in_a_slice
from trioserve.model_files import ModelFiles
from trioserve.protocol.wire import Start


def serve_cuda(order: RankOrder, link: RankLink, files: ModelFiles) -> None:
    """Load this rank's part of the model, and launch what rank 0 launches, until the worker ends.

    Raises:
        ModelLoadError: A rank can't load its part.
    """
    start = order.start
    gpu = agreed(link, lambda: open_gpu(order.device, order.num_threads))
    group = join_group(start, order.rank, order.rendezvous, order.device)
    part = part_of_rank(start, files.native, order.rank)
    follow_model(gpu, start, files, getattr(torch, order.dtype), CudaRank(link, group, part))


def follow_model(
    gpu: Gpu, start: Start, files: ModelFiles, dtype: torch.dtype, rank: CudaRank
) -> None:
    """Load the part of another rank than rank 0, then launch each step, until rank 0 ends.

    See :func:`gpu.cuda.loading.load_model` and :func:`gpu.cuda.stage_loading.load_stages`.
    """

    def prepare(
        model: Decoder, limits: ServingLimits, lengths: Sequence[int]
    ) -> tuple[object, Callable[[], None]]:
        forward = assemble_forward(gpu.loader, model, limits, rank)
        return forward, lambda: follow(rank.link, forward)

    models, decoders, _ = load_parts(gpu, start, files, dtype, rank, unseen, prepare)
    limits = models[0].limits

    def assemble() -> tuple[ForwardPass, AdapterSlots | None]:
        with explaining(lambda: cache_doesnt_fit(limits.num_pages)):
            slots = make_adapter_slots(gpu, decoders[0], start, rank)
            return assemble_forward(gpu.loader, decoders[0], limits, rank, slots), slots

    forward, slots = rank.agreed(assemble)
    if not start.enforce_eager:
        with rank.in_step():
            capture(gpu, models, [forward], unseen)
    follow(rank.link, forward, None if slots is None else slots.store)


@torch.inference_mode()
def follow(
    link: RankLink, forward: ForwardPass, adapters: AdapterStore[PackedAdapter] | None = None
) -> None:
    """Launch what rank 0 launches, step by step, until it ends the steps of a measurement."""
    stage = None
    if isinstance(forward, StageForward):
        own = FollowingCudaStage(forward)
        stage = StageSteps(link.stages, own, forward.model.vocab_size)
    while True:
        match decode_rank_step(link.receive()):
            case LaunchStep() as step:
                if stage is None:
                    launch(forward, step)
                else:
                    stage.compute(step)
            case ReturnResults() as results:
                assert stage is not None
                stage.return_results(results)
            case CopyPages(copies=pairs):
                copies = np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2)
                forward.attention.copy_pages(copies)
            case LoadOnRanks() as message:
                assert adapters is not None
                adapters.put(message.number, adapter_of(message))
            case UnloadOnRanks(number=number):
                assert adapters is not None
                adapters.unload(number)
            case EndSteps():
                return


class FollowingCudaStage:
    """:class:`gpu.cpu.stage_steps.StageModel` of one stage."""

    def __init__(self, forward: StageForward) -> None:
        self._forward = forward
        self._before: torch.Tensor | None = None
        """States in the host's memory that the next step begins with; None on the first stage."""

    @property
    def model(self) -> ModelHead:
        """See :attr:`gpu.cpu.stage_steps.StageModel.model`."""
        return self

    def states_before(self, step: LaunchStep) -> npt.NDArray[Any]:
        """See :meth:`gpu.cpu.stage_steps.StageModel.states_before`."""
        model = self._forward.model
        self._before = torch.empty(step.num_tokens, model.config.hidden_size, dtype=model.dtype)
        return raw(self._before)

    def compute(self, step: LaunchStep) -> Any:
        """See :meth:`gpu.cpu.stage_steps.StageModel.compute`; block until it is computed."""
        forward = self._forward
        if self._before is not None:
            forward.begin_with(self._before)
        launch_layers(forward, step)
        if not forward.stage.is_last:
            return forward.sent_states(step.num_tokens)
        if forward.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # so that the time is that of the layers
        return forward.states(step.num_tokens)

    def floats(self, hidden: torch.Tensor) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        floats: Floats = hidden.float().cpu().numpy()
        return floats

    def logits(self, hidden: torch.Tensor, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
        if rows is not None:
            hidden = hidden.index_select(0, upload(rows, hidden.device))
        logits: Floats = self._forward.model.logits(hidden).cpu().numpy()
        return logits


def launch(forward: ForwardPass, step: LaunchStep) -> None:
    """Launch a step as rank 0 does: see :meth:`gpu.cuda.executor.CudaExecutor.begin`."""
    hidden = launch_layers(forward, step)
    if hidden is None:
        return
    size = rows_in_a_slice(forward.model.vocab_size)
    for first, stop in step.scored:
        for start in range(first, stop, size):
            forward.model.logits(hidden[start : min(start + size, stop)])
    if step.num_sampled:
        forward.head_of_sampled(hidden, step.num_sampled)


def launch_layers(forward: ForwardPass, step: LaunchStep) -> torch.Tensor | None:
    """Launch a step as far as its hidden states, and return these; None if it is a graph."""
    forward.buffer.fill(step.numbers)
    forward.state.large += [
        (first, np.frombuffer(numbers, dtype=np.int32).copy()) for first, numbers in step.large
    ]
    if step.adapters:
        assert forward.adapters is not None
        forward.adapters.follow(step.adapters, step.num_tiles)
    forward.buffer.upload()
    forward.state.copy_large()
    if step.shape is None:
        forward.replay(step.graphs, step.size)
        return None
    forward.attention.prepare(step.shape)
    return forward.run(step.num_tokens, adapted=bool(step.adapters))

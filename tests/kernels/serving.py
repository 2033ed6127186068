"""A small random model served by kernels, and the same model in float32 to judge it by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from gpu.attention import StepLayout
from gpu.cuda.assembly import ServingLimits, assemble, assemble_forward
from gpu.cuda.draft_model import CudaDraftModel
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.forward import ForwardPass
from gpu.cuda.graphs import Capturer, CudaCapturer
from gpu.cuda.ranks import SoleRank
from gpu.cuda.timeline import CudaTimeline, HostTimeline, Timeline
from gpu.kernels import KernelLoader
from gpu.lora.adapter_slots import AdapterSlots, PackedAdapter
from gpu.lora.reading import read_adapter
from gpu.lora.store import AdapterStore
from gpu.models.decoder import Decoder
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.registry import build_model
from gpu.models.rotary_positions import rotary_positions
from gpu.runner import Runner
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.weights.tensors import load_weights
from tests.kernels.tape import TapeCapturer, TapedLoader
from tests.support.plans import PlanMaker, make_attention
from trioserve.model_files import open_model
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.sampling import SamplerParams

__all__ = ["Judge", "MakeRank", "Planned", "Server", "open_follower", "serving_limits"]

PAGE_SIZE = 16
NUM_PAGES = 64


MakeRank = Callable[[TapedLoader], SoleRank]
"""Returns the rank that a server is, given the loader of its kernels."""


class Planned(Protocol):
    """Something that runs plans: ``maker`` makes them for ``runner``."""

    @property
    def runner(self) -> Runner: ...

    @property
    def maker(self) -> PlanMaker: ...


@attrs.define
class Server:
    """A runner over kernels. ``loader`` counts launches; ``maker`` makes plans for ``runner``."""

    loader: TapedLoader
    executor: CudaExecutor
    runner: Runner
    maker: PlanMaker
    _limits: ServingLimits
    _timeline: Timeline
    _capturer: Capturer | None
    """None if steps have no graphs."""

    @classmethod
    def of(
        cls,
        folder: Path,
        loader: KernelLoader,
        *,
        dtype: torch.dtype = torch.bfloat16,
        graphs: bool = False,
        max_num_seqs: int = 4,
        adjuster: Adjuster | None = None,
        adapters: Sequence[Path] = (),
        make_rank: MakeRank = lambda _: SoleRank(),
        **limits: Any,
    ) -> Server:
        taped = TapedLoader(loader)
        rank = make_rank(taped)
        model = _decoder(folder, taped, dtype, rank)
        timeline, capturer = _timeline_and_capturer(taped)
        adapter_slots = _adapter_slots(folder, model, adapters, rank)
        serving = serving_limits(max_num_seqs=max_num_seqs, **limits)
        executor, slots = assemble(
            taped, model, serving, timeline, adjuster, adapter_slots, rank=rank
        )
        if graphs:
            executor.capture(capturer, max_num_seqs, lambda done, total: None)
        runner = Runner(executor, slots, max_num_batched_tokens=serving.max_num_batched_tokens)
        maker = PlanMaker(runner.step, page_size=serving.page_size, num_pages=NUM_PAGES)
        used = capturer if graphs else None
        return cls(taped, executor, runner, maker, serving, timeline, used)

    def draft_model(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> CudaDraftModel:
        """Return the model of ``folder`` as a draft model over this server's slots and pages."""
        model = _decoder(folder, self.loader, dtype)
        limits = attrs.evolve(self._limits, drafts=False)
        executor, _ = assemble(self.loader, model, limits, self._timeline, slots=self.runner.slots)
        if self._capturer is not None:
            executor.capture(self._capturer, limits.max_num_seqs, lambda done, total: None)
        return CudaDraftModel(executor, limits.max_num_seqs)


class Judge:
    """A reference: the same weights in float32 on the CPU, with the reference backend and sampler.

    The weights are those of the served dtype, so only the arithmetic differs.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        exact = ((name, tensor.float()) for name, tensor in _weights(folder, dtype))
        self._model: Decoder = build_model(open_model(folder).config, exact)

    def check(
        self,
        tokens: list[int],
        prompt_length: int,
        params: SamplerParams,
        *,
        margin: float,
        grids: Sequence[ImageGrid] = (),
    ) -> int:
        """Assert that the reference draws the same output, or nearly.

        A token that it doesn't draw must win once its logit is raised by ``margin``. Returns how
        many tokens had to be raised.
        """
        logits = self.logits(tokens[:-1], grids)[prompt_length - 1 :]
        sampler = Sampler(logits.shape[1], "cpu")
        near_ties = 0
        for index, token in enumerate(tokens[prompt_length:]):
            row = SamplerRow(params, np.array(tokens[: prompt_length + index]), prompt_length)
            drawn = int(sampler.sample(logits[index : index + 1].clone(), [row]).tokens[0])
            if drawn == token:
                continue
            raised = logits[index : index + 1].clone()
            raised[0, token] += margin
            drawn_then = int(sampler.sample(raised, [row]).tokens[0])
            assert drawn_then == token, (
                f"position {prompt_length + index}: the kernels drew {token}, the reference {drawn}"
            )
            near_ties += 1
        return near_ties

    def logits(self, tokens: list[int], grids: Sequence[ImageGrid] = ()) -> torch.Tensor:
        """[T, V]: what follows each of ``tokens``."""
        with torch.inference_mode():
            return self._model.logits(self.hidden(tokens, grids))

    def hidden(self, tokens: list[int], grids: Sequence[ImageGrid] = ()) -> torch.Tensor:
        """[T, E]: the states of ``tokens`` behind the last norm."""
        total = len(tokens)
        num_pages = -(-total // PAGE_SIZE)
        attention = make_attention(self._model, page_size=PAGE_SIZE, num_pages=num_pages)
        layout = StepLayout(
            positions=np.arange(total),
            query_start=np.array([0, total]),
            context_lens=np.array([total]),
            slots=np.zeros(1, np.int64),
            block_tables=np.arange(num_pages, dtype=np.int32)[None],
            num_decode_rows=int(total == 1),
            rotary_positions=rotary_positions(grids, 0, total) if grids else None,
        )
        with torch.inference_mode():
            attention.begin(layout)
            return self._model.forward(torch.tensor(tokens), attention)


def _timeline_and_capturer(loader: TapedLoader) -> tuple[Timeline, Capturer]:
    if loader.device.type == "cpu":
        return HostTimeline(), TapeCapturer(loader)
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return CudaTimeline(loader.device), CudaCapturer()


def open_follower(
    folder: Path,
    loader: KernelLoader,
    make_rank: MakeRank,
    *,
    adapters: Sequence[Path] = (),
    **limits: Any,
) -> tuple[ForwardPass, AdapterStore[PackedAdapter] | None]:
    """Return what another rank than rank 0 launches, with its graphs, and its adapters.

    The options are those of :meth:`Server.of`.
    """
    taped = TapedLoader(loader)
    rank = make_rank(taped)
    model, serving = _decoder(folder, taped, torch.bfloat16, rank), serving_limits(**limits)
    slots = _adapter_slots(folder, model, adapters, rank)
    forward = assemble_forward(taped, model, serving, rank, slots)
    _, capturer = _timeline_and_capturer(taped)
    forward.capture(capturer, serving.max_num_seqs, lambda done, total: None)
    return forward, None if slots is None else slots.store


def serving_limits(**limits: Any) -> ServingLimits:
    """Return the limits of a small model."""
    fields: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "kv_cache_dtype": "auto",
        "max_logprobs": 5,
        "logprobs_mode": "raw",
        "batch_invariant_attention": False,
        **limits,
    }
    return ServingLimits(**fields)


def _adapter_slots(
    folder: Path, model: Decoder, adapters: Sequence[Path], rank: SoleRank
) -> AdapterSlots | None:
    """Return room for two adapters; rank 0 has ``adapters``, if there are any."""
    if not adapters:
        return None
    slots = AdapterSlots(model.config, 64, model.dtype, model.device, 2, rank.adapter_store)
    for number, path in enumerate(adapters if rank.leads else (), 1):
        slots.store.put(number, read_adapter(path, open_model(folder).config, 64))
    return slots


def _decoder(
    folder: Path, loader: TapedLoader, dtype: torch.dtype, rank: SoleRank | None = None
) -> Decoder:
    rank = rank or SoleRank()
    config = open_model(folder).config
    own = config if rank.part is None else rank.part.config()
    operations = CudaOperations(
        loader, hidden_size=own.hidden_size, mlp_sizes=own.mlp_sizes, dtype=dtype
    )
    weights = _weights(folder, dtype)
    return build_model(config, weights, operations, rank.part, rank.ranks, loader.device)


def _weights(folder: Path, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    return list(load_weights(open_model(folder), dtype, lambda done, total: None))

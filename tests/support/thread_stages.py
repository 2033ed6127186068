"""The stages of a model as threads of one process, for tests without processes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from gpu.cpu.following_stages import StageSteps
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters, LeadingAdapters
from gpu.models.parallel.leading import LeadingAttention, LeadingDecoder
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.pipeline import LeadingStage, PipelineGroup
from gpu.models.parallel.stages import stages_of
from gpu.models.registry import build_model
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.sampler import Sampler
from gpu.slots import SlotTable
from gpu.weights.tensors import load_weights
from tests.support.plans import make_attention
from trioserve.model_files import open_model

__all__ = ["ThreadStages"]

SECONDS = 60
Boxes = dict[tuple[int, int], "queue.SimpleQueue[torch.Tensor | None]"]


class _TheEnd(Exception):
    """The test is over."""


class _Sent:
    """A tensor that is in its box."""

    def wait(self) -> None:
        """Return at once."""


class _ThreadGroup(PipelineGroup):
    """A stage of one rank, whose tensors lie in boxes by sender and receiver."""

    def __init__(self, stage: int, num_stages: int, boxes: Boxes) -> None:
        self.stage, self.rank = stage, 0
        self.size, self.num_stages = 1, num_stages
        self._sent = deque()
        self._boxes = boxes

    def _begin_send(self, x: torch.Tensor, to: int) -> _Sent:
        self._boxes[self.stage, to].put(x.clone())
        return _Sent()

    def _take(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        found = self._boxes[sender, self.stage].get(timeout=SECONDS)
        if found is None:
            raise _TheEnd
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        return x.copy_(found)


class _ThreadLink(RankLink):
    """Messages of the first stage in a queue for each other stage."""

    def __init__(self, queues: list[queue.SimpleQueue[bytes | None]]) -> None:
        self._queues = queues

    def send(self, message: bytes) -> None:
        for each in self._queues:
            each.put(message)

    def receive(self) -> bytes:
        (only,) = self._queues
        found = only.get(timeout=SECONDS)
        if found is None:
            raise _TheEnd
        return found

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Let the block fail as it does."""
        yield


@attrs.frozen
class ThreadStages:
    """The executor of a model of which each stage but the first runs in a thread."""

    executor: PipelinedExecutor
    adapters: LeadingAdapters
    slots: SlotTable
    num_stages: int
    _queues: list[queue.SimpleQueue[bytes | None]]
    _threads: list[threading.Thread]

    @classmethod
    def start(
        cls,
        folder: Path,
        num_stages: int,
        *,
        page_size: int,
        num_pages: int,
        num_host_pages: int = 0,
        adjuster: Adjuster | None = None,
        max_lora_rank: int = 8,
    ) -> ThreadStages:
        """Start the stages of the model in ``folder``, in float32."""
        config = open_model(folder).native
        boxes: Boxes = defaultdict(queue.SimpleQueue)
        threads: list[threading.Thread] = []
        parts = [ModelPart(config, 0, 1, stage=each) for each in stages_of(config, num_stages)]
        decoders = [_load(folder, part) for part in parts]
        groups = [_ThreadGroup(stage, num_stages, boxes) for stage in range(num_stages)]
        sizes = {"page_size": page_size, "num_pages": num_pages + num_host_pages}
        attentions = [make_attention(decoder, **sizes) for decoder in decoders]
        queues: list[queue.SimpleQueue[bytes | None]] = [
            queue.SimpleQueue() for _ in range(1, num_stages)
        ]
        link = _ThreadLink(queues)
        for stage, own in enumerate(queues, 1):
            part, decoder, attention = parts[stage], decoders[stage], attentions[stage]
            group, adapters = groups[stage], FollowingAdapters(part, decoder.dtype)
            steps = StageSteps(
                _ThreadLink([own]), group, decoder, attention, adapters, config.vocab_size
            )
            threads.append(threading.Thread(target=_follow, args=(steps,)))
            threads[-1].start()
        leading = LeadingAdapters(parts[0], link, max_lora_rank, decoders[0].dtype)
        model = TorchModel(
            LeadingStage(LeadingDecoder(decoders[0], link), link, groups[0]),
            LeadingAttention(attentions[0], link),
            leading,
        )
        slots = SlotTable(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            num_host_pages=num_host_pages,
        )
        slots.adapters = leading.store
        executor = PipelinedExecutor(
            model,
            TorchSampler(Sampler(config.vocab_size, "cpu")),
            slots,
            link,
            groups[0],
            config.hidden_size,
            adjuster,
        )
        return cls(executor, leading, slots, num_stages, queues, threads)

    def end(self) -> None:
        """End the threads, which wait for a message."""
        for own, thread in zip(self._queues, self._threads, strict=True):
            own.put(None)
            thread.join(SECONDS)
            assert not thread.is_alive()


def _load(folder: Path, part: ModelPart) -> Decoder:
    files = open_model(folder)
    return build_model(
        files.native, load_weights(files, torch.float32, lambda *_: None), None, part
    )


def _follow(steps: StageSteps) -> None:
    with contextlib.suppress(_TheEnd), torch.inference_mode():
        steps.follow()

"""Plans made by hand, for tests of the worker's side: pages, numbers and slots kept in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from gpu.attention import CacheShape, StepLayout
from gpu.attention.torch_cpu import TorchCpuAttention
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.models.decoder import Decoder
from gpu.models.registry import build_model
from gpu.models.rope import cos_sin_table
from gpu.models.rotary_positions import axes_of
from gpu.runner import Runner
from gpu.sampling.adjustments import Adjuster, Adjustment
from gpu.sampling.sampler import Sampled, Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.slots import SlotTable
from gpu.weights.tensors import load_weights
from trioserve.model_files import open_model
from trioserve.protocol.embeddings import EmbeddingRows, ImageGrid
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, StepResult, from_ints, ints

__all__ = [
    "GREEDY",
    "PlanMaker",
    "RecordingSampler",
    "begun_attention",
    "load_tiny",
    "make_attention",
    "make_runner",
    "outputs_over_moved_pages",
    "prompt_logits",
]

GREEDY = SamplerParams(temperature=0.0)


def load_tiny(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the model of a folder that ``make_tiny`` wrote."""
    files = open_model(folder)
    return build_model(files.config, load_weights(files, dtype, lambda done, total: None))


class RecordingSampler(Sampler):
    """Keeps the logits of every row it sees, by the tokens that the row had: [V] float32."""

    seen: dict[tuple[int, ...], torch.Tensor]

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplerRow],
        adjustment: Adjustment | None = None,
    ) -> Sampled:
        if not hasattr(self, "seen"):
            self.seen = {}
        for row, values in zip(rows, logits, strict=True):
            self.seen[tuple(int(token) for token in row.tokens)] = values.clone()
        return super().sample(logits, rows, adjustment)


def make_attention(model: Decoder, *, page_size: int, num_pages: int) -> TorchCpuAttention:
    """Return a KV cache for ``model``."""
    config = model.config
    shape = CacheShape(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    table = torch.from_numpy(cos_sin_table(config, config.max_position_embeddings))
    return TorchCpuAttention(shape, config.num_heads, table, config.windows, axes_of(config))


def begun_attention(model: Decoder, count: int) -> TorchCpuAttention:
    """Return the attention of a step that computes one prompt of ``count`` tokens, in a cold cache.

    Its pages of 16 tokens are in reverse order.
    """
    num_pages = -(-count // 16)
    attention = make_attention(model, page_size=16, num_pages=num_pages)
    layout = StepLayout(
        positions=np.arange(count),
        query_start=np.array([0, count]),
        context_lens=np.array([count]),
        slots=np.array([0]),
        block_tables=np.arange(num_pages - 1, -1, -1, dtype=np.int32)[None],
        num_decode_rows=0,
    )
    attention.begin(layout)
    return attention


def prompt_logits(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each of ``tokens``, computed at once: [T, V] float32."""
    with torch.inference_mode():
        attention = begun_attention(model, len(tokens))
        return model.logits(model.forward(torch.tensor(tokens), attention))


def make_runner(
    model: Decoder,
    *,
    page_size: int = 4,
    num_pages: int = 64,
    max_num_batched_tokens: int = 256,
    sampler_class: type[RecordingSampler] = RecordingSampler,
    adjuster: Adjuster | None = None,
) -> tuple[Runner, RecordingSampler]:
    """Return a runner for ``model``, and its sampler."""
    sampler = sampler_class(model.config.vocab_size, model.device)
    slots = SlotTable(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
    )
    attention = make_attention(model, page_size=page_size, num_pages=num_pages)
    executor = CpuExecutor(TorchModel(model, attention), TorchSampler(sampler), slots, adjuster)
    return Runner(executor, slots, max_num_batched_tokens=max_num_batched_tokens), sampler


@attrs.define
class _Known:
    tokens: list[int]
    pages: list[int]
    computed: int


class PlanMaker:
    """Makes plans and keeps track of what they did, as an engine would.

    ``step`` runs one plan. Pages are handed out from the last to the first, as rows need them.
    """

    def __init__(
        self, step: Callable[[Plan], StepResult], *, page_size: int = 4, num_pages: int = 64
    ) -> None:
        self._step = step
        self._page_size = page_size
        self.num_pages = num_pages
        self.number = 0
        self.free = list(range(num_pages))
        self.slots: dict[int, _Known] = {}
        self.generations: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []
        """Pages that the next plan copies, from where to where."""
        self._closed: list[int] = []
        self._opened: list[OpenSlot] = []

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        params: SamplerParams = GREEDY,
        *,
        prompt_length: int | None = None,
        shared_pages: Sequence[int] = (),
        prompt_logprobs_from: int = -1,
        states_from: int = -1,
        context_logits_from: int = -1,
        adapter: int = 0,
        embeddings: Sequence[EmbeddingRows] = (),
        grids: Sequence[ImageGrid] = (),
        prefix: Sequence[EmbeddingRows] = (),
        num_prefix: int = 0,
    ) -> None:
        """Open ``slot`` in the next plan; ``shared_pages`` hold its first tokens already, or it
        brings those of the first ``num_prefix``.
        """
        computed = max(len(shared_pages) * self._page_size, num_prefix)
        self.generations[slot] = self.generations.get(slot, 0) + 1
        self.slots[slot] = _Known(list(tokens), list(shared_pages), computed)
        opened = OpenSlot(
            slot=slot,
            generation=self.generations[slot],
            tokens=from_ints(tokens),
            prompt_length=len(tokens) if prompt_length is None else prompt_length,
            computed=computed,
            pages=from_ints(shared_pages),
            sampler=params,
            prompt_logprobs_from=prompt_logprobs_from,
            states_from=states_from,
            context_logits_from=context_logits_from,
            adapter=adapter,
            embeddings=list(embeddings),
            grids=list(grids),
            prefix=list(prefix),
        )
        self._opened.append(opened)

    def close(self, slot: int) -> None:
        """Close ``slot`` in the next plan. Its pages aren't used again."""
        del self.slots[slot]
        self._closed.append(slot)

    def plan(self, rows: dict[int, int]) -> Plan:
        """Return the next plan: ``rows[slot]`` tokens of each slot, with the pages they need."""
        self.number += 1
        appended = []
        for slot, count in rows.items():
            known = self.slots[slot]
            known.computed += count
            while len(known.pages) * self._page_size < known.computed:
                known.pages.append(self.free.pop())
                appended.append((slot, known.pages[-1]))
        plan = Plan(
            number=self.number,
            closed=from_ints(self._closed),
            opened=list(self._opened),
            page_slots=from_ints([slot for slot, _ in appended]),
            page_ids=from_ints([page for _, page in appended]),
            row_slots=from_ints(list(rows)),
            row_counts=from_ints(list(rows.values())),
            copies=from_ints(list(itertools.chain(*self.copies))),
        )
        self.copies.clear()
        self._closed.clear()
        self._opened.clear()
        return plan

    def accept(self, result: StepResult) -> dict[int, list[int]]:
        """Return the tokens of each row, after adding them to its slot."""
        offsets, tokens = ints(result.offsets).tolist(), ints(result.tokens).tolist()
        given: dict[int, list[int]] = {}
        for row, slot in enumerate(ints(result.slots).tolist()):
            assert ints(result.generations)[row] == self.generations[slot]
            given[slot] = tokens[offsets[row] : offsets[row + 1]]
            self.slots[slot].tokens += given[slot]
        assert len(tokens) == offsets[-1]
        return given

    def step(self, rows: dict[int, int]) -> dict[int, list[int]]:
        """Run the next plan; the tokens that each row gave."""
        result = self._step(self.plan(rows))
        assert result.number == self.number
        return self.accept(result)


def outputs_over_moved_pages(
    maker: PlanMaker, prompt: Sequence[int], page_size: int, num_steps: int = 4
) -> tuple[list[int], list[int]]:
    """Return the tokens after ``prompt`` over its own first pages, and over copies of them.

    The pages go to the host, are overwritten, and come back to other pages. The outputs are equal
    if copies are complete and in order. No slot may be open.
    """
    maker.open(0, prompt)
    maker.open(1, list(reversed(prompt)))
    maker.step({0: len(prompt), 1: len(prompt)})
    count = (len(prompt) - 1) // page_size
    pages, others = maker.slots[0].pages[:count], maker.slots[1].pages[:count]
    maker.close(0)
    before = _continuation(maker, 0, prompt, pages, page_size, num_steps)
    maker.close(0)
    places = [maker.num_pages + index for index in range(count)]
    moved = [maker.free.pop() for _ in pages]
    maker.copies += zip(pages, places, strict=True)
    maker.copies += zip(others, pages, strict=True)
    maker.copies += zip(places, moved, strict=True)
    # The places are used again at once.
    maker.copies += zip(pages, places, strict=True)
    return before, _continuation(maker, 0, prompt, moved, page_size, num_steps)


def _continuation(
    maker: PlanMaker,
    slot: int,
    prompt: Sequence[int],
    pages: Sequence[int],
    page_size: int,
    num_steps: int,
) -> list[int]:
    maker.open(slot, prompt, shared_pages=pages)
    maker.step({slot: len(prompt) - len(pages) * page_size})
    for _ in range(num_steps):
        maker.step({slot: 1})
    return maker.slots[slot].tokens[len(prompt) :]

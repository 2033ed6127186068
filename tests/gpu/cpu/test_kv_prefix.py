"""Keys and values that a sequence brings are where the compiled attention reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import load_compiled
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.page_format import CompiledPages
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.loading.loaded_model import unseen
from gpu.models.kv_prefix import PlainPages
from gpu.models.rope import cos_sin_table
from gpu.runner import Runner
from gpu.slots import PlanError, SlotTable
from tests.gpu.cpu.test_native_model import SCORED, decoder, distance, prompt_of
from tests.support.plans import PlanMaker, RecordingSampler, make_attention
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.embeddings import NUMPY_DTYPES, EmbeddingRows

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

COUNT, NUM_PAGES, MAX_TOKENS = 21, 64, 64
PROMPT = prompt_of(COUNT + 30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


def compiled(path: Path, page_size: int) -> CompiledModel:
    files = open_model(path)
    model = CompiledModel(load_library(), files.config, "none", 1)
    load_compiled(model, files, unseen)
    table = cos_sin_table(files.config, files.config.max_position_embeddings)
    model.finish(table, page_size=page_size, num_pages=NUM_PAGES, max_tokens=MAX_TOKENS)
    return model


def exact(path: Path, page_size: int) -> TorchModel:
    model = decoder(path, torch.float32)
    return TorchModel(model, make_attention(model, page_size=page_size, num_pages=NUM_PAGES))


def runner_of(
    model: CpuModel, slots: SlotTable, page_size: int
) -> tuple[RecordingSampler, Runner, PlanMaker]:
    sampler = RecordingSampler(300, "cpu")
    sampler.seen = {}
    executor = CpuExecutor(model, TorchSampler(sampler), slots)
    runner = Runner(executor, slots, max_num_batched_tokens=MAX_TOKENS)
    maker = PlanMaker(runner.step, page_size=page_size, num_pages=NUM_PAGES)
    return sampler, runner, maker


def logits_of(
    model: CpuModel, slots: SlotTable, page_size: int, prefixes: list[list[EmbeddingRows]]
) -> list[torch.Tensor]:
    """Return the logits behind the prompt with each of ``prefixes``, all in one batch."""
    sampler, _, maker = runner_of(model, slots, page_size)
    found = []
    for slot, prefix in enumerate(prefixes):
        sampler.seen = {}
        maker.open(slot, PROMPT, SCORED, prefix=prefix, num_prefix=COUNT)
        maker.step({slot: 10})
        assert slots.prefixes == []
        maker.step({slot: len(PROMPT) - COUNT - 10})
        found.append(sampler.seen[tuple(PROMPT)])
        maker.close(slot)
    return found


def rows_of(shape: tuple[int, int, int], seed: int) -> list[EmbeddingRows]:
    """Return random keys and values, in two parts that no page ends with."""
    numbers = np.random.default_rng(seed).standard_normal((COUNT, 2 * int(np.prod(shape))))
    numbers = numbers.astype(NUMPY_DTYPES["bfloat16"])
    return [
        EmbeddingRows(start=start, rows=part.tobytes(), number_format="bfloat16")
        for start, part in ((0, numbers[:7]), (7, numbers[7:]))
    ]


@pytest.mark.parametrize("page_size", [16, 12, 4, 3])
def test_a_prefix_is_read_as_torch_reads_it(tiny: Path, page_size: int) -> None:
    shape = open_model(tiny).native.kv_shape
    prefixes = [rows_of(shape, seed) for seed in (1, 2)]

    def slots() -> SlotTable:
        return SlotTable(
            num_pages=NUM_PAGES, page_size=page_size, max_model_len=256, vocab_size=300
        )

    of_torch, of_kernels = slots(), slots()
    numbers = NUMPY_DTYPES["float32"]
    of_torch.kv_format = PlainPages(shape=shape, page_size=page_size, numbers=numbers)
    of_kernels.kv_format = CompiledPages(shape=shape, page_size=page_size)
    expected = logits_of(exact(tiny, page_size), of_torch, page_size, prefixes)
    found = logits_of(compiled(tiny, page_size), of_kernels, page_size, prefixes)
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 0.05
    assert distance(found[0], expected[1]) > 0.2


def test_a_prefix_is_written_without_a_row(tiny: Path) -> None:
    """Its sequence is dropped, and another one goes on with its pages."""
    shape, page_size = open_model(tiny).native.kv_shape, 3
    slots = SlotTable(num_pages=NUM_PAGES, page_size=page_size, max_model_len=256, vocab_size=300)
    slots.kv_format = CompiledPages(shape=shape, page_size=page_size)
    model, prefix = compiled(tiny, page_size), rows_of(shape, 1)
    (expected,) = logits_of(model, slots, page_size, [prefix])
    slots.clear()
    for page in range(NUM_PAGES):
        model.write_page(page, np.zeros_like(model.read_page(page)))
    sampler, runner, maker = runner_of(model, slots, page_size)
    maker.open(0, PROMPT, prefix=prefix, num_prefix=COUNT)
    runner.drop(0, 1, plan=0)
    assert maker.step({0: 10}) == {0: []}
    shared = maker.slots[0].pages[: COUNT // page_size]
    maker.open(1, PROMPT, SCORED, shared_pages=shared)
    maker.step({1: len(PROMPT) - COUNT})
    assert torch.equal(sampler.seen[tuple(PROMPT)], expected)


def test_a_prefix_of_another_model_is_refused(tiny: Path) -> None:
    layers, heads, size = open_model(tiny).native.kv_shape
    slots = SlotTable(num_pages=NUM_PAGES, page_size=4, max_model_len=256, vocab_size=300)
    prefixes = [rows_of((layers, heads, size), 1)]
    model = compiled(tiny, 4)
    with pytest.raises(PlanError, match="slot 0 has a prefix with embeddings of another width"):
        logits_of(model, slots, 4, prefixes)
    slots.clear()
    slots.kv_format = CompiledPages(shape=(layers, heads, 2 * size), page_size=4)
    with pytest.raises(PlanError, match="slot 0 has a prefix with embeddings"):
        logits_of(model, slots, 4, prefixes)

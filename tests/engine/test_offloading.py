"""Pages of real models on their way to the host's memory and back, and a whole engine with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trio

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.loading.memory import choose_num_host_pages
from gpu.models.rope import cos_sin_table
from gpu.runner import Runner
from gpu.sampling.sampler import Sampler
from gpu.slots import PlanError, SlotTable
from gpu.weights import read_weights
from gpu.weights.blocks import BFLOAT16
from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.plans import PlanMaker, load_tiny, make_attention, outputs_over_moved_pages
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, InvalidRequest, ModelLoadError
from trioserve.model_files import open_model
from trioserve.protocol.wire import Plan, Start, from_ints

PAGE_SIZE, NUM_PAGES, NUM_HOST_PAGES = 4, 32, 8
PROMPT = [(7 * i * i + 3 * i) % 290 + 3 for i in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama3"), head_dim=32)


def torch_model(folder: Path) -> CpuModel:
    model = load_tiny(folder)
    total = NUM_PAGES + NUM_HOST_PAGES
    return TorchModel(model, make_attention(model, page_size=PAGE_SIZE, num_pages=total))


def compiled_model(folder: Path) -> CpuModel:
    try:
        library = load_library()
    except LibraryBuildError as error:
        pytest.skip(f"no compiled kernels: {error}")
    files = open_model(folder)
    model = CompiledModel(library, files.config, "none", 1)
    model.load(read_weights(files, BFLOAT16, lambda done, total: None))
    model.finish(
        cos_sin_table(files.config, 256),
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES + NUM_HOST_PAGES,
        max_tokens=64,
    )
    return model


def slot_table(vocab_size: int) -> SlotTable:
    return SlotTable(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_model_len=256,
        vocab_size=vocab_size,
        num_host_pages=NUM_HOST_PAGES,
    )


@pytest.mark.parametrize("make", [torch_model, compiled_model])
def test_a_page_is_the_same_wherever_it_has_been(make: object, folder: Path) -> None:
    config = open_model(folder).config
    model = make(folder)  # type: ignore[operator]
    slots = slot_table(config.vocab_size)
    executor = CpuExecutor(model, TorchSampler(Sampler(config.vocab_size, "cpu")), slots)
    runner = Runner(executor, slots, max_num_batched_tokens=64)
    maker = PlanMaker(runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    before, after = outputs_over_moved_pages(maker, PROMPT, PAGE_SIZE)
    assert before == after
    maker.close(0)
    # Other pages give something else: the content matters.
    maker.open(2, PROMPT, shared_pages=list(range(7)))
    maker.step({2: 2})
    for _ in range(4):
        maker.step({2: 1})
    assert maker.slots[2].tokens[len(PROMPT) :] != before


@pytest.mark.parametrize(
    "copies", [[0, NUM_PAGES + NUM_HOST_PAGES], [-1, 0], [1 << 30, 0], [0, 1, 2]]
)
def test_a_plan_that_copies_what_is_not_there_fails(copies: list[int]) -> None:
    with pytest.raises(PlanError):
        slot_table(300).copies(Plan(number=1, copies=from_ints(copies)))


def test_copies_of_a_plan_are_pairs_in_order() -> None:
    plan = Plan(number=1, copies=from_ints([3, 33, 33, 5]))
    assert slot_table(300).copies(plan).tolist() == [[3, 33], [33, 5]]
    assert slot_table(300).copies(Plan(number=1)).shape == (0, 2)


def start(kv_offloading_bytes: int) -> Start:
    values = dict.fromkeys((field.name for field in Start.__attrs_attrs__), 0)  # type: ignore[attr-defined]
    return Start(**{**values, "kv_offloading_bytes": kv_offloading_bytes})  # type: ignore[arg-type]


def test_the_hosts_memory_is_counted_in_pages() -> None:
    assert choose_num_host_pages(start(0), 1000, 1 << 20) == 0
    assert choose_num_host_pages(start(5999), 1000, 1 << 20) == 5
    with pytest.raises(ModelLoadError, match=r"asks for 4\.0 GiB .* and 2\.0 GiB are available"):
        choose_num_host_pages(start(4 << 30), 1000, 2 << 30)
    with pytest.raises(ModelLoadError, match="is 999 and one page of the KV cache has 1000 bytes"):
        choose_num_host_pages(start(999), 1000, 1 << 20)


def test_it_needs_a_prefix_cache() -> None:
    with pytest.raises(InvalidRequest, match="needs a prefix cache") as caught:
        EngineConfig("m", enable_prefix_caching=False, kv_offloading_bytes=1 << 20)
    assert caught.value.param == "kv_offloading_bytes"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_finds_on_the_host_what_it_pushed_out(folder: Path, dtype: str) -> None:
    """Compare the answers with those of an engine that has room for everything."""
    prompts = [
        [(number * 37 + index * index) % 290 + 3 for index in range(60)] for number in range(6)
    ]
    answers: list[list[list[int]]] = []
    for num_pages, offloading in ((200, None), (24, 8 << 20)):
        async with open_tiny_engine(
            folder,
            dtype=dtype,
            block_size=4,
            max_model_len=80,
            num_gpu_blocks_override=num_pages,
            kv_offloading_bytes=offloading,
        ) as engine:
            given: list[list[int]] = []
            found = 0
            for _ in range(2):
                for prompt in prompts:
                    completion = await engine.complete(
                        prompt, max_tokens=8, temperature=0, ignore_eos=True
                    )
                    given.append(list(completion.token_ids))
                    found += completion.usage.cached_tokens
            answers.append(given)
            assert found == 6 * 56
            scheduler = engine.statistics().scheduler
            assert (scheduler.pages_onloaded > 0) == (offloading is not None)
            assert scheduler.pages_evicted == 0
            await assert_idle(engine)
    assert answers[0] == answers[1]


async def test_together_and_preempted(folder: Path) -> None:
    """Many at once in a cache for two of them: what is taken from one comes back to it."""
    prompts = [[(number * 41 + 7 * index) % 290 + 3 for index in range(20)] for number in range(6)]
    answers: list[dict[int, list[int]]] = []
    for num_pages, offloading in ((400, None), (24, 8 << 20)):
        given: dict[int, list[int]] = {}
        async with open_tiny_engine(
            folder,
            block_size=4,
            max_model_len=80,
            num_gpu_blocks_override=num_pages,
            kv_offloading_bytes=offloading,
            deterministic=False,
        ) as engine:

            async def ask(number: int, given: dict[int, list[int]] = given) -> None:
                completion = await engine.complete(
                    prompts[number], max_tokens=40, temperature=0, ignore_eos=True
                )
                given[number] = list(completion.token_ids)

            async with trio.open_nursery() as nursery:
                for number in range(len(prompts)):
                    nursery.start_soon(ask, number)
            if offloading is not None:
                assert engine.statistics().scheduler.num_preemptions > 0
                assert engine.statistics().scheduler.pages_onloaded > 0
            await assert_idle(engine)
        answers.append(given)
    # In float32, batches change sums by no more than rounding, and no near-tie is among these.
    assert answers[0] == answers[1]


def test_both_sides_of_the_cache_have_the_same_bytes() -> None:
    """Scales of an e4m3 cache travel with their page."""
    from gpu.attention import CacheShape
    from gpu.attention.kv_cache import KvCache, bytes_per_page, content_of, fill

    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        shape = CacheShape(
            num_layers=2,
            num_pages=6,
            page_size=16,
            num_kv_heads=2,
            head_dim=32,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        cache = KvCache(shape, num_host_pages=3)
        generator = torch.Generator().manual_seed(0)
        written = []
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
                if tensor is not None:
                    raw = tensor.view(torch.uint8)
                    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator))
                    written.append((raw, raw.clone()))
        contents = [content_of(cache.page(number)) for number in (8, 3)]
        assert contents[0].shape == (bytes_per_page(shape),)
        fill(cache.page(8), contents[1])
        assert np.array_equal(content_of(cache.page(8)), contents[1])
        with pytest.raises(ValueError, match="bytes, not"):
            fill(cache.page(8), contents[1][1:])
        cache.copy_pages(np.array([(4, 8), (0, 4), (8, 2), (5, 8), (8, 0)], dtype=np.int32))
        for raw, before in written:
            assert torch.equal(raw[2], before[4])
            assert torch.equal(raw[4], before[0])
            assert torch.equal(raw[0], before[5])
            for page in (1, 3, 5):
                assert torch.equal(raw[page], before[page])

"""The division of memory, on a CPU and on a GPU, in made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu.loading.memory import GpuMemory, choose_num_gpu_pages, choose_num_pages, graph_bytes
from tests.gpu.test_worker import start_message
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError

GIB = 1 << 30


def start(**changes: Any) -> wire.Start:
    return start_message(Path("x"), **{"num_pages": 0, **changes})


class TestCpu:
    @pytest.mark.parametrize(
        ("asked", "available", "pages"),
        [
            ({"num_pages": 3}, 0, 3),
            ({"kv_cache_memory_bytes": 30_999}, 0, 30),
            ({}, 1_000_000, 250),
            ({}, 1 << 40, (2 << 30) // 1000),
            ({}, 30_000, 25),  # a quarter isn't enough for one sequence
        ],
    )
    def test_num_pages(self, asked: dict[str, int], available: int, pages: int) -> None:
        assert choose_num_pages(start(**asked), 1000, 100, available) == pages

    def test_no_room_for_one_sequence(self) -> None:
        with pytest.raises(ModelLoadError, match=r"room for 72 tokens .* lower --max-model-len or"):
            choose_num_pages(start(), 1000, 100, 20_000)
        with pytest.raises(ModelLoadError, match="raise --kv-cache-memory-bytes to 25000"):
            choose_num_pages(start(kv_cache_memory_bytes=24_000), 1000, 100, 1 << 40)


class TestGpu:
    def test_the_budget_is_a_share_of_all_less_what_others_hold(self) -> None:
        alone = GpuMemory(total=80 * GIB, free=80 * GIB, utilization=0.75)
        assert alone.budget == 60 * GIB
        beside = GpuMemory(total=80 * GIB, free=70 * GIB, utilization=0.75)
        assert beside.budget == 50 * GIB
        crowded = GpuMemory(total=80 * GIB, free=10 * GIB, utilization=0.75)
        assert crowded.budget == 0

    @pytest.mark.parametrize(
        ("memory", "advice"),
        [
            (GpuMemory(total=8 * GIB, free=8 * GIB, utilization=1.0), "take a smaller model or"),
            (
                GpuMemory(total=20 * GIB, free=20 * GIB, utilization=0.5),
                r"may use 10.0 GiB of the GPU's 20.0 GiB: raise --gpu-memory-utilization above 0.5",
            ),
            (
                GpuMemory(total=24 * GIB, free=17 * GIB, utilization=0.9),
                r"end what else uses this GPU \(7.0 GiB of it\)",
            ),
        ],
    )
    def test_weights_that_do_not_fit_are_refused_in_one_line(
        self, memory: GpuMemory, advice: str
    ) -> None:
        memory.check_weights(memory.budget)
        with pytest.raises(ModelLoadError, match=r"the weights take 15.0 GiB .*" + advice) as error:
            memory.check_weights(15 * GIB)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("asked", "pages"),
        [
            ({}, 30_000),
            ({"num_pages": 3}, 3),
            ({"kv_cache_memory_bytes": 50_000_999}, 25_000),
        ],
    )
    def test_the_cache_gets_what_is_left_or_what_was_asked_for(
        self, asked: dict[str, int], pages: int
    ) -> None:
        memory = GpuMemory(total=100_000_000, free=100_000_000, utilization=0.9)
        chosen = choose_num_gpu_pages(
            start(**asked),
            memory,
            in_use=60_000_000,
            bytes_per_page=1000,
            bytes_of_ranks=2000,
            max_model_len=512,
        )
        assert chosen == pages

    @pytest.mark.parametrize(
        ("changes", "in_use", "advice"),
        [
            (
                {},
                89_900,
                "above 0.9, or use --kv-cache-dtype fp8",
            ),
            ({}, 200_000, "has room for 0 tokens"),
            ({"kv_cache_dtype": "fp8"}, 89_900, "--gpu-memory-utilization above 0.9"),
            ({"kv_cache_memory_bytes": 999}, 0, "raise --kv-cache-memory-bytes to 5000"),
        ],
    )
    def test_a_cache_too_small_for_one_sequence_is_refused_in_one_line(
        self, changes: dict[str, Any], in_use: int, advice: str
    ) -> None:
        memory = GpuMemory(total=100_000, free=100_000, utilization=0.9)
        with pytest.raises(ModelLoadError, match=advice) as error:
            choose_num_gpu_pages(
                start(**changes),
                memory,
                in_use=in_use,
                bytes_per_page=100,
                bytes_of_ranks=200,
                max_model_len=100,
            )
        assert "one sequence may have 100: lower --max-model-len or " in str(error.value)
        assert ("fp8" in str(error.value)) == (not changes)
        assert "\n" not in str(error.value)

    def test_graphs_share_their_activations(self) -> None:
        few, many = (graph_bytes(count, 300, 1 << 20) for count in (2, 70))
        assert (1 << 20) < few < many < 70 * few

"""Prompts and outputs on different workers, with real models: the bits of one worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, facts_of, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, InvalidRequest
from trioserve.protocol.grammar import Grammar

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "n": 2, "logprobs": 0},
    {"grammar": Grammar("regex", "(ab|cd){20,40}")},
    {"temperature": 0.8, "prompt_logprobs": 1, "repetition_penalty": 1.2},
    {"beam_width": 3, "n": 2},
]
APART: dict[str, Any] = {
    "data_parallel_size": 2,
    "disaggregation": ("prefill", "decode"),
    "kv_offloading_bytes": 1 << 22,
    "block_size": 4,
}
COUNT = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("size", [1, 2], ids=["one-plan", "two-plans"])
async def test_the_bits_are_those_of_one_worker(tiny: Path, size: int) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, "max_plans_in_flight": size}
    async with open_tiny_engine(tiny, **options, block_size=4) as engine:
        alone = await facts_of(engine, KINDS, COUNT, max_tokens=30)
    async with open_tiny_engine(tiny, **options, **APART) as engine:
        assert await facts_of(engine, KINDS, COUNT, max_tokens=30) == alone
        counts = engine.statistics().scheduler
        assert [each.role for each in engine.workers] == ["prefill", "decode"]
        # All but the beams, which are computed where outputs are.
        assert counts.num_handed_over == COUNT * 4 // 5
        assert counts.pages_imported > 0
        await assert_idle(engine)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_pages_go_from_ranks_to_ranks(tmp_path: Path, split: str) -> None:
    folder = make_tiny("qwen3", tmp_path, hidden_size=256, intermediate_size=256, head_dim=64)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 2, "tensor_parallel_slices": 4}
    async with open_tiny_engine(folder, **options, block_size=4) as engine:
        alone = await facts_of(engine, KINDS, 5, max_tokens=12)
    async with open_tiny_engine(folder, **options, **APART, **{split: 2}) as engine:
        assert [len(each.rank_pids) for each in engine.workers] == [1, 1]
        assert await facts_of(engine, KINDS, 5, max_tokens=12) == alone
        counts = engine.statistics().scheduler
        assert counts.num_handed_over == 4
        assert counts.pages_imported > 0
        await assert_idle(engine)


@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
async def test_the_loss_of_either_worker_loses_no_request(tiny: Path, role: int) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, **APART}
    async with open_tiny_engine(tiny, **options) as engine:
        alone = await facts_of(engine, KINDS, COUNT, max_tokens=60)

        async def kill() -> None:
            handed_over = engine.statistics().scheduler.num_handed_over
            while engine.statistics().scheduler.num_handed_over < handed_over + 4:
                await trio.sleep(0.001)
            pid = engine.workers[role].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            assert await facts_of(engine, KINDS, COUNT, max_tokens=60) == alone
        while engine.statistics().worker_restarts < 1:
            await trio.sleep(0.01)
        assert await facts_of(engine, KINDS, COUNT, max_tokens=60) == alone
        await assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 1, "disaggregation": ("prefill", "decode")},
            "disaggregation names 2 roles, and there are 1 workers: name one for each",
        ),
        (
            {"data_parallel_size": 2, "disaggregation": ("prefill", "prefill")},
            "disaggregation names prefill for all workers: one has to be decode or both",
        ),
        (
            {"data_parallel_size": 2, "disaggregation": ("decode", "decode")},
            "disaggregation names decode for all workers: one has to be prefill or both",
        ),
        (
            {"data_parallel_size": 2, "disaggregation": ("auto", "decode")},
            "disaggregation names auto among other roles",
        ),
        (
            {**APART, "kv_offloading_bytes": None, "enable_prefix_caching": False},
            "disaggregation needs a prefix cache",
        ),
    ],
)
def test_roles_that_can_t_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        EngineConfig("m", **options)
    assert caught.value.param == "disaggregation"


def test_pages_that_are_handed_over_have_memory() -> None:
    roles: dict[str, Any] = {"data_parallel_size": 2, "disaggregation": ("prefill", "decode")}
    assert EngineConfig("m", **roles).kv_host_bytes == 1 << 30
    assert EngineConfig("m", **roles, kv_offloading_bytes=5).kv_host_bytes == 5
    assert EngineConfig("m").kv_host_bytes == 0
    assert not EngineConfig("m").lends_pages

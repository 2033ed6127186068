"""Tensor parallel with the compiled kernels: processes give the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from tests.engine.test_speculation import SUFFIX, draft_model, open_engine, run_all
from tests.engine.test_tensor_parallel import assert_lost_with_its_worker, outputs_with_adapters
from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.process_faults import hung
from tests.support.rank_engines import (
    WAYS_TO_LOSE,
    answers,
    assert_gone,
    assert_noticed,
    logprobs_of,
    prompt,
    ranks_of,
    tokens_of,
)
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve import ModelLoadError

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
COMPILED: dict[str, Any] = {"dtype": "auto", "tensor_parallel_slices": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return make_tiny("qwen3_moe", folder, moe_intermediate_size=128, **SIZES)


def libraries_of(process: psutil.Process) -> str:
    return "\n".join(each.path for each in process.memory_maps())


async def test_outputs_are_the_bits_of_one_process(tiny: Path) -> None:
    """With prompts in chunks and too few pages for all, so that sequences are preempted."""
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "block_size": 4}
    found = []
    for size in (1, 2, 4):
        more = {} if size == 1 else {"kv_offloading_bytes": 1 << 20}
        options = {**options, **COMPILED, **more, "tensor_parallel_size": size}
        async with open_tiny_engine(tiny, **options) as engine:
            assert engine.ready.computing.startswith("compiled kernels")
            assert engine.ready.computing.endswith(f"in BF16, {size} ranks, 4 slices")
            assert engine.ready.warning == ""
            found.append(await answers(engine))
            worker, ranks = await worker_of(engine), await ranks_of(engine)
            assert len(ranks) == size - 1
            assert not any("torch" in libraries_of(each) for each in (worker, *ranks))
            counts = engine.statistics().scheduler
            assert counts.num_preemptions > 0
            assert bool(counts.pages_offloaded) == (size > 1)
            await assert_idle(engine)
    for each in found[1:]:
        for one, other in zip(found[0], each, strict=True):
            assert tokens_of(one) == tokens_of(other)
            assert logprobs_of(one) == logprobs_of(other)
    assert any(map(logprobs_of, found[0]))


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"quantization": "int4"}, "Q4_0, Q8_0, BF16, 2 ranks, 4 slices"),
        ({"enable_expert_parallel": True}, "BF16, 2 ranks, 4 slices"),
        ({"tensor_parallel_slices": 2, "deterministic": True}, "BF16, 2 ranks, 2 slices"),
    ],
)
async def test_other_weights_and_slices(tiny: Path, options: dict[str, Any], weights: str) -> None:
    options = {**COMPILED, "tensor_parallel_size": 2, **options}
    async with open_tiny_engine(tiny, **options) as engine:
        assert engine.ready.computing.endswith(f"weights in {weights}")
        answer = await engine.complete(prompt(2), max_tokens=8, temperature=0, ignore_eos=True)
        again = await engine.complete(prompt(2), max_tokens=8, temperature=0, ignore_eos=True)
        assert answer.token_ids == again.token_ids
        await assert_idle(engine)


async def test_adapters_have_the_bits_of_one_process(tmp_path: Path) -> None:
    alone, together = await outputs_with_adapters(tmp_path, **COMPILED)
    assert alone == together
    assert len(set(alone)) == 6


@pytest.mark.parametrize("method", ["suffix", "draft model"])
async def test_drafts_change_no_bit(tiny: Path, tmp_path: Path, method: str) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter")
    async with open_engine(tiny, adapter, tensor_parallel_slices=4) as engine:
        plain = await run_all(engine, together=True)
    drafts = SUFFIX if method == "suffix" else draft_model(tiny, adaptive=False)
    options = {"tensor_parallel_size": 2, "tensor_parallel_slices": 4}
    async with open_engine(tiny, adapter, speculative_config=drafts, **options) as engine:
        assert engine.ready.computing.endswith("2 ranks, 4 slices")
        assert await run_all(engine, together=True) == plain
        assert engine.statistics().scheduler.num_accepted_drafts > 50
        await assert_idle(engine)


@pytest.mark.parametrize("lost", ["rank", "worker"])
async def test_a_rank_that_is_lost_is_the_workers_loss(tiny: Path, lost: str) -> None:
    await assert_lost_with_its_worker(tiny, lost, **COMPILED)


async def test_a_rank_that_is_lost_between_steps_is_noticed_within_a_second(tiny: Path) -> None:
    async with open_tiny_engine(tiny, tensor_parallel_size=2, **COMPILED) as engine:
        for way in WAYS_TO_LOSE:
            await assert_noticed(engine, way)


async def test_a_rank_that_hangs_ends_with_its_worker(tiny: Path) -> None:
    """The others sleep in the meantime: no thread waits for it busily."""
    options = {"tensor_parallel_size": 2, "watchdog_timeout": 4.0, **COMPILED}
    async with open_tiny_engine(tiny, **options) as engine:
        worker, ranks = await worker_of(engine), await ranks_of(engine)
        with hung(ranks[0].pid), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.complete, prompt(0))
                await trio.sleep(0.5)
                before = worker.cpu_times()
                await trio.sleep(2.0)
                after = worker.cpu_times()
            await assert_gone([worker, *ranks])
        assert after.user + after.system - before.user - before.system < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_slices": 3}, "--tensor-parallel-slices 3 must be a multiple of"),
        ({"tensor_parallel_slices": 16}, "divide the model's sums of 128, 256 numbers"),
        (
            {"dtype": "float32"},
            "--tensor-parallel-slices 4 can't be had: the compiled kernels compute in bfloat16",
        ),
        (
            {"speculative_config": '{"method": "ngram"}', "dtype": "float32"},
            "--speculative-config can't be had: the compiled kernels compute in bfloat16",
        ),
        ({"model_impl": "transformers"}, "2 is for models of this server's own decoders"),
        (
            {"model_impl": "transformers", "tensor_parallel_size": 1},
            "--tensor-parallel-slices 4 is for models of this server's own decoders on a CPU",
        ),
    ],
)
async def test_what_is_not_served_is_refused(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        async with open_tiny_engine(tiny, **{**COMPILED, "tensor_parallel_size": 2, **options}):
            raise AssertionError("it was opened")


async def test_torch_computes_what_the_kernels_cannot_split(tmp_path: Path) -> None:
    """Two ranks have 48 numbers each of 96, which are no whole blocks of 32."""
    path = make_tiny("qwen3", tmp_path)
    async with open_tiny_engine(path, dtype="auto", tensor_parallel_size=2) as engine:
        assert engine.ready.computing.startswith("torch (the compiled kernels compute blocks of 32")
        assert engine.ready.computing.endswith(", 2 ranks")
        assert "2 to 4 times as fast" in engine.ready.warning
        answer = await engine.complete(prompt(0), max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4


@pytest.mark.parametrize("option", ["tensor_parallel_size", "tensor_parallel_slices"])
async def test_an_encoder_is_not_split(option: str, tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path)
    message = f"--{option.replace('_', '-')}( 2)? is for models that generate"
    with pytest.raises(ModelLoadError, match=message):
        async with open_tiny_engine(folder, **{option: 2}):
            raise AssertionError("it was opened")

"""Pipeline parallel by torch: several stages give what one process gives, and are lost together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.rank_engines import (
    adapted,
    answers,
    assert_gone,
    logprobs_of,
    prompt,
    ranks_of,
    tokens_of,
)
from tests.support.tiny_models import make_tiny
from trioserve import ModelLoadError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.mark.parametrize(
    ("num_stages", "more"),
    [
        (2, {"kv_offloading_bytes": 1 << 20}),
        (2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        (3, {}),
    ],
)
async def test_outputs_are_those_of_one_process(
    tiny: Path, num_stages: int, more: dict[str, Any]
) -> None:
    """With prompts in chunks and too few pages for all, so that sequences are preempted."""
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "block_size": 4}
    async with open_tiny_engine(tiny, **options) as engine:
        alone = await answers(engine)
    size = more.get("tensor_parallel_size", 1)
    async with open_tiny_engine(
        tiny, pipeline_parallel_size=num_stages, **options, **more
    ) as engine:
        assert len(await ranks_of(engine)) == num_stages * size - 1
        together = await answers(engine)
        counts = engine.statistics().scheduler
        assert counts.num_preemptions > 0
        assert bool(counts.pages_offloaded) == ("kv_offloading_bytes" in more)
        await assert_idle(engine)
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)
    assert any(map(logprobs_of, alone))


async def test_embeddings_are_those_of_one_process(tiny: Path) -> None:
    found = []
    for num_stages in (1, 2):
        async with open_tiny_engine(
            tiny, pipeline_parallel_size=num_stages, max_num_batched_tokens=16
        ) as engine:
            found.append((await engine.embed([prompt(1), prompt(4)])).vectors)
    assert found[0].shape == (2, 64)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


async def outputs_with_adapters(folder: Path, **options: Any) -> list[list[tuple[int, ...]]]:
    """Return the outputs with adapters that come and go, of one stage and of two."""
    model = make_tiny("llama3", folder / "model", head_dim=32)
    paths = {f"a{i}": make_adapter(model, folder / f"{i}", seed=i) for i in range(3)}
    found = []
    for num_stages in (1, 2):
        options = {**options, "enable_lora": True, "pipeline_parallel_size": num_stages}
        async with open_tiny_engine(model, **options) as engine:
            for name in ("a0", "a1"):
                await engine.load_adapter(name, paths[name])
            first = await adapted(engine, "a0", "", "a1")
            await engine.unload_adapter("a0")
            await engine.load_adapter("a2", paths["a2"])
            found.append([*first, *await adapted(engine, "a2", "a1", "")])
            await assert_idle(engine)
    return found


async def test_each_stage_has_the_adapters_of_its_layers(tmp_path: Path) -> None:
    alone, together = await outputs_with_adapters(tmp_path)
    assert alone == together
    assert len(set(alone)) == 6


async def test_a_stage_that_is_lost_is_the_workers_loss(tiny: Path) -> None:
    await assert_a_lost_stage_is_the_workers_loss(tiny, 1)


async def assert_a_lost_stage_is_the_workers_loss(folder: Path, lost: int, **more: Any) -> None:
    """Kill the middle or the last of three: no request is lost, and the streams go on."""
    async with open_tiny_engine(folder, pipeline_parallel_size=3, **more) as engine:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        numbers = range(4)
        expected = [await engine.complete(prompt(number), **options) for number in numbers]
        processes = [await worker_of(engine), *await ranks_of(engine)]
        found: dict[int, list[int]] = {number: [] for number in numbers}

        async def follow(number: int) -> None:
            async with engine.generate(prompt(number), **options) as stream:
                async for delta in stream:
                    found[number] += delta.token_ids
                    if number == 1 and len(found[number]) == 10:
                        processes[lost].kill()

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(follow, number)
        assert [found[number] for number in numbers] == [list(e.token_ids) for e in expected]
        await assert_gone(processes)
        assert engine.statistics().worker_restarts == 1
        (report,) = engine.workers
        assert "killed by signal 9" in str(report.last_loss)
        await assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 4}, "4 is more than the model's 3 layers"),
        ({"pipeline_parallel_layers": "2,2"}, "layers has 4 layers, and the model 3"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 doesn't divide the model's 4"),
        (
            {"kv_offloading_bytes": 1 << 20, "kv_offloading_dir": "/tmp/pages"},
            "--kv-offloading-dir can't be had with several ranks: the compiled kernels compute in",
        ),
        (
            {"model_impl": "transformers"},
            "--pipeline-parallel-size 2 is for models of this server's own decoders$",
        ),
        (
            {"quantization": "int8"},
            "--quantization int8 can't be had: the compiled kernels compute in bfloat16 only",
        ),
        (
            {"speculative_config": '{"method": "ngram"}'},
            "--speculative-config can't be had: the compiled kernels compute in bfloat16 only",
        ),
    ],
)
async def test_what_stages_do_not_serve_is_refused(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        async with open_tiny_engine(tiny, **{"pipeline_parallel_size": 2, **options}):
            raise AssertionError("it was opened")

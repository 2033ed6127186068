"""Pipeline parallel with the compiled kernels: the stages' processes give the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from tests.engine.test_compiled_ranks import SIZES, libraries_of
from tests.engine.test_pipeline_parallel import (
    assert_a_lost_stage_is_the_workers_loss,
    outputs_with_adapters,
)
from tests.engine.test_several_hosts import over_hosts, rank_processes
from tests.engine.test_speculation import SUFFIX, draft_model, open_engine, run_all
from tests.support.engines import (
    assert_idle,
    facts_of,
    open_compiled_engine,
    open_tiny_engine,
    worker_of,
)
from tests.support.lora_adapters import make_adapter
from tests.support.process_faults import hung
from tests.support.rank_engines import (
    answers,
    assert_gone,
    assert_noticed,
    logprobs_of,
    prompt,
    ranks_of,
    tokens_of,
)
from tests.support.tiny_models import make_tiny
from trioserve import Grammar
from trioserve.workers.remote.certificates import make_certificates

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

AUTO: dict[str, Any] = {"dtype": "auto"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return make_tiny("qwen3_moe", folder, moe_intermediate_size=128, **SIZES)


@pytest.mark.parametrize(
    ("num_stages", "more", "computing"),
    [
        (2, {}, "stages of 2 + 1 layers, 2 ranks"),
        (3, {"kv_offloading_bytes": 1 << 20}, "stages of 1 + 1 + 1 layers, 3 ranks"),
        (
            2,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "stages of 2 + 1 layers, 4 ranks, 4 slices",
        ),
    ],
)
async def test_outputs_are_the_bits_of_one_stage(
    tiny: Path, num_stages: int, more: dict[str, Any], computing: str
) -> None:
    """With prompts in chunks and too few pages for all, so that sequences are preempted.

    Stages of two ranks give the bits of two ranks.
    """
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "block_size": 4, **AUTO}
    options |= more
    async with open_tiny_engine(tiny, **options) as engine:
        alone = await answers(engine)
    async with open_tiny_engine(tiny, pipeline_parallel_size=num_stages, **options) as engine:
        assert engine.ready.computing.startswith("compiled kernels")
        assert engine.ready.computing.endswith(f"weights in BF16, {computing}")
        assert engine.ready.warning == ""
        together = await answers(engine)
        worker, ranks = await worker_of(engine), await ranks_of(engine)
        assert len(ranks) == num_stages * more.get("tensor_parallel_size", 1) - 1
        assert not any("torch" in libraries_of(each) for each in (worker, *ranks))
        counts = engine.statistics().scheduler
        assert counts.num_preemptions > 0
        assert bool(counts.pages_offloaded) == ("kv_offloading_bytes" in more)
        await assert_idle(engine)
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert logprobs_of(one) == logprobs_of(other)
    assert any(map(logprobs_of, alone))


@pytest.mark.parametrize(
    ("num_hosts", "ranks"),
    [
        (2, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        # States go from the second host to the third by way of the first.
        (3, {"pipeline_parallel_size": 3}),
    ],
)
async def test_outputs_over_several_hosts_are_the_bits_of_one_process(
    tiny: Path, tmp_path: Path, num_hosts: int, ranks: dict[str, Any]
) -> None:
    make_certificates(tmp_path)
    slices = 4 if "tensor_parallel_size" in ranks else None
    async with open_tiny_engine(tiny, **AUTO, tensor_parallel_slices=slices) as engine:
        alone = await answers(engine)
    more = {**AUTO, **ranks, "speculative_config": SUFFIX, "kv_offloading_bytes": 1 << 20}
    async with over_hosts(tiny, tmp_path, num_hosts, **more) as (engine, _):
        assert engine.ready.computing.startswith("compiled kernels")
        together = await answers(engine)
        assert not any("torch" in libraries_of(each) for each in rank_processes())
        await assert_idle(engine)
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert logprobs_of(one) == logprobs_of(other)


async def test_a_real_model_s_outputs_are_the_bits_of_one_process() -> None:
    """Eight streams of several kinds, which begin and end at different times."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "n": 2, "logprobs": 0},
        {"grammar": Grammar("regex", "(ab|cd){20,40}")},
        {"beam_width": 3, "n": 2},
    ]
    found = []
    for num_stages in (1, 2):
        options = {**AUTO, "pipeline_parallel_size": num_stages}
        async with open_tiny_engine(Path("smollm2-135m"), **options) as engine:
            found.append(await facts_of(engine, kinds, 8, max_tokens=24))
            embedded = (await engine.embed([prompt(1), prompt(4)])).vectors
            found[-1].append(embedded.tolist())
            await assert_idle(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("quantization", "weights"), [("int8", "Q8_0, BF16"), ("int4", "Q4_0, Q8_0, BF16")]
)
async def test_rounded_weights_are_the_bits_of_one_process(
    tiny: Path, quantization: str, weights: str
) -> None:
    """With a split of the layers that was asked for."""
    found = []
    for num_stages, layers in ((1, None), (2, "1,2")):
        options = {**AUTO, "pipeline_parallel_size": num_stages, "quantization": quantization}
        options["pipeline_parallel_layers"] = layers
        async with open_tiny_engine(tiny, **options) as engine:
            assert f"weights in {weights}" in engine.ready.computing
            assert ("stages of 1 + 2 layers" in engine.ready.computing) == (num_stages == 2)
            answer = await engine.complete(prompt(2), max_tokens=8, temperature=0, logprobs=1)
            found.append((answer.token_ids, logprobs_of(answer)))
    assert found[0] == found[1]


async def test_adapters_have_the_bits_of_one_process(tmp_path: Path) -> None:
    alone, together = await outputs_with_adapters(tmp_path, **AUTO)
    assert alone == together
    assert len(set(alone)) == 6


async def test_drafts_change_no_bit(tiny: Path, tmp_path: Path) -> None:
    """Drafts are verified while other plans are in flight, and sequences are preempted."""
    adapter, slices = make_adapter(tiny, tmp_path / "adapter"), {"tensor_parallel_slices": 4}
    async with open_engine(tiny, adapter, **slices) as engine:
        plain = await run_all(engine, together=True)
    model = draft_model(tiny, adaptive=False)
    for drafts, size, num_pages in ((SUFFIX, 1, 24), (model, 2, 500)):
        options = {"pipeline_parallel_size": 2, "tensor_parallel_size": size, **slices}
        options |= {"speculative_config": drafts, "num_gpu_blocks_override": num_pages}
        async with open_engine(tiny, adapter, **options) as engine:
            assert f"{2 * size} ranks, 4 slices" in engine.ready.computing
            assert await run_all(engine, together=True) == plain
            counts = engine.statistics().scheduler
            assert counts.num_accepted_drafts > 50
            assert bool(counts.num_preemptions) == (num_pages < 500)
            await assert_idle(engine)


async def test_many_streams_are_those_of_one_process(tiny: Path) -> None:
    """Streams begin and end at different times, so that micro-batches change."""
    found = []
    for num_stages in (1, 3):
        async with open_compiled_engine(tiny, pipeline_parallel_size=num_stages) as engine:
            tokens: dict[int, tuple[int, ...]] = {}

            async def ask(number: int, tokens: dict[int, tuple[int, ...]] = tokens) -> None:
                options = {"max_tokens": 5 + 3 * number, "temperature": 0.8, "seed": number}
                answer = await engine.complete(prompt(number % 7), ignore_eos=True, **options)
                tokens[number] = tuple(answer.token_ids)

            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(ask, number)
            await assert_idle(engine)
        found.append(tokens)
    assert found[0] == found[1]


async def test_a_stage_that_is_cut_off_between_steps_is_noticed_within_a_second(tiny: Path) -> None:
    async with open_compiled_engine(tiny, pipeline_parallel_size=2) as engine:
        await assert_noticed(engine, "cut off")


async def test_a_stage_that_hangs_ends_with_its_worker(tiny: Path) -> None:
    """Its process lives, so only the step that doesn't end shows it."""
    async with open_compiled_engine(tiny, watchdog_timeout=2.0, pipeline_parallel_size=2) as engine:
        worker, ranks = await worker_of(engine), await ranks_of(engine)
        with hung(ranks[0].pid), trio.fail_after(60):
            answer = await engine.complete(prompt(0), max_tokens=5, ignore_eos=True)
            assert len(answer.token_ids) == 5
            await assert_gone([worker, *ranks])
        (report,) = engine.workers
        assert "no step within" in str(report.last_loss)


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_stage_that_is_lost_is_the_workers_loss(tiny: Path, lost: int) -> None:
    await assert_a_lost_stage_is_the_workers_loss(tiny, lost, **AUTO)

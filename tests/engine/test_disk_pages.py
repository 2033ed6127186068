"""Pages of real models on disk: a new engine finds them, with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.engine.test_several_hosts import over_hosts
from tests.support.engines import assert_idle, open_compiled_engine, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import Engine, EngineConfig, InvalidRequest, ModelLoadError
from trioserve.workers.remote.certificates import make_certificates

PROMPTS = [[(number * 37 + index * index) % 290 + 3 for index in range(60)] for number in range(6)]
SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 80,
    "num_gpu_blocks_override": 24,
    "kv_offloading_bytes": 1 << 20,
}
Facts = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama3"), head_dim=32)


async def ask_all(engine: Engine) -> tuple[list[Facts], int]:
    """Return tokens and log-probabilities of all prompts, and the number of cached tokens."""
    facts, found = [], 0
    for prompt in PROMPTS:
        options: dict[str, Any] = {"temperature": 0.8, "seed": 1, "ignore_eos": True}
        completion = await engine.complete(prompt, max_tokens=8, logprobs=0, **options)
        logprobs = tuple(each.logprob for each in completion.logprobs or ())
        facts.append((tuple(completion.token_ids), logprobs))
        found += completion.usage.cached_tokens
    return facts, found


async def until_written(engine: Engine) -> None:
    """Wait until all pages that were copied to the host are on disk."""
    with trio.fail_after(20):
        while True:
            scheduler = engine.statistics().scheduler
            if scheduler.pages_written >= scheduler.pages_offloaded - scheduler.pages_read > 0:
                return
            await trio.sleep(0.01)


async def until_known(engine: Engine) -> None:
    """Wait until the engine knows which pages are on disk."""
    with trio.fail_after(20):
        while not engine.statistics().scheduler.disk_pages:
            await trio.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_new_engine_finds_what_the_last_one_wrote(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    options: dict[str, Any] = {**SMALL, "dtype": dtype, "kv_offloading_dir": str(tmp_path / "kv")}
    async with open_tiny_engine(folder, **options) as engine:
        first, found = await ask_all(engine)
        assert found == 0
        await until_written(engine)
        await assert_idle(engine)
    async with open_tiny_engine(folder, **options) as engine:
        await until_known(engine)
        second, found = await ask_all(engine)
        # The first transfer is made in any case, later ones if they are quicker than computing.
        assert found >= 56
        assert engine.statistics().scheduler.pages_read > 0
        await assert_idle(engine)
    if dtype == "bfloat16":  # Torch's bits depend on where a prompt was cut.
        assert first == second
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]


@pytest.mark.parametrize("num_hosts", [1, 2])
async def test_stages_find_what_ranks_wrote(tmp_path: Path, num_hosts: int) -> None:
    """A page has the same bytes and the same name whichever processes computed it."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = make_tiny("llama3", tmp_path / "model", **sizes)
    options: dict[str, Any] = {**SMALL, "dtype": "bfloat16", "kv_offloading_dir": str(tmp_path)}
    options["tensor_parallel_slices"] = 4
    async with open_tiny_engine(folder, **options, tensor_parallel_size=2) as engine:
        first, found = await ask_all(engine)
        assert found == 0
        await until_written(engine)
        await assert_idle(engine)
    damage(next(tmp_path.rglob("*.page")))
    options["pipeline_parallel_size"] = 2
    async with contextlib.AsyncExitStack() as stack:
        if num_hosts == 1:
            engine = await stack.enter_async_context(open_tiny_engine(folder, **options))
        else:
            make_certificates(tls := tmp_path / "tls")
            hosts = over_hosts(folder, tls, num_hosts, **options)
            engine, _ = await stack.enter_async_context(hosts)
        await until_known(engine)
        second, found = await ask_all(engine)
        assert found > 0
        assert engine.statistics().scheduler.pages_read > 0
        await assert_idle(engine)
    assert first == second


async def test_workers_of_one_engine_read_each_other_s_files(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SMALL, "kv_offloading_dir": str(tmp_path)}
    options |= {"data_parallel_size": 2, "routing_policy": "round_robin"}
    async with open_compiled_engine(folder, **options) as engine:
        first, found = await ask_all(engine)
        assert found == 0
        await until_written(engine)
        # With one request between, each prompt comes to the worker that hasn't computed it.
        await engine.complete([5] * 8, max_tokens=1)
        second, found = await ask_all(engine)
        assert found >= 56
        assert engine.statistics().scheduler.pages_read > 0
        await assert_idle(engine)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_workers_take_pages_from_each_other_s_memory(folder: Path, dtype: str) -> None:
    options: dict[str, Any] = {**SMALL, "num_gpu_blocks_override": 200, "dtype": dtype}
    options |= {"data_parallel_size": 2, "routing_policy": "round_robin"}
    async with open_tiny_engine(folder, **options) as engine:
        first, found = await ask_all(engine)
        assert found == 0
        await engine.complete([5] * 8, max_tokens=1)
        second, found = await ask_all(engine)
        assert found >= 56
        statistics = engine.statistics().scheduler
        assert statistics.pages_imported > 0 == statistics.pages_offloaded
        await assert_idle(engine)
    if dtype == "bfloat16":  # Torch's bits depend on where a prompt was cut.
        assert first == second
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [damage, Path.unlink])
async def test_files_that_are_damaged_or_gone_cost_a_computation(
    folder: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    options: dict[str, Any] = {**SMALL, "kv_offloading_dir": str(tmp_path)}
    async with open_compiled_engine(folder, **options) as engine:
        first, _ = await ask_all(engine)
        await until_written(engine)
    async with open_compiled_engine(folder, **options) as engine:
        await until_known(engine)
        for path in tmp_path.rglob("*.page"):
            harm(path)
        second, found = await ask_all(engine)
        assert found == 0
        await assert_idle(engine)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]


async def test_pages_of_other_settings_are_not_found(folder: Path, tmp_path: Path) -> None:
    async with open_compiled_engine(folder, **SMALL, kv_offloading_dir=str(tmp_path)) as engine:
        await ask_all(engine)
        await until_written(engine)
    options: dict[str, Any] = {**SMALL, "block_size": 8, "num_gpu_blocks_override": 12}
    async with open_compiled_engine(folder, **options, kv_offloading_dir=str(tmp_path)) as engine:
        _, found = await ask_all(engine)
        assert found == 0
    assert len(list(tmp_path.iterdir())) == 2


async def test_pages_that_are_rotated_in_another_way_are_not_found(tmp_path: Path) -> None:
    """LongRoPE has other angles where sequences beyond the training length are served."""
    folder, files = make_tiny("phi3", tmp_path / "model"), tmp_path / "kv"
    options: dict[str, Any] = {**SMALL, "kv_offloading_dir": str(files)}
    async with open_tiny_engine(folder, **options) as engine:
        await ask_all(engine)
        await until_written(engine)
    options |= {"max_model_len": 300, "num_gpu_blocks_override": 80}
    async with open_tiny_engine(folder, **options) as engine:
        _, found = await ask_all(engine)
        assert found == 0
    assert len(list(files.iterdir())) == 2


async def test_other_weights_have_other_files(folder: Path, tmp_path: Path) -> None:
    other = make_tiny("llama3", tmp_path / "other", seed=5, head_dim=32)
    files = tmp_path / "kv"
    async with open_compiled_engine(folder, **SMALL, kv_offloading_dir=str(files)) as engine:
        before, _ = await ask_all(engine)
        await until_written(engine)
        await engine.update_weights(other)
        after, found = await ask_all(engine)
        assert found == 0
        assert after != before
        await until_written(engine)
        await assert_idle(engine)
    async with open_compiled_engine(other, **SMALL, kv_offloading_dir=str(files)) as engine:
        await until_known(engine)
        again, found = await ask_all(engine)
        assert found > 0
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in after]


def test_it_needs_the_hosts_memory() -> None:
    with pytest.raises(InvalidRequest, match="kv_offloading_dir needs memory of the host"):
        EngineConfig("m", kv_offloading_dir="/tmp/kv")


async def test_a_folder_that_cannot_be_made_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {**SMALL, "kv_offloading_dir": str(tmp_path / "file")}
    with pytest.raises(ModelLoadError, match=r"--kv-offloading-dir can't be used: .*file"):
        async with open_compiled_engine(folder, **options):
            pass

"""Prompt adapters over a fake worker: the virtual tokens come first, whatever the request is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from safetensors.numpy import load_file

from tests.support.front_ends import open_server
from tests.support.prompt_adapters import write_prefix_adapter, write_prompt_adapter
from trioserve import AdapterNotFound, Completion, EmbeddingsPrompt, Engine, InvalidRequest
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.generation import completion_of
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_model import EMBEDDING_WIDTH, KV_SHAPE, embedded_token

COUNTS = {"short": 5, "long": 40, "prefix": 22}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_prefix_adapter(root / name, count=count, kv_shape=KV_SHAPE)
        if name == "prefix"
        else write_prompt_adapter(root / name, count=count, width=EMBEDDING_WIDTH, seed=count)
        for name, count in COUNTS.items()
    }


def small(**fields: Any) -> FakeWorker:
    return FakeWorker(num_pages=60, page_size=4, max_num_batched_tokens=32, **fields)


def modules(folders: dict[str, Path]) -> list[str]:
    return [*(f"{name}={path}" for name, path in folders.items()), "lora=/adapters/lora"]


def rows_of(folder: Path) -> Any:
    return load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]


def check(completion: Completion, folder: Path, prompt: list[int], seed: int) -> None:
    """Assert that each output is computed from the virtual tokens and the prompt."""
    for output in completion.outputs:
        context = [*map(embedded_token, rows_of(folder)), *prompt]
        for token in output.token_ids:
            sampler = SamplerParams(seed=seed, sequence_index=output.index)
            assert token == FakeWorker().token(context, sampler)
            context.append(token)


async def test_any_company_any_accident(folders: dict[str, Path], autojump_clock: object) -> None:
    """Two workers that die now and then, and not enough pages for all."""
    numbers = random.Random(4)
    num_shared = 0

    def die(step: int, _: object) -> None:
        if step == 100:
            raise WorkerDies

    async def ask(engine: Engine, name: str) -> None:
        nonlocal num_shared
        prompt = [numbers.randint(0, 255) for _ in range(numbers.randint(1, 20))]
        options = {"max_tokens": 10, "seed": 7, "n": numbers.randint(1, 2)}
        await trio.sleep(numbers.random() * 20)
        async with engine.generate(prompt, adapter=name, **options) as stream:
            chunks = [chunk async for chunk in stream]
        check(completion_of(stream, chunks), folders[name], prompt, seed=7)
        num_shared += stream.request.num_cached_tokens >= COUNTS[name] // 4 * 4

    options: dict[str, Any] = {"data_parallel_size": 2, "lora_modules": modules(folders)}
    async with open_fake_engine(lambda: small(script=die, step_time=0.01), **options) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(ask, engine, list(COUNTS)[number % 3])
        assert sum(worker.restarts for worker in engine.workers) > 1
        assert num_shared > 50
        for name in folders:
            await engine.unload_adapter(name)
            with pytest.raises(AdapterNotFound):
                await engine.complete([5], adapter=name, max_tokens=1)
        assert engine.statistics().scheduler.pages_cached == 0


async def test_beams_and_embeddings_behind_virtual_tokens(folders: dict[str, Path]) -> None:
    """An adapter and the rest of a prompt are the whole prompt."""
    tail = np.random.default_rng(1).normal(size=(9, EMBEDDING_WIDTH)).astype(np.float32)
    whole = np.concatenate([rows_of(folders["long"]), tail])
    async with open_fake_engine(small, lora_modules=modules(folders)) as engine:
        for fields in ({"beam_width": 3, "n": 3}, {"n": 2}, {"logprobs": 2}):
            options: dict[str, Any] = {"max_tokens": 8, "seed": 1, **fields}
            found = await engine.complete(EmbeddingsPrompt(tail), adapter="long", **options)
            expected = await engine.complete(EmbeddingsPrompt(whole), **options)
            assert found.outputs == expected.outputs
            assert (found.usage.prompt_tokens, expected.usage.prompt_tokens) == (9, 49)
        states: dict[str, Any] = {"max_tokens": 2, "return_hidden_states": "all"}
        found = await engine.complete(EmbeddingsPrompt(tail), adapter="long", **states)
        expected = await engine.complete(EmbeddingsPrompt(whole), **states)
        assert found.prompt_hidden_states is not None
        assert expected.prompt_hidden_states is not None
        assert np.array_equal(found.prompt_hidden_states, expected.prompt_hidden_states[40:])


async def test_keys_and_values_are_no_embeddings(folders: dict[str, Path]) -> None:
    """There are no arrays of the whole prompt: virtual tokens aren't computed."""
    tail = np.random.default_rng(1).normal(size=(9, EMBEDDING_WIDTH)).astype(np.float32)
    worker = small()
    async with open_fake_engine(lambda: worker, lora_modules=modules(folders)) as engine:
        for fields in ({"beam_width": 3, "n": 2}, {"n": 2}):
            options: dict[str, Any] = {"adapter": "prefix", "max_tokens": 6, "seed": 1, **fields}
            found = await engine.complete(EmbeddingsPrompt(tail), **options)
            again = await engine.complete(EmbeddingsPrompt(tail), **options)
            assert again.outputs == found.outputs
            assert again.usage.cached_tokens == 6
        states: dict[str, Any] = {"adapter": "prefix", "max_tokens": 2}
        found = await engine.complete([5, 6], **states, return_hidden_states="last")
        assert found.outputs[0].hidden_states is not None
        refused = ({"return_hidden_states": "all"}, {"return_context_logits": True})
        for each in refused:
            with pytest.raises(InvalidRequest, match="aren't returned with its adapter") as caught:
                await engine.complete([5, 6], **states, **each)
            assert caught.value.param == next(iter(each))


async def test_unloading_waits_for_what_runs(folders: dict[str, Path]) -> None:
    """Two adapters with one name, one after the other, at the same time."""
    results: list[Completion] = []

    async def ask(engine: Engine) -> None:
        results.append(await engine.complete([5, 6], adapter="it", max_tokens=100, seed=4))

    async def unload(engine: Engine) -> None:
        await engine.unload_adapter("it")
        assert worker.num_steps >= 100

    # Files are read in a thread, beside steps: five seconds of them are left by then.
    pace = [0.05]
    worker = small(step_time=lambda _plan: pace[0])
    async with open_fake_engine(lambda: worker, enable_lora=True) as engine:
        await engine.load_adapter("it", folders["long"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine)
            while engine.statistics().scheduler.running_adapters != ("it",):
                await trio.sleep(0.01)
            nursery.start_soon(unload, engine)
            await trio.testing.wait_all_tasks_blocked()
            await engine.load_adapter("it", folders["short"])
            found = await engine.complete([5, 6], adapter="it", max_tokens=5, seed=4)
            check(found, folders["short"], [5, 6], seed=4)
            assert not results
            pace[0] = 0.0
        assert not worker.adapters
        assert len(results[0].token_ids) == 100
        check(results[0], folders["long"], [5, 6], seed=4)


async def test_a_session_with_an_adapter(folders: dict[str, Path]) -> None:
    """Virtual tokens are before a session's history, and no part of it; pins keep its pages."""
    async with open_fake_engine(small, lora_modules=modules(folders)) as engine:
        with engine.open_session() as session:
            history: list[int] = []
            for cached, prompt in ((0, [5, 6, 7]), (8, [8, 9]), (16, [10])):
                found = await session.complete(prompt, adapter="long", max_tokens=6, seed=2)
                assert list(found.prompt_token_ids) == [*history, *prompt]
                assert found.usage.cached_tokens == cached
                check(found, folders["long"], [*history, *prompt], seed=2)
                history = [*found.prompt_token_ids, *found.token_ids]
                for number in range(10):  # Enough to take all other pages.
                    await engine.complete([number] * 40, max_tokens=1)


async def test_front_ends_know_the_lengths(tmp_path: Path, folders: dict[str, Path]) -> None:
    prompt = list(range(30, 40))
    async with open_server(tmp_path, small, lora_modules=modules(folders)) as server:
        await server.front_ends[0].server_api.load_adapter("own", str(folders["short"]))
        for front_end in server.front_ends:
            with trio.fail_after(30):
                while len(front_end.engine.adapters) < len(COUNTS) + 2:
                    await trio.sleep(0.001)
            for name, folder in (*folders.items(), ("own", folders["short"])):
                found = await front_end.engine.complete(
                    prompt, adapter=name, max_tokens=5, seed=3, n=2
                )
                assert found.usage.prompt_tokens == len(found.prompt_token_ids) == len(prompt)
                check(found, folder, prompt, seed=3)
        await server.wait_nothing_held()

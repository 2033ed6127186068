"""Adapters in whole engines: the tokens are the merged model's, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_compiled_engine, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter, merge
from tests.support.tiny_models import make_tiny
from trioserve import (
    LLM,
    AdapterNotFound,
    Engine,
    EngineError,
    InvalidRequest,
    ModelLoadError,
)

PROMPT = [3 + 7 * place % 200 for place in range(45)]
GREEDY: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
NAMES = ("", "low", "high", "some")


class Setting:
    """A model, three adapters, and the models that they make of it."""

    def __init__(self, root: Path) -> None:
        self.model = make_tiny("qwen3", root / "model", max_position_embeddings=2048)
        self.adapters = {
            "low": make_adapter(self.model, root / "low", seed=1, rank=4),
            "high": make_adapter(self.model, root / "high", seed=2, rank=20, use_rslora=True),
            "some": make_adapter(
                self.model,
                root / "some",
                seed=3,
                rank=8,
                parts=("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"),
                ranks={"mlp.down_proj": 3},
                alpha_pattern={"v_proj": 24},
            ),
        }
        self.merged = {
            name: merge(self.model, path, root / f"merged-{name}")
            for name, path in self.adapters.items()
        }
        self.merged[""] = self.model

    @property
    def modules(self) -> list[str]:
        return [f"{name}={path}" for name, path in self.adapters.items()]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def expected(setting: Setting) -> dict[str, tuple[int, ...]]:
    """The greedy tokens of the merged models."""

    async def tokens(path: Path) -> tuple[int, ...]:
        async with open_tiny_engine(path) as engine:
            return (await engine.complete(PROMPT, **GREEDY)).token_ids

    found = {name: trio.run(tokens, path) for name, path in setting.merged.items()}
    assert len(set(found.values())) == len(found)  # else they would say nothing
    return found


async def all_at_once(engine: Engine, times: int = 1, **options: Any) -> dict[str, set[Any]]:
    """Return the outputs of each adapter and of none, asked ``times`` times, all together."""
    found: dict[str, set[Any]] = {name: set() for name in NAMES}

    async def ask(name: str) -> None:
        completion = await engine.complete(PROMPT, adapter=name, **{**GREEDY, **options})
        found[name].add(completion.token_ids)

    async with trio.open_nursery() as nursery:
        for name in NAMES * times:
            nursery.start_soon(ask, name)
    return found


@pytest.mark.parametrize("depth", [1, 2])
async def test_one_batch_of_several_and_none(
    setting: Setting, expected: dict[str, tuple[int, ...]], depth: int
) -> None:
    async with open_tiny_engine(
        setting.model, lora_modules=setting.modules, max_plans_in_flight=depth
    ) as engine:
        assert [adapter.name for adapter in engine.adapters] == ["low", "high", "some"]
        found = await all_at_once(engine, 2)
        assert found == {name: {tokens} for name, tokens in expected.items()}
        # From the prefix cache, each from its own.
        for name in NAMES:
            completion = await engine.complete(PROMPT, adapter=name, **GREEDY)
            assert completion.token_ids == expected[name]
            assert completion.usage.cached_tokens == 32
        await assert_idle(engine)


async def test_chunks_preemption_and_few_places(
    setting: Setting, expected: dict[str, tuple[int, ...]]
) -> None:
    """Room for less than two whole sequences, and for two adapters of three."""
    async with open_tiny_engine(
        setting.model,
        lora_modules=setting.modules,
        max_num_batched_tokens=20,
        num_gpu_blocks_override=9,
        max_loras=2,
        max_cpu_loras=2,
    ) as engine:
        found = await all_at_once(engine, 3)
        assert found == {name: {tokens} for name, tokens in expected.items()}
        assert engine.statistics().scheduler.num_preemptions > 0
        await assert_idle(engine)


async def test_several_outputs_of_one_prompt(setting: Setting) -> None:
    sampling = {**GREEDY, "temperature": 0.8, "seed": 5, "n": 3}
    async with open_tiny_engine(setting.merged["low"]) as engine:
        merged = await engine.complete(PROMPT, **sampling)
    async with open_tiny_engine(setting.model, lora_modules=setting.modules) as engine:
        found = await engine.complete(PROMPT, adapter="low", **sampling)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in merged.outputs]


async def test_a_new_worker_gets_all_adapters_again(
    setting: Setting, expected: dict[str, tuple[int, ...]]
) -> None:
    length = 300
    async with open_tiny_engine(setting.model, lora_modules=setting.modules) as engine:
        undisturbed = await all_at_once(engine, max_tokens=length)
        restarts = 0

        async def kill() -> None:
            nonlocal restarts
            while engine.statistics().scheduler.num_running < len(NAMES):
                await trio.sleep(0.001)
            (await worker_of(engine)).kill()
            restarts += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            assert await all_at_once(engine, max_tokens=length) == undisturbed
        assert engine.statistics().worker_restarts == restarts == 1
        # Even adapters that no request used meanwhile.
        assert await all_at_once(engine) == {name: {tokens} for name, tokens in expected.items()}
        await assert_idle(engine)


async def test_loaded_and_unloaded_while_others_run(
    setting: Setting, expected: dict[str, tuple[int, ...]]
) -> None:
    async with open_tiny_engine(setting.model, enable_lora=True) as engine:
        with pytest.raises(AdapterNotFound, match="no adapter 'low' is loaded"):
            await engine.complete(PROMPT, adapter="low", **GREEDY)
        await engine.load_adapter("low", setting.adapters["low"])
        with pytest.raises(InvalidRequest, match="'low' is loaded already"):
            await engine.load_adapter("low", setting.adapters["low"])
        left = trio.Event()

        async def unload() -> None:
            await engine.unload_adapter("low")
            left.set()

        async with trio.open_nursery() as nursery:
            # Far longer than the other one is read for.
            long = {**GREEDY, "max_tokens": 1500}
            async with engine.generate(PROMPT, adapter="low", **long) as stream:
                tokens = list((await anext(stream)).token_ids)
                nursery.start_soon(unload)
                while engine.adapters:
                    await trio.sleep(0.001)
                with pytest.raises(AdapterNotFound):
                    await engine.complete(PROMPT, adapter="low", **GREEDY)
                # The same name anew, for another adapter, while the old one still runs.
                await engine.load_adapter("low", setting.adapters["some"])
                completion = await engine.complete(PROMPT, adapter="low", **GREEDY)
                assert completion.token_ids == expected["some"]
                assert completion.usage.cached_tokens == 0
                assert not left.is_set()
                async for chunk in stream:
                    tokens += chunk.token_ids
        assert tuple(tokens[:30]) == expected["low"]
        assert len(tokens) == 1500
        await assert_idle(engine)


async def test_what_can_t_be_loaded(setting: Setting, tmp_path: Path) -> None:
    async with open_compiled_engine(setting.model, enable_lora=True, max_lora_rank=8) as engine:
        with pytest.raises(InvalidRequest, match="raise --max-lora-rank") as caught:
            await engine.load_adapter("high", setting.adapters["high"])
        assert caught.value.param == "path"
        with pytest.raises(InvalidRequest, match=r"adapter_config\.json is missing"):
            await engine.load_adapter("none", tmp_path)
        for name in ("", " low", "l\now", "x" * 513, engine.model_name):
            with pytest.raises(InvalidRequest) as caught:
                await engine.load_adapter(name, setting.adapters["low"])
            assert caught.value.param == "name"
        assert engine.adapters == ()
        with pytest.raises(AdapterNotFound):
            await engine.unload_adapter("none")
        with pytest.raises(AdapterNotFound, match="is missing"):
            await engine.load_adapter("none", tmp_path / "none")
        await engine.load_adapter("low", setting.adapters["low"])
        await assert_idle(engine)
    async with open_compiled_engine(setting.model) as engine:
        with pytest.raises(InvalidRequest, match="--enable-lora"):
            await engine.load_adapter("low", setting.adapters["low"])
    with pytest.raises(ModelLoadError, match="the adapter 'low' can't be loaded"):
        async with open_compiled_engine(setting.model, lora_modules=[f"low={tmp_path}"]):
            pass


async def test_files_that_change_under_a_loaded_adapter(setting: Setting, tmp_path: Path) -> None:
    """End an adapter's requests with an error if its files differ when they are read again."""
    make_adapter(setting.model, tmp_path / "it", seed=1)
    async with open_compiled_engine(
        setting.model, enable_lora=True, max_loras=1, max_cpu_loras=1
    ) as engine:
        await engine.load_adapter("it", tmp_path / "it")
        before = await engine.complete(PROMPT, adapter="it", **GREEDY)
        await engine.load_adapter("low", setting.adapters["low"])  # there is no room for both
        again = await engine.complete([5, *PROMPT], adapter="it", **GREEDY)
        assert len(again.token_ids) == len(before.token_ids)
        await engine.complete(PROMPT, adapter="low", **GREEDY)
        make_adapter(setting.model, tmp_path / "it", seed=9)
        with pytest.raises(EngineError, match="holds another adapter than the one"):
            await engine.complete([6, *PROMPT], adapter="it", **GREEDY)
        assert (await engine.complete(PROMPT, **GREEDY)).finish_reason == "length"
        await assert_idle(engine)


async def test_a_worker_that_is_sent_away_and_weights_that_are_exchanged(
    setting: Setting, expected: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """Adapters are over whatever weights there are, in whatever worker."""
    other = make_tiny("qwen3", tmp_path / "other", seed=7, max_position_embeddings=2048)
    merged = merge(other, setting.adapters["low"], tmp_path / "merged")
    async with open_tiny_engine(merged) as engine:
        anew = (await engine.complete(PROMPT, **GREEDY)).token_ids
    async with open_tiny_engine(setting.model, lora_modules=setting.modules) as engine:
        await engine.release_memory()
        await engine.resume_memory()
        found = await all_at_once(engine)
        assert found == {name: {tokens} for name, tokens in expected.items()}
        await engine.update_weights(str(other))
        completion = await engine.complete(PROMPT, adapter="low", **GREEDY)
        assert completion.token_ids == anew != expected["low"]
        await assert_idle(engine)


async def test_compiled_kernels_keep_adapters_over_exchanged_weights(tmp_path: Path) -> None:
    first, second = (
        make_tiny("qwen3", tmp_path / str(seed), seed=seed, head_dim=32) for seed in (0, 7)
    )
    modules = [f"it={make_adapter(first, tmp_path / 'adapter', seed=1, rank=4)}"]
    options: dict[str, Any] = {"dtype": "bfloat16", "lora_modules": modules}
    found = []
    for path in (second, first):
        async with open_tiny_engine(path, **options) as engine:
            if path == first:
                await engine.update_weights(str(second))
            for names in ({"adapter": "it"}, {}):
                found.append((await engine.complete(PROMPT, **names, **GREEDY)).token_ids)
            await assert_idle(engine)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_in_a_script(setting: Setting, expected: dict[str, tuple[int, ...]]) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    with LLM(str(setting.model), lora_modules=setting.modules, **options) as llm:
        for name in ("", "high"):
            (completion,) = llm.generate([PROMPT], adapter=name, progress=False, **GREEDY)
            assert completion.token_ids == expected[name]

"""Weights exchanged under a running engine: the new ones' tokens, and the old ones if it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import trio
import trio.testing

from gpu.models.registry import build_model
from gpu.weights.tensors import load_weights
from tests.support.engines import assert_idle, open_compiled_engine, worker_of
from tests.support.http_stub import server_config
from tests.support.tiny_models import FAMILIES, make_tiny
from trioserve import Engine, InvalidRequest
from trioserve.http import create_app
from trioserve.model_files import open_model
from trioserve.protocol.errors import WorkerLost

PROMPT = [3 + (7 * place) % 200 for place in range(40)]
LENGTH = 120
LONG = 1000
"""So many tokens that they take far longer than new weights are read for."""


def ask(**options: Any) -> dict[str, Any]:
    return {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, **options}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    return make_tiny("qwen3", folder, max_position_embeddings=2048, head_dim=32)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its weights changed."""
    folder = tmp_path_factory.mktemp("new") / "model"
    shutil.copytree(old, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    random = np.random.default_rng(1)
    changed = {
        name: (each + 0.05 * random.standard_normal(each.shape)).astype(each.dtype)
        for name, each in tensors.items()
    }
    safetensors.numpy.save_file(changed, folder / "model.safetensors")
    return folder


async def tokens_of(engine: Engine, **options: Any) -> tuple[int, ...]:
    return (await engine.complete(PROMPT, **ask(**options))).token_ids


async def tokens_from(folder: Path, **options: Any) -> tuple[int, ...]:
    """Return what an engine gives that has loaded ``folder`` from the start."""
    async with open_compiled_engine(folder, **options) as engine:
        return await tokens_of(engine)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}], ids=["compiled", "torch"])
async def test_the_new_weights_are_served(old: Path, new: Path, options: dict[str, Any]) -> None:
    expected = [await tokens_from(folder, **options) for folder in (old, new)]
    assert expected[0] != expected[1]
    async with open_compiled_engine(old, **options) as engine:
        assert engine.weight_version == "default"
        for folder, tokens, version in ((new, expected[1], None), (old, expected[0], "first")):
            await engine.update_weights(str(folder), weight_version=version)
            again = await engine.complete(PROMPT, **ask())
            assert again.token_ids == tokens
            assert again.usage.cached_tokens == 0
            assert engine.weight_version == version or len(engine.weight_version) == 32
        await assert_idle(engine)


async def test_a_file_of_tensors_in_shared_memory(old: Path, new: Path) -> None:
    expected = await tokens_from(new)
    with trio.CancelScope(), shared_file(new / "model.safetensors") as file:
        async with open_compiled_engine(old) as engine:
            await engine.update_weights(str(file))
            assert await tokens_of(engine) == expected


async def test_over_http(old: Path, new: Path) -> None:
    first, second = await tokens_from(old), await tokens_from(new)
    admin = {"Authorization": "Bearer the-admin-key"}
    with trio.CancelScope(), shared_file(new / "model.safetensors") as file:
        async with open_compiled_engine(old) as engine:
            config = server_config(admin_api_key=["the-admin-key"])
            client: Any = create_app(engine, config).test_client()

            async def post(path: str, **body: Any) -> tuple[int, Any]:
                response = await client.post(path, json=body, headers=admin)
                return response.status_code, await response.get_json()

            tensors = {"model_path": str(file), "weight_version": "step 7"}
            status, reply = await post("/update_weights_from_tensor", **tensors)
            assert (status, reply["success"]) == (200, True)
            assert await tokens_of(engine) == second
            version = await (await client.get("/weight_version", headers=admin)).get_json()
            assert version == {"weight_version": "step 7"}
            folder = {"model_path": str(old), "mode": "retract", "keep_pause": True}
            status, reply = await post("/update_weights_from_disk", **folder)
            assert status == 200, reply
            assert engine.paused
            engine.resume()
            assert await tokens_of(engine) == first
            for path in ("/update_weights_from_disk", "/update_weights_from_tensor"):
                status, reply = await post(path, model_path="/nowhere")
                assert (status, reply["error"]["param"]) == (400, "model_path")
            pickles = {"serialized_named_tensors": ["gASVDgAAAAAAAACMCG9zLnN5c3RlbZQu"]}
            status, reply = await post("/update_weights_from_tensor", **pickles)
            assert (status, reply["error"]["param"]) == (400, "serialized_named_tensors")
            assert "safetensors" in reply["error"]["message"]
            assert await tokens_of(engine) == first


class shared_file:
    """A copy of a file in shared memory, for the time of a block."""

    def __init__(self, path: Path) -> None:
        self._source = path

    def __enter__(self) -> Path:
        self._path = Path("/dev/shm") / f"trioserve-test-{self._source.stat().st_ino}.safetensors"
        shutil.copy(self._source, self._path)
        return self._path

    def __exit__(self, *_: object) -> None:
        self._path.unlink()


async def test_wait_lets_those_there_are_finish_with_the_old(old: Path, new: Path) -> None:
    async with open_compiled_engine(old, enable_prefix_caching=False) as engine:
        expected = [await tokens_of(engine, max_tokens=LONG), await tokens_from(new)]
        got: dict[str, tuple[int, ...]] = {}

        async def run(name: str, length: int) -> None:
            got[name] = await tokens_of(engine, max_tokens=length)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "before", LONG)
            await until_running(engine, 1)
            nursery.start_soon(engine.update_weights, str(new))
            # A request that comes while the new ones are read is still served by the old ones.
            await until(lambda: not engine.schedulers[0]._core.pause_gate.is_open)
            nursery.start_soon(run, "after", LENGTH)
        assert got == {"before": expected[0], "after": expected[1]}
        await assert_idle(engine)


@pytest.mark.parametrize("mode", ["retract", "abort", "wait in a pause"])
async def test_running_requests_are_retracted_or_aborted(old: Path, new: Path, mode: str) -> None:
    async with open_compiled_engine(old) as engine:
        undisturbed = await tokens_of(engine, max_tokens=LONG)
        tokens: list[int] = []
        reason = None
        async with engine.generate(PROMPT, **ask(max_tokens=LONG)) as stream:
            async for chunk in stream:
                tokens.extend(chunk.token_ids)
                reason = chunk.finish_reason
                if len(tokens) >= 10 and engine.weight_version == "default":
                    if mode == "wait in a pause":
                        await engine.pause("in_place")
                        await engine.update_weights(str(new), weight_version="new")
                        assert engine.paused
                        engine.resume()
                    else:
                        await engine.update_weights(str(new), mode=mode, weight_version="new")
        if mode == "abort":
            assert reason == "abort"
            assert tuple(tokens) == undisturbed[: len(tokens)]
            assert len(tokens) < LONG
            return
        assert reason == "length"
        assert len(tokens) == LONG
        # From the first one that the old weights would not have given, they are what the new ones
        # make of all that came before it.
        pairs = enumerate(zip(tokens, undisturbed, strict=True))
        first = next(place for place, (given, old_one) in pairs if given != old_one)
        assert first >= 10
        rest = await engine.complete(PROMPT + tokens[:first], **ask())
        assert list(rest.token_ids)[: LONG - first] == tokens[first : first + LENGTH]
        await assert_idle(engine)


async def test_a_worker_that_dies_is_replaced_by_one_with_the_new(old: Path, new: Path) -> None:
    expected = await tokens_from(new)
    async with open_compiled_engine(old) as engine:
        await engine.update_weights(str(new))
        await kill_worker(engine)
        assert await tokens_of(engine) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing there", "no-such-model"),
        ("cut short", "truncated"),
        ("another shape", "is no checkpoint of the model that is served: hidden_size is"),
        ("a tensor is missing", "has no tensor model.norm.weight"),
        ("a tensor has NaN", "tensor model.norm.weight holds infinities or NaN"),
    ],
)
async def test_bad_weights_leave_the_old_ones_serving(
    old: Path, new: Path, tmp_path: Path, damage: str, message: str
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(new, folder)
    weights = folder / "model.safetensors"
    if damage == "nothing there":
        folder = tmp_path / "no-such-model"
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "another shape":
        config = json.loads((folder / "config.json").read_text())
        config["hidden_size"] *= 2
        (folder / "config.json").write_text(json.dumps(config))
    else:
        tensors = safetensors.numpy.load_file(weights)
        if damage == "a tensor is missing":
            del tensors["model.norm.weight"]
        else:
            tensors["model.norm.weight"][-1] = np.nan
        safetensors.numpy.save_file(tensors, weights)
    async with open_compiled_engine(old) as engine:
        before = await tokens_of(engine)
        with pytest.raises(InvalidRequest, match=message) as caught:
            await engine.update_weights(str(folder))
        assert caught.value.param == "model"
        assert "\n" not in str(caught.value)
        assert engine.weight_version == "default"
        assert not engine.paused
        assert await tokens_of(engine) == before
        # And good ones can be had afterwards.
        await engine.update_weights(str(new))
        assert await tokens_of(engine) != before
        await assert_idle(engine)


async def test_giving_up_leaves_the_old_ones_serving(old: Path, new: Path) -> None:
    async with open_compiled_engine(old) as engine:
        before = await tokens_of(engine)
        async with engine.generate(PROMPT, **ask(max_tokens=LONG)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.update_weights, str(new))
                # They are read, and wait for the request to end.
                await until(lambda: not engine.schedulers[0]._core.pause_gate.is_open)
                nursery.cancel_scope.cancel()
            assert engine.statistics().scheduler.num_running == 1
            assert await tokens_of(engine) == before
        await engine.update_weights(str(new))
        assert await tokens_of(engine) != before
        await assert_idle(engine)


async def test_the_worker_dies_while_it_reads(old: Path, new: Path) -> None:
    async with open_compiled_engine(old) as engine:
        before = await tokens_of(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_worker, engine)
            with pytest.raises(WorkerLost):
                while True:
                    await engine.update_weights(str(new), weight_version="new")
                    await engine.update_weights(str(old), weight_version="old")
        await until(lambda: engine.healthy)
        serves_new = engine.weight_version == "new"
        assert (await tokens_of(engine) == before) is not serves_new
        await assert_idle(engine)


async def test_a_worker_that_is_stopped_while_it_reads(old: Path, new: Path) -> None:
    async with open_compiled_engine(old, watchdog_timeout=5) as engine:
        before = await tokens_of(engine)
        (await worker_of(engine)).suspend()
        # Something may have been asked before: to end a slot, or whether it still holds any.
        with pytest.raises(WorkerLost, match=r"before it answered '(read_weights|statistics)'"):
            await engine.update_weights(str(new))
        await until(lambda: engine.healthy)
        assert engine.statistics().worker_restarts == 1
        assert engine.weight_version == "default"
        assert await tokens_of(engine) == before
        await assert_idle(engine)


async def test_an_unknown_mode(old: Path) -> None:
    async with open_compiled_engine(old) as engine:
        with pytest.raises(InvalidRequest, match="mode is one of wait, abort, retract"):
            await engine.update_weights(str(old), mode="in_place")


@pytest.mark.parametrize("family", FAMILIES)
def test_overwriting_a_decoder_is_building_it_anew(family: str, tmp_path: Path) -> None:
    """In the same memory, which is what CUDA graphs have noted."""
    files = open_model(make_tiny(family, tmp_path))
    weights = dict(load_weights(files, torch.float32, lambda *_: None))
    served = build_model(
        files.config, {name: each.clone() for name, each in weights.items()}.items()
    )
    places = memory_of(served)
    changed = {name: each + 0.1 for name, each in weights.items()}
    served.overwrite(changed.items())
    anew = memory_of(build_model(files.config, changed.items()))
    assert {place: each.data_ptr() for place, each in memory_of(served).items()} == {
        place: each.data_ptr() for place, each in places.items()
    }
    for place, tensor in anew.items():
        torch.testing.assert_close(places[place], tensor, rtol=0, atol=0)


def memory_of(thing: Any, place: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor that an object holds, in the objects that it holds, too."""
    if isinstance(thing, torch.Tensor):
        return {place: thing}
    if isinstance(thing, (list, tuple)):
        held = {str(index): each for index, each in enumerate(thing)}
    elif type(thing).__module__.startswith("gpu."):
        names = [*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())]
        held = {name: getattr(thing, name, None) for name in names}
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, each in held.items():
        found |= memory_of(each, f"{place}.{name}")
    return found


async def kill_worker(engine: Engine) -> None:
    """Kill it, and wait for the next one."""
    await trio.sleep(0.05)
    restarts = engine.statistics().worker_restarts
    (await worker_of(engine)).kill()
    await until(lambda: engine.statistics().worker_restarts > restarts and engine.healthy)


async def until_running(engine: Engine, number: int) -> None:
    await until(lambda: engine.statistics().scheduler.num_running == number)


async def until(condition: Any) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.005)

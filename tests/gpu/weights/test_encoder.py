"""Weights of an encoder, exchanged while it serves: new vectors, or the old ones if it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import trio

from tests.support.engines import assert_idle, worker_of
from tests.support.http_stub import server_config
from tests.support.tiny_encoders import make_encoder
from trioserve import Engine, InvalidRequest, open_engine
from trioserve.http import create_app

TEXTS = ["the quick brown fox", "a lazy dog", "42"]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("new"), seed=2)


async def vectors(engine: Engine) -> npt.NDArray[np.float32]:
    return (await engine.embed(TEXTS)).vectors


async def vectors_of(folder: Path) -> npt.NDArray[np.float32]:
    async with open_engine(str(folder), num_threads=1) as engine:
        return await vectors(engine)


@pytest.mark.parametrize("mode", ["wait", "abort", "retract"])
async def test_new_vectors_from_then_on(old: Path, new: Path, mode: str) -> None:
    expected = await vectors_of(new)
    async with open_engine(str(old), num_threads=1) as engine:
        before = await vectors(engine)
        assert not np.allclose(before, expected, atol=1e-2)
        await engine.update_weights(str(new), mode=mode)
        np.testing.assert_allclose(await vectors(engine), expected, atol=1e-5)
        # A later worker has them, too.
        (await worker_of(engine)).kill()
        np.testing.assert_allclose(await vectors(engine), expected, atol=1e-5)
        await engine.update_weights(str(old))
        np.testing.assert_allclose(await vectors(engine), before, atol=1e-5)
        await assert_idle(engine)


async def test_what_cannot_take_their_place(old: Path, tmp_path: Path) -> None:
    wider = make_encoder("bert", tmp_path / "wider", seed=3, intermediate_size=96)
    async with open_engine(str(old), num_threads=1) as engine:
        before = await vectors(engine)
        for folder, message in (
            (wider, "no checkpoint of the model that is served: intermediate_size is 96"),
            (tmp_path / "none", "none"),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                await engine.update_weights(str(folder))
            assert caught.value.param == "model"
        np.testing.assert_array_equal(await vectors(engine), before)
        assert not engine.paused


async def test_requests_under_way_keep_the_weights_they_began_with(old: Path, new: Path) -> None:
    """Check that a request's vectors are all of the old weights or all of the new ones."""
    both = [await vectors_of(folder) for folder in (old, new)]
    found: list[npt.NDArray[np.float32]] = []
    exchanged = False
    async with open_engine(str(old), num_threads=1) as engine, trio.open_nursery() as nursery:

        async def ask() -> None:
            while not exchanged:
                found.append(await vectors(engine))

        for _ in range(3):
            nursery.start_soon(ask)
        await engine.update_weights(str(new))
        exchanged = True
        found.append(await vectors(engine))
    kinds = [[np.allclose(each, known, atol=1e-4) for known in both] for each in found]
    assert all(any(kind) for kind in kinds)
    assert kinds[-1] == [False, True]


async def test_over_http(old: Path, new: Path) -> None:
    async with open_engine(str(old), num_threads=1) as engine:
        config = server_config(admin_api_key=["the-admin-key"])
        response = await (
            create_app(engine, config)
            .test_client()
            .post(
                "/update_weights_from_disk",
                json={"model_path": str(new)},
                headers={"Authorization": "Bearer the-admin-key"},
            )
        )
        assert response.status_code == 200, await response.get_data(True)
        np.testing.assert_allclose(await vectors(engine), await vectors_of(new), atol=1e-5)

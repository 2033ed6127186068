"""Weight swaps of workers of several processes: the outputs are those of the new weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.rank_engines import prompt, ranks_of
from tests.support.tiny_models import make_tiny
from trioserve import Engine, InvalidRequest

try:
    load_library()
    HAS_KERNELS = True
except LibraryBuildError:
    HAS_KERNELS = False

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
COMPILED: dict[str, Any] = {"dtype": "auto", "tensor_parallel_slices": 4}
WAYS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, **COMPILED},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **COMPILED},
]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("first"), **SIZES)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("second"), seed=7, **SIZES)


async def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    found = [await engine.complete(prompt(number), **asked) for number in range(3)]
    return [tuple(each.token_ids) for each in found]


@pytest.mark.parametrize("way", WAYS)
async def test_all_ranks_compute_with_the_new_weights(
    first: Path, second: Path, way: dict[str, Any], tmp_path: Path
) -> None:
    """One that replaces a lost worker as well. Weights that can't be read leave the old ones."""
    if "dtype" in way and not HAS_KERNELS:
        pytest.skip("no compiled kernels")
    alone = {name: way[name] for name in COMPILED if name in way}
    wanted = []
    for path in (first, second):
        async with open_tiny_engine(path, **alone) as engine:
            wanted.append(await tokens_of(engine))
    assert wanted[0] != wanted[1]
    damaged = shutil.copytree(second, tmp_path / "damaged")
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    async with open_tiny_engine(first, **way) as engine:
        assert await tokens_of(engine) == wanted[0]
        with pytest.raises(InvalidRequest, match="safetensors"):
            await engine.update_weights(str(damaged))
        assert await tokens_of(engine) == wanted[0]
        await engine.update_weights(str(second))
        assert await tokens_of(engine) == wanted[1]
        (await ranks_of(engine))[-1].kill()
        assert await tokens_of(engine) == wanted[1]
        assert engine.statistics().worker_restarts == 1
        await engine.update_weights(str(first))
        assert await tokens_of(engine) == wanted[0]
        await assert_idle(engine)

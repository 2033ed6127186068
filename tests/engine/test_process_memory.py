"""A model that is larger than one process may have is served by two, each within the limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.kernels import isas
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve import Engine, ModelLoadError

MIB = 1 << 20
LIMIT = 64 * MIB
WITH_STEP = LIMIT + 40 * MIB
"""Bytes with those that a step computes in, and that are read at a time."""
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Sizes of a model of 92 MiB in bfloat16, whose KV cache takes 24 KiB for each token."""
SPLITS: list[dict[str, Any]] = [
    pytest.param(
        {"dtype": "bfloat16", "tensor_parallel_size": 2},
        marks=pytest.mark.skipif(not isas(), reason="no compiled kernels"),
    ),
    {"dtype": "bfloat16", "pipeline_parallel_size": 2},
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("large"), vocab_size=2048, **SIZES)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that has nothing, so that its processes are those without one."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return make_tiny("qwen3", tmp_path_factory.mktemp("small"), **sizes)


async def peaks(engine: Engine, num_pages: int) -> list[int]:
    """Return the most bytes that each process of the worker had, once ``num_pages`` were used."""
    (report,) = engine.workers
    assert report.pid is not None
    number = 0
    while engine.statistics().scheduler.pages_free > report.pages_total - num_pages:
        prompt = [3 + (number * 31 + place) % 290 for place in range(480)]
        await engine.complete([number + 3, *prompt], max_tokens=1, ignore_eos=True)
        number += 1
    await assert_idle(engine)
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in (report.pid, *report.rank_pids)]
    found = [re.search(r"VmHWM:\s+(\d+) kB", text) for text in texts]
    return [int(each[1]) << 10 for each in found if each is not None]


@pytest.mark.parametrize("split", SPLITS, ids=str)
async def test_a_model_larger_than_the_limit_is_served_by_two(
    large: Path, small: Path, split: dict[str, Any]
) -> None:
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 512}
    limited = {**options, "process_memory_limit": LIMIT}
    with pytest.raises(ModelLoadError, match=r"a process needs .* use --tensor-parallel-size 2"):
        async with open_tiny_engine(large, **limited, dtype="bfloat16"):
            raise AssertionError("it was opened")
    async with open_tiny_engine(small, **options, **split) as engine:
        bare = await peaks(engine, 0)
    async with open_tiny_engine(large, **limited, **split) as engine:
        num_pages = engine.workers[0].pages_total
        found = await peaks(engine, num_pages - 10)
    assert len(found) == 2
    assert num_pages * 16 > 1024
    for peak, own in zip(found, bare, strict=True):
        assert peak - own < WITH_STEP
    options |= {"num_gpu_blocks_override": num_pages, "dtype": split["dtype"]}
    async with open_tiny_engine(small, **options) as engine:
        (bare_alone,) = await peaks(engine, 0)
    async with open_tiny_engine(large, **options) as engine:
        (alone,) = await peaks(engine, num_pages - 10)
    assert alone - bare_alone > WITH_STEP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_impl": "transformers"}, "is for models of this server's own decoders on a CPU"),
        (
            {"speculative_config": '{"method": "draft_model", "model": "MODEL"}'},
            "--process-memory-limit doesn't go with a draft model",
        ),
    ],
)
async def test_what_the_limit_does_not_count_is_refused(
    small: Path, options: dict[str, Any], message: str
) -> None:
    options = {name: text.replace("MODEL", str(small)) for name, text in options.items()}
    with pytest.raises(ModelLoadError, match=message), trio.fail_after(60):
        async with open_tiny_engine(small, process_memory_limit=LIMIT, **options):
            raise AssertionError("it was opened")


async def test_an_encoder_has_no_limit(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="--process-memory-limit is for models that generate"):
        async with open_tiny_engine(make_encoder("bert", tmp_path), process_memory_limit=LIMIT):
            raise AssertionError("it was opened")

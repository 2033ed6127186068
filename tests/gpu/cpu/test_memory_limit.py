"""The memory limit of processes: what is stored is counted, and what doesn't fit is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.formats import Format, read_as
from gpu.cpu.library import load_library
from gpu.cpu.memory_limit import Needs, StoredModel, stored_by_torch, within_limit
from gpu.loading.memory import kv_bytes_per_page
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.stages import stages_of
from gpu.weights import read_weights
from gpu.weights.expected import expected_tensors
from gpu.weights.tensors import load_weights
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny
from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.model_files import ModelFiles, open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

BYTES = {Format.BF16: 64, Format.Q8_0: 34, Format.W8A8: 34, Format.Q4_0: 18, Format.Q4_1: 20}
"""Bytes of 32 numbers in each format."""


def start_of(files: ModelFiles, **options: Any) -> Start:
    start = start_message(EngineConfig(str(files.path), block_size=16), files.path)
    return attrs.evolve(start, max_model_len=128, **options)


def vector_bytes(files: ModelFiles, number_bytes: int = 2) -> int:
    shapes = expected_tensors(files.native).values()
    return number_bytes * sum(math.prod(shape) for shape in shapes if len(shape) == 1)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8", "auto"])
@pytest.mark.parametrize("stored", ["folder", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama3"])
def test_the_bytes_are_those_of_what_is_stored(
    tmp_path: Path, family: str, stored: str, quantization: str
) -> None:
    path = make_tiny(family, tmp_path / "model", head_dim=32)
    if stored != "folder":
        path = write_gguf(path, tmp_path / "m.gguf", quantization=stored)
    files = open_model(path)
    model = CompiledModel(load_library(), files.native, quantization, 1)
    dtype, keep = read_as(quantization)
    model.load(read_weights(files, dtype, lambda *_: None, keep))
    matrices = sum(count * BYTES[kind] // 32 for kind, count in model.num_weights.items())
    counted = StoredModel(files=files, number_bytes=2, quantization=quantization)
    (needs,) = counted.needs(start_of(files))
    assert needs.weights == matrices + vector_bytes(files)
    assert needs.page == kv_bytes_per_page(files.native, 16, 2)


@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ],
)
def test_each_process_needs_its_part(tmp_path: Path, split: dict[str, Any]) -> None:
    files = open_model(make_tiny("qwen3_moe", tmp_path))
    start = start_of(files, **split)
    stages = stages_of(files.native, start.pipeline_parallel_size)
    expected = []
    for stage in stages:
        for rank in range(start.tensor_parallel_size):
            size, by_expert = start.tensor_parallel_size, start.enable_expert_parallel
            part = ModelPart(files.native, rank, size, by_expert, stage)
            weights = load_weights(files, torch.float32, lambda *_: None)
            pieces = [part.piece(*each) for each in weights if part.name_of(each[0]) is not None]
            numbers = sum(piece.numel() for piece in pieces if piece is not None)
            expected.append(Needs(4 * numbers, kv_bytes_per_page(part.config(), 16, 4)))
    assert stored_by_torch(files, "float32").needs(start) == expected


def test_torch_has_a_tied_head_twice_in_bfloat16_alone(tmp_path: Path) -> None:
    files = open_model(make_tiny("smollm2", tmp_path))
    start = start_of(files)
    wide, narrow = (stored_by_torch(files, each).needs(start) for each in ("float32", "bfloat16"))
    head = files.native.vocab_size * files.native.hidden_size
    assert narrow[0].weights == wide[0].weights // 2 + 2 * head


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return open_model(make_tiny("llama2", tmp_path_factory.mktemp("llama2"), num_hidden_layers=8))


def test_the_cache_gets_what_the_weights_leave(files: ModelFiles) -> None:
    stored = stored_by_torch(files, "float32")
    (needs,) = stored.needs(start_of(files))
    least = 8  # pages of a sequence of 128 tokens
    for spare in (0, 5, 7):
        limit = needs.weights + (least + spare) * needs.page + needs.page - 1
        found = within_limit(start_of(files, process_memory_limit=limit), stored)
        assert found.kv_cache_memory_bytes == (least + spare) * needs.page
    without = start_of(files)
    assert within_limit(without, stored) is without
    ample = within_limit(start_of(files, process_memory_limit=1 << 40), stored)
    assert ample.kv_cache_memory_bytes == (2 << 30) // needs.page * needs.page


@pytest.mark.parametrize("asked", ["num_pages", "kv_cache_memory_bytes", "kv_offloading_bytes"])
def test_pages_that_were_asked_for_count(files: ModelFiles, asked: str) -> None:
    stored = stored_by_torch(files, "float32")
    (needs,) = stored.needs(start_of(files))
    num_pages = 30 if asked != "kv_offloading_bytes" else 22
    amount = num_pages * (1 if asked == "num_pages" else needs.page)
    limit = needs.weights + 30 * needs.page
    start = start_of(files, process_memory_limit=limit, **{asked: amount})
    found = within_limit(start, stored)
    assert found.kv_cache_memory_bytes in (start.kv_cache_memory_bytes, 8 * needs.page)
    with pytest.raises(ModelLoadError, match="--process-memory-limit"):
        within_limit(attrs.evolve(start, process_memory_limit=limit - 1), stored)


@pytest.mark.parametrize(
    ("share", "remedy"),
    [
        (0.6, "use --tensor-parallel-size 2, or raise it"),
        (0.36, "use --tensor-parallel-size 4, or raise it"),
        # Four ranks have each of two heads of keys and values twice.
        (0.3, "use --pipeline-parallel-size 4, or raise it"),
        (0.01, "raise it, or lower --max-model-len"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_ranks_that_would(
    files: ModelFiles, share: float, remedy: str
) -> None:
    stored = stored_by_torch(files, "float32")
    (needs,) = stored.needs(start_of(files))
    limit = int(share * (needs.weights + 8 * needs.page))
    with pytest.raises(ModelLoadError) as caught:
        within_limit(start_of(files, process_memory_limit=limit), stored)
    assert str(caught.value) == (
        f"a process needs 2 MiB for its weights and 1 MiB for its KV cache of 128 tokens, and "
        f"--process-memory-limit is {-(-limit // (1 << 20))} MiB: {remedy}"
    )

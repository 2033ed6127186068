"""The memory limit of a worker's processes (``--process-memory-limit``).

A model's weights, as they will be stored, and its KV cache are counted for each process apart,
before anything is read.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping

import attrs

from gpu.cpu.formats import read_as
from gpu.loading.memory import DEFAULT_CACHE_BYTES, kv_bytes_per_page
from gpu.models.parallel.model_part import ModelPart, parts_of_worker
from gpu.weights.expected import expected_tensors
from gpu.weights.experts import split_experts
from gpu.weights.gguf import hugging_face_name
from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start

_ROUNDED = {"int8": 34 / 32, "w8a8": 34 / 32, "int4": 18 / 32}
"""Bytes of a number of a matrix that is rounded, by quantization; 32 numbers share a scale."""
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_MOST_RANKS = 64
"""Most ranks that are recommended."""


@attrs.frozen
class Needs:
    """Bytes that a process needs."""

    weights: int
    page: int
    """Bytes of its part of a page of the KV cache."""


@attrs.frozen(kw_only=True)
class StoredModel:
    """A model as processes have it in memory.

    Args:
        files: The model's files.
        number_bytes: Bytes of a number that isn't rounded.
        quantization: The one of :class:`~gpu.cpu.compiled.CompiledModel`; torch rounds nothing.
        by_torch: True if torch computes.
    """

    files: ModelFiles
    number_bytes: int
    quantization: str = "none"
    by_torch: bool = False

    def needs(self, start: Start) -> list[Needs]:
        """Return the needs of each process of the worker of ``start``.

        Raises:
            ModelLoadError: The model can't be split so.
        """
        kept = self._kept()
        return [
            Needs(
                math.ceil(sum(self._bytes_of(part, kept))),
                kv_bytes_per_page(part.config(), start.page_size, self.number_bytes),
            )
            for part in parts_of_worker(start, self.files.native)
        ]

    def _bytes_of(self, part: ModelPart, kept: Mapping[str, float]) -> Iterator[float]:
        """Yield the bytes of each tensor of which ``part`` has a piece."""
        for name, shape in expected_tensors(part.whole).items():
            if part.has(name):
                dim, own = part.cut(name, shape)
                count = math.prod(shape) // shape[dim] * len(range(*own.indices(shape[dim])))
                yield count * (kept.get(name) or self._bytes_of_number(name, part))

    def _bytes_of_number(self, name: str, part: ModelPart) -> float:
        is_matrix = name.endswith("_proj.weight") or name in _VOCABULARY
        if is_matrix and self.quantization in _ROUNDED:
            return _ROUNDED["int8" if name in _VOCABULARY else self.quantization]
        # Torch packs a head in bfloat16, and looks embeddings up in what it was packed from.
        is_packed = self.by_torch and self.number_bytes == 2
        is_tied = name == _VOCABULARY[0] and part.whole.tie_word_embeddings and part.is_last
        return self.number_bytes * (2 if is_packed and is_tied else 1)

    def _kept(self) -> dict[str, float]:
        """Return the bytes of a number of each matrix that stays as its GGUF file has it."""
        header, (_, kinds) = self.files.gguf_header, read_as(self.quantization)
        if header is None or self.by_torch:
            return {}
        expected = expected_tensors(self.files.native)
        return {
            name: tensor.type.block_bytes / tensor.type.block_numbers
            for stored, tensor in header.tensors.items()
            if tensor.type.name in kinds
            for name in split_experts(hugging_face_name(stored), tensor.shape, expected)[0]
        }


def stored_by_torch(files: ModelFiles, dtype: str) -> StoredModel:
    """Return the model as torch stores it."""
    return StoredModel(files=files, number_bytes=2 if dtype == "bfloat16" else 4, by_torch=True)


def within_limit(start: Start, model: StoredModel) -> Start:
    """Return ``start`` with a KV cache for which each process has memory, if there is a limit.

    Raises:
        ModelLoadError: A process would need more than it may have.
    """
    limit = start.process_memory_limit
    if not limit:
        return start
    needs = model.needs(start)
    of_page = sum(each.page for each in needs)
    num_host_pages = start.kv_offloading_bytes // of_page
    asked = start.num_pages or start.kv_cache_memory_bytes // of_page
    least = asked or -(-start.max_model_len // start.page_size)
    largest = max(needs, key=lambda each: each.weights + least * each.page)
    if not _fit(needs, least + num_host_pages, limit):
        cache = (least + num_host_pages) * largest.page
        raise ModelLoadError(
            f"a process needs {_size(largest.weights)} for its weights and {_size(cache)} for its "
            f"KV cache of {least * start.page_size} tokens, and --process-memory-limit is "
            f"{_size(limit)}: {_remedy(start, model, least + num_host_pages)}"
        )
    if asked:
        return start
    room = min((limit - each.weights) // each.page for each in needs) - num_host_pages
    num_pages = min(room, max(least, DEFAULT_CACHE_BYTES // of_page))
    return attrs.evolve(start, kv_cache_memory_bytes=num_pages * of_page)


def _fit(needs: list[Needs], num_pages: int, limit: int) -> bool:
    return all(each.weights + num_pages * each.page <= limit for each in needs)


def _remedy(start: Start, model: StoredModel, num_pages: int) -> str:
    """Return what to do: the least number of ranks with which the model fits, or less of it."""
    limit = start.process_memory_limit
    fewest = -(-sum(each.weights for each in model.needs(start)) // limit)
    sizes = range(max(fewest, 2), _MOST_RANKS + 1)
    splits = itertools.chain(
        ((f"tensor-parallel-size {n}", attrs.evolve(start, tensor_parallel_size=n)) for n in sizes),
        ((f"pipeline-parallel-size {n}", _with_stages(start, n)) for n in sizes),
    )
    for option, split in splits:
        with contextlib.suppress(ModelLoadError):
            if _fit(model.needs(split), num_pages, limit):
                return f"use --{option}, or raise it"
    return "raise it, or lower --max-model-len"


def _with_stages(start: Start, count: int) -> Start:
    return attrs.evolve(start, pipeline_parallel_size=count, pipeline_parallel_layers=[])


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{-(-num_bytes // (1 << 20))} MiB"

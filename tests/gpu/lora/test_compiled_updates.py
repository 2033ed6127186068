"""The compiled updates against float64, for random groups of tokens."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.cpu.adapters import (
    AdapterProductStruct,
    AdapterStepStruct,
    CompiledAdapter,
    Module,
    pack_module,
    step_of,
)
from gpu.cpu.library import Library, load_library
from gpu.lora.reading import LowRankUpdate
from gpu.weights.packed_modules import PACKED_MODULES

pytestmark = pytest.mark.usefixtures("each_isa")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


def declared() -> Library:
    """Return the library, with the types of the functions that are tested."""
    library = load_library()
    library.adapters_width.restype = COUNT
    library.adapters_width.argtypes = [COUNT]
    library.adapters_update.restype = None
    library.adapters_update.argtypes = [
        *(ctypes.c_int32, ctypes.POINTER(AdapterStepStruct), POINTER, COUNT),
        *(POINTER, COUNT, POINTER, COUNT),
    ]
    return library


def packed(updates: list[LowRankUpdate | None], outputs: list[int]) -> CompiledAdapter:
    """Return a single layer with ``updates`` in its first product, one for each of its parts."""
    products, memory = (AdapterProductStruct * len(PACKED_MODULES))(), list[np.ndarray]()
    first = 0
    for update, size in zip(updates, outputs, strict=True):
        if update is not None:
            a, b = pack_module(update)
            memory += [a, b]
            module = Module(first, size, update.rank, a.ctypes.data, b.ctypes.data)
            products[0].modules[products[0].num_modules] = module
            products[0].num_modules += 1
        first += size
    return CompiledAdapter(products, memory)


def updated(
    adapters: dict[int, CompiledAdapter],
    owners: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    threads: int,
) -> np.ndarray:
    """Return ``y`` with the updates of the tokens that have an owner other than 0."""
    result = y.copy()
    tokens = {
        number: np.flatnonzero(owners == number).astype(np.int32)
        for number in adapters
        if (owners == number).any()
    }
    step = step_of(adapters, tokens)
    library = declared()
    width = library.adapters_width(64)
    t = np.full((len(x), width), np.nan, dtype=np.float32)
    library.adapters_update(
        *(threads, ctypes.byref(step.step), x.ctypes.data, x.shape[1]),
        *(result.ctypes.data, y.shape[1], t.ctypes.data, width),
    )
    return result


def exact(update: LowRankUpdate, x: np.ndarray) -> np.ndarray:
    """Return what the rounded matrices of ``update`` make of ``x``, in float64."""
    a = update.a.astype(BFLOAT16).astype(np.float64)
    scaled = update.b.astype(np.float32) * np.float32(update.scale)
    b = scaled.astype(BFLOAT16).astype(np.float64)
    product: np.ndarray = x.astype(np.float64) @ a.T @ b.T
    return product


ranks = st.one_of(st.none(), st.integers(1, 40), st.just(64))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    shapes=st.lists(st.tuples(st.integers(1, 5), ranks, ranks, ranks), min_size=1, max_size=3),
    blocks=st.integers(1, 6),
    threads=st.integers(1, 3),
)
def test_each_token_gets_its_own_adapter_s_update(
    seed: int,
    owners: list[int],
    shapes: list[tuple[int, int | None, int | None, int | None]],
    blocks: int,
    threads: int,
) -> None:
    draw = np.random.default_rng(seed)
    inputs, outputs = 32 * blocks, [16 * size for size, *_ in shapes]
    who = np.array(owners)
    x = draw.standard_normal((len(who), inputs)).astype(BFLOAT16)
    y = draw.standard_normal((len(who), sum(outputs))).astype(BFLOAT16)
    updates: dict[int, list[LowRankUpdate | None]] = {}
    for number in (1, 2, 3):
        updates[number] = [
            None
            if (rank := shape[number]) is None
            else LowRankUpdate(
                draw.standard_normal((rank, inputs)).astype(np.float32) / 8,
                draw.standard_normal((16 * shape[0], rank)).astype(np.float32) / 8,
                float(draw.uniform(0.1, 4)),
            )
            for shape in shapes
        ]
    adapters = {number: packed(own, outputs) for number, own in updates.items()}
    got = updated(adapters, who, x, y, threads)
    bounds = np.concatenate([[0], np.cumsum(outputs)])
    for token, number in enumerate(owners):
        for part in range(len(shapes)):
            columns = slice(bounds[part], bounds[part + 1])
            before = y[token, columns].astype(np.float64)
            update = updates[number][part] if number else None
            if update is None:
                assert np.array_equal(got[token, columns], y[token, columns])
                continue
            after = before + exact(update, x[token : token + 1])[0]
            # Sums in float32, of which bfloat16 keeps eight bits.
            room = 2**-8 * np.abs(after) + 1e-4 * (1 + np.abs(after - before).max())
            assert (np.abs(got[token, columns].astype(np.float64) - after) <= room).all()
    # Each token alone, by one thread: the same, bit for bit.
    for token in range(len(owners)):
        one = slice(token, token + 1)
        alone = updated(adapters, who[one], x[one].copy(), y[one].copy(), 1)
        assert np.array_equal(alone[0].view(np.uint16), got[token].view(np.uint16))

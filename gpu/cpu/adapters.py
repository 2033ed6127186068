"""Adapters as the compiled decoder takes them; ``csrc/adapters.h`` describes their layout."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int64, c_void_p

import attrs
import numpy as np
import numpy.typing as npt

from gpu.lora.reading import LoraWeights, LowRankUpdate
from gpu.weights.blocks import BFLOAT16, FLOAT32, Numbers
from gpu.weights.packed_modules import PACKED_MODULES, packed_shapes
from trioserve.model_files import ModelConfig

LANES = 16
ALIGNMENT = 32  # numbers of 16 bits: 64 bytes
_MAX_MODULES = 3


class Module(ctypes.Structure):
    """``AdapterModule``."""

    _fields_ = (
        ("first", c_int64),
        ("outputs", c_int64),
        ("rank", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
    )


class AdapterProductStruct(ctypes.Structure):
    """``AdapterProduct``."""

    _fields_ = (("num_modules", c_int64), ("modules", Module * _MAX_MODULES))


class AdapterGroupStruct(ctypes.Structure):
    """``AdapterGroup``."""

    _fields_ = (("layers", c_void_p), ("tokens", c_void_p), ("num_tokens", c_int64))


class AdapterStepStruct(ctypes.Structure):
    """``AdapterStep``."""

    _fields_ = (("groups", c_void_p), ("num_groups", c_int64))


@attrs.frozen(eq=False)
class CompiledAdapter:
    """An adapter in the decoder's layout: what points into it, and the memory that it points to."""

    layers: ctypes.Array[AdapterProductStruct]  # [num_layers * len(PACKED_MODULES)]
    memory: object


@attrs.frozen(eq=False)
class AdapterStep:
    """The groups of a step, valid as long as this lives."""

    step: AdapterStepStruct
    _groups: ctypes.Array[AdapterGroupStruct]
    _tokens: list[npt.NDArray[np.int32]]


def pack_module(update: LowRankUpdate) -> tuple[Numbers, Numbers]:
    """Return the matrices of an update as ``AdapterModule`` has them: ``a`` and ``b`` in bfloat16.

    The inputs are a multiple of 32, the outputs of 16.
    """
    rank, inputs = update.a.shape
    outputs = len(update.b)
    padded = -(-rank // LANES) * LANES
    a = np.zeros((padded, inputs), dtype=np.uint16)
    a[:rank] = update.a.astype(BFLOAT16).view(np.uint16)
    strips = a.reshape(padded // LANES, LANES, inputs // 2, 2).transpose(0, 2, 1, 3)
    scaled = (update.b.astype(FLOAT32) * np.float32(update.scale)).astype(BFLOAT16)
    b = scaled.view(np.uint16).reshape(outputs // LANES, LANES, rank).transpose(0, 2, 1)
    return np.ascontiguousarray(strips), np.ascontiguousarray(b)


def pack_adapter(adapter: LoraWeights, config: ModelConfig) -> CompiledAdapter:
    """Return the compiled decoder's form of ``adapter``."""
    layers = (AdapterProductStruct * (config.num_layers * len(PACKED_MODULES)))()
    # In one piece, in the order in which it is read: NumPy asks for large pages for it.
    memory = np.empty(_packed_size(adapter), dtype=np.uint16)
    end = -memory.ctypes.data // 2 % ALIGNMENT

    def keep(numbers: Numbers) -> int:
        """Put ``numbers`` into the memory, and say where they are."""
        nonlocal end
        begin, end = end, end + -(-numbers.size // ALIGNMENT) * ALIGNMENT
        memory[begin : begin + numbers.size] = numbers.ravel()
        return int(memory.ctypes.data) + 2 * begin

    for layer in range(config.num_layers):
        shapes = packed_shapes(config, layer)
        for index, name in enumerate(PACKED_MODULES):
            if name not in shapes:
                continue
            product, first = layers[layer * len(PACKED_MODULES) + index], 0
            for part, outputs in shapes[name].outputs.items():
                update = adapter.updates.get((layer, part))
                if update is not None:
                    a, b = pack_module(update)
                    product.modules[product.num_modules] = Module(
                        first, outputs, update.rank, keep(a), keep(b)
                    )
                    product.num_modules += 1
                first += outputs
    return CompiledAdapter(layers, memory)


def _packed_size(adapter: LoraWeights) -> int:
    """Return how many numbers of 16 bits its matrices have at most, with what is between them."""
    padded: list[int] = [
        -(-update.rank // LANES) * LANES * (update.a.shape[1] + len(update.b)) + 2 * ALIGNMENT
        for update in adapter.updates.values()
    ]
    return sum(padded) + ALIGNMENT


def step_of(
    adapters: Mapping[int, CompiledAdapter], tokens: Mapping[int, npt.NDArray[np.int32]]
) -> AdapterStep:
    """Return a step in which ``tokens`` of each adapter, by its number, are computed."""
    groups = (AdapterGroupStruct * len(tokens))()
    for group, (number, own) in zip(groups, tokens.items(), strict=True):
        group.layers = ctypes.addressof(adapters[number].layers)
        group.tokens, group.num_tokens = own.ctypes.data, len(own)
    return AdapterStep(
        AdapterStepStruct(ctypes.addressof(groups), len(groups)), groups, list(tokens.values())
    )

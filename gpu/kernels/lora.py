"""Launches ``lora_shrink.cu`` and ``lora_expand.cu``: the adapters of all tokens of one product.

They share one struct of parameters; see ``lora.cuh``.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, element_name, parameters

DTYPES = (torch.bfloat16, torch.float16)
NUM_THREADS = 128
TILE = 16
"""Tokens of one adapter that are computed together."""
BLOCK = 16
"""Ranks that are."""
SPLIT = 1024
"""Inputs that a block sums over; the same for any batch, so that a token's sums are."""
COLUMNS = 256
"""Outputs of a block."""
VECTOR = 8
MAX_PARTS = 3

ENTRY = parameters(
    ("a", "i8"),
    ("b", "i8"),
    ("rank0", "i4"),
    ("rank1", "i4"),
    ("rank2", "i4"),
    ("unused", "i4"),
)
"""One adapter's entry for one product."""
TILE_NUMBERS = 3
"""Numbers of a tile: the adapter's place, the first of ``tokens``, and how many."""

PARAMETERS = parameters(
    ("x", "u8"),
    ("y", "u8"),
    ("places", "u8"),
    ("entries", "u8"),
    ("tiles", "u8"),
    ("tokens", "u8"),
    ("partial", "u8"),
    ("place_size", "i8"),
    ("place_entries", "i4"),
    ("inputs", "i4"),
    ("outputs0", "i4"),
    ("outputs1", "i4"),
    ("outputs2", "i4"),
    ("max_tokens", "i4"),
    ("rank_stride", "i4"),
)


@attrs.frozen
class ProductShape:
    """A product with up to three parts in its result, each with matrices of its own."""

    inputs: int
    outputs: tuple[int, ...]

    @property
    def num_splits(self) -> int:
        """Number of partial sums there are over the inputs."""
        return -(-self.inputs // SPLIT)


def padded_rank(rank: int) -> int:
    """Return the rank that an update's matrices have on the device, filled up with zeros."""
    return -(-rank // BLOCK) * BLOCK


def max_tiles(num_tokens: int, num_adapters: int) -> int:
    """Return the most tiles of so many tokens with at most so many different adapters."""
    return min(num_tokens, (num_tokens + num_adapters * (TILE - 1)) // TILE)


def partial_numbers(shapes: Iterable[ProductShape], max_tokens: int, max_rank: int) -> int:
    """Return the most numbers of float32 that come between the two kernels."""
    widest = max(shape.num_splits * len(shape.outputs) for shape in shapes)
    return widest * max_tokens * padded_rank(max_rank)


def lora_sources(dtype: torch.dtype) -> dict[str, KernelSource]:
    """Both kernels for one number format, by name."""
    return {
        name: KernelSource(
            name=name,
            parameters=PARAMETERS,
            num_threads=NUM_THREADS,
            defines=(("ELEMENT", element_name(dtype)), ("SPLIT", SPLIT), ("COLUMNS", COLUMNS)),
        )
        for name in ("lora_shrink", "lora_expand")
    }


VARIANTS = [source for dtype in DTYPES for source in lora_sources(dtype).values()]


class LoraUpdate:
    """y += B (A x) for all tokens that have adapters, each with its own.

    All tensors are contiguous and on the device, and are read when the kernels run.

    Args:
        loader: where the kernels run.
        shapes: of the products that are launched.
        places: [number of slots, place_size] bfloat16 or float16: the numbers of one adapter each.
        entries: [number of slots, products, 4] int64, rows of :data:`ENTRY`.
        tiles: int32, :data:`TILE_NUMBERS` of each tile. A count of 0 stands for none.
        tokens: int32 [max_tokens], the rows of x and y in the order of the tiles.
        max_rank: the largest rank of an update.

    Raises:
        ValueError: a size or a number format that the kernels aren't made for.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        shapes: Iterable[ProductShape],
        places: torch.Tensor,
        entries: torch.Tensor,
        tiles: torch.Tensor,
        tokens: torch.Tensor,
        max_rank: int,
    ) -> None:
        shapes = list(shapes)
        _check(shapes, places.dtype)
        kernels = {name: loader.load(each) for name, each in lora_sources(places.dtype).items()}
        self._shrink, self._expand = kernels["lora_shrink"], kernels["lora_expand"]
        self._rank = padded_rank(max_rank)
        max_tokens = tokens.numel()
        self._partial = torch.empty(
            partial_numbers(shapes, max_tokens, max_rank), dtype=torch.float32, device=loader.device
        )
        self._entries = entries
        self._kept = (places, tiles, tokens)  # the kernels have only their addresses
        self._parameters = np.zeros(1, PARAMETERS)
        self._parameters["places"] = places.data_ptr()
        self._parameters["tiles"] = tiles.data_ptr()
        self._parameters["tokens"] = tokens.data_ptr()
        self._parameters["partial"] = self._partial.data_ptr()
        self._parameters["place_size"] = places.shape[1]
        self._parameters["place_entries"] = entries.shape[1]
        self._parameters["max_tokens"] = max_tokens

    def launch(
        self, product: int, shape: ProductShape, num_tiles: int, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Add to ``y`` [T, outputs of all parts] what adapters make of ``x`` [T, inputs].

        ``product`` says which of the entries count, and ``num_tiles`` how many tiles are looked at.
        """
        filled = self._parameters
        filled["x"] = x.data_ptr()
        filled["y"] = y.data_ptr()
        filled["entries"] = self._entries.data_ptr() + product * ENTRY.itemsize
        filled["inputs"] = shape.inputs
        for part in range(MAX_PARTS):
            filled[f"outputs{part}"] = shape.outputs[part] if part < len(shape.outputs) else 0
        filled["rank_stride"] = rank_stride = len(shape.outputs) * self._rank
        self._shrink.launch((num_tiles, rank_stride // BLOCK, shape.num_splits), filled)
        blocks = sum(-(-outputs // COLUMNS) for outputs in shape.outputs)
        self._expand.launch((blocks, num_tiles, 1), filled)


def _check(shapes: Iterable[ProductShape], dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"no adapter kernels for {dtype}")
    for shape in shapes:
        sizes = (shape.inputs, *shape.outputs)
        if any(size % VECTOR for size in sizes) or not 0 < len(shape.outputs) <= MAX_PARTS:
            raise ValueError(
                f"adapters from {shape.inputs} to {list(shape.outputs)} numbers: the kernels want "
                f"multiples of {VECTOR}"
            )

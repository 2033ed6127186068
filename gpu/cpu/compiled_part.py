"""The part of a model that one rank's compiled decoder has, and the slices of its sums.

A product whose inputs are split among the ranks is computed in slices of equal size, which are
added up in one order (``csrc/ranks.h``). So ranks that have the same slices between them give the
same bits, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from gpu.cpu.decoder_abi import RanksShape
from gpu.models.parallel.model_part import ModelPart
from gpu.weights.blocks import Blocks, Weight
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

SLICES = 4
"""Slices of several ranks, where these and the model divide so."""
_BLOCK = 32


@attrs.frozen
class CompiledPart:
    """The part of one rank, and the slices of all ranks together.

    There are 0 slices if one rank computes its layers as a model that is whole.
    """

    part: ModelPart
    slices: int

    def ranks_shape(self, memory: int) -> RanksShape:
        """Return the place of this rank; ``memory`` is the address of what they share."""
        part = self.part
        return RanksShape(
            rank=part.rank,
            size=part.size,
            slices=self.slices,
            by_expert=part.by_expert,
            vocab_size=part.whole.vocab_size,
            memory=memory,
        )


def choose_slices(part: ModelPart, asked: int) -> int | None:
    """Return the slices of the ranks of ``part``: those ``asked`` for, or if that is 0 what fits.

    None if no number fits, so that the compiled kernels can't compute the model in parts.

    Raises:
        ModelLoadError: The ranks or the model can't be split into as many as asked for.
    """
    widths = set(_widths(part))
    fitting = [
        slices
        for slices in ([asked] if asked else [SLICES, part.size])
        if slices % part.size == 0 and not any(width % (slices * _BLOCK) for width in widths)
    ]
    if asked and not fitting:
        sizes = ", ".join(map(str, sorted(widths)))
        raise ModelLoadError(
            f"--tensor-parallel-slices {asked} must be a multiple of --tensor-parallel-size "
            f"{part.size}, and divide the model's sums of {sizes} numbers into blocks of {_BLOCK}"
        )
    return fitting[0] if fitting else None


def _widths(part: ModelPart) -> Iterator[int]:
    """Yield the inputs of the whole model's products that are split by inputs."""
    whole: ModelConfig = part.whole
    yield whole.num_heads * whole.head_dim
    yield from part.split_sizes()


def cut_weights(
    part: ModelPart, weights: Iterable[tuple[str, Weight]]
) -> Iterator[tuple[str, Weight]]:
    """Yield what a rank has of ``weights``, by its name in the part.

    Biases that are added to a sum are whole.
    """
    for name, weight in weights:
        own_name = part.name_of(name)
        if own_name is not None:
            dim, own = part.cut(name, weight.shape)
            yield own_name, weight if own == slice(None) else _cut(weight, dim, own)


def _cut(weight: Weight, dim: int, own: slice) -> Weight:
    if not isinstance(weight, Blocks):
        return weight[:, own] if dim else weight[own]
    raw, (rows, inputs) = weight.raw, weight.shape
    if dim:
        bytes_per_block = raw.shape[1] * _BLOCK // inputs
        first, stop = (place // _BLOCK * bytes_per_block for place in (own.start, own.stop))
        raw, inputs = np.ascontiguousarray(raw[:, first:stop]), own.stop - own.start
    else:
        raw = raw[own]
        rows = len(raw)
    return attrs.evolve(weight, shape=(rows, inputs), raw=raw)

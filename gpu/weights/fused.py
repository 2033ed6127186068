"""Splits tensors of Phi 3 into those of other families.

Its files have one matrix for queries, keys and values, and one for the MLP's gate and up. The rows
of a head's queries and keys are put in the order in which they are rotated.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpu.weights.blocks import Numbers
from gpu.weights.packed_modules import PACKED_MODULES
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

FUSED_MODULES = {
    "self_attn.qkv_proj": PACKED_MODULES["qkv"],
    "mlp.gate_up_proj": PACKED_MODULES["gate_up"],
}
"""By the name of a matrix: the modules whose rows it has, in their order."""
_ROTATED = ("self_attn.q_proj.", "self_attn.k_proj.")


def split_fused(
    name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the names of a matrix's parts, in order, and their shapes.

    Any other tensor is returned as it is.

    Raises:
        ModelLoadError: The matrix has another shape than its ``expected`` parts together.
    """
    for fused, modules in FUSED_MODULES.items():
        if f".{fused}." not in name or not shape:
            continue
        parts = [name.replace(fused, module) for module in modules]
        shapes = [expected.get(part, (0,)) for part in parts]
        wanted = (sum(each[0] for each in shapes), *shapes[0][1:])
        if wanted != shape:
            raise ModelLoadError(
                f"{name} has the shape {list(shape)}, and config.json says {list(wanted)}: they "
                "don't belong together"
            )
        return dict(zip(parts, shapes, strict=True))
    return {name: shape}


def order_of_rows(config: ModelConfig) -> npt.NDArray[np.int64] | None:
    """Return the rows [head_dim] of a head in a file, in the order of its pairs.

    It is None if they have this order in the file.
    """
    if config.rotary_dim == config.head_dim:
        return None
    first, second = np.arange(config.rotary_dim).reshape(2, -1)
    others = np.arange(config.rotary_dim, config.head_dim).reshape(2, -1)
    return np.concatenate([first, others[0], second, others[1]])


def in_rotated_order(name: str, numbers: Numbers, config: ModelConfig) -> Numbers:
    """Return the rows of a tensor in the order in which they are rotated."""
    order = order_of_rows(config)
    if order is None or not any(each in name for each in _ROTATED):
        return numbers
    heads = numbers.reshape(-1, config.head_dim, *numbers.shape[1:])
    return heads[:, order].reshape(numbers.shape)

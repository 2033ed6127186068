"""Which projections of a layer are computed as one product."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PRODUCTS", "outputs_of"]

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""By product, its parts in the order of their outputs. All of them may have updates."""


def outputs_of(shapes: Mapping[str, tuple[int, ...]], layer: int, product: str) -> dict[str, int]:
    """The outputs of each part; none where the layer has experts instead of that product.

    ``shapes`` are those of :func:`gpu.weights.expected_tensors`.
    """
    stem = f"model.layers.{layer}."
    names = {part: f"{stem}{part}.weight" for part in PRODUCTS[product]}
    return {part: shapes[name][0] for part, name in names.items() if name in shapes}

"""The map from a model's matrices to products and layers of the compiled decoder."""

from __future__ import annotations

import enum
import re

import attrs

from gpu.weights.packed_modules import PACKED_MODULES, PACKED_PLACES


class ProductKind(enum.IntEnum):
    """The products of a model, as decoder_abi.cpp numbers them."""

    EMBEDDING = 0
    HEAD = 1
    QKV = 2
    OUTPUT = 3
    GATE_UP = 4
    DOWN = 5
    ROUTER = 6
    EXPERT_GATE_UP = 7
    EXPERT_DOWN = 8


_WHOLE = {"model.embed_tokens": ProductKind.EMBEDDING, "lm_head": ProductKind.HEAD}
_OF_LAYER = {
    "qkv": ProductKind.QKV,
    "output": ProductKind.OUTPUT,
    "gate_up": ProductKind.GATE_UP,
    "down": ProductKind.DOWN,
}
_OF_EXPERT = {"gate_up": ProductKind.EXPERT_GATE_UP, "down": ProductKind.EXPERT_DOWN}
NUM_PARTS = {
    ProductKind.ROUTER: 1,
    **{
        which: len(PACKED_MODULES[product])
        for product, which in (*_OF_LAYER.items(), *_OF_EXPERT.items())
    },
}
"""By product, how many matrices it is made of."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


@attrs.frozen
class ProductPart:
    """A part of a product, the ``number``-th along its outputs."""

    which: ProductKind
    layer: int
    expert: int
    number: int

    @property
    def product(self) -> tuple[ProductKind, int, int]:
        """The product that it shares with other parts."""
        return self.which, self.layer, self.expert


def part_of(module: str) -> ProductPart | None:
    """Return the part that is called ``module``, such as ``model.layers.3.self_attn.k_proj``.

    None for what is no matrix.
    """
    if module in _WHOLE:
        return ProductPart(_WHOLE[module], 0, 0, 0)
    match = _LAYER.fullmatch(module)
    if match is None:
        return None
    layer, inner, expert, products = int(match[1]), match[2], 0, _OF_LAYER
    if inner == "mlp.gate":
        return ProductPart(ProductKind.ROUTER, layer, 0, 0)
    if of_expert := _EXPERT.fullmatch(inner):
        expert, inner, products = int(of_expert[1]), f"mlp.{of_expert[2]}", _OF_EXPERT
    if inner not in PACKED_PLACES:
        return None
    product, number = PACKED_PLACES[inner]
    return ProductPart(products[product], layer, expert, number)

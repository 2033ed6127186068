"""The linear modules of a layer that are packed into one matrix product, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trioserve.model_files import ModelConfig
from trioserve.model_files.config import ExpertsConfig

PACKED_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""By product: its modules in the order of their outputs. An expert's MLP has the last two."""

PACKED_PLACES = {
    module: (product, number)
    for product, modules in PACKED_MODULES.items()
    for number, module in enumerate(modules)
}
"""By module: its product, and its index in it."""


@attrs.frozen
class PackedShape:
    """The shape of a product. Each of its modules has a weight [outputs, inputs]."""

    outputs: Mapping[str, int]
    """By the module's name within the layer."""
    inputs: int
    bias: bool


def packed_shapes(config: ModelConfig, layer: int) -> dict[str, PackedShape]:
    """Return the products of a layer by name; a layer with experts has none for the MLP."""
    hidden = config.hidden_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv = dict(zip(PACKED_MODULES["qkv"], (q_size, kv_size, kv_size), strict=True))
    shapes = {
        "qkv": PackedShape(qkv, hidden, config.qkv_bias),
        "output": PackedShape(
            dict.fromkeys(PACKED_MODULES["output"], hidden), q_size, config.output_bias
        ),
    }
    if config.experts_of(layer) is None:
        shapes |= _mlp("mlp.", hidden, config.intermediate_size, bias=config.mlp_bias)
    return shapes


def expert_shapes(
    config: ModelConfig, experts: ExpertsConfig, number: int
) -> dict[str, PackedShape]:
    """Return the products of one expert by name."""
    hidden, inner = config.hidden_size, experts.intermediate_size
    return _mlp(f"mlp.experts.{number}.", hidden, inner, bias=False)


def _mlp(stem: str, hidden: int, inner: int, *, bias: bool) -> dict[str, PackedShape]:
    gate_up, down = (
        [stem + module.removeprefix("mlp.") for module in PACKED_MODULES[product]]
        for product in ("gate_up", "down")
    )
    return {
        "gate_up": PackedShape(dict.fromkeys(gate_up, inner), hidden, bias),
        "down": PackedShape(dict.fromkeys(down, hidden), inner, bias),
    }

"""The names and shapes of a decoder's tensors, and a check of its files against them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpu.weights.packed_modules import PackedShape, expert_shapes, packed_shapes
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model, by Hugging Face's name."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= _of_products(prefix, packed_shapes(config, layer))
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        experts = config.experts_of(layer)
        if experts is not None:
            shapes[f"{prefix}mlp.gate.weight"] = (experts.count, hidden)
            for number in range(experts.count):
                shapes |= _of_products(prefix, expert_shapes(config, experts, number))
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _of_products(prefix: str, products: Mapping[str, PackedShape]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for product in products.values():
        for module, outputs in product.outputs.items():
            shapes[f"{prefix}{module}.weight"] = (outputs, product.inputs)
            if product.bias:
                shapes[f"{prefix}{module}.bias"] = (outputs,)
    return shapes


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    path: Path,
    family: str,
) -> None:
    """Compare the shapes ``found`` in the files at ``path`` with those ``expected``.

    An unknown tensor is refused too, since the model's results may depend on it.

    Raises:
        ModelLoadError: they differ; the message names one tensor.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ModelLoadError(f"{path} has no tensor {name}: fetch the model again")
        if found[name] != shape:
            raise ModelLoadError(
                f"{path}: tensor {name} is {list(found[name])}, and the model's configuration "
                f"asks for {list(shape)}: they don't belong together"
            )
    for name in found:
        if name not in expected:
            raise ModelLoadError(
                f"{path} holds the tensor {name}, which a {family} model of its "
                "configuration doesn't have: the model isn't served"
            )

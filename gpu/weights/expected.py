"""Which tensors a model has, and whether the files have just those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

__all__ = ["check_tensors", "expected_tensors"]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, by name, with its shape."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        experts = config.experts_of(layer)
        for name, (rows, columns, bias) in linears.items():
            if experts is not None and name.startswith("mlp."):
                continue
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if experts is not None:
            shapes[f"{prefix}mlp.gate.weight"] = (experts.count, hidden)
            for expert in range(experts.count):
                stem, inner = f"{prefix}mlp.experts.{expert}.", experts.intermediate_size
                shapes[f"{stem}gate_proj.weight"] = (inner, hidden)
                shapes[f"{stem}up_proj.weight"] = (inner, hidden)
                shapes[f"{stem}down_proj.weight"] = (hidden, inner)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    path: Path,
    family: str,
) -> None:
    """Compare the tensors in the files at ``path``, ``found``, with those that the model has.

    An unknown tensor is refused too: to leave it out would give another model than the file's.

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

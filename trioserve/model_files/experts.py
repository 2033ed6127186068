"""The mixture of experts in config.json, by family."""

from __future__ import annotations

from trioserve.model_files.config import ExpertsConfig
from trioserve.model_files.fields import Fields


def read_experts(fields: Fields, family: str, num_layers: int) -> ExpertsConfig | None:
    """Return the experts of a model of ``family``; None if no layer has any.

    Missing fields have transformers' defaults.

    Raises:
        ModelLoadError: A field is invalid.
    """
    if family == "mixtral":
        return ExpertsConfig(
            count=fields.integer("num_local_experts", 8),
            per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size"),
            normalized=True,
            layers=(True,) * num_layers,
        )
    if family != "qwen3_moe":
        return None
    # transformers 5 uses Mixtral's name for it.
    written = fields.integer("num_local_experts", 128, least=0)
    count = fields.integer("num_experts", written, least=0)
    step = fields.integer("decoder_sparse_step", 1)
    dense = _dense_layers(fields)
    layers = tuple(
        count > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)
    )
    if not any(layers):
        return None
    return ExpertsConfig(
        count=count,
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob"),
        layers=layers,
    )


def _dense_layers(fields: Fields) -> list[int]:
    layers = fields.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise fields.error("mlp_only_layers", layers)
    return layers

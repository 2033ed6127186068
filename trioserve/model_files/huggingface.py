"""The JSON files of a model's folder in the format of Hugging Face's libraries.

Old and new spellings are read: transformers 4 writes ``rope_theta`` and ``rope_scaling`` side
by side and ``torch_dtype``; transformers 5 writes ``rope_parameters`` and ``dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trioserve.model_files.common_fields import (
    architecture_of,
    dtype_of,
    ids_that_end,
    refuse_quantized,
    token_ids,
)
from trioserve.model_files.config import (
    MAX_LAYERS,
    ModelConfig,
    RopeScaling,
    check_config,
)
from trioserve.model_files.experts import read_experts
from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_file, read_object
from trioserve.model_files.media_config import HEADS, other_decoder, reads_media, text_values
from trioserve.model_files.native import refused_by_tokenizers
from trioserve.model_files.sentence_modules import MODULES
from trioserve.model_files.shards import read_shards
from trioserve.model_files.tokenizer_growth import check_growth
from trioserve.protocol.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}
_BARE_MODELS = {name.replace("ForCausalLM", "Model"): family for name, family in FAMILIES.items()}
"""Classes without an output matrix, for embeddings."""

# transformers' defaults that differ between families.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
}

_MAX_TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer.json: several times the size of the largest vocabularies."""

_ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
_PARTIAL_KINDS = ("default", "longrope")
"""Kinds of RoPE that may rotate a part of each head."""


def read_folder_config(folder: Path) -> ModelConfig:
    """Return the shape of the model in ``folder``, from config.json and generation_config.json.

    Raises:
        ModelLoadError: A file is missing or damaged, or the model is unsupported.
    """
    path = folder / "config.json"
    whole = read_object(path)
    values = text_values(path, whole)
    family = _family(path, values)
    fields = Fields(path, values, _FAMILY_DEFAULTS[family])
    _refuse_unserved(fields)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = _rope(fields, max_positions)
    if scaling is not None and family == "phi3" and scaling.kind != "longrope":
        raise ModelLoadError(f"{path}: RoPE scaling {scaling.kind!r} isn't served with Phi 3")
    if scaling is not None:
        max_positions = scaling.stretched(max_positions)
    rope_layers = _rope_layers(fields, family, num_layers)
    attention_bias = fields.flag("attention_bias") and family not in ("mistral", "mixtral", "phi3")
    has_head = _has_head(folder, values)
    is_tied = fields.flag("tie_word_embeddings")
    if reads_media(whole):
        is_tied = not _has_tensor(folder, *HEADS)
    config = ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_part=_rotary_part(fields, family),
        mrope_section=_mrope_section(fields) if reads_media(whole) else (),
        tie_word_embeddings=is_tied or not has_head,
        has_head=has_head,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family in ("llama", "smollm3") and fields.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=read_experts(fields, family, num_layers),
        windows=_windows(fields, family, num_layers, rope_layers),
        rope_layers=rope_layers,
        dtype=dtype_of(fields, folder),
        bos_token_id=_first(token_ids(fields, "bos_token_id")),
        eos_token_ids=ids_that_end(fields, folder),
    )
    check_config(config, path)
    return config


def has_family(values: Mapping[str, Any]) -> bool:
    """Return True if trioserve itself implements the family in config.json."""
    architecture = architecture_of(values)
    if reads_media(values):
        return other_decoder(values) is None
    if architecture is None:
        return values.get("model_type") in FAMILIES.values()
    return architecture in FAMILIES or architecture in _BARE_MODELS


def _family(path: Path, values: Mapping[str, Any]) -> str:
    architecture = architecture_of(values)
    if architecture is None:
        model_type = values.get("model_type")
        if model_type in FAMILIES.values():
            return str(model_type)
        raise ModelLoadError(f"{path} names no architecture: it is no language model's folder")
    family = FAMILIES.get(architecture) or _BARE_MODELS.get(architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(f"{path}: the architecture {architecture} isn't served; {known} are")
    return family


def _has_head(folder: Path, values: Mapping[str, Any]) -> bool:
    """Return True if the model has an output matrix; some embedding models have none."""
    if architecture_of(values) in _BARE_MODELS:
        return False
    if values.get("tie_word_embeddings") or not (folder / MODULES).exists():
        return True
    return _has_tensor(folder, "lm_head.weight")


def _has_tensor(folder: Path, *names: str) -> bool:
    """Return True if the files have a tensor of one of ``names``."""
    return any(name in shard.shapes for shard in read_shards(folder) for name in names)


def _refuse_unserved(fields: Fields) -> None:
    refuse_quantized(fields)
    if (fields.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise ModelLoadError(
            f"{fields.path}: hidden_act {fields.get('hidden_act')!r} isn't served; silu is"
        )


def _rope(fields: Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Return the base frequency and the scaling, from either spelling."""
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = _rope_kind(rope)
    if kind in ("default", "mrope"):
        return theta, None
    if kind not in _ROPE_KINDS:
        known = ", ".join(_ROPE_KINDS)
        raise ModelLoadError(f"{fields.path}: RoPE scaling {kind!r} isn't served; {known} are")
    # Dynamic scaling starts at the training length, max_position_embeddings.
    original = max_positions
    if kind != "dynamic":
        name = "original_max_position_embeddings"
        original = fields.integer(name, rope.integer(name, max_positions))
    factor = None if rope.get("factor") is None else rope.number("factor", 1.0)
    if factor is None:
        if kind not in ("yarn", "longrope"):
            raise rope.error("factor", None)
        factor = max_positions / original
    if kind == "longrope":
        return theta, _longrope(rope, factor, original, max_positions)
    attention_factor = rope.get("attention_factor")
    mscale, mscale_all_dim = (
        rope.number(name, 1.0) if rope.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    return theta, RopeScaling(
        kind=str(kind),
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else rope.number("attention_factor", 1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.get("truncate") is not False,
    )


def _rope_fields(fields: Fields) -> Fields:
    """Return the fields of RoPE that are together, in either spelling."""
    written = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(written, dict) or any(isinstance(value, dict) for value in written.values()):
        raise ModelLoadError(f"{fields.path}: RoPE that differs from layer to layer isn't served")
    return Fields(fields.path, written, {})


def _rope_kind(rope: Fields) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Old files of Phi 3 call it so.
    return "longrope" if kind == "su" else str(kind)


def _rotary_part(fields: Fields, family: str) -> float:
    """Return the part of each head that is rotated."""
    rope = _rope_fields(fields)
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if part != 1.0 and (family != "phi3" or _rope_kind(rope) not in _PARTIAL_KINDS):
        raise ModelLoadError(f"{fields.path}: RoPE over a part of each head isn't served")
    return part


def _longrope(rope: Fields, factor: float, original: int, max_positions: int) -> RopeScaling:
    """Return LongRoPE, for the training length and for more."""
    attention_factor = 1.0
    if factor > 1 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor", 1.0)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        frequency_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
        long_positions=max(max_positions, original),
    )


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    factors = rope.get(name)
    if not isinstance(factors, list) or not all(type(each) in (int, float) for each in factors):
        raise rope.error(name, factors)
    return tuple(map(float, factors))


def _mrope_section(fields: Fields) -> tuple[int, ...]:
    """Return the sections of rotary frequencies; none if all turn by a token's position."""
    section = (fields.get("rope_parameters") or {}).get("mrope_section") or []
    if not isinstance(section, list) or not all(
        type(each) is int and each >= 0 for each in section
    ):
        raise fields.error("mrope_section", section)
    return tuple(section)


def _rope_layers(fields: Fields, family: str, num_layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * num_layers
    layers = fields.get("no_rope_layers")
    if layers is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    # Despite the field's name, a 1 means a layer with RoPE.
    if not isinstance(layers, list) or len(layers) < num_layers:
        raise fields.error("no_rope_layers", layers)
    return tuple(bool(layer) for layer in layers[:num_layers])


def _windows(
    fields: Fields, family: str, num_layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    none: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or fields.get("sliding_window") is None:
        return none
    if family in ("mistral", "mixtral", "phi3"):
        window = fields.integer("sliding_window")
        if family == "phi3" and window >= fields.integer("max_position_embeddings"):
            return none  # Phi 4's is one that no sequence reaches.
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        return none
    window = fields.integer("sliding_window")
    if family == "qwen3_moe":
        return (window,) * num_layers
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.error("layer_types", types)
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family == "smollm3":
        return tuple(None if rope else window for rope in rope_layers)
    full = fields.get("max_window_layers")
    full = 28 if full is None else full
    if isinstance(full, bool) or not isinstance(full, int):
        raise fields.error("max_window_layers", full)
    return tuple(window if layer >= full else None for layer in range(num_layers))


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def read_chat_template(folder: Path) -> str | None:
    """Return the default chat template; its own file wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_file(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path} can't be read: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_object(folder / name, required=False).get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict)]
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if isinstance(template, str):
            return template
    return None


def read_special_token(folder: Path, name: str) -> str | None:
    """Return the text of ``bos_token`` or ``eos_token``, for templates."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_object(folder / file, required=False).get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a tokenizer.json, without truncation and padding.

    ``tokenizer_class`` in tokenizer_config.json is ignored: it would replace the file's
    pre-tokenizer.

    Raises:
        ModelLoadError: The file is missing or damaged.
    """
    if not path.exists():
        hint = "fetch the model's folder again"
        if (path.parent / "tokenizer.model").exists():
            hint = "tokenizer.model alone isn't served, so convert it to tokenizer.json"
        raise ModelLoadError(f"{path} is missing: {hint}")
    import tokenizers  # mostly not needed in a worker

    if path.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ModelLoadError(
            f"{path} has more than {_MAX_TOKENIZER_BYTES} bytes: it can't be right"
        )
    data = read_file(path)
    with refused_by_tokenizers(path):
        check_growth(data)
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

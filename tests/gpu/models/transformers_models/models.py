"""Small random models of families that have no file of their own, one folder for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import VOCAB_SIZE, write_tokenizer

__all__ = ["FAMILIES", "UNSERVED", "make_other"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {**_GROUPED, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {**_ALTERNATING, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 32}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", _GROUPED),
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**_ALTERNATING, "sliding_window": 8}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "ernie4_5": ("Ernie4_5", {**_GROUPED, "head_dim": 16}),
    "exaone4": ("Exaone4", {**_ALTERNATING, "sliding_window": 8}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", _GEMMA),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 16}),
    "gpt_bigcode": ("GPTBigCode", {"multi_query": True}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {**_EXPERTS, **_ALTERNATING, "head_dim": 16, "sliding_window": 8}),
    "granite": (
        "Granite",
        {
            **_GROUPED,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
        },
    ),
    "granite_moe": ("GraniteMoe", _EXPERTS),
    "helium": ("Helium", {**_GROUPED, "head_dim": 16}),
    "nemotron": ("Nemotron", {**_GROUPED, "head_dim": 16}),
    "olmo2": ("Olmo2", _GROUPED),
    "olmoe": ("Olmoe", _EXPERTS),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "moe_intermediate_size": 48}),
    "starcoder2": ("Starcoder2", {**_GROUPED, "sliding_window": 8}),
}
"""Name -> (the prefix of transformers' classes, fields of its configuration). Learned positions,
partial and no rotary embedding, norms in many places, shared, grouped and latent keys, windows,
soft caps, sinks, scaled logits and mixtures of experts are among them."""

UNSERVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stablelm": ("StableLm", _GROUPED, "StableLmForCausalLM .*_supports_attention_backend"),
    "lfm2": (
        "Lfm2",
        {**_GROUPED, "layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM .* layers of conv",
    ),
    "llama4": (
        "Llama4",
        {**_EXPERTS, "head_dim": 16, "layer_types": ["chunked_attention", "full_attention"]},
        "Llama4ForCausalLM .* layers of chunked_attention",
    ),
    "diffllama": ("DiffLlama", _GROUPED, "attention of its layer 0 more than once"),
    "doge": ("Doge", {**_GROUPED, "head_dim": 16}, "can't be loaded from .*_ProbedMask"),
}
"""Likewise, with what is said of them."""

_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def make_other(prefix: str, fields: dict[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """Write a model with float32 weights and a tokenizer into ``folder``. Returns it."""
    import torch
    import transformers

    config_class = getattr(transformers, _CONFIGS.get(prefix, f"{prefix}Config"))
    config = config_class(**{**_COMMON, **fields})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder

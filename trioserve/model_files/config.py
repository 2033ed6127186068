"""The shape of a decoder model, in one class, whichever file format it came from."""

from __future__ import annotations

import attrs

__all__ = ["ModelConfig", "RopeScaling"]


@attrs.frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length the model was trained at.

    ``kind`` is ``linear``, ``dynamic``, ``llama3``, ``yarn`` or ``factors``; fields that a kind
    doesn't use keep their defaults. Formulas: Llama 3's from its reference code; YaRN's from Peng
    et al. 2023 (arXiv:2309.00071). ``factors`` is what GGUF files hold: each of the
    ``head_dim // 2`` inverse frequencies is divided by its own number in ``frequency_factors``.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A llama-like decoder: norm, attention, norm, gated MLP, repeated.

    ``windows[i]`` is layer i's sliding window in tokens, None for full attention;
    ``rope_layers[i]`` is False where layer i uses no rotary embedding (SmolLM3). Both have
    ``num_layers`` entries.
    """

    family: str
    """``llama``, ``mistral``, ``qwen2``, ``qwen3`` or ``smollm3``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    """The number format that the file names for its weights."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

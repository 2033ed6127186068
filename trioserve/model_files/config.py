"""The shape of a decoder model, in one class, whichever file format it came from."""

from __future__ import annotations

import math
from pathlib import Path

import attrs

from trioserve.protocol.errors import ModelLoadError

MAX_LAYERS = 4096
"""More than any model has, and few enough for what is made for each layer before its weights."""
MAX_EXPERTS = 1 << 16
"""Of all layers together, likewise."""
MAX_SIZE = 2**31 - 1
"""Of any other count: they are 32-bit integers in messages and kernels."""
MAX_NUMBER = 1e15
"""Of RoPE's base, factors and the like: products of two of them are still finite."""


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
class ExpertsConfig:
    """Layers whose MLP is one of many for each token: a mixture of experts.

    A router's logits become probabilities over all experts of a layer. Those of the ``per_token``
    most probable compute the token, and their results are added up, each times its probability.
    """

    count: int
    """Experts of a layer."""
    per_token: int
    intermediate_size: int
    """Of each expert."""
    normalized: bool
    """Whether the probabilities of a token's experts are scaled to a sum of 1."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have one MLP."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A llama-like decoder: norm, attention, norm, gated MLP or experts, repeated.

    ``windows[i]`` is layer i's sliding window in tokens, None for full attention;
    ``rope_layers[i]`` is False where layer i uses no rotary embedding (SmolLM3). Both have
    ``num_layers`` entries.
    """

    family: str
    """``llama``, ``mistral``, ``mixtral``, ``qwen2``, ``qwen3``, ``qwen3_moe`` or ``smollm3``."""
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
    has_head: bool = True
    """False for a model that was trained to embed texts and has nothing that makes logits: its
    table of tokens stands in, so that what computes needn't know."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    """None where every layer has one MLP."""
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    """The number format that the file names for its weights."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The intermediate sizes of its MLPs and of its experts, each once."""
        sizes = (
            self.intermediate_size if experts is None else experts.intermediate_size
            for experts in map(self.experts_of, range(self.num_layers))
        )
        return tuple(dict.fromkeys(sizes))

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts that a layer has, None where it has one MLP."""
        has_them = self.experts is not None and self.experts.layers[layer]
        return self.experts if has_them else None


def check_config(config: ModelConfig, path: Path) -> None:
    """Refuse a shape that contradicts itself, of which the computation would know nothing to make.

    Raises:
        ModelLoadError: it does; the message names the numbers.
    """
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    if heads % kv_heads:
        raise _contradiction(path, f"{heads} heads can't share {kv_heads} heads of keys and values")
    if head_dim % 2 or head_dim <= 2:
        raise _contradiction(path, f"heads of {head_dim} numbers can't be rotated in pairs")
    experts = config.experts
    if experts is not None:
        count, per_token = experts.count, experts.per_token
        if per_token > count:
            raise _contradiction(path, f"a token can't have {per_token} of {count} experts")
        if count * config.num_layers > MAX_EXPERTS:
            raise _contradiction(
                path, f"{config.num_layers} layers can't have {count} experts each"
            )
    scaling = config.rope_scaling
    if scaling is None:
        return
    factors = scaling.frequency_factors
    if scaling.kind == "factors" and len(factors) != head_dim // 2:
        raise _contradiction(path, f"{len(factors)} factors for {head_dim // 2} frequencies")
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise _contradiction(path, "a factor of a frequency isn't a positive number")
    if scaling.kind == "llama3" and scaling.low_freq_factor == scaling.high_freq_factor:
        raise _contradiction(path, "low_freq_factor and high_freq_factor of RoPE are the same")
    if scaling.kind == "yarn" and config.rope_theta == 1.0:
        raise _contradiction(path, "RoPE can't be stretched with the base 1")


def _contradiction(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {reason}, so its configuration is damaged; fetch it again")

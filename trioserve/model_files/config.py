"""The shape of a decoder model, in one class for all file formats."""

from __future__ import annotations

import math
from pathlib import Path

import attrs

from trioserve.protocol.errors import ModelLoadError

MAX_LAYERS = 4096
"""Most layers. No model has as many, and per-layer work before loading stays small."""
MAX_EXPERTS = 1 << 16
"""Most experts of all layers together."""
MAX_SIZE = 2**31 - 1
"""Largest other count, because messages and kernels have 32-bit integers."""
MAX_NUMBER = 1e15
"""Largest RoPE base, factor and the like, so that the product of two is finite."""


@attrs.frozen(kw_only=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond the training length.

    ``kind`` is ``linear``, ``dynamic``, ``llama3``, ``yarn``, ``longrope`` or ``factors``. Fields
    that a kind doesn't use keep their defaults. ``llama3`` follows Llama 3's reference code;
    ``yarn`` follows Peng et al. 2023 (arXiv:2309.00071). ``factors`` is GGUF's form: each of the
    inverse frequencies is divided by its entry in ``frequency_factors``. ``longrope`` is that of
    Ding et al. 2024 (arXiv:2402.13753): ``frequency_factors`` hold up to the training length, and
    ``long_factors`` where longer sequences are served.
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
    long_factors: tuple[float, ...] = ()
    long_positions: int = 0
    """Number of positions with ``long_factors``."""

    def stretched(self, max_positions: int) -> int:
        """Return the number of positions unless more are asked for.

        YaRN may have more than the file's ``max_positions``. LongRoPE has the training length,
        because more of them rotate short sequences by other angles, too.
        """
        if self.kind == "longrope":
            return min(max_positions, self.original_max_position_embeddings)
        if self.kind != "yarn":
            return max_positions
        stretched = int(self.factor * self.original_max_position_embeddings)
        return min(max(max_positions, stretched), MAX_SIZE)


@attrs.frozen(kw_only=True)
class ExpertsConfig:
    """Layers with a mixture of experts: many MLPs, of which each token uses a few.

    A router gives each token probabilities over all experts of a layer. The ``per_token`` most
    probable experts compute the token, and their results are summed, weighted by the
    probabilities.
    """

    count: int
    """Number of experts of a layer."""
    per_token: int
    intermediate_size: int
    """Intermediate size of each expert."""
    normalized: bool
    """True if the probabilities of a token's experts are scaled to a sum of 1."""
    layers: tuple[bool, ...]
    """For each layer, True if it has experts; the others have one MLP."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A llama-like decoder: norm, attention, norm, gated MLP or experts, repeated.

    ``windows[i]`` is layer i's sliding window in tokens, None for full attention;
    ``rope_layers[i]`` is False where layer i uses no rotary embedding (SmolLM3). Both have
    ``num_layers`` entries.
    """

    family: str
    """``llama``, ``mistral``, ``mixtral``, ``phi3``, ``qwen2``, ``qwen3``, ``qwen3_moe`` or
    ``smollm3``."""
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
    rotary_part: float = 1.0
    """Part of each head that is rotated, from its first number on."""
    mrope_section: tuple[int, ...] = ()
    """Numbers of rotary frequencies that turn by a token's time, row and column: M-RoPE (Wang et
    al. 2024, arXiv:2409.12191). Empty if all turn by its position."""
    tie_word_embeddings: bool = False
    has_head: bool = True
    """False for an embedding model without an output matrix. Its token embeddings replace the
    matrix, so computing needs no special case.
    """
    qkv_bias: bool = False
    output_bias: bool = False
    """True if the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    """None if every layer has one MLP."""
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    """Number format of the weights, as in the file."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.head_dim * self.rotary_part)

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Intermediate sizes of MLPs and experts, without duplicates."""
        sizes = (
            self.intermediate_size if experts is None else experts.intermediate_size
            for experts in map(self.experts_of, range(self.num_layers))
        )
        return tuple(dict.fromkeys(sizes))

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and numbers of a head."""
        return self.num_layers, self.num_kv_heads, self.head_dim

    @property
    def takes_keys(self) -> bool:
        """True if adapters may bring keys and values: no windows, no heads in another order."""
        return not any(self.windows) and self.rotary_part == 1.0

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a layer; None if it has one MLP."""
        has_them = self.experts is not None and self.experts.layers[layer]
        return self.experts if has_them else None


def check_config(config: ModelConfig, path: Path) -> None:
    """Refuse a contradictory shape.

    Raises:
        ModelLoadError: The shape contradicts itself; the message names the numbers.
    """
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    if heads % kv_heads:
        raise _contradiction(path, f"{heads} heads can't share {kv_heads} heads of keys and values")
    if head_dim % 2 or head_dim <= 2:
        raise _contradiction(path, f"heads of {head_dim} numbers can't be rotated in pairs")
    rotary_dim = config.rotary_dim
    if rotary_dim % 2 or not 2 < rotary_dim <= head_dim:
        raise _contradiction(path, f"{rotary_dim} of a head's {head_dim} numbers can't be rotated")
    section = config.mrope_section
    if section and (len(section) != 3 or sum(section) != head_dim // 2):
        raise _contradiction(
            path, f"mrope_section {list(section)} isn't three parts of {head_dim // 2} frequencies"
        )
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
    all_factors = [scaling.frequency_factors]
    if scaling.kind == "longrope":
        all_factors.append(scaling.long_factors)
    for factors in all_factors:
        if scaling.kind in ("factors", "longrope") and len(factors) != rotary_dim // 2:
            raise _contradiction(path, f"{len(factors)} factors for {rotary_dim // 2} frequencies")
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise _contradiction(path, "a factor of a frequency isn't a positive number")
    if scaling.kind == "llama3" and scaling.low_freq_factor == scaling.high_freq_factor:
        raise _contradiction(path, "low_freq_factor and high_freq_factor of RoPE are the same")
    if scaling.kind == "yarn" and config.rope_theta == 1.0:
        raise _contradiction(path, "RoPE can't be stretched with the base 1")


def _contradiction(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {reason}, so its configuration is damaged; fetch it again")

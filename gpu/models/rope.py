"""Rotary position embedding: tables of cosines and sines, with every kind of scaling.

In a head of ``head_dim`` numbers, pair i is number i and number ``i + head_dim / 2``. At position p
it is rotated by ``p * inverse_frequencies[i]`` radians (Su et al. 2021, arXiv:2104.09864).

In a head of which only ``rotary_dim`` numbers are rotated, the last pairs stay as they are. Files
have other pairs, number i and number ``i + rotary_dim / 2``: :mod:`gpu.weights.fused` puts the rows
of queries and keys in this order. Products of queries and keys don't depend on it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trioserve.model_files.config import ModelConfig, RopeScaling
from trioserve.protocol.errors import ModelLoadError

Floats = npt.NDArray[np.float32]


def cos_sin_table(config: ModelConfig, length: int, rows: int | None = None) -> Floats:
    """Return cosines and sines of positions 0 to ``rows - 1``: [rows, head_dim] float32.

    Row p holds head_dim / 2 cosines, then head_dim / 2 sines, both multiplied by the attention
    factor of YaRN or LongRoPE. Pairs that aren't rotated have ones and zeros. ``length`` is the
    longest sequence served, and the default of ``rows``; fewer rows suffice if the cache has no
    room for such a sequence.

    Raises:
        ModelLoadError: the kind of scaling is unknown.
    """
    frequencies, attention_factor = inverse_frequencies(config, length)
    positions = np.arange(length if rows is None else rows, dtype=np.float32)
    angles = np.outer(positions, frequencies)
    cosines, sines = (each(angles) * np.float32(attention_factor) for each in (np.cos, np.sin))
    still = np.zeros((len(positions), (config.head_dim - config.rotary_dim) // 2), np.float32)
    return np.concatenate([cosines, still + 1, sines, still], axis=-1)


def cos_sin_table_for(config: ModelConfig, length: int, cache_tokens: int) -> Floats:
    """Return :func:`cos_sin_table` for as many positions as a cache of so many tokens has."""
    return cos_sin_table(config, length, min(length, cache_tokens))


def inverse_frequencies(config: ModelConfig, length: int) -> tuple[Floats, float]:
    """Return radians per position, [rotary_dim / 2] float32, and a factor on cosines and sines.

    Dynamic scaling and LongRoPE depend on ``length``, the longest sequence served. It is fixed, so
    that a token's rotation depends on its position alone.

    Raises:
        ModelLoadError: the kind of scaling is unknown.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return _plain(config.rope_theta, config.rotary_dim), 1.0
    if scaling.kind == "linear":
        return _plain(config.rope_theta, config.head_dim) / scaling.factor, 1.0
    if scaling.kind in ("factors", "longrope"):
        is_long = bool(scaling.long_factors) and length > scaling.original_max_position_embeddings
        factors = scaling.long_factors if is_long else scaling.frequency_factors
        divisors = np.array(factors, dtype=np.float32)
        frequencies = _plain(config.rope_theta, config.rotary_dim) / divisors
        return frequencies, scaling.attention_factor or 1.0
    if scaling.kind == "dynamic":
        return _dynamic(config, scaling, length), 1.0
    if scaling.kind == "llama3":
        return _llama3(_plain(config.rope_theta, config.head_dim), scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(config, scaling), _yarn_attention_factor(scaling)
    raise ModelLoadError(
        f"the model scales its rotary embedding by {scaling.kind!r}: not supported"
    )


def _plain(theta: float, head_dim: int) -> Floats:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


def _dynamic(config: ModelConfig, scaling: RopeScaling, length: int) -> Floats:
    """Scale NTK-aware: the base grows with the length, so low frequencies are stretched most."""
    trained = config.max_position_embeddings
    stretch = scaling.factor * max(length, trained) / trained - (scaling.factor - 1)
    theta = config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))
    return _plain(theta, config.head_dim)


def _llama3(frequencies: Floats, scaling: RopeScaling) -> Floats:
    """Keep high frequencies, divide low ones by the factor, and interpolate between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clip(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(config: ModelConfig, scaling: RopeScaling) -> Floats:
    """Keep fast frequencies, divide slow ones by the factor, and interpolate along a ramp."""
    head_dim, theta = config.head_dim, config.rope_theta
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
    frequencies = _plain(theta, head_dim)
    stretched: Floats = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    return stretched


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)

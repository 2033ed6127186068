"""The least time of a piece of work on a card: bytes and operations counted from its shapes.

Everything here is arithmetic. The fewest bytes are those of every input read once and every output
written once, through device memory; operations are those of the matrix products, a multiplication
and an addition each. What a block table or a list of work items costs is left out: it is thousands
of times smaller. The floor is the longer of the two times at the rates that a card was measured to
reach (Williams et al., "Roofline: an insightful visual performance model", CACM 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.model_files import ModelConfig

_FLOAT32, _ELEMENT = 4, 2


@attrs.frozen
class Work:
    """Bytes through device memory, and operations of matrix products."""

    bytes: float
    flops: float = 0.0


@attrs.frozen(kw_only=True)
class Ceilings:
    """The rates that one card reached in this very run.

    ``copy`` is bytes read plus bytes written per second of a large copy on the device; ``matrix``
    operations per second of a large product of 16-bit random numbers.
    """

    copy: float
    matrix: float

    def floor(self, *parts: Work) -> float:
        """Return the seconds that ``parts`` take at least, one after the other."""
        return sum(max(part.bytes / self.copy, part.flops / self.matrix) for part in parts)

    def bound(self, work: Work) -> str:
        """Return ``memory`` or ``matrix``, where the floor comes from."""
        return "memory" if work.bytes / self.copy >= work.flops / self.matrix else "matrix"


@attrs.frozen(kw_only=True)
class AttentionShape:
    """Heads of an attention layer in 16-bit numbers; those of Llama-3.1-8B unless told otherwise.

    An ``fp8`` cache is in e4m3, with a scale for each token and head, of keys and of values.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    fp8: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer's cache."""
        head = self.head_dim + _FLOAT32 if self.fp8 else self.head_dim * _ELEMENT
        return 2 * self.num_kv_heads * head

    @property
    def query_bytes_per_token(self) -> int:
        """Bytes of one token's queries, which are also those of its output."""
        return self.num_heads * self.head_dim * _ELEMENT


def prefill_attention(
    shape: AttentionShape, rows: Sequence[tuple[int, int]], window: int | None = None
) -> Work:
    """Count causal attention of rows of (queries, context), the queries at the context's end."""
    pairs = keys = queries = 0
    for count, context in rows:
        start = context - count  # the position of the first query
        pairs += _visible(context, window) - _visible(start, window)
        keys += context - (max(start - window + 1, 0) if window else 0)
        queries += count
    return Work(
        bytes=keys * shape.kv_bytes_per_token + 2 * queries * shape.query_bytes_per_token,
        # Of one query against one key in all heads: the score and the weighted value.
        flops=pairs * 4 * shape.num_heads * shape.head_dim,
    )


def _visible(length: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of the queries at positions below ``length``."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def decode_attention(shape: AttentionShape, contexts: Sequence[int]) -> Work:
    """Count one query of each row over its own keys, ``contexts[i]`` of them."""
    return prefill_attention(shape, [(1, context) for context in contexts])


def shared_prefix_attention(shape: AttentionShape, prefix: int, suffixes: Sequence[int]) -> Work:
    """Count one query of each row over a prefix that all share and a suffix of its own.

    The prefix's keys and values are read once. The pairs are those of each row on its own.
    """
    alone = decode_attention(shape, [prefix + suffix for suffix in suffixes])
    saved = (len(suffixes) - 1) * prefix * shape.kv_bytes_per_token
    return Work(bytes=alone.bytes - saved, flops=alone.flops)


def rope_and_write(shape: AttentionShape, num_tokens: int) -> Work:
    """Count queries, keys, values and angles read, queries and the cache written."""
    read = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * _ELEMENT
    angles = shape.head_dim * _FLOAT32
    written = shape.query_bytes_per_token + shape.kv_bytes_per_token
    return Work(bytes=num_tokens * (read + angles + written))


def rms_norm(num_tokens: int, hidden: int) -> Work:
    """Count a row and the residual read, their sum and its norm written; and the weight."""
    return Work(bytes=(4 * num_tokens + 1) * hidden * _ELEMENT)


def silu_mul(num_tokens: int, inner: int) -> Work:
    """Count gate and up read, their product written."""
    return Work(bytes=3 * num_tokens * inner * _ELEMENT)


def lora_update(tokens: int, adapters: int, inputs: int, outputs: int, rank: int) -> Work:
    """Count the adapters' matrices and x read, y read and written."""
    weights = adapters * rank * (inputs + outputs)
    return Work(
        bytes=(weights + tokens * (inputs + 2 * outputs)) * _ELEMENT,
        flops=2.0 * tokens * rank * (inputs + outputs),
    )


def sampling(num_rows: int, vocab_size: int) -> Work:
    """Count one pass over the logits: the least that any way to draw needs."""
    return Work(bytes=num_rows * vocab_size * _FLOAT32)


def decode_step_parts(config: ModelConfig, contexts: Sequence[int]) -> list[Work]:
    """Count a step of a whole model in 16-bit numbers: its products, then its attention.

    Activations stay out: even for 256 rows they are a hundredth of the weights.
    """
    shape = AttentionShape(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    products = Work(bytes=2.0 * weights, flops=2.0 * weights * len(contexts))
    attention = decode_attention(shape, contexts)
    layers = config.num_layers
    return [products, Work(bytes=layers * attention.bytes, flops=layers * attention.flops)]

"""The compiled decoder's structures and functions, as decoder_abi.cpp has them."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

from gpu.cpu.adapters import AdapterStepStruct
from gpu.cpu.library import Library
from trioserve.model_files import ModelConfig


class DecoderVector(enum.IntEnum):
    """The vectors of a model, as decoder_abi.cpp numbers them."""

    NORM = 0
    ATTENTION_NORM = 1
    MLP_NORM = 2
    QK_NORM = 3


class DecoderShape(ctypes.Structure):
    """The sizes of a model, and the threads that compute it."""

    _fields_ = (
        *((name, c_int64) for name in ("vocab_size", "hidden_size", "intermediate_size")),
        *((name, c_int64) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("num_experts", "experts_per_token", "expert_size")),
        ("rms_norm_eps", c_float),
        ("threads", c_int32),
        ("normalizes_experts", c_int32),
    )

    @classmethod
    def of(cls, config: ModelConfig, threads: int) -> DecoderShape:
        """Return the shape of ``config``."""
        names = [field[0] for field in cls._fields_ if hasattr(config, field[0])]
        shape = cls(**{name: getattr(config, name) for name in names}, threads=threads)
        experts = config.experts
        if experts is not None:
            shape.num_experts, shape.experts_per_token = experts.count, experts.per_token
            shape.expert_size = experts.intermediate_size
            shape.normalizes_experts = experts.normalized
        return shape


class DecoderLimits(ctypes.Structure):
    """The sizes of the KV cache, of the largest step and of adapters."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("page_size", "num_pages", "max_tokens", "num_positions", "max_rank")
    )


class RanksShape(ctypes.Structure):
    """The place of a decoder among the ranks of its model, and the memory that they share."""

    _fields_ = (
        *((name, c_int32) for name in ("rank", "size", "slices", "by_expert")),
        ("vocab_size", c_int64),
        ("memory", c_void_p),
    )


class DecoderStep(ctypes.Structure):
    """The rows of a step, where each row's pages are, and angles that aren't their positions'."""

    _fields_ = (
        ("num_rows", c_int64),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("angles", c_void_p),
    )


def declare(library: Library) -> Library:
    """Set what the functions take and give; pointers are integers."""
    pointer, number, count = c_void_p, c_int32, c_int64
    signatures = {
        "decoder_create": (pointer, [POINTER(DecoderShape)]),
        "decoder_destroy": (None, [pointer]),
        "decoder_add_segment": (
            number,
            [pointer, number, count, count, number, number, pointer, count, count],
        ),
        "decoder_set_bias": (number, [pointer, number, count, pointer, count]),
        "decoder_set_vector": (number, [pointer, number, count, pointer, count]),
        "decoder_set_layer": (number, [pointer, count, count, number, number]),
        "decoder_ranks_bytes": (count, [POINTER(DecoderShape), POINTER(RanksShape), count, count]),
        "decoder_finish": (
            number,
            [pointer, POINTER(DecoderLimits), pointer, POINTER(RanksShape)],
        ),
        "decoder_hidden": (pointer, [pointer]),
        "decoder_states": (pointer, [pointer]),
        "decoder_copy_pages": (None, [pointer, pointer, count]),
        "decoder_page_numbers": (count, [pointer]),
        "decoder_read_page": (None, [pointer, number, pointer]),
        "decoder_write_page": (None, [pointer, number, pointer]),
        "decoder_embed": (None, [pointer, pointer, count]),
        "decoder_forward": (
            None,
            [pointer, pointer, POINTER(DecoderStep), POINTER(AdapterStepStruct)],
        ),
        "decoder_logits": (None, [pointer, pointer, pointer, count, pointer]),
        "decoder_most_probable": (None, [pointer, pointer, pointer, count, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library

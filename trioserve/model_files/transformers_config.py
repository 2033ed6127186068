"""The config.json of a decoder that runs with transformers' implementation.

transformers builds the layers in the worker. The engine needs the vocabulary's size, the maximum
sequence length and the ids that end a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files.common_fields import (
    architecture_of,
    dtype_of,
    ids_that_end,
    refuse_quantized,
    token_ids,
)
from trioserve.model_files.config import MAX_LAYERS
from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_object
from trioserve.model_files.media_config import other_decoder, reads_media, text_values
from trioserve.protocol.errors import ModelLoadError

_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""Endings of the class names of decoders."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_NOT_OF_THE_SHAPE = (
    "_name_or_path",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


@attrs.frozen(kw_only=True)
class TransformersConfig:
    """A decoder that transformers computes. Fields are as in :class:`ModelConfig`."""

    architecture: str
    """Class name of the decoder in transformers, such as ``GPTNeoXForCausalLM``."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Maximum sequence length, which may be less than config.json's."""
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    shape: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    """All fields of config.json that affect computing."""

    @property
    def family(self) -> str:
        """``model_type`` in config.json."""
        return str(self.shape.get("model_type"))


def is_other_decoder(values: Mapping[str, Any]) -> bool:
    """Return True if config.json names a decoder's class, known or unknown."""
    if reads_media(values) and other_decoder(values) is None:
        return False
    architecture = other_decoder(values) or architecture_of(values) or ""
    return architecture.endswith(_ENDINGS) and not values.get("is_encoder_decoder")


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Return the configuration in ``folder`` of a model that transformers computes.

    Raises:
        ModelLoadError: A file is missing or damaged, or the model is unsupported.
    """
    path = folder / "config.json"
    values = read_object(path)
    if other_decoder(values) is not None:
        values = text_values(path, values)
    fields = Fields(path, values, {})
    architecture = architecture_of(values)
    if reads_media(values) and other_decoder(values) is None:
        raise ModelLoadError(
            f"{path}: transformers doesn't compute the decoder of {architecture} here: leave out "
            "--model-impl"
        )
    if architecture is None or not is_other_decoder(values):
        raise ModelLoadError(
            f"{path}: {architecture or 'a model without an architecture'} isn't served; of those "
            "that transformers computes, decoders are (…ForCausalLM)"
        )
    refuse_quantized(fields)
    if _first_in(values, _DEPTHS) in values:  # Otherwise transformers has a default.
        fields.integer(_first_in(values, _DEPTHS), most=MAX_LAYERS)
    return TransformersConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer(_first_in(values, _WIDTHS)),
        max_position_embeddings=_longest(fields),
        dtype=dtype_of(fields, folder),
        bos_token_id=next(iter(token_ids(fields, "bos_token_id")), None),
        eos_token_ids=ids_that_end(fields, folder),
        shape={name: value for name, value in values.items() if name not in _NOT_OF_THE_SHAPE},
    )


def _first_in(values: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first name in ``values``; if there is none, the usual one, for the error."""
    return next((name for name in names if values.get(name) is not None), names[0])


def _longest(fields: Fields) -> int:
    """Return the length of the longest sequence that has the same rotation for all tokens.

    Beyond the training length, LongRoPE rotates the whole sequence by other angles, which cached
    keys and other sequences of a step don't have.
    """
    longest = fields.integer(_first_in(fields.values, _LENGTHS))
    for rope in _ropes(fields):
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            outer = fields.integer("original_max_position_embeddings", longest)
            longest = min(longest, rope.integer("original_max_position_embeddings", outer))
    return longest


def _ropes(fields: Fields) -> Iterator[Fields]:
    """Yield the fields of RoPE: for all layers, or for each kind of layer."""
    written = fields.get("rope_parameters") or fields.get("rope_scaling")
    if not isinstance(written, dict):
        return
    of_kinds = [value for value in written.values() if isinstance(value, dict)]
    for values in of_kinds or [written]:
        yield Fields(fields.path, values, {})

"""Whisper models: an encoder of audio, and a decoder that writes what is spoken in it.

config.json has the shape, and generation_config.json the tokens that tell the decoder its task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

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
from trioserve.model_files.transformers_config import TransformersConfig
from trioserve.protocol.errors import ModelLoadError

ARCHITECTURE = "WhisperForConditionalGeneration"
SECONDS_OF_STATE = 0.02
"""Seconds of audio for an encoder state, and between two timestamps."""
SpeechTask = Literal["transcribe", "translate"]


@attrs.frozen(kw_only=True)
class SpeechConfig:
    """The encoder of a Whisper model, and the tokens with a meaning of their own."""

    width: int
    """Width of an encoder state."""
    num_states: int
    """Encoder states of a window of audio: 1500, for 30 seconds, except in tests."""
    num_layers: int
    """Layers of the decoder."""
    num_heads: int
    """Heads of each of its layers."""
    start_token: int
    """Token that begins a transcript."""
    end_token: int
    """Token that ends it; tokens of text are smaller."""
    no_timestamps_token: int
    """Token that asks for text without timestamps; larger tokens are timestamps."""
    previous_text_token: int
    """Token in front of text that precedes a transcript."""
    languages: Mapping[str, int] = attrs.field(factory=dict)
    """Tokens of languages by their codes; empty for a model of English alone."""
    tasks: Mapping[str, int] = attrs.field(factory=dict)
    """Tokens of tasks by their names; empty for a model of English alone."""
    never: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    never_first: tuple[int, ...] = ()
    """Tokens that aren't drawn at the beginning of a transcript."""
    most_initial_timestamp: int | None = None
    """Largest number of the first timestamp; None for any."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layers of the decoder and their heads whose attention follows what is spoken; empty if the
    files name none."""

    def heads_that_align(self) -> tuple[tuple[int, int], ...]:
        """Return the :attr:`alignment_heads`; without any, the published default.

        These are all heads of the later half of the layers.
        """
        layers, heads = range(self.num_layers // 2, self.num_layers), range(self.num_heads)
        return self.alignment_heads or tuple((layer, head) for layer in layers for head in heads)

    @property
    def first_timestamp(self) -> int:
        """Token of the beginning of a window; each further one is 0.02 seconds later."""
        return self.no_timestamps_token + 1

    @property
    def no_speech_token(self) -> int:
        """Token whose probability behind the start is that of silence; it stands before the last
        one that isn't a timestamp."""
        return self.no_timestamps_token - 1

    @property
    def numbers_of_audio(self) -> int:
        """Numbers of all encoder states of a window."""
        return self.num_states * self.width

    @property
    def window_seconds(self) -> float:
        """Seconds of audio that the encoder takes at a time."""
        return self.num_states * SECONDS_OF_STATE


def is_speech_model(values: Mapping[str, Any]) -> bool:
    """Return True if config.json is that of a Whisper model."""
    return architecture_of(values) == ARCHITECTURE


def read_speech_config(folder: Path) -> tuple[TransformersConfig, SpeechConfig]:
    """Return the configuration in ``folder`` of a Whisper model: its decoder, and the rest.

    Raises:
        ModelLoadError: A file is missing or damaged, or the weights are quantized.
    """
    path = folder / "config.json"
    fields = Fields(path, read_object(path), {})
    refuse_quantized(fields)
    ends = ids_that_end(fields, folder)
    if not ends:
        raise fields.error("eos_token_id", None)
    width, num_heads = fields.integer("d_model"), fields.integer("decoder_attention_heads")
    if width % num_heads:
        raise fields.error("decoder_attention_heads", num_heads)
    decoder = TransformersConfig(
        architecture=ARCHITECTURE,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=width,
        max_position_embeddings=fields.integer("max_target_positions"),
        dtype=dtype_of(fields, folder),
        bos_token_id=next(iter(token_ids(fields, "bos_token_id")), None),
        eos_token_ids=ends,
        shape=fields.values,
    )
    speech = _read_tokens(
        folder,
        decoder.vocab_size,
        {
            "width": width,
            "num_states": fields.integer("max_source_positions"),
            "num_layers": fields.integer("decoder_layers", most=MAX_LAYERS),
            "num_heads": num_heads,
            "start_token": fields.integer("decoder_start_token_id", least=0),
            "end_token": ends[0],
        },
    )
    return decoder, speech


def _read_tokens(folder: Path, vocab_size: int, shape: dict[str, int]) -> SpeechConfig:
    """Return the configuration with the tokens of generation_config.json.

    Raises:
        ModelLoadError: The file is missing or damaged, or older than such tokens.
    """
    path = folder / "generation_config.json"
    fields = Fields(path, read_object(path), {})
    last = vocab_size - 1
    languages = _tokens_by_name(fields, "lang_to_id", last)
    tasks = _tokens_by_name(fields, "task_to_id", last)
    is_complete = languages and {"transcribe", "translate"} <= tasks.keys()
    if fields.flag("is_multilingual") and not is_complete:
        raise ModelLoadError(
            f"{path} has no lang_to_id and task_to_id, and the model is multilingual: the file is "
            "an old one; fetch the model again"
        )
    no_timestamps = fields.integer("no_timestamps_token_id", least=2, most=last)
    initial = "max_initial_timestamp_index"
    return SpeechConfig(
        **shape,
        no_timestamps_token=no_timestamps,
        previous_text_token=fields.integer("prev_sot_token_id", no_timestamps - 2, most=last),
        languages={name.strip("<|>"): id for name, id in languages.items()},
        tasks=tasks,
        never=_known(token_ids(fields, "suppress_tokens"), last),
        never_first=_known(token_ids(fields, "begin_suppress_tokens"), last),
        most_initial_timestamp=(
            None if fields.get(initial) is None else fields.integer(initial, least=0)
        ),
        alignment_heads=_alignment_heads(fields, shape["num_layers"], shape["num_heads"]),
    )


def _alignment_heads(
    fields: Fields, num_layers: int, num_heads: int
) -> tuple[tuple[int, int], ...]:
    name = "alignment_heads"
    given = fields.get(name) or []
    if not isinstance(given, list):
        raise fields.error(name, given)
    for each in given:
        if not (
            isinstance(each, list)
            and [type(number) for number in each] == [int, int]
            and 0 <= each[0] < num_layers
            and 0 <= each[1] < num_heads
        ):
            raise fields.error(name, given)
    return tuple(dict.fromkeys((layer, head) for layer, head in given))


def _tokens_by_name(fields: Fields, name: str, last: int) -> dict[str, int]:
    """Return the field ``name``, which has tokens up to ``last`` by their names, or is absent."""
    given = fields.get(name)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise fields.error(name, given)
    tokens = Fields(fields.path, given, {})
    return {each: tokens.integer(each, least=0, most=last) for each in given}


def _known(ids: tuple[int, ...], last: int) -> tuple[int, ...]:
    return tuple(id for id in ids if id <= last)

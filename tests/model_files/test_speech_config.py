"""The configuration read from a Whisper model's folder, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trioserve.model_files import task_of
from trioserve.model_files.speech_config import SpeechConfig, read_speech_config
from trioserve.protocol.errors import ModelLoadError

CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": 51865,
    "d_model": 384,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "dtype": "float16",
}
GENERATION: dict[str, Any] = {
    "no_timestamps_token_id": 50363,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "suppress_tokens": [1, 2, 99999],
    "begin_suppress_tokens": [220, 50257],
    "max_initial_timestamp_index": 50,
    "alignment_heads": [[2, 3], [0, 5], [2, 3]],
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> SpeechConfig:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({**GENERATION, **generation}))
    decoder, speech = read_speech_config(folder)
    assert (decoder.vocab_size, decoder.max_position_embeddings) == (51865, 448)
    assert (decoder.dtype, decoder.eos_token_ids) == ("float16", (50257,))
    return speech


def test_a_multilingual_model(tmp_path: Path) -> None:
    found = read(tmp_path, {}, {})
    assert found == SpeechConfig(
        width=384,
        num_states=1500,
        num_layers=4,
        num_heads=6,
        start_token=50258,
        end_token=50257,
        previous_text_token=50361,
        no_timestamps_token=50363,
        languages={"en": 50259, "de": 50261},
        tasks={"transcribe": 50359, "translate": 50358},
        never=(1, 2),
        never_first=(220, 50257),
        most_initial_timestamp=50,
        alignment_heads=((2, 3), (0, 5)),
    )
    assert found.heads_that_align() == found.alignment_heads
    assert (found.first_timestamp, found.window_seconds) == (50364, 30.0)
    assert found.numbers_of_audio == 1500 * 384
    assert task_of(tmp_path) == "transcribe"


def test_a_model_of_english_alone(tmp_path: Path) -> None:
    without: dict[str, Any] = dict.fromkeys(("lang_to_id", "task_to_id", "suppress_tokens"))
    found = read(
        tmp_path,
        {},
        {**without, "is_multilingual": False, "prev_sot_token_id": 7}
        | {"max_initial_timestamp_index": None, "alignment_heads": None},
    )
    later = tuple((layer, head) for layer in (2, 3) for head in range(6))
    assert (found.alignment_heads, found.heads_that_align()) == ((), later)
    assert (found.languages, found.tasks, found.never) == ({}, {}, ())
    assert (found.previous_text_token, found.most_initial_timestamp) == (7, None)


@pytest.mark.parametrize(
    ("config", "generation", "told"),
    [
        ({}, None, "generation_config.json is missing"),
        ({}, {"no_timestamps_token_id": None}, "no no_timestamps_token_id"),
        ({}, {"no_timestamps_token_id": 51865}, "no_timestamps_token_id = 51865"),
        ({}, {"lang_to_id": None}, "has no lang_to_id and task_to_id"),
        ({}, {"task_to_id": {"transcribe": 50359}}, "has no lang_to_id and task_to_id"),
        ({}, {"lang_to_id": {"<|en|>": -1}}, "<|en|> = -1"),
        ({}, {"lang_to_id": 3}, "lang_to_id = 3"),
        ({}, {"max_initial_timestamp_index": -1}, "max_initial_timestamp_index = -1"),
        ({}, {"alignment_heads": 3}, "alignment_heads = 3"),
        ({}, {"alignment_heads": [[4, 0]]}, "alignment_heads = [[4, 0]]"),
        ({}, {"alignment_heads": [[0, 6]]}, "alignment_heads = [[0, 6]]"),
        ({}, {"alignment_heads": [[0, -1]]}, "alignment_heads = [[0, -1]]"),
        ({}, {"alignment_heads": [[0, [1]]]}, "alignment_heads = [[0, [1]]]"),
        ({}, {"alignment_heads": [0, 1]}, "alignment_heads = [0, 1]"),
        ({"d_model": None}, {}, "no d_model"),
        ({"decoder_layers": 5000}, {}, "decoder_layers = 5000"),
        ({"decoder_attention_heads": 7}, {}, "decoder_attention_heads = 7"),
        ({"eos_token_id": None}, {}, "no eos_token_id"),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, "gptq aren't served"),
    ],
)
def test_damaged_files(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, told: str
) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(tmp_path, config, generation)
    assert told in str(refused.value)
    assert str(tmp_path) in str(refused.value)

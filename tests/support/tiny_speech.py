"""Small random Whisper models in folders, and audio for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from trioserve.model_files.speech_config import SpeechConfig
from trioserve.requests.media.audio import Samples

__all__ = ["CONFIG", "LANGUAGES", "RATE", "make_speech_model", "sound", "wav"]

RATE = 16_000
NUM_STATES = 50
"""Encoder states of a window of one second."""
LETTERS = 256
LANGUAGES = ("en", "de", "fr")
CONFIG = SpeechConfig(
    width=8,
    num_states=20,
    num_layers=1,
    num_heads=1,
    start_token=31,
    end_token=30,
    previous_text_token=38,
    no_timestamps_token=40,
    languages={"en": 32, "de": 33},
    tasks={"translate": 34, "transcribe": 35},
    never=(3, 4, 31, 38),
    never_first=(5, 30),
    most_initial_timestamp=6,
)
"""Tokens of a model that is only told of."""


def _tokens(languages: tuple[str, ...]) -> list[str]:
    """Return the special tokens in the order of Whisper's vocabulary, behind the letters."""
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in languages),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]


def make_speech_model(folder: Path, *, languages: tuple[str, ...] = LANGUAGES) -> Path:
    """Write a model into ``folder`` and return it; without ``languages``, one of English alone."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = _tokens(languages)
    ids = {name: LETTERS + index for index, name in enumerate(names)}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={each: id for id, each in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in names])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=names[0], bos_token=names[0]
    ).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = transformers.WhisperConfig(
        vocab_size=LETTERS + len(names) + NUM_STATES + 1,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=3,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_source_positions=NUM_STATES,
        max_target_positions=96,
        init_std=0.3,
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=[32, end],
    )
    torch.manual_seed(11)
    model: Any = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        is_multilingual=bool(languages),
        suppress_tokens=[1, 2, 7, ids["<|startoflm|>"], ids["<|startofprev|>"], start],
        begin_suppress_tokens=[32, end],
        max_initial_timestamp_index=10,
        max_length=96,
        return_timestamps=False,
        alignment_heads=[[1, 0], [2, 1]],
    )
    if languages:
        names = [f"<|{code}|>" for code in languages]
        model.generation_config.lang_to_id = {name: ids[name] for name in names}
        model.generation_config.task_to_id = {
            name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")
        }
    model.save_pretrained(folder)
    return folder


def sound(number: int, seconds: float) -> Samples:
    """Return ``seconds`` of tones that differ for each ``number``, at :data:`RATE`."""
    times = np.arange(round(seconds * RATE)) / RATE
    random = np.random.default_rng(number)
    tones = random.uniform(100, 3000, 4)[:, None] * (1 + 0.3 * np.sin(3 * times))
    return np.sin(tones * times).mean(0).astype(np.float32)


def wav(number: int, seconds: float) -> bytes:
    """Return the WAV file of :func:`sound`, in float32."""
    import soundfile

    stream = io.BytesIO()
    soundfile.write(stream, sound(number, seconds), RATE, format="WAV", subtype="FLOAT")
    return stream.getvalue()

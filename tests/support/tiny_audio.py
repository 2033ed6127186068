"""Small random models that read audio, in folders: weights, processor, tokenizer, template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_media import DECODER
from tests.support.tiny_processors import tokenizer

__all__ = ["AUDIO_FAMILIES", "TOKENS", "make_audio_model"]

TOKENS = {"qwen2_audio": "<|AUDIO|>", "audioflamingo3": "<sound>"}
"""Token that stands for a clip, by the family."""
AUDIO_FAMILIES = tuple(TOKENS)
NUM_STATES = 50
"""Encoder states of a window of one second."""
_TOWER: dict[str, Any] = {
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "max_source_positions": NUM_STATES,
}


def make_audio_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` into ``folder``; return ``folder``.

    Qwen2-Audio hears a clip of a second, and Audio Flamingo 3 three such windows.
    """
    import torch
    import transformers

    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    token = TOKENS[family]
    if family == "qwen2_audio":
        made: Any = transformers.Qwen2AudioProcessor(extractor, tokenizer(token))
        config: Any = transformers.Qwen2AudioConfig
        tower: Any = transformers.Qwen2AudioEncoderConfig(**_TOWER)
        name = "audio_token_index"
    else:
        made = transformers.AudioFlamingo3Processor(extractor, tokenizer(token), max_audio_len=3)
        config = transformers.AudioFlamingo3Config
        tower = transformers.AudioFlamingo3EncoderConfig(**_TOWER)
        name = "audio_token_id"
    made.save_pretrained(folder)
    text = transformers.Qwen2Config(**DECODER)
    ids = {name: made.tokenizer.convert_tokens_to_ids(token)}
    model_class = getattr(
        transformers, config.__name__.replace("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(5)
    model = model_class(config(text_config=text, audio_config=tower, **ids))
    for name, parameter in model.named_parameters():
        # As initialized, the tower's features would drown in the embeddings of text.
        if "projector" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template_of(token))
    return folder


def template_of(token: str) -> str:
    """Return a chat template that prints ``token`` for a clip."""
    return (
        "<s>{% for m in messages %}{{ m.role }}:"
        "{% if m.content is string %} {{ m.content }}{% else %}{% for part in m.content %}"
        "{% if 'audio' in part %}" + token + "{% else %} {{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )

"""Small random models that read images, in folders: weights, processor, tokenizer, template."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from tests.support import tiny_processors

__all__ = ["MEDIA_FAMILIES", "image", "make_media_model", "png"]

TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %} {{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'video' %}<video>"
    "{% else %} {{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 319,
    "pad_token_id": 256,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_CONFIGS = {"idefics3": "Idefics3Config", "smolvlm": "SmolVLMConfig"}
MEDIA_FAMILIES = ("llava", "idefics3", "smolvlm")


def make_media_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` into ``folder``; return ``folder``."""
    import torch
    import transformers

    processor = getattr(tiny_processors, family)(folder)
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    if family == "llava":
        vision: dict[str, Any] = {**_TOWER, "image_size": 28, "patch_size": 14}
        config: Any = transformers.LlavaConfig(
            text_config=_TEXT,
            vision_config={**vision, "model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=token,
        )
    else:
        config_class = getattr(transformers, _CONFIGS[family])
        config = config_class(
            text_config=_TEXT,
            vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
            image_token_id=token,
            scale_factor=2,
        )
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        # As initialized, the towers' features would drown in the embeddings of text.
        if "projector" in name or "connector" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def image(number: int, size: tuple[int, int] = (40, 30)) -> PIL.Image.Image:
    """Return a random picture of ``size``."""
    pixels = np.random.default_rng(number).integers(0, 256, (*reversed(size), 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def png(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return the PNG file of :func:`image`."""
    stream = io.BytesIO()
    image(number, size).save(stream, "PNG")
    return stream.getvalue()

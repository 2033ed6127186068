"""Small random models that read images, in folders: weights, processor, tokenizer, template."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from tests.support import tiny_processors

__all__ = ["DECODER", "IMAGE_TEXTS", "MEDIA_FAMILIES", "image", "make_media_model", "png"]

TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %} {{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'video' %}<video>"
    "{% else %} {{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
DECODER: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 319,
    "pad_token_id": 256,
}
"""Fields of the decoders, of whatever family."""
_TEXT: dict[str, Any] = {"model_type": "llama", "head_dim": 64, **DECODER}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_QWEN_TEXT: dict[str, Any] = {
    **DECODER,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 12, 12],
    },
}
_GEMMA_TEXT: dict[str, Any] = {
    **DECODER,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "initializer_range": 0.02,
}
"""Its window is shorter than an image. With larger embeddings it would predict its last token."""
_PHI4_TEXT: dict[str, Any] = {
    **DECODER,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + number / 24 for number in range(24)],
        "long_factor": [2.0 + number for number in range(24)],
    },
}
_PHI4_HEARING: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 8,
}
PHI4_AUDIO = "<|audio|>"
"""Text that the template prints for a clip."""
_CONFIGS = {"idefics3": "Idefics3Config", "smolvlm": "SmolVLMConfig"}
MEDIA_FAMILIES = (
    *("llava", "llava_onevision", "idefics3", "smolvlm"),
    *("qwen2_vl", "qwen2_5_vl", "gemma3", "phi4"),
)
IMAGE_TEXTS = {
    "llava": "<image>",
    "llava_onevision": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_vl": QWEN_IMAGE,
    "qwen2_5_vl": QWEN_IMAGE,
    "gemma3": "<start_of_image>",
    "phi4": "<|image|>",
}
"""Text that the template of each family prints for an image."""


def make_media_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` into ``folder``; return ``folder``."""
    import torch
    import transformers

    is_qwen = family.startswith("qwen")
    config = _qwen_config(family, folder) if is_qwen else _config(family, folder)
    torch.manual_seed(5)
    if family == "phi4":
        model: Any = transformers.Phi4MultimodalForCausalLM(config)
    else:
        model = transformers.AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        # As initialized, the towers' features would drown in the embeddings of text.
        if any(each in name for each in ("projector", "connector", "merger", "projection_down")):
            parameter.data.normal_(0, 0.3)
        if "feature_extensor" in name or "down_proj_for" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    if family == "qwen2_vl":
        _write_as_qwen_does(folder / "config.json")
    template = TEMPLATE.replace("<image>", IMAGE_TEXTS[family])
    if family == "phi4":
        template = template.replace("part.type == 'video'", "'audio' in part")
        template = template.replace("<video>", PHI4_AUDIO)
    if is_qwen:
        template = template.replace("<video>", QWEN_IMAGE.replace("image", "video"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _config(family: str, folder: Path) -> Any:
    """Write the processor of a family but Qwen's, and return the model's configuration."""
    import transformers

    processor = getattr(tiny_processors, family)(folder)
    if family == "gemma3":
        return transformers.Gemma3Config(
            text_config=_GEMMA_TEXT,
            vision_config={**_TOWER, "image_size": 32, "patch_size": 4},
            mm_tokens_per_image=16,
            image_token_index=processor.tokenizer.image_token_id,
            boi_token_index=processor.tokenizer.boi_token_id,
            eoi_token_index=processor.tokenizer.eoi_token_id,
        )
    if family == "phi4":
        tokens = processor.tokenizer
        vision: dict[str, Any] = {**_TOWER, "image_token_id": tokens.image_token_id}
        hearing = {**_PHI4_HEARING, "audio_token_id": tokens.audio_token_id}
        return transformers.Phi4MultimodalConfig(
            **_PHI4_TEXT, vision_config=vision, audio_config=hearing
        )
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    if family == "llava_onevision":
        vision = {**_TOWER, "image_size": 32, "patch_size": 8, "vision_use_head": False}
        return transformers.LlavaOnevisionConfig(
            text_config={"model_type": "qwen2", **DECODER},
            vision_config={**vision, "model_type": "siglip_vision_model"},
            image_token_index=token,
            video_token_index=processor.tokenizer.convert_tokens_to_ids("<video>"),
            image_grid_pinpoints=tiny_processors.ONEVISION_GRIDS,
        )
    if family == "llava":
        vision = {**_TOWER, "image_size": 28, "patch_size": 14}
        return transformers.LlavaConfig(
            text_config=_TEXT,
            vision_config={**vision, "model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=token,
        )
    return getattr(transformers, _CONFIGS[family])(
        text_config=_TEXT,
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        image_token_id=token,
        scale_factor=2,
    )


def _qwen_config(family: str, folder: Path) -> Any:
    """Write the processor of Qwen's models, and return the configuration of one."""
    import transformers

    tiny_processors.qwen2_vl(folder, fewest_tokens=6)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_tokens_to_ids(list(tiny_processors.QWEN_TOKENS))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tower = {"depth": 3, "num_heads": 2}
    if family == "qwen2_vl":
        kind: Any = transformers.Qwen2VLConfig
        vision = {**tower, "embed_dim": 32, "hidden_size": 256, "mlp_ratio": 2}
    else:
        kind = transformers.Qwen2_5_VLConfig
        vision = {**tower, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 256}
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    ids = dict(zip(names, tokens, strict=True))
    return kind(text_config=_QWEN_TEXT, vision_config=vision, **ids)


def _write_as_qwen_does(path: Path) -> None:
    """Put the decoder's fields in a config.json where the files of Qwen2-VL have them."""
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    values = {**text, **values, "rope_theta": rope["rope_theta"]}
    values["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(values))


def image(number: int, size: tuple[int, int] = (40, 30)) -> PIL.Image.Image:
    """Return a random picture of ``size``."""
    pixels = np.random.default_rng(number).integers(0, 256, (*reversed(size), 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def png(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return the PNG file of :func:`image`."""
    stream = io.BytesIO()
    image(number, size).save(stream, "PNG")
    return stream.getvalue()

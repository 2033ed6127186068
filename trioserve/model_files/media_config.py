"""Models that read images or audio: a tower of transformers' before a decoder of this project, or
before one of transformers.

config.json has the decoder's fields in ``text_config``, and the decoder's tensors have a prefix
that tells them from the tower's. transformers has changed the prefixes over time. Older files of
Qwen2-VL and Qwen2.5-VL, and all of Phi-4, have the decoder's fields and tensors where a decoder
alone has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files.common_fields import architecture_of
from trioserve.model_files.fields import Fields
from trioserve.protocol.errors import ModelLoadError

_QWEN_2_5 = "Qwen2_5_VLForConditionalGeneration"
_QWEN_CLASSES = ("Qwen2VLForConditionalGeneration", _QWEN_2_5)
"""Classes whose decoder rotates by the rows and columns of an image, and by a video's times."""
_QWEN_VIDEO = 151656
"""transformers' default of their token for videos."""
_GEMMA = "Gemma3ForConditionalGeneration"
_PHI4 = "Phi4MultimodalForCausalLM"
_PHI4_TOKENS = {"image": 200010, "audio": 200011}
"""transformers' defaults of Phi-4's tokens."""
FLAT_CLASSES = (_PHI4,)
"""Classes whose configuration in transformers has the decoder's fields beside the towers'."""
_OTHER_DECODERS = {_GEMMA: "Gemma3ForCausalLM"}
"""transformers' classes of decoders that transformers computes, by the classes of whole models."""
MEDIA_CLASSES = (
    _GEMMA,
    "Idefics3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    *_QWEN_CLASSES,
    _PHI4,
    "SmolVLMForConditionalGeneration",
)
"""Classes whose tower gives embeddings for the placeholder tokens of an image."""
AUDIO_CLASSES = ("AudioFlamingo3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration")
"""Classes whose tower gives embeddings for the placeholder tokens of an audio clip."""
_VIDEO_TEXTS = {"SmolVLMForConditionalGeneration": "<video>"}
"""Texts that stand for videos, by the classes whose tower takes their frames as images."""
_GEMMA_IMAGE = "<start_of_image>"
"""Text that stands for an image with Gemma 3."""
_VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}"
    "{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""transformers' chat template for SmolVLM's conversations with videos."""
_OF_BOTH = ("dtype", "torch_dtype", "quantization_config")
"""Fields of the whole model that hold for the decoder."""
_ENDS = ("bos_token_id", "eos_token_id")
"""Fields of the whole model that hold for a decoder that transformers computes."""
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}
"""transformers' defaults, which files of LLaVA leave out."""
_QWEN2_VL = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "vocab_size": 152064,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""transformers' defaults of Qwen2-VL's decoders."""
_MROPE_SECTION = [16, 24, 24]
"""transformers' default."""
_QWEN2 = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
"""transformers' defaults, which files of Qwen2-Audio leave out."""
_GEMMA3 = {"hidden_size": 2304, "max_position_embeddings": 131072, "vocab_size": 262208}
"""transformers' defaults, which files of Gemma 3 leave out."""
_PHI4_DECODER = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "bos_token_id": 199999,
    "eos_token_id": [199999, 200020],
}
"""transformers' defaults, which files of Phi-4 leave out."""
_DEFAULTS = {"llama": _LLAMA, "qwen2": _QWEN2, "gemma3_text": _GEMMA3}
_TEXT_PREFIXES = re.compile(
    r"(?:language_model\.model|model\.language_model|model\.text_model|"
    r"language_model|text_model|model)\.(?=embed_tokens\.|layers\.|norm\.)"
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
"""Names of the output matrix."""


@attrs.frozen(kw_only=True)
class MediaConfig:
    """The tower of a model that reads images or audio."""

    architecture: str
    """Class of the whole model in transformers."""
    width: int
    """Width of its embeddings: the decoder's hidden size."""
    token_ids: Mapping[str, int]
    """Token at the positions whose embeddings the tower gives, by the kind of the medium."""
    texts: Mapping[str, str] = attrs.field(factory=dict)
    """Texts that stand for media in a prompt, by their kinds, where they aren't those tokens'."""
    merge_size: int = 0
    """Number of an image's patches, down and across, that become one embedding. 0 if the decoder
    doesn't need to know how the embeddings lie in the image."""
    tokens_per_second: int = 0
    """Number of rotary positions for each second of a video; 0 if a frame takes one."""
    tokens_together: int = 0
    """Number of an image's tokens, if each of them sees all others, so that one step has to compute
    them. 0 if each sees those before it only."""
    audio_depends_on_images: bool = False
    """True if audio has other embeddings in a prompt with images."""


def reads_media(values: Mapping[str, Any]) -> bool:
    """Return True if config.json is that of a model with a tower."""
    return architecture_of(values) in (*MEDIA_CLASSES, *AUDIO_CLASSES)


def other_decoder(values: Mapping[str, Any]) -> str | None:
    """Return the class of a decoder behind a tower that transformers computes; None for others."""
    return _OTHER_DECODERS.get(architecture_of(values) or "")


def read_media_config(path: Path, values: Mapping[str, Any], width: int) -> MediaConfig | None:
    """Return the tower that config.json at ``path`` describes; None for a decoder alone.

    ``width`` is the decoder's hidden size.

    Raises:
        ModelLoadError: The token of images or audio is missing, or a field is damaged.
    """
    if not reads_media(values):
        return None
    fields = Fields(path, dict(values), {})
    architecture = architecture_of(values)
    assert architecture is not None
    if architecture == _PHI4:
        return _read_phi4(fields, width)
    kind = "audio" if architecture in AUDIO_CLASSES else "image"
    name = f"{kind}_token_id"
    if values.get(name) is None:
        name = f"{kind}_token_index"
    token_ids = {kind: fields.integer(name)}
    texts = {}
    if architecture in _VIDEO_TEXTS:
        token_ids["video"] = token_ids["image"]
        texts["video"] = _VIDEO_TEXTS[architecture]
    if architecture == _GEMMA:
        texts["image"] = _GEMMA_IMAGE
    merge_size = tokens_per_second = 0
    if architecture in _QWEN_CLASSES:
        vision = values.get("vision_config")
        of_vision = Fields(path, vision if isinstance(vision, dict) else {}, {})
        merge_size = of_vision.integer("spatial_merge_size", 2)
        token_ids["video"] = fields.integer("video_token_id", _QWEN_VIDEO)
        if architecture == _QWEN_2_5:
            tokens_per_second = of_vision.integer("tokens_per_second", 4)
    return MediaConfig(
        architecture=architecture,
        width=width,
        token_ids=token_ids,
        texts=texts,
        merge_size=merge_size,
        tokens_per_second=tokens_per_second,
        tokens_together=(
            fields.integer("mm_tokens_per_image", 256) if architecture == _GEMMA else 0
        ),
    )


def _read_phi4(fields: Fields, width: int) -> MediaConfig:
    """Return the towers of Phi-4."""
    token_ids = {}
    for kind, tower in (("image", "vision_config"), ("audio", "audio_config")):
        written = fields.get(tower)
        of_tower = Fields(fields.path, written if isinstance(written, dict) else {}, {})
        token_ids[kind] = of_tower.integer(f"{kind}_token_id", _PHI4_TOKENS[kind])
    return MediaConfig(
        architecture=_PHI4, width=width, token_ids=token_ids, audio_depends_on_images=True
    )


def template_with_videos(media: MediaConfig | None, template: str | None) -> str | None:
    """Return a model's chat template, or another one if its own one prints no videos.

    transformers does so for SmolVLM, whose older files have such templates.
    """
    text = None if media is None else media.texts.get("video")
    return template if text is None or (template and text in template) else _VIDEO_TEMPLATE


def text_values(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the decoder: those of ``text_config``, or all of them without a tower.

    Raises:
        ModelLoadError: ``text_config`` is missing.
    """
    if not reads_media(values):
        return values
    if architecture_of(values) == _PHI4:
        family = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
        return {**_PHI4_DECODER, **values, **family}
    is_qwen = architecture_of(values) in _QWEN_CLASSES
    text = values.get("text_config", values if is_qwen else None)
    if not isinstance(text, dict):
        raise ModelLoadError(f"{path} has no text_config: it is damaged; fetch it again")
    of_both = {name: values[name] for name in _OF_BOTH if name in values}
    # The class of the decoder may be one that transformers lacks; its type is right.
    own = {name: value for name, value in text.items() if name != "architectures"}
    if is_qwen:
        return {**_QWEN2_VL, **of_both, **own, "model_type": "qwen2", **_qwen_rope(own)}
    defaults = _DEFAULTS.get(text.get("model_type", ""), {})
    if (other := other_decoder(values)) is not None:
        of_both |= {name: values[name] for name in _ENDS if name in values}
        own["architectures"] = [other]
    return {**defaults, **of_both, **own}


def _qwen_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the rotary embedding, with the sections of its frequencies."""
    written = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(written, dict):
        return {}  # refused where it is read
    return {"rope_parameters": {"mrope_section": _MROPE_SECTION, **written}}


def text_tensor(stored: str) -> str | None:
    """Return the decoder's name of a tensor of the whole model; None for one of the tower."""
    if stored in HEADS:
        return "lm_head.weight"
    prefix = _TEXT_PREFIXES.match(stored)
    return None if prefix is None else f"model.{stored[prefix.end() :]}"

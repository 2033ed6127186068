"""What is in a model's folder or GGUF file: no torch, no trio, used by both sides."""

from __future__ import annotations

from trioserve.model_files.config import ExpertsConfig, ModelConfig, RopeScaling
from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.encoder_files import EncoderFiles, open_encoder, task_of
from trioserve.model_files.files import ModelFiles, load_tokenizer_from, open_model
from trioserve.model_files.locate import locate
from trioserve.model_files.transformers_config import TransformersConfig

__all__ = [
    "EncoderConfig",
    "EncoderFiles",
    "ExpertsConfig",
    "ModelConfig",
    "ModelFiles",
    "RopeScaling",
    "TransformersConfig",
    "load_tokenizer_from",
    "locate",
    "open_encoder",
    "open_model",
    "task_of",
]

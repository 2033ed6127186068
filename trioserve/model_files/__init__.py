"""Readers of a model's folder or GGUF file, for both processes. They need neither torch nor trio.

Imported by ``text``, ``workers``, ``pooling``, ``engine``, ``front_ends``, ``testing``, ``load``
and ``cli``.
"""

from __future__ import annotations

from trioserve.model_files.config import ExpertsConfig as ExpertsConfig
from trioserve.model_files.config import ModelConfig as ModelConfig
from trioserve.model_files.config import RopeScaling as RopeScaling
from trioserve.model_files.encoder_config import EncoderConfig as EncoderConfig
from trioserve.model_files.encoder_files import ENCODING as ENCODING
from trioserve.model_files.encoder_files import EncoderFiles as EncoderFiles
from trioserve.model_files.encoder_files import open_encoder as open_encoder
from trioserve.model_files.encoder_files import task_of as task_of
from trioserve.model_files.files import ModelFiles as ModelFiles
from trioserve.model_files.files import load_tokenizer_from as load_tokenizer_from
from trioserve.model_files.files import open_model as open_model
from trioserve.model_files.locate import locate as locate
from trioserve.model_files.transformers_config import TransformersConfig as TransformersConfig

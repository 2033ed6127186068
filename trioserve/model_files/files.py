"""The files of a model, in a folder or a GGUF file, for both processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from trioserve.model_files import gguf, huggingface
from trioserve.model_files.checksum import Checksum
from trioserve.model_files.config import ModelConfig
from trioserve.model_files.decoder_embedding import DecoderEmbedding, read_decoder_embedding
from trioserve.model_files.generation_config import GenerationConfig, read_generation_config
from trioserve.model_files.gguf_header import GGUFHeader, read_header
from trioserve.model_files.jsonfile import read_object
from trioserve.model_files.locate import default_name, known_name
from trioserve.model_files.media_config import MediaConfig, read_media_config
from trioserve.model_files.shards import shard_paths
from trioserve.model_files.speech_config import (
    SpeechConfig,
    is_speech_model,
    read_speech_config,
)
from trioserve.model_files.transformers_config import (
    TransformersConfig,
    is_other_decoder,
    read_transformers_config,
)
from trioserve.protocol.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

KNOWN_GENERATION_CONFIGS = {
    "smollm2-135m": GenerationConfig(
        sampling={
            "temperature": 0.2,
            "top_p": 0.9,
        },  # https://hf.co/HuggingFaceTB/SmolLM2-135M-Instruct
        max_tokens=512,
    )
}
"""Generation defaults of the known models, which their GGUF files lack."""


@attrs.frozen(kw_only=True)
class ModelFiles:
    """A model on disk with a valid, supported configuration.

    ``chat_template``, ``bos_token`` and ``eos_token`` are texts; None if the files have none.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    config: ModelConfig | TransformersConfig
    name: str
    """Short name under which the model is served."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    generation: GenerationConfig
    """Defaults of requests, recommended by the model's authors."""
    embedding: DecoderEmbedding | None = None
    """Embedding of an embedding model; None for others."""
    media: MediaConfig | None = None
    """Tower of a model that reads images; None for others."""
    speech: SpeechConfig | None = None
    """Encoder and tokens of a model that transcribes speech; None for others."""
    gguf_header: GGUFHeader | None = attrs.field(default=None, repr=False, eq=False)
    """Parsed header of a GGUF file; None for a folder."""
    only_finite: bool = attrs.field(default=False, eq=False)
    """True to refuse tensors with infinities or NaN when the weights are read."""

    @property
    def native(self) -> ModelConfig:
        """Configuration of a model that trioserve implements itself."""
        assert isinstance(self.config, ModelConfig)
        return self.config

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ModelLoadError: The tokenizer is missing, damaged, or of an unsupported kind.
        """
        if self.gguf_header is not None:
            from trioserve.model_files import gguf_tokenizer  # mostly not needed in a worker

            return gguf_tokenizer.build_tokenizer(self.gguf_header)
        return huggingface.read_tokenizer(self.path / "tokenizer.json")

    def checksum(self) -> str:
        """Return a hash that distinguishes models by their weights: see :class:`Checksum`."""
        checksum = Checksum()
        if self.gguf_header is not None:
            checksum.add_file(self.path, self.gguf_header.data_offset)
        else:
            checksum.add_folder(self.path)
        return checksum.hexdigest()


def open_model(path: Path, implementation: str = "auto") -> ModelFiles:
    """Read a model's folder or GGUF file, except its tokenizer and weights.

    ``implementation`` is ``native`` for trioserve's own code, or ``transformers``; ``auto`` takes
    trioserve's if it has the model's family.

    Raises:
        ModelLoadError: A file is missing or damaged, or the model is unsupported; the message is
            one line that names the file and says what to do.
    """
    if path.is_dir():
        return _open_folder(path, implementation)
    if not path.exists():
        raise ModelLoadError(f"{path} doesn't exist: give a model's folder or a .gguf file")
    if implementation == "transformers":
        raise ModelLoadError(
            f"{path} is a GGUF file, which isn't served through transformers: leave out "
            "--model-impl, or give the model's folder"
        )
    header = read_header(path)
    config = gguf.read_gguf_config(header)
    return ModelFiles(
        path=path,
        format="gguf",
        config=config,
        name=default_name(path),
        chat_template=gguf.read_chat_template(header),
        bos_token=gguf.read_token_text(header, config.bos_token_id),
        eos_token=gguf.read_token_text(header, next(iter(config.eos_token_ids), None)),
        generation=KNOWN_GENERATION_CONFIGS.get(known_name(path) or "", GenerationConfig()),
        gguf_header=header,
    )


def _open_folder(path: Path, implementation: str) -> ModelFiles:
    values = read_object(path / "config.json")
    others = implementation == "auto" and not huggingface.has_family(values)
    config: ModelConfig | TransformersConfig
    speech = None
    if is_speech_model(values):
        config, speech = read_speech_config(path)
    elif implementation == "transformers" or (others and is_other_decoder(values)):
        config = read_transformers_config(path)
    else:
        config = huggingface.read_folder_config(path)
    embedding = read_decoder_embedding(path, config.hidden_size)
    if embedding is None and isinstance(config, ModelConfig) and not config.has_head:
        embedding = DecoderEmbedding()
    shard_paths(path)  # A folder without weights fails before a worker starts.
    return ModelFiles(
        path=path,
        format="safetensors",
        config=config,
        name=default_name(path),
        chat_template=huggingface.read_chat_template(path),
        bos_token=huggingface.read_special_token(path, "bos_token"),
        eos_token=huggingface.read_special_token(path, "eos_token"),
        generation=read_generation_config(path),
        embedding=embedding,
        media=read_media_config(path / "config.json", values, config.hidden_size),
        speech=speech,
    )


def load_tokenizer_from(path: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder, or of a ``tokenizer.json`` file.

    Raises:
        ModelLoadError: The tokenizer is missing or damaged.
    """
    place = Path(path).expanduser()
    return huggingface.read_tokenizer(place / "tokenizer.json" if place.is_dir() else place)

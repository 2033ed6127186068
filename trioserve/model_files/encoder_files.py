"""The files of an encoder's folder, and the task of any model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from trioserve.model_files import huggingface
from trioserve.model_files.checksum import Checksum
from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.encoder_folder import encoder_task, read_encoder_config
from trioserve.model_files.jsonfile import read_object
from trioserve.model_files.locate import default_name
from trioserve.model_files.shards import read_header_bytes, shard_paths
from trioserve.model_files.speech_config import is_speech_model
from trioserve.protocol.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

ModelTask = Literal["generate", "embed", "classify", "transcribe"]
ENCODING: frozenset[ModelTask] = frozenset({"embed", "classify"})
"""Tasks of encoders; :func:`task_of` gives them to no other model."""


@attrs.frozen(kw_only=True)
class EncoderFiles:
    """An encoder on disk with a valid, supported configuration."""

    path: Path
    config: EncoderConfig
    name: str
    """Short name under which the model is served."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the model's tokenizer, with lower-casing if the configuration has it.

        Raises:
            ModelLoadError: The tokenizer is missing or damaged, or the special tokens of a pair
                fill the model's length.
        """
        path = self.path / "tokenizer.json"
        tokenizer = huggingface.read_tokenizer(path)
        added = tokenizer.num_special_tokens_to_add(is_pair=True)
        if added >= self.config.max_length:
            raise ModelLoadError(
                f"{path} adds {added} tokens to a pair of texts, and the model takes "
                f"{self.config.max_length}: they don't belong together"
            )
        if self.config.lower_case:
            from tokenizers import normalizers  # not needed in a worker

            steps = [normalizers.Lowercase()]
            if tokenizer.normalizer is not None:
                steps.append(tokenizer.normalizer)
            tokenizer.normalizer = normalizers.Sequence(steps)
        return tokenizer

    def checksum(self) -> str:
        """Return a hash that distinguishes models by their weights: see :class:`Checksum`."""
        checksum = Checksum()
        checksum.add_folder(self.path)
        for dense in self.config.dense:
            for path in shard_paths(self.path / dense.folder):
                checksum.add_file(path, 8 + len(read_header_bytes(path)))
        return checksum.hexdigest()


def open_encoder(path: Path) -> EncoderFiles:
    """Read an encoder's folder, except its tokenizer and weights.

    Raises:
        ModelLoadError: A file is missing or damaged, or the model is unsupported; the message is
            one line that names the file and says what to do.
    """
    config = read_encoder_config(path)
    for folder in (path, *(path / dense.folder for dense in config.dense)):
        shard_paths(folder)  # A folder without weights fails before a worker starts.
    return EncoderFiles(path=path, config=config, name=default_name(path))


def task_of(path: Path) -> ModelTask:
    """Return the task of the model in a folder or GGUF file, by its architecture.

    The task is ``generate`` for every model that neither is an encoder nor transcribes speech,
    supported or not.

    Raises:
        ModelLoadError: A folder's config.json is missing or damaged.
    """
    if not path.is_dir():
        return "generate"
    if is_speech_model(read_object(path / "config.json")):
        return "transcribe"
    return encoder_task(path) or "generate"

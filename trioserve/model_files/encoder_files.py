"""What is in an encoder's folder, and which kind of model a folder or file holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from trioserve.model_files import huggingface
from trioserve.model_files.checksum import Checksum
from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.encoder_folder import encoder_task, read_encoder_config
from trioserve.model_files.locate import default_name
from trioserve.model_files.shards import read_header_bytes, shard_paths
from trioserve.protocol.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

ModelTask = Literal["generate", "embed", "classify"]


@attrs.frozen(kw_only=True)
class EncoderFiles:
    """An encoder on disk whose configuration has been read and is served."""

    path: Path
    config: EncoderConfig
    name: str
    """A short name to serve the model under."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """The model's own tokenizer, which lower-cases texts first where the configuration says so.

        Raises:
            ModelLoadError: it is missing or damaged, or the tokens that it adds to a pair alone are
                as many as the model takes.
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
            from tokenizers import normalizers  # a worker does without

            steps = [normalizers.Lowercase()]
            if tokenizer.normalizer is not None:
                steps.append(tokenizer.normalizer)
            tokenizer.normalizer = normalizers.Sequence(steps)
        return tokenizer

    def checksum(self) -> str:
        """A hash that tells this model's weights from others': see :class:`Checksum`."""
        checksum = Checksum()
        checksum.add_folder(self.path)
        for dense in self.config.dense:
            for path in shard_paths(self.path / dense.folder):
                checksum.add_file(path, 8 + len(read_header_bytes(path)))
        return checksum.hexdigest()


def open_encoder(path: Path) -> EncoderFiles:
    """Read what is in an encoder's folder, all but tokenizer and weights.

    Raises:
        ModelLoadError: a file is missing or damaged, or the model is of a kind not served; one
            line names the file and says what to do.
    """
    config = read_encoder_config(path)
    for folder in (path, *(path / dense.folder for dense in config.dense)):
        shard_paths(folder)  # a folder without weights is told so before a worker starts
    return EncoderFiles(path=path, config=config, name=default_name(path))


def task_of(path: Path) -> ModelTask:
    """What the model in a folder or GGUF file is for, as far as its architecture says it.

    ``generate`` for all that is no encoder, be it served or not.

    Raises:
        ModelLoadError: a folder without config.json, or a damaged one.
    """
    return (encoder_task(path) or "generate") if path.is_dir() else "generate"

"""The files that a front end reads, and their hashes: on another host they have to be the same."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from trioserve.config import EngineConfig
from trioserve.config.options import flag_name
from trioserve.protocol.errors import ModelLoadError
from trioserve.requests.media.processor_loading import PROCESSOR_FILES

MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *PROCESSOR_FILES,
)
"""Files of a model's folder that decide how texts and media become tokens, and the defaults of
requests."""


def hashes_of(config: EngineConfig, model: Path) -> dict[str, str]:
    """Return the files' hashes by their names in errors; that of a missing file is empty.

    Blocks on the disk. A GGUF file has all of it in its header, which the model's checksum covers.

    Raises:
        ModelLoadError: a file can't be read.
    """
    files = {f"{name} of MODEL": model / name for name in MODEL_FILES} if model.is_dir() else {}
    template, generation = config.chat_template, config.generation_config
    if config.tokenizer is not None:
        name = f"{flag_name('tokenizer')} {config.tokenizer}"
        files[name] = _within(config.tokenizer, "tokenizer.json")
    if template is not None and "{" not in template and "\n" not in template:
        files[f"{flag_name('chat_template')} {template}"] = Path(template)
    if generation not in ("auto", "vllm"):
        name = f"{flag_name('generation_config')} {generation}"
        files[name] = _within(generation, "generation_config.json")
    return {name: _hash(path) for name, path in files.items()}


def check_files(told: dict[str, str], config: EngineConfig, model: Path) -> None:
    """Check that the files on this host are those of the engine's. Blocks on the disk.

    Raises:
        ModelLoadError: one is missing or differs.
    """
    own = hashes_of(config, model)
    different = [name for name in told.keys() | own.keys() if own.get(name) != told.get(name)]
    if different:
        names = ", ".join(sorted(different))
        raise ModelLoadError(
            f"files on {socket.gethostname()} aren't those of the engine's host: {names}. Put the "
            "same there, those of options under the same path"
        )


def _within(given: str, name: str) -> Path:
    """Return a path that is given, or the file of that name in it if it is a folder."""
    path = Path(given).expanduser()
    return path / name if path.is_dir() else path


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror or error}") from error

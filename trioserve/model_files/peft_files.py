"""The files of an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from pathlib import Path

from trioserve.model_files.jsonfile import read_file
from trioserve.model_files.shards import Shard, read_shard
from trioserve.protocol.errors import ModelLoadError

CONFIG_NAME = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20


def read_adapter_config(path: Path) -> bytes:
    """Return the bytes of the configuration at ``path``.

    Raises:
        ModelLoadError: It is missing, too large, or can't be read.
    """
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: that is no PEFT adapter's folder")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelLoadError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes: it can't be right")
    return read_file(path)


def read_adapter_header(folder: Path) -> Shard:
    """Return the header of the adapter's safetensors file, checked against the file's size.

    Raises:
        ModelLoadError: The file is missing, damaged or truncated.
    """
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        return read_shard(weights)
    if (folder / "adapter_model.bin").exists():
        raise ModelLoadError(
            f"{folder} holds its weights as adapter_model.bin, which can run code when it is read: "
            "convert it to safetensors"
        )
    raise ModelLoadError(
        f"{folder} has no adapter_model.safetensors: that is no PEFT adapter's folder"
    )


def unserved(path: Path, name: str, value: object, why: str) -> ModelLoadError:
    """Return the error for the field ``name`` of the configuration at ``path``."""
    return ModelLoadError(f"{path} has {name} = {value!r}: {why}")

"""Defaults of requests, from a generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_object
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.protocol.sampling import GENERATION_CONFIG_FIELDS, SamplingParams

_NAME = "generation_config.json"


@attrs.frozen(kw_only=True)
class GenerationConfig:
    """Defaults of requests, and a limit of their output length."""

    sampling: dict[str, float | int] = attrs.field(factory=dict)
    """Sampling parameters by name."""
    max_tokens: int | None = None
    """Default of ``max_tokens``; None for as many tokens as fit."""
    most_tokens: int | None = None
    """Limit of ``max_tokens``; None for no limit."""

    def shown(self) -> dict[str, float | int]:
        """Return all defaults, by names of sampling parameters."""
        return self.sampling | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read the generation_config.json of a model's folder; an absent file has no defaults.

    Raises:
        ModelLoadError: The file is damaged, or has a value that requests may not have.
    """
    path = folder / _NAME
    return _of(read_object(path, required=False), path)


def read_generation_file(path: Path) -> GenerationConfig:
    """Read a generation_config.json, or the one in a folder.

    Raises:
        ModelLoadError: The file is missing or damaged, or has a value that requests may not have.
    """
    file = path / _NAME if path.is_dir() else path
    return _of(read_object(file), file)


def _of(values: Mapping[str, Any], path: Path) -> GenerationConfig:
    # The penalty applies to greedy decoding, too; the others only to sampling.
    samples = values.get("do_sample") is not False
    names = GENERATION_CONFIG_FIELDS if samples else ("repetition_penalty",)
    sampling = {
        name: values[name]
        for name in names
        if isinstance(values.get(name), (int, float)) and not isinstance(values[name], bool)
    }
    try:
        SamplingParams(**sampling)
    except InvalidRequest as error:
        raise ModelLoadError(f"{path} can't be right: {error}") from error
    has_length = values.get("max_new_tokens") is not None
    max_tokens = Fields(path, values, {}).integer("max_new_tokens") if has_length else None
    return GenerationConfig(sampling=sampling, max_tokens=max_tokens)

"""The files of a draft model, and why it can't be one."""

from __future__ import annotations

from pathlib import Path

from trioserve.model_files import ModelConfig, ModelFiles, open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start


def open_draft_files(start: Start) -> ModelFiles | None:
    """Return the files of the draft model; None if there is none.

    Raises:
        ModelLoadError: its family isn't one of this server's own kernels.
    """
    if start.speculative is None or not start.speculative.model:
        return None
    files = open_model(Path(start.speculative.model))
    if not isinstance(files.config, ModelConfig):
        raise cannot_draft(files, "only transformers computes its family")
    return files


def cannot_draft(files: ModelFiles, reason: str) -> ModelLoadError:
    """Return the error for a draft model that can't be one, for this ``reason``."""
    return ModelLoadError(f"speculative_config: {files.name} can't draft: {reason}")

"""Loads a part of a model with transformers: the rest of it has no layers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError


def read_part(files: ModelFiles, architecture: str, dtype: torch.dtype, *, without: str) -> Any:
    """Return transformers' model in evaluation mode.

    ``without`` is the field of its configuration with the number of layers of the rest, such as
    ``text_config.num_hidden_layers``. The head may be missing.

    Raises:
        ModelLoadError: transformers can't load it.
    """
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()  # Each tensor of the rest would be reported.
    logging.disable_progress_bar()
    safely: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    *owners, field = without.split(".")
    try:
        config = transformers.AutoConfig.from_pretrained(files.path, **safely)
        setattr(functools.reduce(getattr, owners, config), field, 0)
        model, report = getattr(transformers, architecture).from_pretrained(
            files.path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **safely,
        )
    except Exception as error:  # transformers raises many kinds for damaged files
        lines = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"{architecture} in {files.path} can't be loaded: {lines[0]}"
        ) from error
    missing = sorted(name for name in report["missing_keys"] if not name.endswith("lm_head.weight"))
    if missing:
        raise ModelLoadError(f"{files.path} has no tensor {missing[0]}: fetch the model again")
    return model.eval()

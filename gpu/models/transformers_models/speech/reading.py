"""Loads one half of a Whisper model with transformers: its encoder, or its decoder."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError

Half = Literal["encoder", "decoder"]


def read_half(files: ModelFiles, half: Half, dtype: torch.dtype) -> Any:
    """Return transformers' model in evaluation mode, in which the other half has no layers.

    Raises:
        ModelLoadError: transformers can't load it.
    """
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()  # Each tensor of the other half would be reported.
    logging.disable_progress_bar()
    safely: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(files.path, **safely)
        if half == "encoder":
            config.decoder_layers = 0
        else:
            config.encoder_layers = 0
        model_class: Any = transformers.WhisperForConditionalGeneration
        model, report = model_class.from_pretrained(
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
            f"the {half} of speech in {files.path} can't be loaded: {lines[0]}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(f"{files.path} has no tensor {missing[0]}: fetch the model again")
    return model.eval()

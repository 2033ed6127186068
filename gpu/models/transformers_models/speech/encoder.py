"""The encoder of a Whisper model, as :class:`gpu.models.media.encoding.EncodeMedia` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.models.part_reading import read_part
from trioserve.model_files import ModelFiles
from trioserve.model_files.speech_config import ARCHITECTURE


class SpeechEncoder:
    """transformers' encoder without the decoder.

    Args:
        model: A ``WhisperForConditionalGeneration``.
    """

    def __init__(self, model: Any) -> None:
        self._encoder = model.model.encoder

    @classmethod
    def load(cls, files: ModelFiles) -> SpeechEncoder:
        """Return the encoder in the folder of ``files``, in float32.

        A CPU computes float32 as fast as other formats, and more precisely.

        Raises:
            ModelLoadError: transformers can't load it.
        """
        return cls(read_part(files, ARCHITECTURE, torch.float32, without="decoder_layers"))

    @torch.inference_mode()
    def embed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> torch.Tensor:
        """Return the states [S, E] of a window of audio.

        Args:
            arrays: ``input_features`` [1, mels, 2 * S], as the model's feature extractor gives it.
        """
        features = torch.from_numpy(np.ascontiguousarray(arrays["input_features"])).float()
        states: torch.Tensor = self._encoder(features).last_hidden_state[0]
        return states

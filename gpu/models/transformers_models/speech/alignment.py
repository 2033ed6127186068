"""The times of a transcript's tokens, by Whisper's published method.

Some heads of the decoder's attention over the audio follow what is spoken. Their weights are
standardized over the tokens and smoothed over the frames. Then the path through their mean gives
the frame at which each token begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gpu.models.transformers_models.interface import AttentionCall
from gpu.models.transformers_models.speech.attention import KeysAndValues, states_in
from gpu.models.transformers_models.speech.decoder import SpeechDecoder
from gpu.models.transformers_models.speech.warping import first_frames
from trioserve.model_files.speech_config import SpeechConfig
from trioserve.protocol.embeddings import EmbeddingRows

Weights: TypeAlias = npt.NDArray[np.floating[Any]]
FILTER_WIDTH = 7
"""Frames whose median stands for the one in their middle."""


class AlignSpeech:
    """The call ``align_speech``: tokens to the frames at which they begin.

    It runs in a thread beside the steps, and only reads the decoder.

    Args:
        decoder: The model.
        config: Its shape, and the heads that follow what is spoken.
    """

    def __init__(self, decoder: SpeechDecoder, config: SpeechConfig) -> None:
        self._decoder = decoder
        self._config = config

    @torch.inference_mode()
    def __call__(self, arguments: dict[str, Any]) -> list[int]:
        """Return the frames at which the tokens of the text begin, and that of its end.

        ``arguments`` has ``tokens``, which end with the token of the end; ``num_before``, their
        number before the last one in front of the text; ``num_frames``, the encoder states with
        audio; and the states as ``rows`` and ``number_format``.
        """
        states = states_in(
            EmbeddingRows(
                start=0, rows=arguments["rows"], number_format=arguments["number_format"]
            ),
            self._config.width,
        )
        tokens = torch.tensor(arguments["tokens"])
        attention = AligningAttention(
            lambda layer: self._decoder.project_in(layer, states),
            self._config.heads_that_align(),
            len(tokens),
            arguments["num_frames"],
        )
        self._decoder.forward(tokens, attention)
        # A token's row says where the model finds the next one.
        rows = attention.mean()[arguments["num_before"] : -1]
        return first_frames(-rows.astype(np.float64))


class AligningAttention:
    """The attention of one sequence without a cache; it notes the weights over the audio.

    Args:
        audio: Returns the keys and values of the audio in a layer.
        heads: Layers and heads whose weights are noted.
        num_tokens: T.
        num_frames: F, the first encoder states, whose weights are noted.
    """

    def __init__(
        self,
        audio: Callable[[int], KeysAndValues],
        heads: Iterable[tuple[int, int]],
        num_tokens: int,
        num_frames: int,
    ) -> None:
        self.positions = torch.arange(num_tokens)
        self._audio = audio
        self._heads: defaultdict[int, list[int]] = defaultdict(list)
        for layer, head in heads:
            self._heads[layer].append(head)
        self._sum: Weights = np.zeros((num_tokens, num_frames), np.float32)

    def mean(self) -> Weights:
        """Return the mean of the heads' :func:`smoothed` weights, [T, F]."""
        return self._sum / sum(map(len, self._heads.values()))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention over the tokens, [T, heads, head_dim]."""
        attended = torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scale
        )
        return attended[0].transpose(0, 1)

    def attend_audio(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the attention over the audio of ``query`` [heads, T, head_dim]; note weights."""
        keys, values = self._audio(layer)
        for head in self._heads.get(layer, ()):
            noted = keys[head, : self._sum.shape[1]].float()
            self._sum += smoothed((query[head].float() @ noted.T).softmax(-1).numpy())
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=1.0)


def smoothed(weights: Weights) -> Weights:
    """Return a head's weights [T, F], standardized over the tokens, as medians over the frames.

    Frames at the ends are mirrored. A frame to which all tokens attend equally has zeros.
    """
    deviation = weights.std(0)
    standard: Weights = (weights - weights.mean(0)) / np.where(deviation > 0, deviation, np.inf)
    border = FILTER_WIDTH // 2
    if weights.shape[1] <= border:
        return standard
    mirrored = np.pad(standard, ((0, 0), (border, border)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, FILTER_WIDTH, axis=1)
    medians: Weights = np.partition(windows, border, axis=-1)[..., border]
    return medians

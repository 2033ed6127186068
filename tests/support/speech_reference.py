"""Transcripts by transformers' model and functions: the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import (
    _dynamic_time_warping,
    _median_filter,
)

from tests.support.tiny_speech import RATE
from trioserve.model_files.speech_config import SECONDS_OF_STATE
from trioserve.requests.speech.reader import SAMPLES_OF_STATE
from trioserve.requests.speech.transcript import Segment, Transcript

__all__ = ["Reference"]

TOLERANCE = 2e-4
LONGEST = 48
"""Tokens of a window's output, half of the context of a model of the tests."""


class Reference:
    """transformers' own model and feature extractor."""

    def __init__(self, folder: Path) -> None:
        self.extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
        self.model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def features(self, samples: np.ndarray[Any, Any]) -> torch.Tensor:
        found = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        features: torch.Tensor = found["input_features"]
        return features

    def check(self, samples: np.ndarray[Any, Any], prompt: list[int], segment: Segment) -> None:
        """Assert that a window's tokens are greedy by transformers' rules for plain text."""
        special = self.model.generation_config
        tokens = list(segment.token_ids)
        most = min(LONGEST, 2 * LONGEST - len(prompt))
        own = tokens + [special.eos_token_id] * (len(tokens) < most)
        ids = torch.tensor([prompt + own])
        with torch.inference_mode():
            whole = self.model(input_features=self.features(samples), decoder_input_ids=ids).logits[
                0
            ]
        silence = whole[prompt.index(special.decoder_start_token_id)].softmax(-1)
        silence = silence[special.no_timestamps_token_id - 1]
        assert segment.no_speech_prob == pytest.approx(float(silence), rel=TOLERANCE)
        logits = whole[len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).mean()
        assert segment.average_logprob == pytest.approx(float(found), abs=TOLERANCE)
        begin = len(prompt)
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(special.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(special.suppress_tokens),
        ]
        for index, scores in enumerate(logits):
            row = scores[None]
            for rule in rules:
                row = rule(ids[:, : begin + index], row)
            assert row.max() - row[0, own[index]] < TOLERANCE

    def token_times(
        self, samples: np.ndarray[Any, Any], before: Sequence[int], text: Sequence[int]
    ) -> list[float]:
        """Return when the tokens of a window's text begin, and when it ends."""
        end = self.model.generation_config.eos_token_id
        frames = _frames(
            self.model,
            self.features(samples),
            [*before, *text, end],
            len(before) - 1,
            len(samples) // SAMPLES_OF_STATE,
        )
        return [frame * SECONDS_OF_STATE for frame in frames]

    def check_windows(
        self, transcript: Transcript, samples: np.ndarray[Any, Any], *, is_conditioned: bool = False
    ) -> None:
        """Assert that a German transcript without timestamps is that of this model.

        With ``is_conditioned`` the text so far precedes each window.
        """
        config = self.model.generation_config
        prompt = [
            config.decoder_start_token_id,
            config.lang_to_id["<|de|>"],
            config.task_to_id["transcribe"],
            config.no_timestamps_token_id,
        ]
        assert transcript.duration == pytest.approx(len(samples) / RATE)
        starts = [each.start for each in transcript.segments]
        assert starts == list(range(math.ceil(transcript.duration)))
        before: list[int] = []
        for each in transcript.segments:
            window = samples[round(each.start * RATE) :][:RATE]
            previous = [config.no_timestamps_token_id - 2, *before[1 - LONGEST :]] if before else []
            self.check(window, previous + prompt, each)
            if is_conditioned:
                before += each.token_ids


def _frames(
    model: Any, features: torch.Tensor, tokens: Sequence[int], num_before: int, num_frames: int
) -> list[int]:
    """Return the frames at which the tokens of a window's text begin, and that of its end.

    Args:
        model: A ``WhisperForConditionalGeneration`` with eager attention.
        features: Features of the window.
        tokens: Tokens in front of the text, those of the text, and that of the end.
        num_before: Number of those in front, without the last one.
        num_frames: Frames that have audio.
    """
    with torch.inference_mode():
        attentions = model(
            input_features=features,
            decoder_input_ids=torch.tensor([tokens]),
            output_attentions=True,
        ).cross_attentions
    heads = model.generation_config.alignment_heads
    weights = torch.stack([attentions[layer][0, head] for layer, head in heads])
    # transformers' own times are of attention to the silence behind the audio as well.
    weights = weights[..., :num_frames]
    weights = weights / weights.sum(-1, keepdim=True)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    matrix = _median_filter((weights - mean) / deviation, model.config.median_filter_width).mean(0)
    rows, frames = _dynamic_time_warping(-matrix[num_before:-1].double().numpy())
    begins = np.concatenate([[True], np.diff(rows) > 0])
    return [int(frame) for frame in frames[begins]]

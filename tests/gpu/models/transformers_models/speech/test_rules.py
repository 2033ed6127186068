"""The rules of transcripts are those of transformers' processors."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from gpu.models.transformers_models.speech.rules import SpeechRules
from tests.support.tiny_speech import CONFIG
from trioserve.model_files.speech_config import SpeechConfig
from trioserve.protocol.logits_processors import ProcessorRow

VOCABULARY = 62
FIRST = CONFIG.first_timestamp
OUTPUTS: list[list[int]] = [
    [],
    [FIRST],
    [FIRST, 7],
    [FIRST, 7, FIRST + 3],
    [FIRST, 7, FIRST + 3, FIRST + 3],
    [FIRST + 1, FIRST + 2],
    [FIRST, 7, FIRST + 3, FIRST + 4, 8, 9],
    [8, 9],
    [8, FIRST + 20],
]


def allowed(
    config: SpeechConfig, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """Return the logits after the rules, beside those of another slot."""
    bias = torch.zeros(2, VOCABULARY)
    both = torch.stack([torch.zeros_like(logits), logits])
    row = ProcessorRow(
        index=1, slot=5, tokens=np.array(prompt + output, np.int32), prompt_length=len(prompt)
    )
    SpeechRules(config).apply(both, bias, [row])
    assert not bias[0].any()
    return (both + bias)[1]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("most_initial", [6, None])
@pytest.mark.parametrize("seed", range(3))
def test_the_rules_are_those_of_transformers(
    output: list[int], most_initial: int | None, seed: int
) -> None:
    config = attrs.evolve(CONFIG, most_initial_timestamp=most_initial)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    for prompt in ([31, 33, 35], [31, 33, 35, 40]):
        special: Any = transformers.GenerationConfig(eos_token_id=30, no_timestamps_token_id=40)
        special.max_initial_timestamp_index = most_initial
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor([5, 30], len(prompt)),
            SuppressTokensLogitsProcessor([3, 4, 31, 38]),
        ]
        if prompt[-1] != 40:
            rules.append(WhisperTimeStampLogitsProcessor(special, len(prompt)))
        wanted = logits[None]
        for rule in rules:
            wanted = rule(torch.tensor([prompt + output]), wanted)
        assert torch.equal(allowed(config, prompt, output, logits), wanted[0])


def test_only_languages_are_detected() -> None:
    found = allowed(CONFIG, [31], [], torch.ones(VOCABULARY))
    assert found.isfinite().nonzero()[:, 0].tolist() == [32, 33]
    english = attrs.evolve(CONFIG, languages={}, tasks={})
    assert allowed(english, [31], [], torch.ones(VOCABULARY)).argmax() == FIRST

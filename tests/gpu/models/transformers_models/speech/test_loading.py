"""The slots of a Whisper model: as many as there is memory for the audio of each."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from gpu.models.transformers_models.speech import loading
from tests.support.tiny_speech import CONFIG
from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.protocol.errors import ModelLoadError

LARGE = attrs.evolve(CONFIG, width=1280, num_states=1500, num_layers=32, num_heads=20)
"""The shape of whisper-large-v3."""


class SmallMachine:
    """A machine with 4 GB of free memory."""

    def memory(self) -> tuple[int, int]:
        return 8 * 10**9, 4 * 10**9


def test_audio_has_keys_and_values_in_every_layer() -> None:
    assert loading.audio_bytes(LARGE, "float32") == 491_520_000
    assert loading.audio_bytes(LARGE, "bfloat16") == 245_760_000


def test_slots_are_limited_by_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "Machine", SmallMachine)
    start = start_message(EngineConfig("m", max_num_seqs=256), tmp_path)
    assert loading.fit_slots(start, CONFIG, "float32").max_num_seqs == 256
    assert loading.fit_slots(start, LARGE, "float32").max_num_seqs == 4
    assert loading.fit_slots(start, LARGE, "bfloat16").max_num_seqs == 8
    shared = attrs.evolve(start, num_sharing=4)
    assert loading.fit_slots(shared, LARGE, "float32").max_num_seqs == 1
    with pytest.raises(ModelLoadError, match="468 MiB, and 238 MiB"):
        loading.fit_slots(attrs.evolve(start, num_sharing=8), LARGE, "float32")

"""Space for a model is checked before it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.decode_step import engine as engine_idle
from bench.decode_step.room import NoRoomError, folder_with_room, model_bytes
from bench.random_model import LLAMA_8B, TINY, write_model

MEMORY, DISK = Path("/dev/shm"), Path("/tmp")


def test_the_first_folder_with_room_is_taken() -> None:
    sizes = {MEMORY: 10, DISK: 20}
    assert folder_with_room(10, [MEMORY, DISK], sizes.__getitem__) == MEMORY
    assert folder_with_room(11, [MEMORY, DISK], sizes.__getitem__) == DISK


def test_no_room_names_what_is_needed_and_what_there_is() -> None:
    sizes = {MEMORY: 8_000_000_000, DISK: 2_500_000_000}
    with pytest.raises(NoRoomError) as raised:
        folder_with_room(16_100_000_000, [MEMORY, DISK], sizes.__getitem__)
    expected = "16.1 GB of free space are needed: /dev/shm has 8.0 GB, /tmp has 2.5 GB"
    assert str(raised.value) == expected


def test_a_model_is_no_larger_than_the_estimate(tmp_path: Path) -> None:
    assert 16.0e9 < model_bytes(LLAMA_8B) < 16.5e9
    write_model(TINY, tmp_path, torch.device("cpu"))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < model_bytes(TINY)


def test_nothing_is_written_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_idle, "temporary_folders", lambda: [tmp_path])
    monkeypatch.setattr(engine_idle, "model_bytes", lambda config: 10**18)
    assert engine_idle.measure_engine(on_gpu=False, streams=1, out=tmp_path / "out") == 1
    assert f"GB of free space are needed: {tmp_path} has" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

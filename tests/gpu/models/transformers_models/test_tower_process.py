"""The tower in a process of its own: the same numbers, and what becomes of its errors and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.models.media.encoding import EncodeMedia
from gpu.models.media.tower import MediaTower
from gpu.models.transformers_models.tower_process import (
    NICENESS,
    TowerFailed,
    TowerOrder,
    TowerProcess,
)
from tests.support.tiny_media import make_media_model
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError

SHAPE = (1, 3, 28, 28)
"""Shape of the images of the model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_model("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def tower(folder: Path) -> Iterator[TowerProcess]:
    process = TowerProcess(TowerOrder(model=str(folder), dtype="bfloat16", num_threads=1))
    yield process
    process.close()


def arguments(name: str = "pixel_values") -> dict[str, Any]:
    numbers = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    return {"arrays": [(name, numbers.dtype.str, SHAPE, numbers.tobytes())]}


def child(tower: TowerProcess) -> int:
    assert tower._process is not None
    return tower._process.pid


def test_its_numbers_are_those_of_the_tower(folder: Path, tower: TowerProcess) -> None:
    files = open_model(folder)
    same = EncodeMedia(MediaTower.load(files, torch.float32, torch.device("cpu")), torch.bfloat16)
    assert tower(arguments()) == same(arguments())
    threads = Path(f"/proc/{child(tower)}/task").iterdir()
    assert {os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in threads} == {NICENESS}
    group = Path(f"/proc/{child(tower)}/autogroup")
    if group.exists():
        assert group.read_text().endswith(f"nice {NICENESS}\n")


def test_an_error_is_that_of_the_call(tower: TowerProcess) -> None:
    before = child(tower)
    with pytest.raises(TowerFailed, match="pixel_values") as caught:
        tower(arguments(name="another"))
    assert "Traceback" in caught.value.__notes__[0]
    assert tower(arguments())["rows"]
    assert child(tower) == before


def test_a_process_that_was_killed_is_started_again(tower: TowerProcess) -> None:
    expected, before = tower(arguments()), child(tower)
    os.kill(before, signal.SIGKILL)
    assert tower(arguments()) == expected
    assert child(tower) != before


def test_what_ends_it_again_and_again_is_refused(
    tower: TowerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", ""], stdin=pipe, stdout=pipe)

    os.kill(child(tower), signal.SIGKILL)
    with monkeypatch.context() as patches:
        patches.setattr(tower, "_start", start)
        with pytest.raises(TowerFailed, match="ended 2 times while it computed this"):
            tower(arguments())
    assert tower(arguments())["rows"]


def test_a_start_that_fails_is_tried_again_by_the_next_call(
    tower: TowerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> subprocess.Popen[bytes]:
        raise ModelLoadError("no memory")

    os.kill(child(tower), signal.SIGKILL)
    with monkeypatch.context() as patches:
        patches.setattr(tower, "_start", start)
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="no memory"):
                tower(arguments())
    assert tower(arguments())["rows"]


def test_a_folder_that_can_t_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        TowerProcess(TowerOrder(model=str(tmp_path), dtype="float32", num_threads=1))

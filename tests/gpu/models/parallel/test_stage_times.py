"""The times of stages, and the split of layers that they suggest."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gpu.models.parallel import stage_times
from gpu.models.parallel.stage_times import StageTimes
from gpu.models.parallel.stages import stages_of
from tests.support.tiny_models import make_tiny
from trioserve.model_files import ModelConfig, open_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("llama")
    return open_model(make_tiny("llama2", folder, num_hidden_layers=10)).native


def times_of(config: ModelConfig, layers: list[int]) -> StageTimes:
    return StageTimes(stages_of(config, len(layers), layers))


def test_a_better_split_follows_from_the_means(config: ModelConfig) -> None:
    times = times_of(config, [5, 5])
    times.add(np.array([4_000, 4_000, 4_500]))
    times.add(np.array([6_000, 6_000, 3_500]))
    # A layer takes 1 ms and the head 4.
    assert times.describe() == (
        "stages of 5 + 5 layers took 5.0 + 9.0 ms a step: with --pipeline-parallel-layers 7,3 the "
        "slowest would take 7.0 ms"
    )


def test_stages_on_unlike_machines_are_told_apart(config: ModelConfig) -> None:
    times = times_of(config, [4, 3, 3])
    times.add(np.array([4_000, 9_000, 3_000, 0]))  # The second stage's cores are slower.
    assert "with --pipeline-parallel-layers 5,1,4 the slowest would take 5.0 ms" in times.describe()


def test_a_small_gain_is_not_worth_a_line(config: ModelConfig) -> None:
    times = times_of(config, [6, 4])
    times.add(np.array([6_000, 4_000, 1_800]))
    assert times.describe() == (
        "stages of 6 + 4 layers took 6.0 + 5.8 ms a step: no other split is much better"
    )


def test_the_log_tells_once(
    config: ModelConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "_STEPS", 3)
    times = times_of(config, [5, 5])
    with caplog.at_level(logging.INFO, logger="gpu.worker"):
        for _ in range(10):
            times.add(np.array([5_000, 5_000, 0]))
    (record,) = caplog.records
    assert record.getMessage() == times.describe()

"""Ranks that are a worker's processes: on GPUs, or on emulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from gpu.models.parallel.link import EXIT_RANK_LOST
from tests.kernels import rank_process
from tests.kernels.serving import Judge
from tests.kernels.test_whole_model import MARGIN, PROMPTS, make_model
from tests.support.plans import GREEDY
from tests.support.source_files import ROOT

SECONDS = 100
Processes: TypeAlias = tuple["subprocess.Popen[str]", list[psutil.Process]]
Load: TypeAlias = Callable[..., AbstractContextManager[Processes]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory)


@pytest.fixture
def load(llama: Path, request: pytest.FixtureRequest) -> Load:
    """Load the model on so many ranks and stages; yield the process of rank 0, and the others."""
    on_gpu = request.config.getoption("--kernels-on") == "gpu"

    @contextmanager
    def loaded(size: int, num_stages: int = 1) -> Iterator[Processes]:
        if on_gpu and _num_gpus() < size * num_stages:
            pytest.skip("one device: not run")
        how, counts = [] if on_gpu else ["--emulated"], map(str, (size, num_stages))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", rank_process.COMMAND, *how, str(llama), *counts],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                others = psutil.Process(process.pid).children()
                yield process, [each for each in others if "--rank" in each.cmdline()]
            finally:
                process.kill()

    return loaded


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.parametrize(("size", "num_stages"), [(1, 1), (2, 1), (1, 2)])
def test_they_give_the_tokens_of_the_whole_model(
    llama: Path, load: Load, size: int, num_stages: int
) -> None:
    with load(size, num_stages) as (process, others):
        assert len(others) == size * num_stages - 1
        found, _ = process.communicate("go\n", timeout=SECONDS)
        assert process.returncode == 0
        assert psutil.wait_procs(others, timeout=SECONDS)[1] == []
    judge = Judge(llama)
    for tokens, prompt in zip(json.loads(found), (PROMPTS[3], PROMPTS[1]), strict=True):
        assert len(tokens) > len(prompt) + 3
        judge.check(tokens, len(prompt), GREEDY, margin=MARGIN)


def test_a_step_that_fails_ends_all(load: Load) -> None:
    with load(2) as (process, others):
        process.communicate("fail\n", timeout=SECONDS)
        assert process.returncode == EXIT_RANK_LOST
        assert psutil.wait_procs(others, timeout=SECONDS)[1] == []


def test_the_loss_of_one_is_the_loss_of_all(load: Load) -> None:
    with load(2) as (process, (other,)):
        other.kill()
        assert process.wait(SECONDS) == -9
    with load(2) as (process, others):
        process.kill()
        assert psutil.wait_procs(others, timeout=SECONDS)[1] == []

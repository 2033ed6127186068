"""The choice of device and number format, and the messages if there is none."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from gpu.loading import devices
from gpu.loading.devices import bind_to_cores, choose_device, choose_dtype, gpu_obstacle
from trioserve.protocol.errors import ModelLoadError

CPU, GPU = "cpu", "cuda:0"
WORKING: dict[str, Any] = {"cuda_version": "13.0", "capability": (9, 0), "cupy_error": None}


def test_number_formats_of_a_cpu() -> None:
    assert choose_dtype("float32", CPU) == "float32"
    assert choose_dtype("bfloat16", CPU) == "bfloat16"
    assert choose_dtype("auto", CPU) in ("float32", "bfloat16")
    with pytest.raises(ModelLoadError, match="float16 is not served on a CPU: use --dtype bfloat"):
        choose_dtype("float16", CPU)


def test_number_formats_of_a_gpu() -> None:
    assert choose_dtype("auto", GPU) == "bfloat16"
    assert choose_dtype("bfloat16", GPU) == "bfloat16"
    assert choose_dtype("float16", GPU) == "float16"
    with pytest.raises(ModelLoadError, match="float32 is not served on a GPU: use --dtype bfloat"):
        choose_dtype("float32", GPU)


def test_a_gpu_that_works_has_no_obstacle() -> None:
    assert gpu_obstacle(**WORKING) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cuda_version": None, "capability": None, "cupy_error": ""}, "built without CUDA"),
        ({"capability": None}, "torch finds no GPU"),
        ({"capability": (7, 5)}, "capability 7.5 and 8.0 is needed"),
        ({"cupy_error": ""}, "pip install '.[cuda13]'"),
        ({"cupy_error": "", "cuda_version": "12.8"}, "pip install '.[cuda12]'"),
        ({"cupy_error": "libnvrtc.so: not found"}, "can't be imported: libnvrtc.so: not found"),
    ],
)
def test_what_is_in_the_way_is_one_line(changes: dict[str, Any], said: str) -> None:
    obstacle = gpu_obstacle(**{**WORKING, **changes})
    assert obstacle is not None
    assert said in obstacle
    assert "\n" not in obstacle


def test_a_number_chooses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [0]
    monkeypatch.setattr(devices, "_has_driver", lambda: True)
    monkeypatch.setattr(devices, "_obstacle_here", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    assert choose_device("auto:1") == "cuda:1"
    assert choose_device("cuda:0") == "cuda:0"
    assert choose_device("cpu") == CPU
    with pytest.raises(ModelLoadError, match="a GPU of its own, and there is no cuda:2: there are"):
        choose_device("auto:2")
    assert choose_device("auto:0", 2) == "cuda:0"
    assert choose_device("cuda", 2) == "cuda:0"
    with pytest.raises(ModelLoadError, match=r"2 GPUs \(--tensor-parallel-size times .* no cuda:2"):
        choose_device("cuda:1", 2)
    assert chosen[-1] == 0


def test_a_worker_is_bound_to_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    bind_to_cores([])
    bind_to_cores([3, 9])
    assert bound == [[3, 9]]
    with pytest.raises(ModelLoadError, match=r"the cores 0-3: this process may use 2-4,9$"):
        bind_to_cores([0, 1, 2, 3])
    assert bound == [[3, 9]]


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ModelLoadError, match=r"^--device cuda can't be used: "):
        choose_device("cuda")

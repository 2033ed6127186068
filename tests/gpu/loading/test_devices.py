"""The choice of device and number format, and the messages if there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu.loading.devices import choose_device, choose_dtype, gpu_obstacle
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


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ModelLoadError, match=r"^--device cuda can't be used: "):
        choose_device("cuda")

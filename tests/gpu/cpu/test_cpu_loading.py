"""The kernels that compute a model on a CPU, and the messages if they can't be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from gpu.cpu import library
from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from gpu.cpu.loading import load_on_cpu
from gpu.loading.loaded_model import Loaded, warm_up
from gpu.loading.loading import load
from gpu.sampling.adjustments import NoAdjuster
from tests.support.kernels import isas, kernels_of_each_isa
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import KERNEL_FEATURES, Machine

try:
    load_library()
    HAS_KERNELS = True
except LibraryBuildError:
    HAS_KERNELS = False
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="no compiled kernels")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("tiny"), head_dim=32)


@pytest.fixture(scope="module")
def quantized(tiny: Path) -> Path:
    return write_gguf(tiny, tiny / "tiny.gguf", quantization="Q4_0")


def load_tiny(path: Path, *, chosen: str | None = None, **options: Any) -> Loaded:
    """Load; ``chosen`` is what was asked for where ``dtype`` is what came of that."""
    start = start_message(EngineConfig(str(path), **options), path)
    start = attrs.evolve(start, max_model_len=512, max_num_batched_tokens=64)
    start = attrs.evolve(start, dtype=chosen or start.dtype)
    stages: list[str] = []
    loaded = load_on_cpu(
        start,
        open_model(path),
        options.get("dtype", "bfloat16"),
        2,
        lambda stage, done, total: stages.append(stage),
        NoAdjuster(),
    )
    assert "weights" in stages
    warm_up(loaded.executor, loaded.slots, [7, 1], start.page_size)
    return loaded


@needs_kernels
@pytest.mark.parametrize("isa", kernels_of_each_isa(isas()))
def test_another_instruction_set_is_chosen_by_name(tiny: Path, isa: str) -> None:
    loaded = load_tiny(tiny, cpu_isa=isa)
    assert loaded.computing == f"compiled kernels ({isa}), weights in BF16"


def test_an_instruction_set_that_the_processor_lacks_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "cpu_features", lambda _: list(KERNEL_FEATURES["avx2"]))
    monkeypatch.setattr(library, "_libraries", {})  # one for AMX may have been opened
    said = "--cpu-isa amx can't be had: the processor has no avx512f, avx512bw, .*amx_int8"
    with pytest.raises(ModelLoadError, match=said):
        load_tiny(tiny, cpu_isa="amx")


def test_torch_has_no_instruction_set_to_choose(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match="--cpu-isa avx512_bf16 can't be had: the compiled"):
        load_tiny(tiny, dtype="float32", cpu_isa="avx512_bf16")


@needs_kernels
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, "BF16"),
        ({"quantization": "int8"}, "Q8_0"),
        ({"quantization": "int4"}, "Q4_0, Q8_0"),
        ({"quantization": "w8a8"}, "W8A8"),
        ({"deterministic": True}, "BF16"),
    ],
)
def test_bfloat16_is_for_the_compiled_kernels(
    tiny: Path, options: dict[str, Any], weights: str
) -> None:
    loaded = load_tiny(tiny, **options)
    isa = Machine().kernel_isas()[-1]
    assert loaded.computing == f"compiled kernels ({isa}), weights in {weights}"
    assert loaded.num_pages > 0


@needs_kernels
def test_a_file_s_own_bits_are_kept_where_nobody_asked_for_others(quantized: Path) -> None:
    def weights(**options: Any) -> str:
        return load_tiny(quantized, **options).computing.rpartition(" in ")[2]

    assert weights() == "Q4_0"
    assert weights(dtype="bfloat16") == "BF16"
    assert weights(dtype="bfloat16", quantization="auto") == "BF16"
    assert weights(quantization="none") == "BF16"
    assert weights(quantization="int8") == "Q8_0"


def test_float32_is_for_torch(tiny: Path, quantized: Path) -> None:
    for path in (tiny, quantized):
        loaded = load_tiny(path, dtype="float32")
        assert loaded.computing == "torch (the compiled kernels compute in bfloat16 only)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantization": "int4"}, "--quantization int4 can't be had: the compiled kernels"),
        ({"deterministic": True}, "--deterministic can't be had: the compiled kernels"),
    ],
)
def test_what_torch_does_not_have_is_refused(
    tiny: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_tiny(tiny, dtype="float32", **options)
    assert "\n" not in str(caught.value)


def test_shapes_that_the_kernels_are_not_made_for_are_for_torch(tmp_path: Path) -> None:
    path = make_tiny("llama2", tmp_path)
    loaded = load_tiny(path)
    assert loaded.computing == "torch (the compiled kernels aren't made for heads of 16 numbers)"


def test_without_a_compiler_torch_computes(
    tiny: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_libraries", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(Machine, "cpu_features", lambda _: list(KERNEL_FEATURES["avx2"]))
    for path in (tiny, quantized):
        loaded = load_tiny(path)
        assert "torch (there is no C++ compiler: install one" in loaded.computing
        assert "2 to 4 times as fast: there is no C++ compiler" in loaded.warning
        assert "apt install g++" in loaded.warning
    with pytest.raises(ModelLoadError, match=r"int8 can't be had: there is no C\+\+ compiler"):
        load_tiny(tiny, quantization="int8")


def test_a_processor_without_the_instructions_is_told_of_and_no_compiler_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_libraries", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(Machine, "cpu_features", lambda _: ["avx512f"])
    loaded = load_tiny(tiny, dtype="float32", chosen="auto")
    assert loaded.warning.endswith("as fast: the processor has no avx2, fma, f16c")
    assert "g++" not in loaded.warning


def test_what_was_asked_for_is_warned_of_nowhere(tiny: Path) -> None:
    assert load_tiny(tiny, dtype="float32").warning == ""


@needs_kernels
def test_compiled_kernels_are_warned_of_nowhere(tiny: Path) -> None:
    assert load_tiny(tiny).warning == ""


def test_a_kv_cache_in_8_bits_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match="fp8 is not served on a CPU"):
        load_tiny(tiny, kv_cache_dtype="fp8")


def test_a_cache_that_there_is_no_memory_for_is_told(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Machine, "memory", lambda _: (64 << 20, 32 << 20))
    assert load_tiny(tiny, num_gpu_blocks_override=10).num_pages == 10
    assert not caplog.text
    assert load_tiny(tiny, num_gpu_blocks_override=100_000).num_pages == 100_000
    assert "may grow to 781 MiB, and 32 MiB of memory are free" in caplog.text


def test_quantization_is_not_for_a_gpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.loading.loading.choose_device", lambda *_: "cuda:0")
    monkeypatch.setattr("gpu.loading.loading.choose_dtype", lambda *_: "bfloat16")
    config = EngineConfig(str(tiny), quantization="int8")
    with pytest.raises(ModelLoadError, match="int8 is for a CPU"):
        load(start_message(config, tiny), lambda *_: None)

"""Loading a model on a GPU that is made up: its memory in numbers, its kernels in the emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu.cuda import loading_parts
from gpu.cuda.device import is_out_of_memory
from gpu.cuda.graphs import Capturer, ladder
from gpu.cuda.loading import load_model
from gpu.cuda.timeline import HostTimeline, Timeline
from gpu.kernels import KernelSource
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.nvrtc import KernelBuildError
from gpu.loading import loading
from gpu.loading.loaded_model import Loaded
from gpu.lora.adapter_slots import AdapterSlots
from gpu.runner import Runner
from tests.gpu.test_worker import start_message
from tests.kernels.tape import TapeCapturer, TapedLoader
from tests.support.plans import PlanMaker
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig

MIB = 1 << 20
PAGE_BYTES = 2 * 2 * 2 * 64 * 2 * 16  # K and V, layers, heads, head_dim, bytes, tokens
FP8_PAGE_BYTES = 2 * 2 * 2 * (64 + 4) * 16


@attrs.define
class FakeGpu:
    """A GPU with ``total`` bytes, of which the weights and static buffers will take ``held``."""

    total: int = 64 * MIB
    held: int = 10 * MIB
    activations: int = 3 * MIB
    fails_in: str = ""
    name: str = "made up"
    loader: TapedLoader = attrs.field(factory=lambda: TapedLoader(EmulatedLoader()))
    built: set[KernelSource] = attrs.field(factory=set)
    page_bytes: int = PAGE_BYTES
    pages_measured: int = 0
    num_assembled: int = 0
    lately: list[int] = attrs.field(factory=list)
    """Bytes that a process which has ended still holds, at each look."""

    def build(self, sources: Iterable[KernelSource], progress: Callable[[int, int], None]) -> None:
        if self.fails_in == "build":
            raise KernelBuildError("decode_attention needs more than this GPU has")
        self.built = set(sources)
        progress(len(self.built), len(self.built))

    def memory(self) -> tuple[int, int]:
        taken = self.held + self.pages_measured * self.page_bytes if self.built else 0
        taken += self.lately.pop(0) if self.lately else 0
        return self.total - taken, self.total

    def peak_of(self, work: Callable[[], None]) -> int:
        if self.fails_in == "step":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2.00 GiB")
        work()
        return self.activations

    def timeline(self) -> Timeline:
        self.num_assembled += 1
        if self.fails_in == "cache" and self.num_assembled == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return HostTimeline()

    def capturer(self) -> Capturer:
        if self.fails_in == "graphs":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return TapeCapturer(self.loader)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("model"), head_dim=64)


def start(folder: Path, **changes: Any) -> wire.Start:
    fields = {
        "device": "cuda", "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 3,
        "max_num_batched_tokens": 60, "page_size": 16, "num_pages": 0,
        "gpu_memory_utilization": 0.75,
    }  # fmt: skip
    return start_message(folder, **{**fields, **changes})


def load(
    folder: Path,
    gpu: FakeGpu,
    stages: list[str] | None = None,
    *,
    pages_measured: int = 6,
    **changes: Any,
) -> Loaded:
    # Three rows of 20 tokens are the largest step: two pages each.
    gpu.pages_measured = pages_measured

    def on_progress(stage: str, done: int, total: int) -> None:
        if stages is not None:
            stages.append(f"{stage} {done}/{total}" if stage != "weights" else stage)

    message = start(folder, **changes)
    return load_model(gpu, message, open_model(folder), torch.bfloat16, on_progress)


def test_the_cache_gets_what_weights_a_step_and_graphs_leave(folder: Path) -> None:
    stages: list[str] = []
    gpu = FakeGpu()
    loaded = load(folder, gpu, stages)
    graphs = 2 * (len(ladder(3)) + 1)
    of_graphs = gpu.activations + graphs * 2 * 14 * 8192
    left = 48 * MIB - gpu.held - gpu.activations - of_graphs
    assert loaded.num_pages == left // PAGE_BYTES
    assert loaded.device_name == "made up"
    assert list(dict.fromkeys(stages)) == [
        f"kernels {len(gpu.built)}/{len(gpu.built)}",
        "weights",
        "memory 0/1",
        "memory 1/1",
        *(f"CUDA graphs {done}/4" for done in range(5)),
    ]


def test_experts_are_counted_and_their_steps_have_no_graphs(tmp_path: Path) -> None:
    experts = make_tiny("mixtral", tmp_path, head_dim=64)
    stages: list[str] = []
    gpu = FakeGpu()
    loaded = load(experts, gpu, stages, max_lora_rank=8, max_loras=2)
    assert not any(stage.startswith("CUDA graphs") for stage in stages)
    assert gpu.built == gpu.loader.loaded
    of_adapters = AdapterSlots.device_bytes(
        open_model(experts).config, 8, torch.bfloat16, 2, max_tokens=60
    )
    assert loaded.num_pages == (48 * MIB - gpu.held - gpu.activations - of_adapters) // PAGE_BYTES
    # Two layers of five experts, each three matrices of 96 x 64, alone take 360 KiB.
    with pytest.raises(ModelLoadError, match="the weights take"):
        load(experts, FakeGpu(total=400 << 10, held=0))


def test_it_waits_for_the_memory_of_the_worker_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = load(folder, FakeGpu())
    assert first.free_memory == 64 * MIB
    naps: list[float] = []
    monkeypatch.setattr(loading_parts.time, "sleep", naps.append)
    monkeypatch.setattr(loading_parts, "MEMORY_SLACK", MIB)
    stages: list[str] = []
    late = FakeGpu(lately=[60 * MIB, 60 * MIB, 5 * MIB])
    second = load(folder, late, stages, free_memory=first.free_memory)
    assert second.num_pages == first.num_pages
    assert len(naps) == 3
    assert "freeing memory 2/150" in stages  # or loading would count as hung
    # It doesn't wait for ever, and then says what is missing.
    never = FakeGpu(lately=[60 * MIB] * 1000)
    with pytest.raises(ModelLoadError, match="end what else uses this GPU"):
        load(folder, never, free_memory=first.free_memory)
    assert sum(naps) < 60
    assert "60 MiB of the GPU's memory aren't free again" in caplog.text


@pytest.mark.parametrize("options", [{}, {"max_lora_rank": 8, "max_loras": 2}])
def test_it_builds_all_kernels_that_it_loads_and_no_other(
    folder: Path, options: dict[str, int]
) -> None:
    gpu = FakeGpu()
    load(folder, gpu, **options)
    assert gpu.built == gpu.loader.loaded


def test_adapters_and_their_graphs_get_their_room(folder: Path) -> None:
    gpu = FakeGpu()
    loaded = load(folder, gpu, max_lora_rank=8, max_loras=2)
    assert loaded.adapters is not None
    assert loaded.adapters.max_rank == 8
    graphs = 2 * (2 * len(ladder(3)) + 1)
    of_graphs = gpu.activations + graphs * 2 * (14 + 8) * 8192
    of_adapters = AdapterSlots.device_bytes(
        open_model(folder).config, 8, torch.bfloat16, 2, max_tokens=60
    )
    assert of_adapters > 0
    left = 48 * MIB - gpu.held - gpu.activations - of_graphs - of_adapters
    assert loaded.num_pages == left // PAGE_BYTES
    assert load(folder, FakeGpu()).adapters is None


def test_what_was_loaded_serves(folder: Path) -> None:
    gpu = FakeGpu()
    loaded = load(folder, gpu)
    assert len(loaded.slots) == 0
    runner = Runner(loaded.executor, loaded.slots, max_num_batched_tokens=60)
    maker = PlanMaker(runner.step, page_size=16, num_pages=loaded.num_pages)
    maker.open(1, [5, 6, 7])
    assert len(maker.step({1: 3})[1]) == 1
    before = gpu.loader.num_launches
    assert len(maker.step({1: 1})[1]) == 1
    assert gpu.loader.num_launches == before  # a graph


def test_drafts_have_room_beside_one_sequence(folder: Path) -> None:
    stages: list[str] = []
    gpu = FakeGpu()
    options = SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)
    loaded = load(folder, gpu, stages, speculative=options, max_num_seqs=1)
    assert loaded.max_row_tokens == 5
    total = len(ladder(5)) + 1
    assert f"CUDA graphs {total}/{total}" in stages
    runner = Runner(loaded.executor, loaded.slots, max_num_batched_tokens=60)
    maker = PlanMaker(runner.step, page_size=16, num_pages=loaded.num_pages)
    maker.open(0, [5, 6, 7, 8, 5, 6], SamplerParams(temperature=0.0, allowed_token_ids=[5, 6]))
    assert len(maker.step({0: 6})[0]) == 1
    before = gpu.loader.num_launches
    assert 1 <= len(maker.step({0: 5})[0]) <= 5
    assert gpu.loader.num_launches == before  # a graph


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a draft model whose pages are half as large."""
    where = tmp_path_factory.mktemp("small")
    return make_tiny("llama2", where, seed=1, head_dim=64, num_hidden_layers=1)


def drafting(model: Path, **fields: Any) -> SpeculativeConfig:
    options = {"num_speculative_tokens": 2, "adaptive": False, **fields}
    return SpeculativeConfig(method="draft_model", model=str(model), **options)


def test_a_draft_model_has_its_share_of_the_memory(folder: Path, small: Path) -> None:
    stages: list[str] = []
    gpu = FakeGpu()
    loaded = load(folder, gpu, stages, pages_measured=9, speculative=drafting(small))
    assert gpu.built == gpu.loader.loaded
    graphs = 2 * (len(ladder(3)) + 1)
    of_graphs = gpu.activations + graphs * (2 + 1) * 14 * 8192
    left = 48 * MIB - gpu.held - gpu.activations - of_graphs
    assert loaded.num_pages == left // (PAGE_BYTES + PAGE_BYTES // 2)
    assert {"CUDA graphs 4/4", "CUDA graphs of the draft model 4/4"} <= set(stages)
    with pytest.raises(ModelLoadError, match="the weights take"):
        # The model alone would fit.
        load(folder, FakeGpu(total=600 << 10, held=0), speculative=drafting(small))


def test_a_draft_model_drafts(folder: Path) -> None:
    gpu = FakeGpu()
    loaded = load(folder, gpu, pages_measured=12, speculative=drafting(folder))
    assert loaded.max_row_tokens == 3
    runner = Runner(loaded.executor, loaded.slots, max_num_batched_tokens=60)
    maker = PlanMaker(runner.step, page_size=16, num_pages=loaded.num_pages)
    maker.open(0, [5, 6, 7, 8])
    assert len(maker.step({0: 4})[0]) == 1
    # The prompt is computed as such, what follows by graphs alone.
    assert len(maker.step({0: 3})[0]) == 3
    before = gpu.loader.num_launches
    assert [len(maker.step({0: 3})[0]) for _ in range(3)] == [3, 3, 3]
    assert gpu.loader.num_launches == before


def test_a_draft_model_of_experts_has_no_graphs(folder: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    experts = make_tiny("mixtral", tmp_path, head_dim=64)
    load(folder, FakeGpu(), stages, speculative=drafting(experts))
    assert "CUDA graphs 4/4" in stages
    assert not any("of the draft model" in stage for stage in stages)


def test_a_draft_model_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    odd = make_tiny("llama2", tmp_path, head_dim=48)
    line = f"speculative_config: {odd.name} can't draft: on a GPU, head_dim is 48"
    with pytest.raises(ModelLoadError, match=line):
        load(folder, FakeGpu(), speculative=drafting(odd))


def test_a_draft_model_in_fewer_bits_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda name, num_gpus: "cuda:0")
    message = start(folder, speculative=drafting(folder, quantization="int4"))
    with pytest.raises(ModelLoadError, match="speculative_config: quantization int4 is for a CPU"):
        loading.load(message, lambda stage, done, total: None)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tensor_parallel_slices": 4}, "--tensor-parallel-slices 4 is for .* on a CPU$"),
        ({"deterministic": True}, "2 doesn't go with --deterministic on a GPU"),
        ({"kv_offloading_dir": "/tmp/pages"}, "2 doesn't go with --kv-offloading-dir on a GPU"),
        ({"hands_over": True}, "2 doesn't go with --disaggregation on a GPU"),
        (
            {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
            "2 doesn't go with --speculative-config",
        ),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel is for models with experts"),
    ],
)
def test_what_several_ranks_do_not_serve_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], line: str
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(loading, "choose_device", lambda *each: asked.append(each) or "cuda:0")
    with pytest.raises(ModelLoadError, match=line):
        loading.load(
            start(folder, tensor_parallel_size=2, **options), lambda stage, done, total: None
        )
    assert asked == [("cuda", 2)]


def test_from_start_to_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(pages_measured=6)
    monkeypatch.setattr(loading, "choose_device", lambda name, num_gpus: "cuda:0")
    monkeypatch.setattr(loading_parts, "CudaDevice", lambda device: gpu)
    monkeypatch.setattr("gc.freeze", lambda: None)  # good for a worker, not for this process
    serving = loading.load(start(folder, dtype="auto"), lambda stage, done, total: None)
    ready = serving.ready
    assert (ready.device, ready.device_name, ready.dtype) == ("cuda", "made up", "bfloat16")
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (3, 60)
    assert (ready.page_size, ready.max_model_len, ready.vocab_size) == (16, 128, 300)
    maker = PlanMaker(serving.runner.step, page_size=16, num_pages=ready.num_pages)
    maker.number = 41  # whatever was run while loading, any number may come first
    maker.open(2, [5, 6, 7])
    assert len(maker.step({2: 3})[2]) == 1


def test_a_gpu_without_what_builds_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> FakeGpu:
        raise KernelBuildError("NVRTC is missing")

    monkeypatch.setattr(loading, "choose_device", lambda name, num_gpus: "cuda:0")
    monkeypatch.setattr(loading_parts, "CudaDevice", refuse)
    with pytest.raises(ModelLoadError, match="the GPU can't be used: NVRTC is missing"):
        loading.load(start(folder), lambda stage, done, total: None)


def test_a_step_has_no_more_rows_than_tokens(folder: Path) -> None:
    stages: list[str] = []
    gpu = FakeGpu()
    gpu.pages_measured = 2
    message = start(folder, max_num_seqs=5, max_num_batched_tokens=2)
    load_model(
        gpu,
        message,
        open_model(folder),
        torch.bfloat16,
        lambda stage, done, total: stages.append(f"{stage} {total}"),
    )
    assert f"CUDA graphs {len(ladder(2)) + 1}" in stages


def test_eager_has_no_graphs_and_more_cache(folder: Path) -> None:
    gpu, stages = FakeGpu(), list[str]()
    loaded = load(folder, gpu, stages, enforce_eager=True)
    assert loaded.num_pages == (48 * MIB - gpu.held - gpu.activations) // PAGE_BYTES
    assert not any("graphs" in stage for stage in stages)


def test_fp8_pages_are_smaller(folder: Path) -> None:
    gpu = FakeGpu(page_bytes=FP8_PAGE_BYTES)
    loaded = load(folder, gpu, kv_cache_dtype="fp8", enforce_eager=True)
    assert loaded.num_pages == (48 * MIB - gpu.held - gpu.activations) // FP8_PAGE_BYTES


@pytest.mark.parametrize(
    ("gpu", "changes", "line"),
    [
        (FakeGpu(), {"page_size": 4}, "--block-size 4 is not served on a GPU: use 16, 32 or 64"),
        (FakeGpu(), {"max_num_batched_tokens": 1 << 16}, "65536 is more .* use at most 65535"),
        (FakeGpu(total=MIB // 8), {}, "the weights take 0.0 GiB"),
        (FakeGpu(fails_in="build"), {}, "the kernels can't be built: decode_attention needs more"),
        (FakeGpu(fails_in="step"), {}, "a step of 60 tokens .* lower --max-num-batched-tokens"),
        (
            FakeGpu(fails_in="graphs"),
            {},
            "no memory is left for the CUDA graphs: .*--enforce-eager",
        ),
        (FakeGpu(held=47 * MIB), {}, "room for 0 tokens and one sequence may have 128: lower"),
        (
            FakeGpu(fails_in="cache"),
            {"num_pages": 77},
            "a KV cache of 77 pages doesn't fit .*--num-gpu-blocks-override",
        ),
    ],
)
def test_what_can_not_be_is_one_line(
    folder: Path, gpu: FakeGpu, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ModelLoadError, match=line) as caught:
        load(folder, gpu, **changes)
    assert "\n" not in str(caught.value)


def test_a_model_that_the_kernels_are_not_made_for(tmp_path: Path) -> None:
    odd = make_tiny("llama2", tmp_path, head_dim=48)
    line = r"not served so on a GPU: head_dim is 48; .* --device cpu may serve it"
    with pytest.raises(ModelLoadError, match=line):
        load(odd, FakeGpu())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_in_any_librarys_words(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected

"""Pipeline parallel over kernels: stages give, bit for bit, the logits of one GPU.

Each stage is a thread with an emulated GPU. They load the model as a worker's processes do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.torch_model import TorchSampler
from gpu.cuda import stage_loading
from gpu.cuda.loading import load_model
from gpu.cuda.model_to_load import ModelToLoad
from gpu.cuda.ranks import CudaRank, SoleRank
from gpu.loading import loading
from gpu.loading.loaded_model import Loaded, unseen
from gpu.lora.adapter_slots import PackedAdapter
from gpu.lora.reading import read_adapter
from gpu.models.parallel.adapter_parts import adapter_part
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import part_of_rank
from gpu.models.parallel.ranks import Alone
from tests.gpu.cpu.test_pipelined import Schedule, run_in_flight
from tests.kernels.rank_serving import RankServer, serve_on_ranks
from tests.kernels.serving import Judge, serving_limits
from tests.kernels.test_cuda_loading import MIB, PAGE_BYTES, FakeGpu, start
from tests.kernels.test_whole_model import PROMPTS, SEEDED, check, make_model, run_ahead
from tests.support.adjusters import ToyAdjuster
from tests.support.lora_adapters import make_adapter
from tests.support.plans import RecordingSampler, outputs_over_moved_pages
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import StepResult, floats

VOCAB = 300
NUM_PLANS = 10
PAGES = {"page_size": 16, "num_pages": 64, "num_host_pages": 4}
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 192, "max_lora_rank": 8, "max_loras": 2}
EAGER = {"enforce_eager": True}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
Logits = dict[tuple[int, ...], torch.Tensor]
"""[V] by the tokens before them."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory)


def record(loaded: Loaded) -> Logits:
    """Return the logits that one GPU will draw from."""
    executor: Any = loaded.executor
    seen, draw = {}, executor.draw

    def recorded(step: Any) -> Any:
        for row, place in zip(step.rows, step.places.tolist(), strict=True):
            seen[tuple(row.slot.tokens.tolist())] = executor._forward.logits[place].clone()
        return draw(step)

    executor.draw = recorded
    return seen


def on_one(folder: Path, use: Callable[[RankServer], Any], **options: Any) -> tuple[Any, Logits]:
    """Return what ``use`` returns with one GPU, and the logits."""
    gpu, message = FakeGpu(), start(folder, **{"max_num_batched_tokens": 128, **options})
    loaded = load_model(
        gpu, message, open_model(folder), torch.bfloat16, unseen, ToyAdjuster(VOCAB)
    )
    seen = record(loaded)
    return use(RankServer.of(loaded, [gpu], message.max_num_batched_tokens)), seen


def on_stages(
    folder: Path, use: Callable[[RankServer], Any], num_stages: int, **options: Any
) -> tuple[Any, Logits]:
    """Return what ``use`` returns with several stages, and the logits."""
    sampler = RecordingSampler(VOCAB, "cpu")

    def run(server: RankServer) -> Any:
        sampler.seen = {}  # of loading
        return use(server)

    options = {"pipeline_parallel_size": num_stages, **options}
    found = serve_on_ranks(folder, 1, run, adjuster=ToyAdjuster(VOCAB), sampler=sampler, **options)
    return found, sampler.seen


def assert_same_bits(found: Logits, expected: Logits) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(logits, expected[tokens]) for tokens, logits in found.items())


FLOATS = ("logprobs", "top_logprobs", "ids_logprobs", "vector")
UNTIMED = dict.fromkeys(("step_us", "gap_us", "idle_us", "launch_us"), 0)


def assert_like(found: Any, expected: Any) -> None:
    """Compare messages; the sampler of a CPU rounds log-probabilities otherwise."""
    blank: dict[str, Any] = {}
    for name in FLOATS:
        if hasattr(expected, name):
            pair = [floats(getattr(each, name)) for each in (found, expected)]
            np.testing.assert_allclose(*pair, atol=1e-4)
            blank[name] = b""
    if isinstance(expected, StepResult):
        for name in ("prompts", "pooled"):
            lists = [getattr(each, name) for each in (found, expected)]
            in_order = [sorted(each, key=lambda part: part.slot) for each in lists]
            for parts in zip(*in_order, strict=True):
                assert_like(*parts)
            blank[name] = []
        blank |= UNTIMED
    assert attrs.evolve(found, **blank) == attrs.evolve(expected, **blank)


@pytest.mark.parametrize(
    ("family", "num_stages", "options"),
    [
        ("qwen2_window", 3, {"deterministic": True, **EAGER}),
        ("qwen3_moe", 2, {}),
    ],
)
def test_results_are_those_of_one_gpu(
    family: str, num_stages: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Chunks, copies of pages, adapters, masks, pooling; slots are closed in flight."""
    folder = make_tiny(family, tmp_path, head_dim=64)
    adapter = make_adapter(folder, tmp_path / "adapter", rank=4)
    schedule = Schedule(1, num_stages + 1, PAGES)
    plans = [schedule.plan(number) for number in range(NUM_PLANS)]

    def run(depth: int, server: RankServer) -> list[StepResult]:
        asked = {"number": 1, "path": str(adapter), "checksum": ""}
        assert server.loaded.adapters is not None
        assert "error" not in server.loaded.adapters.load(asked)
        return list(run_in_flight(server.runner, plans, depth))

    config = open_model(folder).native
    page_bytes = 2 * config.num_layers * config.num_kv_heads * 64 * 2 * 16
    options = {**OPTIONS, **options, "num_pages": 64, "kv_offloading_bytes": 4 * page_bytes}
    expected, logits = on_one(folder, functools.partial(run, 1), **options)
    found, own = on_stages(folder, functools.partial(run, num_stages + 1), num_stages, **options)
    for pair in zip(found, expected, strict=True):
        assert_like(*pair)
    assert_same_bits(own, logits)
    assert any(each.prompts for each in found)
    assert any(each.pooled for each in found)
    assert any(each.ids_logprobs for each in found)


def preempt(server: RankServer) -> dict[int, list[int]]:
    """Preempt a sequence, open it again and another one in its slot; return all tokens."""
    maker = server.maker
    maker.open(0, PROMPTS[2], SEEDED)
    maker.open(1, PROMPTS[1])
    run_ahead(server, [{0: 10}, {0: 7, 1: 5}, {}, *[{0: 1}, {1: 1}] * 3])
    tokens = maker.slots[0].tokens
    maker.close(0)
    maker.open(3, tokens, SEEDED, prompt_length=17)
    maker.open(0, PROMPTS[0])
    run_ahead(server, [{3: 10}, {3: len(tokens) - 10, 0: 30}, {1: 1, 0: 11}])
    run_ahead(server, [{0: 1, 3: 1}, {1: 1}] * 3)
    return {slot: each.tokens for slot, each in maker.slots.items()}


def test_graphs_give_what_those_of_one_gpu_give(llama: Path) -> None:
    """A preempted sequence goes on in another slot, and another one has its place."""

    def run(server: RankServer) -> dict[int, list[int]]:
        found = preempt(server)
        before = [gpu.loader.launches.copy() for gpu in server.gpus]
        server.maker.step({1: 1})
        for gpu, known in zip(server.gpus, before, strict=True):
            assert set(gpu.loader.launches - known) <= {"all_gather"}  # that of the logits
        return found

    options = {"max_num_seqs": 4, "num_pages": 64}
    expected, logits = on_one(llama, run, **options)
    found, own = on_stages(llama, run, 2, **options)
    assert found == expected
    assert_same_bits(own, logits)


def test_pages_go_to_the_host_and_come_back(llama: Path) -> None:
    def move(server: RankServer) -> tuple[list[int], list[int]]:
        assert server.loaded.num_host_pages == 8
        return outputs_over_moved_pages(server.maker, [*PROMPTS[0], *PROMPTS[3]][:60], 16)

    options = {"pipeline_parallel_size": 2, "kv_offloading_bytes": 8 * PAGE_BYTES, **EAGER}
    before, after = serve_on_ranks(llama, 1, move, **options)
    assert before == after


def test_a_stage_may_have_several_ranks(llama: Path) -> None:
    def run(server: RankServer) -> RankServer:
        preempt(server)
        return server

    server = serve_on_ranks(llama, 2, run, pipeline_parallel_size=2, **EAGER)
    assert server.loaded.computing.endswith("bfloat16, stages of 1 + 1 layers, 4 ranks")
    check(Judge(llama), server, {3: 17}, SEEDED)
    check(Judge(llama), server, {0: 41, 1: 5})


def test_each_stage_builds_the_kernels_that_it_loads(tmp_path: Path) -> None:
    folder = make_tiny("qwen2_window", tmp_path, head_dim=64)
    options = {"pipeline_parallel_size": 2, "max_lora_rank": 8, "max_loras": 2}
    server = serve_on_ranks(folder, 1, lambda server: server, **options)
    for gpu in server.gpus:
        assert gpu.built == gpu.loader.loaded
        assert "draw_tokens" not in {each.name for each in gpu.built}
    assert (server.loaded.num_stages, server.loaded.lends_pages) == (2, False)
    with pytest.raises(ModelLoadError, match="weights of several ranks can't be exchanged"):
        server.loaded.read_weights(open_model(folder))


def test_there_are_as_many_pages_as_fit_on_each_gpu(llama: Path) -> None:
    of_stage = PAGE_BYTES // 2
    gpus = [FakeGpu(pages_measured=8, page_bytes=of_stage, held=held * MIB) for held in (10, 25)]
    options = {"num_pages": 0, "pipeline_parallel_size": 2, **EAGER}
    loaded = serve_on_ranks(llama, 1, lambda server: server.loaded, gpus=gpus, **options)
    assert loaded.num_pages == (48 * MIB - gpus[1].held - gpus[1].activations) // of_stage


def test_the_bytes_of_a_cache_are_for_all_stages(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, head_dim=64, num_hidden_layers=4)
    options = {"pipeline_parallel_size": 2, "pipeline_parallel_layers": [3, 1], "num_pages": 0}
    asked = {"kv_cache_memory_bytes": 24 * 2 * PAGE_BYTES, **EAGER}
    loaded = serve_on_ranks(folder, 1, lambda server: server.loaded, **options, **asked)
    assert loaded.num_pages == 24


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_stages_have_the_weights_of_the_model(family: str, tmp_path: Path) -> None:
    """The last one has a tied embedding too."""
    files = open_model(make_tiny(family, tmp_path))
    message = start(tmp_path, pipeline_parallel_size=2)
    ranks = [
        CudaRank(RankLink(0, []), Alone(), part_of_rank(message, files.native, n)) for n in (0, 1)
    ]

    def num_bytes(rank: SoleRank) -> int:
        model = ModelToLoad(
            files=files,
            limits=serving_limits(),
            dtype=torch.bfloat16,
            serves_adapters=False,
            rank=rank,
        )
        return model.weight_bytes

    config = files.native
    twice = 2 * config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert sum(map(num_bytes, ranks)) == num_bytes(SoleRank()) + twice


def test_an_adapter_may_have_nothing_for_a_stage(llama: Path, tmp_path: Path) -> None:
    config = open_model(llama).native
    adapter = read_adapter(make_adapter(llama, tmp_path), config, 8)
    updates = {each: update for each, update in adapter.updates.items() if each[0] == 1}
    adapter = attrs.evolve(adapter, updates=updates)
    part = part_of_rank(start(llama, pipeline_parallel_size=2), config, 0)
    own = adapter_part(adapter, part)
    packed = PackedAdapter.of(own, part.config(), torch.bfloat16, torch.device("cpu"))
    assert not own.updates
    assert packed.entries.shape[0]


def test_a_stage_that_cannot_load_its_part_says_why(llama: Path) -> None:
    gpus = [FakeGpu(), FakeGpu(fails_in="build")]
    with pytest.raises(ModelLoadError, match="the kernels can't be built: decode_attention needs"):
        serve_on_ranks(llama, 1, lambda server: server, gpus=gpus, pipeline_parallel_size=2)


def test_torch_draws_where_there_are_no_compiled_kernels(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(isa: str, on_progress: object) -> None:
        raise LibraryBuildError("there is no compiler")

    monkeypatch.setattr(stage_loading, "load_library", refuse)
    sampler = stage_loading.make_host_sampler(start(llama), VOCAB, 1, unseen)
    assert isinstance(sampler, TorchSampler)
    assert sampler.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kv_offloading_dir": "/tmp/pages"}, "2 doesn't go with --kv-offloading-dir on a GPU"),
        ({"hands_over": True}, "2 doesn't go with --disaggregation on a GPU"),
        ({"speculative": NGRAM}, "2 doesn't go with --speculative-config"),
        ({"tensor_parallel_size": 2, "deterministic": True}, "--tensor-parallel-size 2 doesn't go"),
        ({"tensor_parallel_slices": 4}, "--tensor-parallel-slices 4 is for .* on a CPU$"),
        ({"pipeline_parallel_layers": [2, 1]}, "layers has 3 layers, and the model 2"),
    ],
)
def test_what_stages_do_not_serve_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], line: str
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(loading, "choose_device", lambda *each: asked.append(each) or "cuda:0")
    message = start(llama, pipeline_parallel_size=2, **options)
    with pytest.raises(ModelLoadError, match=line):
        loading.load(message, unseen)
    assert asked == [("cuda", message.num_ranks)]

"""Tensor parallel over kernels: what ranks compute together is what the whole model gives.

The ranks are threads with emulated GPUs. They load the model as a worker's processes do. Tokens are
judged as in tests/kernels/test_whole_model.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from gpu.attention.shared_prefix import PrefixCost
from gpu.cuda import attention_packing as packing
from gpu.cuda.loading import load_model
from gpu.cuda.ranks import CudaRank
from gpu.kernels.emulation import EmulatedLoader
from gpu.loading.loaded_model import unseen
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Alone
from tests.kernels.rank_process import BOTH, PLANS
from tests.kernels.rank_serving import NUM_PAGES, RankServer, serve_on_ranks
from tests.kernels.serving import Judge
from tests.kernels.tape import TapedLoader
from tests.kernels.test_adjusted_model import check_greedy, check_prompts
from tests.kernels.test_cuda_loading import MIB, PAGE_BYTES, FakeGpu, start
from tests.kernels.test_experts import MARGIN as MARGIN_OF_EXPERTS
from tests.kernels.test_pooled_model import LEAST_COSINE, LEAST_ROW_COSINE, cosine
from tests.kernels.test_whole_model import (
    FP8_MARGIN,
    MARGIN,
    MODELS,
    PROMPTS,
    SEEDED,
    check,
    make_model,
    preempt,
    run_ahead,
)
from tests.support.adjusters import ToyAdjuster, chained
from tests.support.lora_adapters import make_adapter, merge
from tests.support.plans import GREEDY, outputs_over_moved_pages
from tests.support.thread_ranks import links_of
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import StepResult, floats


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory)


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory)


def open_two(server: RankServer) -> None:
    server.maker.open(0, PROMPTS[3])
    server.maker.open(1, PROMPTS[1])


def fly(server: RankServer) -> RankServer:
    """Run plans with two in flight."""
    open_two(server)
    given = run_ahead(server, PLANS)
    assert [len(step.get(0, [])) for step in given] == [0, 1, 1, 1, 0, 0, 1, 1]
    return server


@pytest.mark.parametrize("eager", [False, True])
def test_two_plans_in_flight_on_two_ranks(folder: Path, eager: bool) -> None:
    server = serve_on_ranks(folder, 2, fly, enforce_eager=eager)
    check(Judge(folder), server, {0: 66, 1: 5})


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_four_ranks(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two heads of keys and values for four ranks, and four."""
    folder = make_model(family, tmp_path_factory)
    check(Judge(folder), serve_on_ranks(folder, 4, fly), {0: 66, 1: 5})


@pytest.mark.parametrize("family", ["qwen2_window", "smollm3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Layers with a window beside layers without one; tied embeddings, layers without rotation."""
    folder = make_tiny(family, tmp_path, head_dim=64)
    check(Judge(folder), serve_on_ranks(folder, 2, fly), {0: 66, 1: 5})


def last_logits(server: RankServer, rows: int) -> torch.Tensor:
    executor: Any = server.loaded.executor
    return executor._forward.logits[:rows].clone()


def test_logits_are_those_of_one_rank(llama: Path) -> None:
    def logits(server: RankServer) -> torch.Tensor:
        server.maker.open(0, PROMPTS[3])
        server.maker.open(1, PROMPTS[0])
        server.maker.step({0: 66, 1: 41})
        return last_logits(server, 2)

    gpu = FakeGpu()
    message = start(llama, max_num_batched_tokens=128, max_num_seqs=4, num_pages=NUM_PAGES)
    loaded = load_model(gpu, message, open_model(llama), torch.bfloat16, unseen)
    alone = logits(RankServer.of(loaded, [gpu], 128))
    for size in (2, 4):
        together = serve_on_ranks(llama, size, logits)
        assert together.shape == alone.shape
        # A standard deviation of 1.6, of which bfloat16 moves them by 0.05.
        assert float((together - alone).abs().max()) < 2 * MARGIN


def test_all_of_a_decode_step_is_in_graphs(llama: Path) -> None:
    """Sums over all ranks are launched by the replay alone, on each of them."""

    def launched(server: RankServer) -> list[int]:
        open_two(server)
        server.maker.step({0: 66, 1: 5})
        before = [gpu.loader.launches.copy() for gpu in server.gpus]
        server.maker.step(BOTH)
        assert before[0]["all_reduce"] > 0
        return [
            (gpu.loader.launches - known).total()
            for gpu, known in zip(server.gpus, before, strict=True)
        ]

    assert serve_on_ranks(llama, 2, launched) == [0, 0]
    eager = serve_on_ranks(llama, 2, launched, enforce_eager=True)
    assert eager[0] - 4 == eager[1] > 0  # without the sampler's kernels


def test_each_rank_builds_the_kernels_that_it_loads(llama: Path) -> None:
    server = serve_on_ranks(llama, 2, fly, max_lora_rank=8, max_loras=2)
    first, second = server.gpus
    assert first.built == first.loader.loaded
    assert second.built == second.loader.loaded
    assert {each.name for each in first.built - second.built} == {
        *("mark_tokens", "scan_logits", "draw_tokens", "top_logprobs")
    }


def test_preempted_and_opened_again(llama: Path) -> None:
    def run(server: RankServer) -> RankServer:
        preempt(server)
        return server

    server, judge = serve_on_ranks(llama, 2, run), Judge(llama)
    check(judge, server, {3: 17}, SEEDED)
    check(judge, server, {1: 5})


def test_state_that_has_no_place_in_the_step_buffer(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.cuda.state.MAX_UPDATES", 1)
    check(Judge(llama), serve_on_ranks(llama, 2, fly), {0: 66, 1: 5})


@pytest.fixture
def eager_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows share every prefix, for short ones don't pay."""
    monkeypatch.setattr(
        packing, "PrefixCost", functools.partial(PrefixCost, launch=0.0, bandwidth=1.0)
    )


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("eager", [False, True])
def test_a_shared_prefix(llama: Path, eager: bool) -> None:
    def share(server: RankServer) -> RankServer:
        maker, prompt = server.maker, PROMPTS[3]
        maker.open(0, prompt)
        maker.step({0: 66})
        for slot, num_pages in ((1, 4), (2, 2)):
            pages = maker.slots[0].pages[:num_pages]
            maker.open(slot, prompt[: num_pages * 16] + PROMPTS[1][:3], shared_pages=pages)
        maker.step({0: 1, 1: 3, 2: 3})
        for _ in range(3):
            maker.step(dict.fromkeys(range(3), 1))
        return server

    server = serve_on_ranks(llama, 2, share, enforce_eager=eager)
    assert all(gpu.loader.launches["prefix_attention"] for gpu in server.gpus)
    check(Judge(llama), server, {0: 66, 1: 67, 2: 35})


def test_an_fp8_cache(llama: Path) -> None:
    server, judge = serve_on_ranks(llama, 2, fly, kv_cache_dtype="fp8"), Judge(llama)
    for slot, length in ((0, 66), (1, 5)):
        judge.check(server.maker.slots[slot].tokens, length, GREEDY, margin=FP8_MARGIN)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_pages_go_to_the_host_and_come_back(llama: Path, kv_cache_dtype: str) -> None:
    def move(server: RankServer) -> tuple[list[int], list[int]]:
        assert server.loaded.num_host_pages == 8
        return outputs_over_moved_pages(server.maker, [*PROMPTS[0], *PROMPTS[3]][:60], 16)

    fp8 = kv_cache_dtype == "fp8"
    page_bytes = PAGE_BYTES * (68 if fp8 else 128) // 128
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_offloading_bytes": 8 * page_bytes}
    before, after = serve_on_ranks(llama, 2, move, **options)
    assert before == after


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_experts_in_parts_and_whole(family: str, by_expert: bool, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, head_dim=64, norm_topk_prob=True)
    server = serve_on_ranks(folder, 2, fly, enable_expert_parallel=by_expert)
    check(Judge(folder), server, {0: 66, 1: 5}, margin=MARGIN_OF_EXPERTS)


def results_of(server: RankServer, plans: list[dict[int, int]]) -> list[StepResult]:
    """Run plans, two in flight where the runner accepts the second; their results."""
    results = []

    def finish() -> None:
        results.append(server.runner.finish())
        server.maker.accept(results[-1])

    for rows in plans:
        if not server.runner.accepts or server.runner.num_pending == 2:
            finish()
        server.runner.submit(server.maker.plan(rows))
    while server.runner.num_pending:
        finish()
    return results


def test_masks_that_need_the_last_token(llama: Path) -> None:
    """Draws are deferred on rank 0, which alone has masks."""

    def adjusted(server: RankServer) -> RankServer:
        server.maker.open(0, PROMPTS[0], chained(GREEDY))
        server.maker.open(1, PROMPTS[1])
        results_of(server, [{0: 41, 1: 5}, *[BOTH] * 5, {1: 1}, *[BOTH] * 2])
        return server

    server = serve_on_ranks(llama, 2, adjusted, adjuster=ToyAdjuster(300))
    judge = Judge(llama)
    check_greedy(judge, server.maker.slots[0].tokens, 41, 0)
    check(judge, server, {1: 5})


def test_log_probabilities_of_prompts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A slice of eleven rows of logits: a prompt takes several.
    monkeypatch.setattr("gpu.sampling.prompt_logprobs.SLICE_BYTES", 4 * 300 * 11)
    asks = attrs.evolve(GREEDY, prompt_logprobs=3, logprobs=1, logprob_token_ids=[8, 2])

    def report(server: RankServer) -> list[StepResult]:
        server.maker.open(0, PROMPTS[0], asks, prompt_logprobs_from=1, context_logits_from=0)
        server.maker.open(1, PROMPTS[2], asks, prompt_logprobs_from=1)
        return results_of(server, [{0: 20}, {0: 20, 1: 17}, {0: 1, 1: 1}, BOTH])

    results = serve_on_ranks(llama, 2, report)
    check_prompts(Judge(llama), results, {0: PROMPTS[0], 1: PROMPTS[2]})
    pieces = [floats(piece.rows).reshape(-1, 300) for each in results for piece in each.tensors]
    logits = torch.from_numpy(np.concatenate(pieces))
    wanted = Judge(llama).logits(PROMPTS[0]).float()
    assert float(torch.cosine_similarity(logits, wanted).min()) > LEAST_ROW_COSINE


def test_vectors_of_prompts(llama: Path) -> None:
    def pool(server: RankServer) -> list[StepResult]:
        server.maker.open(0, PROMPTS[1])
        server.maker.open(1, PROMPTS[0], attrs.evolve(GREEDY, pooling="mean"))
        return results_of(server, [{0: 5, 1: 20}, {0: 1, 1: 21}, {0: 1}])

    results = serve_on_ranks(llama, 2, pool)
    wanted = Judge(llama).hidden(PROMPTS[0]).mean(0)
    assert cosine(results[1].pooled[0], wanted) > LEAST_COSINE


@pytest.mark.parametrize("eager", [False, True])
def test_adapters_come_and_go(llama: Path, tmp_path: Path, eager: bool) -> None:
    """Two have room on a device, and the third takes the place of one that was unloaded."""
    paths = [make_adapter(llama, tmp_path / str(n), seed=n, rank=3 * n) for n in (1, 2, 3)]

    def load(server: RankServer, number: int) -> None:
        path = str(paths[number - 1])
        asked = {"number": number, "path": path, "checksum": ""}
        assert server.loaded.adapters is not None
        assert "error" not in server.loaded.adapters.load(asked)

    options = {"max_lora_rank": 16, "max_loras": 2, "enforce_eager": eager}

    def all_steps(server: RankServer) -> dict[int, list[int]]:
        maker, adapters = server.maker, server.loaded.adapters
        assert adapters is not None
        load(server, 1)
        load(server, 2)
        for slot in (0, 1, 2):
            maker.open(slot, PROMPTS[slot], adapter=slot)
        run_ahead(server, [{0: 41, 1: 5, 2: 10}, {0: 1, 1: 1, 2: 7}, *[{0: 1, 1: 1, 2: 1}] * 4])
        found = {0: maker.slots[0].tokens, 1: maker.slots[1].tokens}
        maker.close(1)
        maker.step({2: 1})
        adapters.unload(1)
        load(server, 3)
        maker.open(3, PROMPTS[3], adapter=3)
        run_ahead(server, [{2: 1, 3: 66}, *[{2: 1, 3: 1}] * 4])
        return found | {slot: maker.slots[slot].tokens for slot in (2, 3)}

    found = serve_on_ranks(llama, 2, all_steps, **options)
    for slot, tokens in found.items():
        merged = merge(llama, paths[slot - 1], tmp_path / f"merged-{slot}") if slot else llama
        Judge(merged).check(tokens, len(PROMPTS[slot]), GREEDY, margin=2 * MARGIN)
    assert sum(map(len, found.values())) - sum(map(len, PROMPTS)) == 6 + 6 + 11 + 5


def test_there_are_as_many_pages_as_fit_on_each_gpu(llama: Path) -> None:
    gpus = [FakeGpu(pages_measured=8), FakeGpu(pages_measured=8, held=25 * MIB)]
    of_rank = PAGE_BYTES // 2
    for gpu in gpus:
        gpu.page_bytes = of_rank
    options = {"num_pages": 0, "enforce_eager": True}
    server = serve_on_ranks(llama, 2, lambda server: server, gpus=gpus, **options)
    left = 48 * MIB - gpus[1].held - gpus[1].activations
    assert server.loaded.num_pages == left // of_rank
    assert server.loaded.computing == "CUDA kernels, weights in bfloat16, 2 ranks"


def test_the_bytes_of_a_cache_are_for_all_ranks(llama: Path) -> None:
    options = {"num_pages": 0, "kv_cache_memory_bytes": 24 * PAGE_BYTES}
    loaded = serve_on_ranks(llama, 2, lambda server: server.loaded, **options)
    assert loaded.num_pages == 24


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        (FakeGpu(fails_in="build"), "the kernels can't be built: decode_attention needs more"),
        (FakeGpu(total=MIB // 8), "the weights take 0.0 GiB"),
    ],
)
def test_a_rank_that_cannot_load_its_part_says_why(llama: Path, gpu: FakeGpu, line: str) -> None:
    for gpus in ([gpu, FakeGpu()], [FakeGpu(), gpu]):
        with pytest.raises(ModelLoadError, match=line):
            serve_on_ranks(llama, 2, lambda server: server, gpus=gpus)


@pytest.mark.parametrize(
    ("fails_in", "line"),
    [
        ("step", "no memory is left for a step of 128 tokens"),
        ("cache", "a KV cache of 64 pages doesn't fit"),
        ("graphs", "no memory is left for the CUDA graphs"),
    ],
)
def test_rank_0_says_what_does_not_fit(llama: Path, fails_in: str, line: str) -> None:
    """The others wait for it meanwhile, and end with it."""
    with pytest.raises(ModelLoadError, match=line):
        gpus = [FakeGpu(fails_in=fails_in), FakeGpu()]
        serve_on_ranks(llama, 2, lambda server: server, gpus=gpus)


def test_another_rank_ends_where_rank_0_waits_for_it(llama: Path) -> None:
    """It can't tell rank 0, so it mustn't wait to be ended, as it does where all have agreed."""
    links = links_of(2)
    for link, error in zip(links, (ModelLoadError, RuntimeError), strict=True):
        rank = CudaRank(link, Alone(), ModelPart(open_model(llama).native, link.rank, 2))
        with pytest.raises(error, match="no memory") as caught, rank.in_step():
            raise ModelLoadError("no memory")
        assert type(caught.value) is error


def test_gpus_of_a_worker_are_alike(llama: Path) -> None:
    class Larger(EmulatedLoader):
        @property
        def num_multiprocessors(self) -> int:
            return 7

    gpus = [FakeGpu(), FakeGpu(loader=TapedLoader(Larger()))]
    with pytest.raises(
        ModelLoadError, match=r"2 GPUs .* alike, and these have 4, 7 multiprocessors"
    ):
        serve_on_ranks(llama, 2, lambda server: server, gpus=gpus)


def test_other_weights_are_refused(llama: Path) -> None:
    loaded = serve_on_ranks(llama, 2, lambda server: server.loaded)
    with pytest.raises(ModelLoadError, match="weights of several ranks can't be exchanged"):
        loaded.read_weights(open_model(llama))


def test_pages_are_copied_in_the_order_of_the_steps(llama: Path) -> None:
    """A page of a prompt is copied while nothing is computed, and its copy is read."""

    def copy(server: RankServer) -> list[int]:
        maker = server.maker
        maker.open(0, PROMPTS[3])
        maker.step({0: 66})
        moved = [maker.free.pop() for _ in range(4)]
        maker.copies += zip(maker.slots[0].pages[:4], moved, strict=True)
        maker.step({})
        maker.open(1, PROMPTS[3], shared_pages=moved)
        maker.step({1: 2, 0: 1})
        for _ in range(4):
            maker.step(BOTH)
        firsts = [maker.slots[slot].tokens[66:71] for slot in (0, 1)]
        assert firsts[0] == firsts[1]
        return firsts[0]

    tokens = serve_on_ranks(llama, 2, copy)
    Judge(llama).check([*PROMPTS[3], *tokens], 66, GREEDY, margin=MARGIN)
    assert np.min(tokens) >= 0

"""The runner over kernels gives the tokens of the reference, whatever plans make of a request.

Every output is judged by the same model in float32 (tests/kernels/serving.py): a token is right if
the reference draws it after the same tokens, or would with its logit raised by a margin. The margin
is a few times what bfloat16 moves these logits by: a standard deviation of 0.02 to 0.05, with
kernels as with torch, of logits with one of 1.6.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import attrs
import pytest
import torch

from gpu.attention.shared_prefix import PrefixCost
from gpu.cuda import attention_packing as packing
from gpu.kernels import KernelLoader
from tests.kernels.serving import PAGE_SIZE, Judge, Planned, Server
from tests.support.plans import GREEDY, outputs_over_moved_pages
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import StepResult, floats, ints

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "mistral": ("mistral", {"num_key_value_heads": 4, "sliding_window": 24}),
}
MARGIN = 0.1
FP8_MARGIN = 0.5
PROMPTS = [
    [(7 * i * i + 3 * i + 11 * k) % 300 for i in range(length)]
    for k, length in enumerate((41, 5, 17, 66))
]
SEEDED = SamplerParams(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    seed=1234,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    logit_bias={17: 2.0, 250: -3.0},
)


def make_model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[name]
    return make_tiny(family, tmp_path_factory.mktemp(name), head_dim=64, **changes)


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory)


def check(
    judge: Judge,
    server: Planned,
    prompts: dict[int, int],
    params: SamplerParams = GREEDY,
    *,
    margin: float = MARGIN,
) -> None:
    """Judge the slots of ``prompts``, slot -> length of its prompt."""
    near_ties = total = 0
    for slot, length in prompts.items():
        tokens = server.maker.slots[slot].tokens
        near_ties += judge.check(tokens, length, params, margin=margin)
        total += len(tokens) - length
    assert total
    assert near_ties <= max(1, total // 6)


@pytest.mark.parametrize("graphs", [False, True])
def test_chunks_and_mixed_batches(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    server = Server.of(folder, loader, graphs=graphs)
    maker = server.maker
    maker.open(0, PROMPTS[0])
    assert maker.step({0: 20})[0] == []
    maker.open(1, PROMPTS[1])
    maker.step({0: 7, 1: 5})
    # Slot 0 computes one token of its prompt and draws none, beside one row that does and in a step
    # with longer ones.
    assert [len(drawn) for drawn in maker.step({0: 1, 1: 1}).values()] == [0, 1]
    maker.open(2, PROMPTS[2])
    maker.step({1: 1, 0: 1, 2: 3})
    maker.step({1: 1, 0: 12, 2: 14})
    for _ in range(5):
        maker.step({0: 1, 1: 1, 2: 1})
    assert [len(maker.slots[slot].tokens) for slot in (0, 1, 2)] == [47, 14, 23]
    check(Judge(folder), server, {0: 41, 1: 5, 2: 17})


def test_a_replayed_step_launches_nothing_itself(llama: Path, loader: KernelLoader) -> None:
    server = Server.of(llama, loader, graphs=True)
    server.maker.open(0, PROMPTS[1])
    server.maker.step({0: 5})
    before = server.loader.num_launches
    server.maker.step({0: 1})
    assert server.loader.num_launches == before
    eager = Server.of(llama, loader)
    eager.maker.open(0, PROMPTS[1])
    eager.maker.step({0: 5})
    before = eager.loader.num_launches
    eager.maker.step({0: 1})
    assert eager.loader.num_launches > before


@pytest.mark.parametrize("num_rows", [1, 3, 5, 6])
def test_every_batch_size_in_a_padded_graph(
    llama: Path, loader: KernelLoader, num_rows: int
) -> None:
    server = Server.of(llama, loader, graphs=True, max_num_seqs=6)
    lengths = {slot: 4 + 3 * slot for slot in range(num_rows)}
    for slot, length in lengths.items():
        server.maker.open(slot, PROMPTS[3][slot : slot + length])
    server.maker.step(lengths)
    for _ in range(3):
        server.maker.step(dict.fromkeys(lengths, 1))
    tokens = {slot: known.tokens for slot, known in server.maker.slots.items()}
    check(Judge(llama), server, {slot: len(tokens[slot]) - 4 for slot in lengths})


def run_ahead(server: Planned, plans: list[dict[int, int]]) -> list[dict[int, list[int]]]:
    """Run plans with two in flight; what each gave."""
    given = []
    for rows in plans:
        server.runner.submit(server.maker.plan(rows))
        if server.runner.num_pending == 2:
            given.append(server.maker.accept(server.runner.finish()))
    while server.runner.num_pending:
        given.append(server.maker.accept(server.runner.finish()))
    return given


@pytest.mark.parametrize("graphs", [False, True])
def test_two_plans_in_flight(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    server = Server.of(folder, loader, graphs=graphs)
    server.maker.open(0, PROMPTS[3])
    server.maker.open(1, PROMPTS[1])
    both = {0: 1, 1: 1}
    given = run_ahead(server, [{0: 30, 1: 5}, {0: 36, 1: 1}, both, both, {1: 1}, {}, both, both])
    assert [len(step.get(0, [])) for step in given] == [0, 1, 1, 1, 0, 0, 1, 1]
    check(Judge(folder), server, {0: 66, 1: 5})


def test_a_stop_that_is_noticed_a_step_late(llama: Path, loader: KernelLoader) -> None:
    first = Server.of(llama, loader, graphs=True)
    first.maker.open(0, PROMPTS[2])
    drawn = [first.maker.step({0: count})[0][0] for count in (17, 1, 1, 1)]
    assert len(set(drawn)) == 4
    server = Server.of(llama, loader, graphs=True)
    server.maker.open(0, PROMPTS[2], attrs.evolve(GREEDY, stop_ids=[drawn[1]]))
    server.maker.open(1, PROMPTS[1])
    steps = run_ahead(server, [{0: 17, 1: 5}, *[{0: 1, 1: 1}] * 4])
    assert [step[0] for step in steps] == [drawn[:1], drawn[1:2], [], [], []]
    server.maker.close(0)
    server.maker.open(0, PROMPTS[0])
    server.maker.step({0: 41, 1: 1})
    server.maker.step({0: 1, 1: 1})
    check(Judge(llama), server, {0: 41, 1: 5})


@pytest.fixture
def eager_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows share every prefix, for short ones don't pay."""
    monkeypatch.setattr(
        packing, "PrefixCost", functools.partial(PrefixCost, launch=0.0, bandwidth=1.0)
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.usefixtures("eager_sharing")
def test_a_shared_prefix(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    server = Server.of(folder, loader, graphs=graphs)
    maker, prompt = server.maker, PROMPTS[3]
    maker.open(0, prompt)
    maker.step({0: 66})
    for slot, num_pages in ((1, 4), (2, 4), (3, 2)):
        shared = maker.slots[0].pages[:num_pages]
        tail = PROMPTS[1][: slot + 2]
        maker.open(slot, prompt[: num_pages * PAGE_SIZE] + tail, shared_pages=shared)
    maker.step({0: 1, 1: 3, 2: 4, 3: 5})
    launched = server.loader.launches["prefix_attention"]
    for _ in range(4):
        maker.step(dict.fromkeys(range(4), 1))
    sharing = "mistral" not in str(folder)  # a window sees too little of a prefix
    if not graphs:
        assert (server.loader.launches["prefix_attention"] > launched) == sharing
    check(Judge(folder), server, {0: 66, 1: 67, 2: 68, 3: 37})


def preempt(server: Planned) -> None:
    """Close a slot among steps, and open its sequence again in another one."""
    maker = server.maker
    maker.open(0, PROMPTS[2], SEEDED)
    maker.open(1, PROMPTS[1])
    maker.step({0: 17, 1: 5})
    for _ in range(3):
        maker.step({0: 1, 1: 1})
    tokens = maker.slots[0].tokens
    maker.close(0)
    maker.step({1: 1})
    maker.open(3, tokens, SEEDED, prompt_length=17)
    maker.step({3: 10, 1: 1})
    maker.step({3: len(tokens) - 10, 1: 1})
    for _ in range(3):
        maker.step({3: 1, 1: 1})


def test_preempted_and_opened_again(llama: Path, loader: KernelLoader) -> None:
    server, judge = Server.of(llama, loader, graphs=True), Judge(llama)
    preempt(server)
    check(judge, server, {3: 17}, SEEDED)
    check(judge, server, {1: 5})


def test_seeds_and_penalties(folder: Path, loader: KernelLoader) -> None:
    server = Server.of(folder, loader, graphs=True)
    server.maker.open(0, PROMPTS[0], SEEDED)
    server.maker.open(1, PROMPTS[2])
    server.maker.step({0: 41, 1: 17})
    for _ in range(11):
        server.maker.step({0: 1, 1: 1})
    judge = Judge(folder)
    check(judge, server, {0: 41}, SEEDED)
    check(judge, server, {1: 17})


def test_log_probabilities(llama: Path, loader: KernelLoader) -> None:
    server = Server.of(llama, loader, graphs=True)
    maker, asks = server.maker, attrs.evolve(GREEDY, logprobs=3)
    maker.open(2, PROMPTS[0], asks)
    maker.open(0, PROMPTS[1])
    maker.open(1, PROMPTS[2], attrs.evolve(GREEDY, logprobs=0))
    steps: list[StepResult] = []
    for rows in ({0: 5, 2: 41, 1: 17}, {1: 1, 2: 1, 0: 1}):
        steps.append(server.runner.step(maker.plan(rows)))
        maker.accept(steps[-1])
    judge = Judge(llama)
    for step, result in enumerate(steps):
        slots = ints(result.slots).tolist()
        for row, slot in enumerate(slots):
            known = maker.slots[slot].tokens
            position = len(known) - len(steps) + step
            expected = judge.logits(known[:position])[-1].log_softmax(-1)
            logprob = float(floats(result.logprobs)[row])
            begin, end = ints(result.top_offsets)[row : row + 2].tolist()
            assert end - begin == {2: 3, 0: 0, 1: 0}[slot]
            if slot == 0:
                assert math.isnan(logprob)
                continue
            assert logprob == pytest.approx(float(expected[known[position]]), abs=MARGIN)
            for token, value in zip(
                ints(result.top_ids)[begin:end], floats(result.top_logprobs)[begin:end], strict=True
            ):
                assert value == pytest.approx(float(expected[token]), abs=MARGIN)
    assert int(ints(steps[0].slots)[0]) == 0


def test_an_fp8_cache_stays_within_a_margin(folder: Path, loader: KernelLoader) -> None:
    server = Server.of(folder, loader, graphs=True, kv_cache_dtype="fp8")
    server.maker.open(0, PROMPTS[3])
    server.maker.open(1, PROMPTS[1])
    server.maker.step({0: 40, 1: 5})
    server.maker.step({0: 26, 1: 1})
    for _ in range(8):
        server.maker.step({0: 1, 1: 1})
    judge = Judge(folder)
    for slot, length in ((0, 66), (1, 5)):
        tokens = server.maker.slots[slot].tokens
        near_ties = judge.check(tokens, length, GREEDY, margin=FP8_MARGIN)
        assert near_ties <= (len(tokens) - length) // 3


def test_float16(llama: Path, loader: KernelLoader) -> None:
    server = Server.of(llama, loader, dtype=torch.float16)
    server.maker.open(0, PROMPTS[2])
    server.maker.step({0: 17})
    for _ in range(4):
        server.maker.step({0: 1})
    check(Judge(llama, torch.float16), server, {0: 17}, margin=MARGIN / 4)


def test_batch_invariant_attention(llama: Path, loader: KernelLoader) -> None:
    server = Server.of(llama, loader, batch_invariant_attention=True)
    server.maker.open(0, PROMPTS[3])
    server.maker.open(1, PROMPTS[1])
    server.maker.step({0: 66, 1: 5})
    for _ in range(3):
        server.maker.step({0: 1, 1: 1})
    check(Judge(llama), server, {0: 66, 1: 5})


@pytest.mark.parametrize("page_size", [32, 64])
def test_larger_pages(llama: Path, loader: KernelLoader, page_size: int) -> None:
    server = Server.of(llama, loader, page_size=page_size)
    server.maker.open(0, PROMPTS[3])
    server.maker.open(1, PROMPTS[0])
    server.maker.step({0: 50, 1: 41})
    server.maker.step({0: 16, 1: 1})
    for _ in range(3):
        server.maker.step({0: 1, 1: 1})
    check(Judge(llama), server, {0: 66, 1: 41})


@pytest.mark.parametrize("family", ["qwen2_window", "smollm3"])
def test_layers_that_differ(
    family: str, loader: KernelLoader, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Serve layers with a window beside layers without one; some aren't rotated."""
    folder = make_tiny(family, tmp_path_factory.mktemp(family), head_dim=64)
    server = Server.of(folder, loader, graphs=True, max_num_seqs=2)
    server.maker.open(0, PROMPTS[0])
    server.maker.open(1, PROMPTS[1])
    server.maker.step({0: 30, 1: 5})
    server.maker.step({0: 11, 1: 1})
    for _ in range(4):
        server.maker.step({0: 1, 1: 1})
    check(Judge(folder), server, {0: 41, 1: 5})


@pytest.mark.parametrize("graphs", [False, True])
def test_a_row_without_a_token_to_draw(llama: Path, loader: KernelLoader, graphs: bool) -> None:
    server = Server.of(llama, loader, graphs=graphs, max_num_seqs=2)
    everything_masked = attrs.evolve(GREEDY, stop_ids=list(range(300)), min_tokens=9)
    server.maker.open(0, PROMPTS[1])
    server.maker.open(1, PROMPTS[2], everything_masked)
    # No token stands where slot 1's was to be drawn, on the device neither: the second plan, which
    # is in flight by then, computes from it for nothing.
    server.executor._state.history.fill_(-1)
    both = {0: 1, 1: 1}
    given = run_ahead(server, [{0: 5, 1: 17}, both, both, both])
    assert [step[1] for step in given] == [[-1], [], [], []]
    assert int(server.executor._state.history[1, 17]) == -1
    check(Judge(llama), server, {0: 5})


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("graphs", [False, True])
def test_pages_go_to_the_host_and_come_back(
    llama: Path, loader: KernelLoader, kv_cache_dtype: str, graphs: bool
) -> None:
    server = Server.of(
        llama, loader, kv_cache_dtype=kv_cache_dtype, graphs=graphs, num_host_pages=8
    )
    prompt = [*PROMPTS[0], *PROMPTS[3]]
    before, after = outputs_over_moved_pages(server.maker, prompt[:60], PAGE_SIZE)
    assert before == after

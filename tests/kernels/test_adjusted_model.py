"""Adjusted logits between forward pass and draw, over kernels and a whole small model.

The adjuster's masks depend on the last token (tests/support/adjusters.py), so with two plans in
flight draws are deferred; whatever is in flight, the tokens are the same.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import numpy as np
import pytest

from gpu.kernels import KernelLoader
from tests.kernels.serving import Judge, Server
from tests.support.adjusters import CLASSES, ToyAdjuster, chained, follows
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import StepResult, floats, ints

VOCAB = 300
MARGIN = 0.1
"""A few times what bfloat16 moves the logits by; see tests/kernels/test_whole_model.py."""
PROMPTS = [[(7 * i * i + 3 * i + 11 * k) % VOCAB for i in range(12 + 5 * k)] for k in range(4)]
SEEDED = SamplerParams(temperature=0.7, seed=5, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64, **heads)


@pytest.fixture
def server(folder: Path, loader: KernelLoader, request: pytest.FixtureRequest) -> Server:
    """With graphs or without, as the test's parameter says."""
    return Server.of(folder, loader, graphs=request.param, adjuster=ToyAdjuster(VOCAB))


def run(server: Server, plans: list[dict[int, int]], *, ahead: bool) -> list[dict[int, list[int]]]:
    """Run plans, with two in flight where the runner accepts the second; what each gave."""
    given = []
    for rows in plans:
        if not server.runner.accepts or server.runner.num_pending == 2:
            given.append(server.maker.accept(server.runner.finish()))
        server.runner.submit(server.maker.plan(rows))
        if not ahead:
            given.append(server.maker.accept(server.runner.finish()))
    while server.runner.num_pending:
        given.append(server.maker.accept(server.runner.finish()))
    return given


OPENED = [
    chained(GREEDY),
    SEEDED,
    attrs.evolve(GREEDY, extra_args={"bias": 100.0}),
    chained(SEEDED, length=5),  # its sixth draw finds nothing
]
ALL = dict.fromkeys(range(4), 1)
PLANS: list[dict[int, int]] = [
    {0: 12, 1: 17},
    {1: 1, 2: 22, 0: 1},
    {0: 1, 3: 26, 2: 1, 1: 1},
    {1: 1, 0: 1},
    *[ALL] * 3,
    {1: 1, 2: 1},
    {2: 1, 0: 1, 1: 1},
    *[ALL] * 3,
]


def tokens_of(server: Server, *, ahead: bool) -> list[list[int]]:
    """Return the tokens of four slots after ``PLANS``."""
    for slot, params in enumerate(OPENED):
        server.maker.open(slot, PROMPTS[slot], params)
    given = run(server, PLANS, ahead=ahead)
    assert len(given) == len(PLANS)
    return [server.maker.slots[slot].tokens for slot in range(4)]


@pytest.mark.parametrize("graphs", [False, True])
def test_one_and_two_plans_in_flight_give_the_same_tokens(
    folder: Path, loader: KernelLoader, graphs: bool
) -> None:
    one, two = (
        tokens_of(
            Server.of(folder, loader, graphs=graphs, adjuster=ToyAdjuster(VOCAB)), ahead=ahead
        )
        for ahead in (False, True)
    )
    assert one == two
    for slot in (0, 3):
        behind = one[slot][len(PROMPTS[slot]) - 1 :]
        assert all(follows(b, a) for a, b in itertools.pairwise(behind) if b >= 0)
    assert one[3][27 + 5 :] == [-1]
    assert all(token % 2 == 0 for token in one[2][22:])
    judge = Judge(folder)
    judge.check(one[1], 17, SEEDED, margin=MARGIN)
    for slot in (0, 2):
        check_greedy(judge, one[slot], len(PROMPTS[slot]), slot)


def check_greedy(judge: Judge, tokens: list[int], prompt_length: int, slot: int) -> None:
    """Assert that each token has the largest allowed logit, or nearly."""
    logits = judge.logits(tokens[:-1])
    ids = np.arange(VOCAB)
    for position in range(prompt_length, len(tokens)):
        chain = ids % CLASSES == (3 * tokens[position - 1] + 1) % CLASSES
        allowed = logits[position - 1][chain if slot == 0 else ids % 2 == 0]
        assert float(logits[position - 1, tokens[position]]) >= float(allowed.max()) - MARGIN


@pytest.mark.parametrize("server", [True], indirect=True)
def test_an_adjusted_step_replays_its_forward_pass(server: Server) -> None:
    server.maker.open(0, PROMPTS[0], chained(GREEDY))
    server.maker.open(1, PROMPTS[1])
    server.maker.step({0: 12, 1: 17})
    before = server.loader.num_launches
    server.maker.step({1: 1, 0: 1})
    assert server.loader.num_launches == before + 4  # the sampler's kernels
    server.maker.step({1: 1})
    assert server.loader.num_launches == before + 4


@pytest.mark.parametrize("server", [True], indirect=True)
def test_an_adjusted_row_beside_one_that_does_not_sample(server: Server, folder: Path) -> None:
    server.maker.open(0, PROMPTS[0], chained(GREEDY))
    server.maker.open(1, PROMPTS[3])  # the longer one; its logits come first
    given = run(server, [{0: 12, 1: 20}, *[{1: 1, 0: 1}] * 3], ahead=True)
    assert [len(step[1]) for step in given] == [0] * 4
    check_greedy(Judge(folder), server.maker.slots[0].tokens, 12, 0)


@pytest.mark.parametrize("server", [True], indirect=True)
def test_closed_slots_leave_the_adjuster(server: Server) -> None:
    server.maker.open(0, PROMPTS[0], chained(GREEDY))
    server.maker.step({0: 12})
    server.maker.close(0)
    server.maker.open(0, PROMPTS[0])
    server.maker.step({0: 12})
    before = server.loader.num_launches
    server.maker.step({0: 1})
    assert server.loader.num_launches == before  # both of its graphs were replayed


def check_prompts(judge: Judge, results: list[StepResult], prompts: dict[int, list[int]]) -> None:
    """Assert that each prompt token but the first has been reported on once."""
    seen = []
    for piece in (piece for result in results for piece in result.prompts):
        prompt = prompts[piece.slot]
        raw = judge.logits(prompt).log_softmax(-1)
        count = len(piece.logprobs) // 4
        top_ids = ints(piece.top_ids).reshape(count, 3)
        top_logprobs = floats(piece.top_logprobs).reshape(count, 3)
        of_ids = floats(piece.ids_logprobs).reshape(count, 2)
        for i, position in enumerate(range(piece.start, piece.start + count)):
            at = raw[position - 1]
            logprob = at[prompt[position]]
            seen.append((piece.slot, position))
            assert floats(piece.logprobs)[i] == pytest.approx(float(logprob), abs=MARGIN)
            assert ints(piece.ranks)[i] > int((at > logprob + MARGIN).sum())
            assert ints(piece.ranks)[i] <= 1 + int((at > logprob - MARGIN).sum())
            assert top_logprobs[i] == pytest.approx(at[top_ids[i].tolist()].numpy(), abs=MARGIN)
            assert top_logprobs[i] == pytest.approx(at.topk(3).values.numpy(), abs=MARGIN)
            assert of_ids[i] == pytest.approx(at[[8, 2]].numpy(), abs=MARGIN)
    wanted = [(slot, at) for slot, prompt in prompts.items() for at in range(1, len(prompt))]
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("server", [False, True], indirect=True)
def test_prompts_and_named_ids(server: Server, folder: Path) -> None:
    """In chunks of several tokens and of one, with draws of others beside them."""
    asks = attrs.evolve(GREEDY, prompt_logprobs=3, logprobs=1, logprob_token_ids=[8, 2])
    maker, judge = server.maker, Judge(folder)
    maker.open(0, PROMPTS[0])
    maker.open(1, PROMPTS[1], chained(asks), prompt_logprobs_from=1)
    maker.open(2, PROMPTS[2], attrs.evolve(asks, logprobs=-1), prompt_logprobs_from=1)
    results = []
    all_three = {2: 1, 1: 1, 0: 1}
    plans = [{0: 12, 2: 9, 1: 7}, {0: 1, 2: 1}, {0: 1, 1: 10}, {0: 1, 2: 12, 1: 1}, all_three]
    for rows in plans:
        if not server.runner.accepts or server.runner.num_pending == 2:
            results.append(server.runner.finish())
            maker.accept(results[-1])
        server.runner.submit(maker.plan(rows))
    while server.runner.num_pending:
        results.append(server.runner.finish())
        maker.accept(results[-1])
    check_prompts(judge, results, {slot: PROMPTS[slot] for slot in (1, 2)})
    assert [len(result.ids_logprobs) // 4 for result in results] == [0, 0, 2, 2, 2]
    tokens = maker.slots[1].tokens
    for position, result in zip((17, 18, 19), results[2:], strict=True):
        raw = judge.logits(tokens[:position])[-1].log_softmax(-1)
        row = ints(result.slots).tolist().index(1)
        index = int(ints(result.offsets)[row])
        begin, end = ints(result.ids_offsets)[index : index + 2].tolist()
        found = floats(result.ids_logprobs)[begin:end]
        assert found == pytest.approx(raw[[8, 2]].numpy(), abs=MARGIN)
        assert floats(result.logprobs)[index] == pytest.approx(
            float(raw[tokens[position]]), abs=MARGIN
        )

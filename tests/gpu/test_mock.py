"""``--mock-worker``: what it says, what a worker without a model gives, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import trio
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.cpu import compiled_loading, torch_loading
from gpu.loading import loading
from gpu.mock import MockExecutor, mock_num_pages, mock_text
from gpu.runner import Runner
from gpu.slots import SlotTable
from tests.gpu.test_worker import start_message
from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny
from trioserve import EngineError
from trioserve.cli import commands
from trioserve.cli.mock import mock_steps
from trioserve.cli.parser import parse
from trioserve.cli.usage import UsageError
from trioserve.model_files import open_model
from trioserve.protocol.wire import MockSteps, OpenSlot, Plan, from_ints, ints


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"))


def steps_of(text: str) -> MockSteps | None:
    return mock_steps(vars(parse(["serve", "--mock-worker", text])))


@pytest.mark.parametrize(
    ("text", "step", "token"),
    [
        ("10ms", 0.01, 0.0),
        ("0", 0.0, 0.0),
        ("250us", 0.00025, 0.0),
        ("1.5s", 1.5, 0.0),
        ("50000/s", 0.0, 0.00002),
        ("10ms,50000/s", 0.01, 0.00002),
        ("50000/s,10ms", 0.01, 0.00002),
    ],
)
def test_a_step_takes_a_time_or_its_tokens_a_rate(text: str, step: float, token: float) -> None:
    steps = steps_of(text)
    assert steps is not None
    assert attrs.astuple(steps) == pytest.approx((step, token))


@pytest.mark.parametrize(
    "text",
    ["", "10", "ten", "10ms,20ms", "5/s,6/s", "0/s", "10ms,", "2h", "9999s", "1e3/s"],
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--mock-worker must be") as refusal:
        steps_of(text)
    assert "\n" not in str(refusal.value)


def test_without_the_flag_there_is_no_mock_worker_and_only_serving_knows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mock_steps(vars(parse(["serve"]))) is None
    assert commands.main(["serve", "--mock-worker", "soon"]) == 2
    with pytest.raises(SystemExit):
        parse(["serve", "--help=all"])
    assert "compute nothing, to measure everything else" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(SystemExit):
        parse(["generate", "m", "--mock-worker", "1ms"])


def test_the_text_leaves_out_what_would_end_it(tiny: Path) -> None:
    files = open_model(tiny)
    whole = mock_text(files)
    assert len(whole) > 50
    assert whole.max() < files.config.vocab_size
    without = mock_text(files, stop_ids=[int(whole[0])])
    assert whole[0] not in without
    assert len(without) == (whole != whole[0]).sum()


def test_pages_are_enough_for_every_slot_up_to_a_bound() -> None:
    assert mock_num_pages(16, 100, 3) == 21
    assert mock_num_pages(1, 10**6, 10**6) == 1 << 18


async def complete(engine: Any, **options: Any) -> Any:
    return await engine.complete([3, 4, 5], **{"max_tokens": 40, "ignore_eos": True, **options})


def test_loading_reads_no_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the weights were loaded")

    # The two ways in which a worker on a CPU gets its weights.
    monkeypatch.setattr(torch_loading, "load_weights", refuse)
    monkeypatch.setattr(compiled_loading, "read_weights", refuse)
    with pytest.raises(AssertionError, match="were loaded"):
        loading.load(start_message(tiny), lambda *_: None)
    serving = loading.load(start_message(tiny, mock=MockSteps(step_seconds=0.0)), lambda *_: None)
    assert serving.ready.device == "mock"
    assert len(serving.runner.slots) == 0


async def test_a_real_worker_process_gives_the_text_at_its_pace(tiny: Path) -> None:
    text = mock_text(open_model(tiny), open_model(tiny).config.eos_token_ids)
    async with open_tiny_engine(tiny, mock=MockSteps(step_seconds=0.002)) as engine:
        assert engine.ready.device == "mock"
        began = trio.current_time()
        many = len(text) + 2  # all of it, and its beginning again
        completions = [await complete(engine, max_tokens=many), await complete(engine)]
        assert trio.current_time() - began >= (many + 40) * 0.002
        assert list(completions[0].token_ids) == [*text, text[0], text[1]]
        assert list(completions[1].token_ids) == list(text[:40])
        assert "lighthouse" in completions[0].text
        await assert_idle(engine)


async def test_a_request_that_needs_logits_is_refused_and_the_others_go_on(tiny: Path) -> None:
    async with open_tiny_engine(tiny, mock=MockSteps(step_seconds=0.001)) as engine:
        async with trio.open_nursery() as nursery:
            outcome: list[Any] = []

            async def other() -> None:
                outcome.append(await complete(engine, max_tokens=100))

            nursery.start_soon(other)
            with pytest.raises(EngineError, match="no log-probabilities"):
                await complete(engine, logprobs=1)
        assert len(outcome[0].token_ids) == 100


class Forbidden(TorchDispatchMode):
    """Inside it no torch operation may run."""

    def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} was called")


def test_a_step_calls_no_torch_operation() -> None:
    slots = SlotTable(num_pages=64, page_size=4, max_model_len=64, vocab_size=100)
    text = np.array([7, 8, 9], dtype=np.int32)
    runner = Runner(
        MockExecutor(MockSteps(step_seconds=0.0), text), slots, max_num_batched_tokens=8
    )
    opened = [
        OpenSlot(
            slot=slot,
            generation=1,
            tokens=from_ints([1, 2]),
            prompt_length=2,
            computed=0,
            pages=from_ints([slot]),
            sampler=GREEDY,
        )
        for slot in range(3)
    ]
    rows = {"row_slots": from_ints([0, 1, 2]), "row_counts": from_ints([2, 2, 1])}
    with pytest.raises(AssertionError, match="was called"), Forbidden():
        torch.zeros(1)
    with Forbidden():
        first = runner.step(Plan(number=1, opened=opened, **rows))
        rows = {"row_slots": from_ints([0, 1, 2]), "row_counts": from_ints([1, 1, 1])}
        second = runner.step(Plan(number=2, **rows))
    assert ints(first.tokens).tolist() == [7, 7]
    assert ints(first.offsets).tolist() == [0, 1, 2, 2]
    assert ints(second.tokens).tolist() == [8, 8, 7]

"""A step on the device that finds no memory, wherever in it: a Reset leaves nothing of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.kernels import KernelLoader
from tests.kernels.serving import PAGE_SIZE, Server
from tests.support.plans import PlanMaker
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import Plan, StepResult

PROMPTS = {0: list(range(3, 80)), 1: [9, 8, 7], 2: [5] * 40}
PARAMS = SamplerParams(temperature=0.8, seed=11, repetition_penalty=1.2, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("model"), head_dim=64)


def plans(first: int, step: Callable[[Plan], StepResult]) -> list[dict[int, list[int]]]:
    """Prefill three sequences in slots that may have held others, and decode."""
    maker = PlanMaker(step, page_size=PAGE_SIZE)
    maker.number = first - 1
    for slot, prompt in PROMPTS.items():
        maker.open(slot, prompt, PARAMS)
    counts = [{slot: len(prompt) for slot, prompt in PROMPTS.items()}, *([{0: 1, 1: 1, 2: 1}] * 3)]
    return [maker.step(each) for each in counts]


@pytest.mark.parametrize(
    "where",
    ["_buffer.upload", "_state.copy_large", "_forward.model.forward",
     "_forward.model.logits",
     "_sampler.launch", "_timeline.begin_sampling", "_timeline.end_step"],
)  # fmt: skip
def test_a_step_without_memory_leaves_nothing(
    folder: Path, loader: KernelLoader, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = plans(1, Server.of(folder, loader, graphs=True).runner.step)
    server = Server.of(folder, loader, graphs=True)
    part, _, name = where.rpartition(".")
    owner = operator.attrgetter(part)(server.executor)
    whole = getattr(owner, name)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    # Others are in the slots when it happens, in the midst of the prompts.
    maker = PlanMaker(server.runner.step, page_size=PAGE_SIZE)
    for slot in PROMPTS:
        maker.open(slot, [100 + slot] * (90 - 20 * slot), PARAMS)
    maker.step({0: 30, 1: 30, 2: 30})
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(torch.OutOfMemoryError):
        maker.step({0: 60, 1: 20, 2: 20})
    monkeypatch.setattr(owner, name, whole)
    server.runner.reset(50)
    assert len(server.runner.slots) == server.runner.slots.num_pages_used() == 0
    assert plans(50, server.runner.step) == expected

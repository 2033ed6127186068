"""The part of a step's work between the marks that time its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu.cuda.forward import PLAIN
from gpu.kernels import KernelLoader
from tests.kernels.serving import Server
from tests.support.adjusters import ToyAdjuster, chained
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny

PROMPT = [5, 17, 200, 31, 8, 90, 44]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("model"), head_dim=64)


def recorded(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which the calls of the steps from now on are added."""
    calls: list[str] = []

    def record(owner: Any, name: str, label: str) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(label)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    executor: Any = server.executor
    for name in ("begin_step", "begin_forward", "end_forward", "begin_sampling", "end_step"):
        record(executor._timeline, name, name)
    record(executor._buffer, "upload", "copy")
    record(executor._state, "copy_large", "copy")
    record(executor._forward, "replay", "forward")
    record(executor._forward, "run", "forward")
    record(executor._slot_options, "adjustment", "mask")
    record(executor._forward._ladders[PLAIN], "replay_sampling", "draw")
    record(executor._sampler, "launch", "draw")
    return calls


@pytest.mark.parametrize("graphs", [False, True])
def test_copies_and_masks_are_gaps(
    folder: Path, loader: KernelLoader, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    server = Server.of(folder, loader, graphs=graphs, adjuster=ToyAdjuster(300))
    maker = server.maker
    maker.open(0, PROMPT, GREEDY)
    maker.open(1, PROMPT[::-1], chained(GREEDY))
    maker.step({0: len(PROMPT), 1: len(PROMPT)})
    calls = recorded(server, monkeypatch)
    forward = ["begin_step", "copy", "copy", "begin_forward", "forward", "end_forward"]
    maker.step({0: 1})
    assert calls == [*forward, "begin_sampling", "draw", "end_step"]
    calls.clear()
    maker.step({0: 1, 1: 1})
    assert calls == [*forward, "mask", "begin_sampling", "draw", "end_step"]

"""What is heard of a model while transformers reads it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from gpu.transformers_models import reading
from gpu.transformers_models.reading import growing, read_model
from tests.transformers_models.models import FAMILIES, make_other


def test_memory_that_grows_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LOOK_SECONDS", 0.01)
    heard: list[tuple[str, int, int]] = []
    grown, size = threading.Event(), 64 << 20

    def hear(stage: str, done: int, total: int) -> None:
        heard.append((stage, done, total))
        if done >= size // 2:
            grown.set()

    with growing(2 * size, hear):
        kept = np.ones(size, dtype=np.uint8)
        assert grown.wait(60)
    assert kept[-1] == 1
    assert heard[0] == ("weights", 0, 2 * size)
    assert heard[-1] == ("weights", 2 * size, 2 * size)
    done = [each[1] for each in heard]
    assert done == sorted(done)
    assert {thread.name for thread in threading.enumerate()} & {"progress"} == set()


def test_an_error_in_between_is_the_end_of_it() -> None:
    heard: list[int] = []
    with pytest.raises(ZeroDivisionError):
        with growing(100, lambda stage, done, total: heard.append(done)):
            raise ZeroDivisionError
    assert 100 not in heard


def test_a_model_is_read_in_the_format_that_was_asked_for(tmp_path: Path) -> None:
    import torch

    from gpu.transformers_models import interface

    interface.register()
    folder = make_other(*FAMILIES["gpt_neox"], tmp_path)
    model = read_model(folder, "GPTNeoXForCausalLM", torch.bfloat16, lambda *_: None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training

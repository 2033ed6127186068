"""Log lines and errors while transformers reads a model."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from gpu.models.transformers_models import reading
from gpu.models.transformers_models.reading import read_model, reporting_growth
from tests.gpu.models.transformers_models.models import FAMILIES, make_other


def test_memory_that_grows_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinking memory, which pressure from elsewhere causes too, is none."""
    monkeypatch.setattr(reading, "LOOK_SECONDS", 0.001)
    sizes = iter([1000, 1010, 1005, 1010, 1040, 900, 2000])
    last = threading.Event()

    def resident() -> int:
        size = next(sizes, None)
        if size is None:
            last.set()
            return 0
        return size

    monkeypatch.setattr(reading, "_resident_bytes", resident)
    heard: list[tuple[str, int, int]] = []
    with reporting_growth(100, lambda *progress: heard.append(progress)):
        assert last.wait(60)
    assert heard == [("weights", done, 100) for done in (0, 10, 40, 99, 100)]
    assert {thread.name for thread in threading.enumerate()} & {"progress"} == set()


def test_the_memory_of_this_process() -> None:
    """Memory grows until that shows: what other tests give back meanwhile counts against it."""
    before, kept = reading._resident_bytes(), []
    while reading._resident_bytes() < before + (4 << 20):
        kept.append(np.ones(16 << 20, dtype=np.uint8))
        assert len(kept) < 64


def test_an_error_in_between_is_the_end_of_it() -> None:
    heard: list[int] = []
    with pytest.raises(ZeroDivisionError):
        with reporting_growth(100, lambda stage, done, total: heard.append(done)):
            raise ZeroDivisionError
    assert 100 not in heard


def test_a_model_is_read_in_the_format_that_was_asked_for(tmp_path: Path) -> None:
    import torch

    from gpu.models.transformers_models import interface

    interface.register()
    folder = make_other(*FAMILIES["gpt_neox"], tmp_path)
    model = read_model(folder, "GPTNeoXForCausalLM", torch.bfloat16, lambda *_: None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training

"""The logits processor of the documentation does what it says, in a real worker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines import assert_idle, open_tiny_engine
from tests.tiny_models import make_tiny
from trioserve import InvalidRequest, ModelLoadError

PAGE = Path(__file__).parent.parent / "docs" / "logits-processors.md"
NAME = "no_repeats:NoRepeatNgram"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "no_repeats.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return make_tiny("smollm2", tmp_path / "model")


def repeated(ids: Sequence[int], size: int) -> int:
    """How many runs of ``size`` tokens have occurred before."""
    runs = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(runs) - len(set(runs))


async def test_the_processor_of_the_page(folder: Path) -> None:
    async with open_tiny_engine(folder, logits_processors=(NAME,)) as engine:
        few = {"allowed_token_ids": list(range(40, 52))}
        options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, **few}
        plain = await engine.complete([3, 4, 5], **options)
        for size in (2, 3):
            completion = await engine.complete(
                [3, 4, 5], n=3, extra_args={"no_repeat_ngram": size}, **options
            )
            assert repeated(plain.token_ids, size) > 0
            assert [repeated(each.token_ids, size) for each in completion.outputs] == [0, 0, 0]
        again = await engine.complete([3, 4, 5], **options)
        assert again.token_ids == plain.token_ids
        with pytest.raises(InvalidRequest, match="integer from 2 to 8, got 9") as caught:
            await engine.complete([3], extra_args={"no_repeat_ngram": 9})
        assert caught.value.param == "extra_args"
        with pytest.raises(InvalidRequest, match="takes other"):
            await engine.complete([3], extra_args={"other": 1})
        await assert_idle(engine)


async def test_a_processor_that_is_not_there(folder: Path) -> None:
    wrong = "no_repeats:Nothing"
    with pytest.raises(ModelLoadError, match=f"--logits-processors {wrong}: no_repeats has no"):
        async with open_tiny_engine(folder, logits_processors=(wrong,)):
            pass

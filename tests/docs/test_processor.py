"""The logits processor of the documentation does what it says, in a real worker."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import InvalidRequest, ModelLoadError

PAGE = Path(__file__).parents[2] / "docs" / "logits-processors.md"
NAME = "no_repeats:NoRepeatNgram"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "no_repeats.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return make_tiny("smollm2", tmp_path / "model")


def repeated(ids: Sequence[int], size: int) -> int:
    """Return how many runs of ``size`` tokens have occurred before."""
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


async def test_drafts_change_nothing(folder: Path, tmp_path: Path) -> None:
    """Each draft is verified by what the processor makes of the logits in its place."""
    model = make_tiny("qwen3", tmp_path / "qwen3")
    few = {"allowed_token_ids": list(range(40, 52)), "logprobs": 2}
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "n": 3, **few}
    sizes: list[dict[str, Any]] = [{"extra_args": {"no_repeat_ngram": size}} for size in (2, 3)]
    engine_options: dict[str, Any] = {"dtype": "bfloat16", "logits_processors": (NAME,)}
    async with open_tiny_engine(model, **engine_options) as engine:
        plain = [await engine.complete([3, 4, 5], **options, **size) for size in sizes]
    engine_options["speculative_config"] = '{"method": "suffix", "adaptive": false}'
    async with open_tiny_engine(model, **engine_options) as engine:
        for _ in range(2):  # the second time, the outputs of the first are drafted
            drafted = [await engine.complete([3, 4, 5], **options, **size) for size in sizes]
            assert [each.outputs for each in drafted] == [each.outputs for each in plain]
        for completion in drafted:
            assert 20 < completion.usage.accepted_draft_tokens < completion.usage.draft_tokens
        await assert_idle(engine)


async def test_the_same_processor_for_single_requests(folder: Path) -> None:
    """A program names it where it asks; other requests don't meet it, and later workers have it."""
    async with open_tiny_engine(folder) as engine:
        few = {"allowed_token_ids": list(range(40, 52))}
        options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, **few}
        mine: dict[str, Any] = {"logits_processors": [NAME], "extra_args": {"no_repeat_ngram": 2}}
        plain = await engine.complete([3, 4, 5], **options)
        assert repeated(plain.token_ids, 2) > 0
        both: list[Sequence[int]] = []

        async def ask(**more: Any) -> None:
            both.append((await engine.complete([3, 4, 5], **options, **more)).token_ids)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(functools.partial(ask, **mine))
        assert sorted(repeated(ids, 2) > 0 for ids in both) == [False, True]
        await engine.release_memory()
        await engine.resume_memory()
        again = await engine.complete([3, 4, 5], **options, **mine)
        assert repeated(again.token_ids, 2) == 0
        for fields, param, message in (
            ({"extra_args": {"no_repeat_ngram": 2}}, "extra_args", "are for logits processors"),
            ({"logits_processors": [NAME]}, "extra_args", "takes no part"),
            ({"logits_processors": ["no_repeats:No"]}, "logits_processors", "no_repeats has no"),
            ({"logits_processors": ["no_repeats"]}, "logits_processors", "module:Class"),
            ({**mine, "extra_args": {"other": 1}}, "extra_args", "takes no part"),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                await engine.complete([3], **fields)
            assert caught.value.param == param
        await assert_idle(engine)


async def test_a_processor_that_is_not_there(folder: Path) -> None:
    wrong = "no_repeats:Nothing"
    with pytest.raises(ModelLoadError, match=f"--logits-processors {wrong}: no_repeats has no"):
        async with open_tiny_engine(folder, logits_processors=(wrong,)):
            pass

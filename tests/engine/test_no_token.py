"""A request with masks that leave no token ends alone, on a real worker with plans in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import InvalidRequest


@pytest.mark.parametrize("depth", [1, 2])
async def test_masks_that_leave_no_token(tmp_path: Path, depth: int) -> None:
    stop, letter = 2, 9
    async with open_tiny_engine(make_tiny("llama2", tmp_path), max_plans_in_flight=depth) as engine:
        lengths: list[int] = []
        masks: list[dict[str, Any]] = [
            {"allowed_token_ids": [stop], "stop_token_ids": [stop], "min_tokens": 3},
            {"allowed_token_ids": [letter], "bad_words": [engine.tokenizer.decode([letter])]},
        ]

        async def run_beside() -> None:
            params: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 1}
            completion = await engine.complete([5, 6, 7], **params)
            lengths.append(len(completion.token_ids))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_beside)
            for mask in masks:
                with pytest.raises(InvalidRequest, match="leaves no token to draw") as caught:
                    await engine.complete([3, 4, 5], n=2, max_tokens=10, **mask)
                assert caught.value.param == "allowed_token_ids"
        assert lengths == [60]
        assert engine.statistics().worker_restarts == 0
        await assert_idle(engine)

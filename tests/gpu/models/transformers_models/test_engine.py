"""The engine over a model that transformers computes in the worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.models.transformers_models.models import FAMILIES, make_other
from tests.support.engines import assert_idle, open_tiny_engine
from trioserve import InvalidRequest
from trioserve.protocol.grammar import Grammar


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other(*FAMILIES["olmoe"], tmp_path_factory.mktemp("olmoe"))


async def test_what_any_model_does(folder: Path, tmp_path: Path) -> None:
    """Use one engine for all of it, since its worker takes seconds to start."""
    prompt = list(range(3, 60))
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
    async with open_tiny_engine(
        folder, max_num_batched_tokens=16, block_size=4, max_plans_in_flight=2
    ) as engine:
        first = await engine.complete(prompt, **greedy, logprobs=2, prompt_logprobs=1)
        again = await engine.complete(prompt, **greedy)
        assert len(first.token_ids) == 12
        assert again.token_ids == first.token_ids
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens > 40

        seeded = [
            (await engine.complete(prompt, max_tokens=9, seed=7, temperature=1.5)).token_ids
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]

        chosen = await engine.complete(
            "Say yes or no:", grammar=Grammar("choice", '["yes", "no"]'), max_tokens=8
        )
        assert chosen.text in ("yes", "no")

        prefix, fields = FAMILIES["olmoe"]
        other = make_other(prefix, {**fields, "rms_norm_eps": 1e-3}, tmp_path / "other")
        with pytest.raises(InvalidRequest, match=r"rms_norm_eps is 0\.001 instead of 1e-05"):
            await engine.update_weights(str(other))
        same = make_other(prefix, fields, tmp_path / "same", seed=1)
        await engine.update_weights(str(same))
        after = await engine.complete(prompt, **greedy)
        assert after.token_ids != first.token_ids
        await assert_idle(engine)

"""Labels by a model that generates: their probabilities are transformers', however it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
import trio.testing

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.http_stub import server_config
from tests.support.rounding import apart, terms_of_folder
from tests.support.tiny_models import make_tiny
from trioserve import LLM
from trioserve.http import create_app
from trioserve.protocol.errors import DeadlineExceeded, InvalidRequest, RequestAborted
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

QUERY = "hello there, the cat is on the house, and"
ITEMS = [" the dog", " you", " the world is there"]
LABELS = [5, 270, 40]
LOGITS_SIZE = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


def room(folder: Path) -> float:
    """Bound the errors of probabilities, which are no larger than those of the logits."""
    return apart(terms_of_folder(folder, 60), LOGITS_SIZE)


def probabilities(folder: Path, texts: list[str]) -> Any:
    """[N, L]: of each label behind each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
            assert logits.std() < LOGITS_SIZE
            found.append(logits.softmax(-1)[LABELS].numpy())
    return np.stack(found)


async def test_probabilities_are_transformers(folder: Path) -> None:
    wanted = probabilities(folder, [QUERY + item for item in ITEMS])
    turned = probabilities(folder, [item + QUERY for item in ITEMS])
    async with open_tiny_engine(folder) as engine:
        found = await engine.score_labels(QUERY, ITEMS, LABELS)
        np.testing.assert_allclose(found.values, wanted, rtol=0, atol=room(folder))
        assert found.values.dtype == np.float32
        soft = await engine.score_labels(QUERY, ITEMS, LABELS, apply_softmax=True)
        shares = wanted / wanted.sum(1, keepdims=True)
        np.testing.assert_allclose(soft.values, shares, rtol=0, atol=2 * room(folder))
        first = await engine.score_labels(QUERY, ITEMS, LABELS, item_first=True)
        np.testing.assert_allclose(first.values, turned, rtol=0, atol=room(folder))
        one = await engine.score_labels(QUERY, ITEMS[0], LABELS)
        np.testing.assert_allclose(one.values, wanted[:1], rtol=0, atol=room(folder))
        assert one.usage.cached_tokens > 0  # The query's.
        ids = [engine.tokenizer.encode(text) for text in (QUERY, *ITEMS)]
        of_ids = await engine.score_labels(ids[0], ids[1:], LABELS)
        assert of_ids.usage.prompt_tokens == sum(len(ids[0]) + len(each) for each in ids[1:])
        client: Any = create_app(engine, server_config()).test_client()
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
        reply = await (await client.post("/v1/score", json=body)).get_json()
        np.testing.assert_allclose(reply["scores"], wanted, rtol=0, atol=room(folder))
        await assert_idle(engine)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ((QUERY, [[1, 2]], [1]), "query"),
        (([1, 2], "x", [1]), "query"),
        (([1, True], [[1]], [1]), "query"),
        ((QUERY, [], [1]), "items"),
        ((QUERY, 3, [1]), "items"),
        ((QUERY, ["x"] * 9, [1]), "items"),
        ((QUERY, "y" * 600, [1]), "items"),
        ((QUERY, "x", []), "label_token_ids"),
        ((QUERY, "x", [256]), "label_token_ids"),
    ],
)
async def test_what_is_refused(
    autojump_clock: trio.testing.MockClock, arguments: Any, param: str
) -> None:
    async with open_fake_engine(max_model_len=512, max_num_queued_reqs=8) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.score_labels(*arguments)
        assert refused.value.param == param


async def test_what_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0)) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.score_labels("x", ["a", "b"], [1], timeout=0.5)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(RequestAborted):
                    await engine.score_labels("x", ["a", "b"], [1], request_id="mine")

            nursery.start_soon(ask)
            await trio.sleep(0.5)
            assert engine.abort("mine", prefix=True) == 2
    async with open_fake_encoder() as engine:
        with pytest.raises(InvalidRequest, match="it embeds texts"):
            await engine.score_labels("x", "y", [1])


def test_in_a_script(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", device="cpu", num_threads=1) as llm:
        found = llm.score_labels(QUERY, ITEMS, LABELS)
    wanted = probabilities(folder, [QUERY + item for item in ITEMS])
    np.testing.assert_allclose(found.values, wanted, rtol=0, atol=room(folder))

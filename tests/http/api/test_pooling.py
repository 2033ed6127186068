"""Embeddings, scores, ranks and labels over HTTP, against a fake worker."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from quart_trio.testing import TrioClient

from tests.support.http_stub import captured_logs, server_config
from trioserve.http import create_app
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config, fake_vector
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_encoder, open_fake_engine

RANKER = fake_encoder_config("classify", labels=("relevant",))


@contextlib.asynccontextmanager
async def client_for(engine: Any, **options: Any) -> AsyncIterator[TrioClient]:
    async with engine as opened:
        client: Any = create_app(opened, server_config(**options)).test_client()
        yield client


async def post(client: TrioClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, await response.get_data(True)
    return json.loads(await response.get_data(True))


async def refused(client: TrioClient, path: str, status: int = 400, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == status, await response.get_data(True)
    return json.loads(await response.get_data(True))["error"]


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def expected(text: str, size: int = 16) -> Any:
    ids = np.array(ids_of(text), dtype=np.int32)
    return fake_vector(ids, np.zeros_like(ids), size)


def probability(query: str, document: str) -> float:
    return float(1 / (1 + np.exp(-expected(query + document, 1)[0])))


async def test_embeddings() -> None:
    async with client_for(open_fake_encoder()) as client:
        reply = await post(
            client, "/v1/embeddings", model="fake", input=["one", ids_of("two")], user="me"
        )
        assert (reply["object"], reply["model"]) == ("list", "fake")
        usage = {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
        assert reply["usage"] == usage
        assert [each["index"] for each in reply["data"]] == [0, 1]
        for each, text in zip(reply["data"], ("one", "two"), strict=True):
            np.testing.assert_allclose(each["embedding"], expected(text), rtol=1e-6)
        for given in ("one", ids_of("one"), ["one"], [ids_of("one")]):
            (each,) = (await post(client, "/v1/embeddings", input=given))["data"]
            np.testing.assert_allclose(each["embedding"], expected("one"), rtol=1e-6)
        (each,) = (await post(client, "/v1/embeddings", input="one", encoding_format="base64"))[
            "data"
        ]
        found = np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4")
        np.testing.assert_array_equal(found, expected("one"))
        (each,) = (await post(client, "/v1/embeddings", input="one", dimensions=4))["data"]
        cut = expected("one")[:4]
        np.testing.assert_allclose(each["embedding"], cut / np.linalg.norm(cut), rtol=1e-5)
        for name in ("normalize", "use_activation"):
            body = {name: True}
            (each,) = (await post(client, "/v1/embeddings", input="one", **body))["data"]
            assert np.linalg.norm(each["embedding"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "x", "dimensions": 17}, "dimensions", "from 1 to 16"),
        ({"input": []}, "input", ""),
        ({"input": [[]]}, "input[0]", ""),
        ({"input": [1, "x"]}, "input", "a text, a list of token ids, or a list"),
        ({"input": [256]}, "input", "outside 0 to 255"),
        ({"input": "x" * 513}, "input", "513 tokens: the model takes 512"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": ["x"] * 513}, "input", "--max-prompts-per-request"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format", ""),
        ({"input": "x", "priority": 1}, "priority", "isn't served"),
        ({"input": "x", "request_id": "a", "rid": "b"}, "rid", "at most one"),
        ({}, "input", "missing"),
        ({"input": "ab", "cache_salt": ""}, "cache_salt", "length >= 1"),
    ],
)
async def test_what_embeddings_refuse(body: Any, param: str, words: str) -> None:
    async with client_for(open_fake_encoder()) as client:
        error = await refused(client, "/v1/embeddings", **body)
        assert error["param"] == param
        assert words in error["message"]


async def test_long_texts_are_cut_where_that_is_asked_for() -> None:
    async with client_for(open_fake_encoder()) as client:
        reply = await post(client, "/v1/embeddings", input="x" * 600, truncate_prompt_tokens=-1)
        assert reply["usage"]["prompt_tokens"] == 512


async def test_encode_speaks_sglangs_language() -> None:
    async with client_for(open_fake_encoder()) as client:
        one = await post(client, "/encode", text="one", rid="mine")
        np.testing.assert_allclose(one["embedding"], expected("one"), rtol=1e-6)
        assert one["meta_info"]["id"] == "embd-mine"
        several = await post(client, "/encode", text=["three", "two"])
        np.testing.assert_allclose(several[1]["embedding"], expected("two"), rtol=1e-6)
        assert [each["meta_info"]["prompt_tokens"] for each in several] == [5, 3]
        ids = await post(client, "/encode", input_ids=ids_of("one"))
        np.testing.assert_allclose(ids["embedding"], expected("one"), rtol=1e-6)
        error = await refused(client, "/encode", text="x" * 600)
        assert error["param"] == "text"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores(path: str) -> None:
    async with client_for(open_fake_encoder(encoder_config=RANKER)) as client:
        for names in (("text_1", "text_2"), ("queries", "documents"), ("query", "items")):
            body = dict(zip(names, ("q", ["a", "b"]), strict=True))
            reply = await post(client, path, **body)
            assert reply["object"] == "list"
            scores = [each["score"] for each in reply["data"]]
            wanted = [probability("q", "a"), probability("q", "b")]
            np.testing.assert_allclose(scores, wanted, rtol=1e-5)
            assert reply["usage"]["total_tokens"] == 4
        pairs = await post(client, path, text_1=["q", "r"], text_2=["a", "b"])
        assert pairs["data"][1]["score"] == pytest.approx(probability("r", "b"), rel=1e-5)
        error = await refused(client, path, text_1=["q", "r"], text_2=["a"])
        assert error["param"] == "text_2"
        error = await refused(client, path, text_1="q")
        assert error["param"] == "text_2"
        error = await refused(client, path, query=[1, 2], items="a")
        assert error["param"] == "query"
        error = await refused(client, path, query="q", items="a", label_token_ids=[1])
        assert error["param"] == "label_token_ids"
        assert "scores pairs of texts" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_ranks(path: str) -> None:
    texts = ["a", "b", "c"]
    wanted = {text: probability("q", text) for text in texts}
    order = sorted(range(3), key=lambda i: -wanted[texts[i]])
    async with client_for(open_fake_encoder(encoder_config=RANKER)) as client:
        reply = await post(client, path, query="q", documents=["a", {"text": "b"}, "c"])
        assert [each["index"] for each in reply["results"]] == order
        assert [each["document"]["text"] for each in reply["results"]] == [texts[i] for i in order]
        best = await post(client, path, query="q", documents=texts, top_n=1, return_documents=False)
        (only,) = best["results"]
        assert only["index"] == order[0]
        assert only["relevance_score"] == pytest.approx(wanted[texts[order[0]]], rel=1e-5)
        assert "document" not in only


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_labels(path: str) -> None:
    async with client_for(open_fake_encoder("classify")) as client:
        reply = await post(client, path, input=["one", "two"])
        logits = expected("two", 2)
        wanted = np.exp(logits) / np.exp(logits).sum()
        second = reply["data"][1]
        np.testing.assert_allclose(second["probs"], wanted, rtol=1e-5)
        assert second["label"] == ("no", "yes")[int(logits.argmax())]
        assert second["num_classes"] == 2
        for name in ("use_activation", "activation", "softmax"):
            raw = await post(client, path, input="two", **{name: False})
            np.testing.assert_allclose(raw["data"][0]["probs"], logits, rtol=1e-6)
        mixed = [["q: ", "d"], "two", ids_of("two")]
        raw = await post(client, path, input=mixed, use_activation=False)
        wanted = [expected("q: d", 2), logits, logits]
        np.testing.assert_allclose([each["probs"] for each in raw["data"]], wanted, rtol=1e-6)
        for wrong in (["a", "b", "c"], ["a"], ["a", 1]):
            error = await refused(client, path, input=[wrong])
            assert error["param"] == "input"


POOLING = {
    "/v1/embeddings": {"input": "x"},
    "/encode": {"text": "x"},
    "/rerank": {"query": "q", "documents": ["d"]},
    "/classify": {"input": "x"},
    "/score": {"text_1": "q", "text_2": "d"},
}


async def test_what_a_model_is_not_for_is_refused_with_what_it_is_for() -> None:
    async with client_for(open_fake_encoder()) as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/generate", {"text": "x"}),
            ("/classify", {"input": "x"}),
        ):
            error = await refused(client, path, **body)
            assert "it embeds texts" in error["message"], path
            assert error["code"] == "unsupported_task"
    async with client_for(open_fake_engine()) as client:
        for path in ("/rerank", "/classify"):
            error = await refused(client, path, **POOLING[path])
            assert "it generates text" in error["message"], path
        error = await refused(client, "/score", **POOLING["/score"])
        assert error["param"] == "label_token_ids"


async def test_scores_of_labels_by_a_generating_model() -> None:
    async with client_for(open_fake_engine()) as client:
        labels = [65, 66, 200]
        reply = await post(
            client, "/v1/score", query="q: ", items=["a", "b"], label_token_ids=labels
        )
        assert reply["object"] == "scoring"
        assert reply["usage"]["total_tokens"] == 8
        completions = [
            await post(
                client,
                "/v1/completions",
                prompt="q: " + item,
                max_tokens=1,
                logprobs=0,
                logprob_token_ids=labels,
            )
            for item in "ab"
        ]
        assert len(completions) == 2
        soft = await post(
            client,
            "/v1/score",
            query="q: ",
            items=["a", "b"],
            label_token_ids=labels,
            apply_softmax=True,
        )
        for plain, normal in zip(reply["scores"], soft["scores"], strict=True):
            np.testing.assert_allclose(normal, np.array(plain) / sum(plain), rtol=1e-6)
            assert sum(normal) == pytest.approx(1)
        ids = await post(
            client,
            "/v1/score",
            query=ids_of("q: "),
            items=[ids_of("a"), ids_of("b")],
            label_token_ids=labels,
        )
        np.testing.assert_allclose(ids["scores"], reply["scores"])
        first = await post(
            client,
            "/v1/score",
            query="q: ",
            items=["a"],
            label_token_ids=labels,
            item_first=True,
        )
        other = await post(client, "/v1/score", query="aq: ", items=[""], label_token_ids=labels)
        np.testing.assert_allclose(first["scores"], other["scores"])
        error = await refused(client, "/v1/score", query="q", items=[[1]], label_token_ids=labels)
        assert error["param"] == "query"
        error = await refused(client, "/v1/score", query="q", items="a", label_token_ids=[999])
        assert error["param"] == "label_token_ids"


async def test_the_log_tells_of_texts_what_it_may() -> None:
    for log_requests in (False, True):
        async with client_for(open_fake_encoder(), log_requests=log_requests) as client:
            with captured_logs() as lines:
                await post(client, "/v1/embeddings", input=["one", [1, 2], "x" * 500])
        (line,) = [each for each in lines if each["event"] == "request"]
        assert (line["n"], line["prompt_tokens"], line["completion_tokens"]) == (3, 505, 0)
        assert line.get("prompts") == (["one", "[1,2]", "x" * 500] if log_requests else None)


async def test_the_tokenizer_of_an_encoder() -> None:
    async with client_for(open_fake_encoder()) as client:
        reply = await post(client, "/tokenize", prompt="one")
        assert reply["tokens"] == ids_of("one")
        assert reply["max_model_len"] == 512
        assert (await post(client, "/detokenize", tokens=ids_of("one")))["prompt"] == "one"


async def test_timeouts_and_a_full_queue(autojump_clock: trio.testing.MockClock) -> None:
    def make() -> Any:
        return fake_encoder(fake_encoder_config(), call_time=5.0, max_num_seqs=1)

    engine = open_fake_encoder(make_worker=make, max_num_queued_reqs=1)
    async with client_for(engine) as client, trio.open_nursery() as nursery:
        error = await refused(client, "/v1/embeddings", 504, input="x", timeout=1.0)
        assert error["code"] == "deadline_exceeded"
        await trio.sleep(10)  # what was under way is computed
        for _ in range(3):
            nursery.start_soon(_ask, client)
            await trio.sleep(0.1)
        error = await refused(client, "/v1/embeddings", 429, input="x")
        assert error["code"] == "queue_full"


async def _ask(client: TrioClient) -> None:
    await post(client, "/v1/embeddings", input="x")


async def test_a_client_that_leaves_ends_its_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    batches: list[int] = []

    def make() -> Any:
        return fake_encoder(
            fake_encoder_config(),
            call_time=5.0,
            max_num_seqs=1,
            on_batch=lambda texts: batches.append(len(texts)),
        )

    async with open_fake_encoder(make_worker=make) as engine:
        client: Any = create_app(engine, server_config()).test_client()
        with trio.move_on_after(1.0):
            await post(client, "/v1/embeddings", input=["a", "b", "c", "d"])
        with trio.fail_after(100):
            while not engine.idle:
                await trio.sleep(0.5)
    assert len(batches) <= 2

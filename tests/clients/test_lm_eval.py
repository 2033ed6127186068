"""lm-eval's ``local-completions`` against the real server, offline: what it measures is right.

What it sends: ``prompt`` (token ids, or a batch of lists of them), ``max_tokens`` 1, ``logprobs``
1, ``echo``, ``temperature`` 0 and ``seed`` to score; ``max_tokens``, ``stop`` and the task's own
sampling fields to generate. Its tokenizer is the server's, by ``/tokenize``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio
from lm_eval import evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.http_stub import server_config
from tests.support.tiny_models import make_tiny, tiny_tokenizer
from trioserve.http import create_app, serve_app

TOLERANCE = 1e-3
DOCUMENTS = [
    {"question": "The cat is on", "choices": [" the house", " me", " the world there"], "gold": 0},
    {"question": "Hello to the", "choices": [" dog", " world and you", " ünïcödé 🙂"], "gold": 1},
    {"question": "In there is", "choices": [" a", " a much longer continuation of it"], "gold": 1},
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "continuations": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@contextlib.asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[str]:
    """Open a model behind the real server; gives its URL."""
    config = server_config()
    async with open_tiny_engine(folder, **options) as engine, trio.open_nursery() as nursery:
        app = create_app(engine, config)
        (url,) = await nursery.start(serve_app, app, config)
        yield url
        await assert_idle(engine)
        nursery.cancel_scope.cancel()


def expected(reference: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Transformers' log-likelihood of a continuation, and whether it is the greedy one."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logprobs = reference(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    total = logprobs.gather(1, wanted[:, None]).sum().item()
    return total, bool((logprobs.argmax(-1) == wanted).all())


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def task(name: str, data: Path) -> ConfigurableTask:
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    return ConfigurableTask(config={"task": name, "test_split": "test", **source, **TASKS[name]})


async def in_thread(call: Callable[[str], Any], url: str) -> Any:
    """lm-eval waits with threads' means and event loops of its own."""
    return await trio.to_thread.run_sync(call, url)


@pytest.mark.usefixtures("offline")
async def test_a_local_task(folder: Path, reference: Any, tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))

    def run(url: str) -> Any:
        model = LocalCompletionsAPI(
            model=folder.name,
            base_url=f"{url}/v1/completions",
            batch_size=2,
            max_length=256,
            max_retries=1,
        )
        assert model.tokenizer_backend == "remote"
        tasks = {name: task(name, data) for name in TASKS}
        return evaluate(lm=model, task_dict=tasks, bootstrap_iters=0)

    async with served(folder) as url:
        results = await in_thread(run, url)
    tokenizer = tiny_tokenizer()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731

    for document, sample in zip(DOCUMENTS, results["samples"]["choices"], strict=True):
        question, scores = document["question"], []
        for choice, ((found, is_greedy),) in zip(document["choices"], sample["resps"], strict=True):
            context = encode(question)
            continuation = encode(question + choice)[len(context) :]
            score = expected(reference, context, continuation)
            assert found == pytest.approx(score[0], abs=TOLERANCE)
            assert is_greedy == score[1]
            scores.append(score[0])
        assert sample["acc"] == (scores.index(max(scores)) == document["gold"])
    for document, sample in zip(DOCUMENTS, results["samples"]["perplexity"], strict=True):
        bos = encode("<|im_start|>")
        score = expected(reference, bos, encode(document["question"]))
        assert sample["resps"][0][0] == pytest.approx(score[0], abs=TOLERANCE)
    for document, sample in zip(DOCUMENTS, results["samples"]["continuations"], strict=True):
        ids = greedy(reference, encode(document["question"]), 12)
        assert sample["resps"][0][0] == tokenizer.decode(ids[: _end(ids)])


def _end(ids: list[int]) -> int:
    """Return where an output ends: at the end of the sequence, or never."""
    return ids.index(2) if 2 in ids else len(ids)


@pytest.mark.usefixtures("offline")
async def test_greedy_continuations_and_prompts_in_chunks(folder: Path, reference: Any) -> None:
    """Prompts that are computed in pieces, some of them cached, many at once."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 300, (40,), generator=generator).tolist()
    requests = []
    for index in range(6):
        own = torch.randint(3, 300, (1 + 7 * index,), generator=generator).tolist()
        context = shared + own if index % 2 else own
        best = greedy(reference, context, 5)
        other = torch.randint(3, 300, (30,), generator=generator).tolist()
        requests += [(None, context, best), (None, context, other), (None, context, best[:1])]

    def run(url: str, num_concurrent: int) -> Any:
        model = LocalCompletionsAPI(
            model=folder.name,
            base_url=f"{url}/v1/completions",
            num_concurrent=num_concurrent,
            max_length=256,
            max_retries=1,
        )
        return model._loglikelihood_tokens(requests)

    scores = [expected(reference, context, wanted) for _, context, wanted in requests]
    assert {is_greedy for _, is_greedy in scores} == {True, False}
    async with served(folder, max_num_batched_tokens=24) as url:
        for num_concurrent in (1, 4):
            found = await in_thread(lambda url, n=num_concurrent: run(url, n), url)
            assert [is_greedy for _, is_greedy in found] == [each for _, each in scores]
            for (logprob, _), (score, _) in zip(found, scores, strict=True):
                assert logprob == pytest.approx(score, abs=TOLERANCE)
